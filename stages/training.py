"""The training loop, the same on one CPU, one GPU, in a notebook and on a cluster.

    python -m stages.training launch/recipes/modern.toml steps=200 folder=mine
    accelerate launch --config_file launch/ddp.yaml -m stages.training launch/recipes/...
    notebook_launcher(pretrain, (recipe,), num_processes=2)

What a step sees follows from its number: rows and noise are computed from the seed and kept nowhere.
So a run that goes on, after a kill or on other machines, needs weights, optimizers and a number.
"""

from __future__ import annotations

import ast
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import InitProcessGroupKwargs
from accelerate.utils.memory import should_reduce_batch_size
from tqdm import tqdm
from transformers import AutoTokenizer

from stages import checkpoints
from stages import run as runs
from stages import training_callbacks as callbacks
from stages.chunked_loss import chunk_loss
from stages.recipe import Recipe, build_model, share_of_rate
from stages.run import Run
from stages.sharding import make_sharded
from stages.step import Step
from stages.tokens import Split, open_store
from utils.artifacts import read_manifest
from utils.errors import CourseError, build_folder
from utils.lesson import PUBLISHED_BY
from utils.machine import set_seed


def make_accelerator(recipe: Recipe) -> Any:
    """The device and the other processes, as the launcher says; precision is the recipe's business."""
    # Where no accelerator can be used, accelerate must be told so, or each process is alone.
    cpu = os.environ.get("ACCELERATE_USE_CPU") == "true"
    cpu = cpu or not (torch.cuda.is_available() or torch.mps.is_available())
    trackers = recipe.log_to or None
    folder = recipe.place("folder")
    # Gradients lie where they are exchanged, and not twice.
    copies = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    # The roll call gives up first, with an error that can be told; a GPU's library ends the process.
    exchanges = InitProcessGroupKwargs(timeout=runs.PATIENCE * 1.2)
    accelerator = Accelerator(
        cpu=cpu,
        mixed_precision="no",
        log_with=trackers,
        project_dir=folder,
        kwargs_handlers=[copies, exchanges],
    )
    what = find_misfit(recipe.rows, accelerator.num_processes)
    if what:
        raise CourseError(what, "the launch command", "see launch/README.md")
    return accelerator


def find_misfit(rows: int, world: int) -> str:
    """Where a launcher's promise differs from what its processes see, or from what they can do."""
    promised = os.environ
    here = int(promised.get("LOCAL_WORLD_SIZE", "1"))
    gpus = torch.cuda.device_count()
    # Unless somebody dealt them out, a process sees all GPUs of its machine.
    dealt = "CUDA_VISIBLE_DEVICES" in promised
    if int(promised.get("WORLD_SIZE", "1")) != world:
        return "several processes were started, and each believes it is alone"
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):
        # Accelerate itself forgets it where there is no GPU.
        if promised.get(name) == "true":
            return (
                "the launcher shards; this loop does so by itself, with shard=true"
            )
    if 0 < gpus < here and not dealt:
        return f"{here} processes were started on this machine, which has {gpus} GPU(s)"
    if rows % world:
        return f"{rows} rows a step cannot be shared by {world} processes"
    return ""


def find_input(recipe: Recipe, name: str) -> Path:
    """The folder of the tokenizer or of the tokens; if it is not there, the lesson that makes it."""
    path = recipe.place(name)
    if path.exists():
        return path
    profile = "laptop"
    if path.is_relative_to(build_folder()):
        profile = path.parent.name
    lesson = PUBLISHED_BY[name]
    command = f"make run ONLY={lesson} PROFILE={profile}"
    fix = f"lesson {lesson} makes them: {command}; or set {name}=FOLDER"
    raise CourseError(f"the {name} of the recipe are not there", path, fix)


def check_tokens(run: Run, split: Split) -> None:
    """Refuse tokens of other sizes than the recipe wants, and say if a run will see them often."""
    recipe = run.recipe
    for name in ("vocabulary", "block"):
        wanted = getattr(recipe, name)
        size = split.header[name]
        if wanted not in (None, size):
            what = f"the recipe wants a {name} of {wanted:,} tokens, here it is {size:,}"
            fix = f"make tokens of that {name}, see launch/README.md; or set {name}={size}"
            raise CourseError(what, recipe.place("tokens"), fix)
    epochs = recipe.steps * recipe.rows / len(split)
    # Up to four passes repeated text teaches nearly as much as new text (Muennighoff et al., 2023).
    if epochs > 4 and run.is_main:
        tqdm.write(f"few tokens for {recipe.steps:,} steps: {epochs:,.1f} epochs")


def make_model(run: Run, block: int) -> Any:
    """The model of a run, on its device; cut over all of them, if the recipe says so."""
    recipe = run.recipe
    device = run.accelerator.device
    build = partial(build_model, recipe, run.tokenizer)
    if recipe.shard and run.world > 1:
        dtype = getattr(torch, run.progress["precision"])
        model = make_sharded(build, device, dtype, run.world)
    else:
        model = build().to(device)
    positions = getattr(model.config, "max_position_embeddings", block)
    if positions < block:
        what = f"blocks have {block} tokens, the model has {positions} positions"
        fix = f"set the model's positions to {block}"
        raise CourseError(what, "the recipe", fix)
    if recipe.loss_chunk:
        chunk_loss(model, recipe.loss_chunk)
    return model


def pretrain(recipe: Recipe) -> None:
    """Train by a recipe, from its beginning or from where its folder stands."""
    accelerator = make_accelerator(recipe)
    tokenizer = AutoTokenizer.from_pretrained(find_input(recipe, "tokenizer"))
    run = Run(recipe, accelerator, tokenizer)
    with run.locked(), run.stoppable():
        step = begin(run)
        while not run.ends_here:
            with plain_failures(run, step):
                advance(run, step)
        run.finish_saving()
        if run.hub:
            run.hub.wait()
        for tracker in accelerator.trackers:
            tracker.finish()
    if run.stopping and run.is_main:
        print(f"stopped at step {run.step}; the same command goes on from there")


def begin(run: Run) -> Step:
    """The step of a run, at the place where its folder stands."""
    recipe = run.recipe
    tokens = find_input(recipe, "tokens")
    store = open_store(tokens, run.tokenizer)
    check_tokens(run, store["train"])
    manifest = read_manifest(tokens) or {}
    checkpoint = run.find_checkpoint(manifest.get("hash"))
    torch.set_float32_matmul_precision("high")
    torch.set_num_threads(run.progress["threads"])
    model = make_model(run, store["train"].header["block"])
    step = Step(run, model, store)
    if checkpoint:
        checkpoints.load_checkpoint(checkpoint, model, step.optimizers)
    set_seed(recipe.seed)
    log = callbacks.StepLog(run, step)
    check = callbacks.DivergenceCheck(len(run.tokenizer))
    run.callbacks = [log, check, callbacks.evaluate, callbacks.write_samples]
    if recipe.hub and run.is_main:
        run.hub = callbacks.HubPush(recipe.hub)
    callbacks.start_trackers(run)
    choices = {name: run.progress[name] for name in ("precision", "threads")}
    run.log("start", **choices, processes=step.world)
    step.trained.train()
    return step


def advance(run: Run, step: Step) -> None:
    """One step, and what is due behind it."""
    began = time.perf_counter()
    recipe = run.recipe
    number = run.step
    share = share_of_rate(number, recipe)
    figures = step.take(number, share)
    run.progress |= {"step": number + 1, "micro": step.micro}
    run.call_roll()
    run.figures.add(figures, share, time.perf_counter() - began)
    results = []
    # Nothing is saved before somebody has looked whether it is any good.
    if run.is_due(recipe.log_every) or run.is_due(recipe.save_every):
        results = run.figures.read(run.accelerator)
    for callback in run.callbacks:
        callback(run, step, results)
    if run.is_due(recipe.save_every):
        run.save(step)


@contextlib.contextmanager
def plain_failures(run: Run, step: Step) -> Iterator[None]:
    """Say plainly that memory ran out, or that another process of the run is gone."""
    number = run.step + 1
    try:
        yield
    except CourseError:
        raise
    except Exception as error:
        if should_reduce_batch_size(error):
            # Some weights may have moved and others not.
            what = "memory ran out; all since the last checkpoint is lost"
            where = f"step {number}, {step.micro} rows at once"
            fix = f"set micro={max(1, step.micro // 2)}, or take a smaller model"
            raise CourseError(what, where, fix) from error
        if run.world == 1 or not is_of_exchange(error):
            raise
        what = f"{run.find_missing()} is gone, or silent for too long"
        fix = "look at that process's last words; the same command goes on from the last checkpoint"
        raise CourseError(what, f"step {number}, rank {step.rank}", fix) from error


def is_of_exchange(error: Exception) -> bool:
    """Whether an error tells that another process is gone, or has been silent for too long."""
    words = (
        "gloo",
        "NCCL",
        "onnection closed",
        "onnection reset",
        "Timed out",
        "Broken pipe",
    )
    kinds = (torch.distributed.DistError, RuntimeError)
    return isinstance(error, kinds) and any(word in str(error) for word in words)


def parse_changes(arguments: list[str]) -> dict:
    """The changes of a recipe that a command line asks for: each value Python's, or else a text."""
    changes: dict = {"model": {}}
    for argument in arguments:
        name, _, text = argument.partition("=")
        value: Any = {"true": True, "false": False}.get(text, text)
        with contextlib.suppress(ValueError, SyntaxError):
            value = ast.literal_eval(text)
        if name.startswith("model."):
            changes["model"][name.removeprefix("model.")] = value
        else:
            changes[name] = value
    return changes


def main(arguments: list[str]) -> int:
    """`RECIPE [name=value …]`; `model.name=value` reaches into the model."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print("stages.training RECIPE.toml [name=value | model.name=value …]")
        return 0 if arguments else 2
    try:
        pretrain(Recipe.load(arguments[0], **parse_changes(arguments[1:])))
    except CourseError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main(sys.argv[1:]))
