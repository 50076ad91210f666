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
import json
import math
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from filelock import FileLock, Timeout
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from tqdm import tqdm
from transformers import AutoTokenizer

from stages import checkpoints
from stages import training_callbacks as callbacks
from stages.recipe import FREE, Recipe, build_model, make_optimizers, share_of_rate
from stages.tokens import Loader, Split, open_store, split_rows
from utils.artifacts import plain_disk_errors, read_json, read_manifest, write_json
from utils.errors import CourseError, build_folder
from utils.lesson import PUBLISHED_BY
from utils.machine import choose_dtype, choose_threads, set_seed

# The environment's name for a file that stops a run, politely, as soon as it is there.
STOP_FILE = "COURSE_STOP_FILE"


class Step:
    """One update: gradients of a step's rows, clipped, and applied. All ranks take it together."""

    def __init__(self, run: Run, model: Any, store: dict[str, Split]) -> None:
        recipe, accelerator = run.recipe, run.accelerator
        self.run = run
        self.recipe = recipe
        self.accelerator = accelerator
        self.device = accelerator.device
        self.rank = accelerator.process_index
        self.world = accelerator.num_processes
        self.ranks = {"rank": self.rank, "world": self.world}
        self.model = model
        self.optimizers = make_optimizers(model, recipe)
        self.split = store["train"]
        self.held_out = store["validation"]
        self.dtype = getattr(torch, run.progress["precision"])
        # Matrix products in the run's precision.
        narrow = self.dtype != torch.float32
        kind = self.device.type
        self.autocast = partial(torch.autocast, kind, self.dtype, narrow)
        self.micro = self.fit_micro(run.progress["micro"])
        self.sharded = isinstance(next(model.parameters()), DTensor)
        trained: Any = torch.compile(model) if recipe.compile else model
        # Shards exchange their gradients by themselves, copies of a model by DDP.
        self.trained = trained if self.sharded else accelerator.prepare(trained)
        self.go_to(run.step)

    def fit_micro(self, wanted: int) -> int:
        """The largest number of rows up to `wanted` into which a rank's share can be cut evenly."""
        share = self.recipe.rows // self.world
        while share % wanted:
            wanted -= 1
        return wanted

    def go_to(self, number: int) -> None:
        """Let the next rows be those of this step."""
        seed = self.recipe.seed
        start = number * self.recipe.rows
        loader = Loader(self.split, self.micro, seed, start, **self.ranks)
        self.batches = iter(loader)

    def take(self, number: int, share: float) -> tuple[float, float]:
        """Step `number`, at a share of the full rate: the loss over all ranks, the gradients' norm."""
        loss = self.compute_gradients(number)
        norm = self.clip_gradients()
        self.apply(share, norm)
        return self.run.agree(loss), norm

    def compute_gradients(self, number: int) -> torch.Tensor:
        """Forward and backward; where memory runs out, again from the start in halves of the rows."""
        while True:
            try:
                return self.forward_backward(number)
            except Exception as error:
                # Alone, one can try again; other ranks would wait for this one in an exchange.
                alone = self.world == 1 and self.micro > 1
                if not alone or not should_reduce_batch_size(error):
                    raise
            self.halve_micro(number)

    def halve_micro(self, number: int) -> None:
        """Halve the rows of a micro-batch; a step still has as many rows."""
        self.model.zero_grad()
        clear_device_cache(garbage_collection=True)
        before = self.micro
        self.micro = self.fit_micro(self.micro // 2)
        what = f"out of memory: {self.micro} rows at once from here on"
        tqdm.write(f"{what}, not {before}")
        self.go_to(number)

    def forward_backward(self, number: int) -> torch.Tensor:
        """Gradients of the mean loss over this rank's rows of a step; returns that loss."""
        noise = random.Random(f"{self.recipe.seed} {number} {self.rank}")
        torch.manual_seed(noise.getrandbits(63))
        pieces = self.recipe.rows // (self.world * self.micro)
        total = torch.zeros((), device=self.device)
        for piece in range(pieces):
            rows = next(self.batches)
            if self.device.type == "cuda":
                rows = rows.pin_memory()
            with self.exchange(last=piece == pieces - 1):
                with self.autocast():
                    parts = split_rows(rows.to(self.device, non_blocking=True))
                    loss = self.trained(**parts, use_cache=False).loss / pieces
                loss.backward()
            total += loss.detach()
        return total

    def exchange(self, last: bool) -> Any:
        """Let ranks exchange gradients behind the last piece of a step only."""
        if self.sharded:
            self.model.set_requires_gradient_sync(last)
        elif not last:
            return self.accelerator.no_sync(self.trained)
        return contextlib.nullcontext()

    def clip_gradients(self) -> float:
        """Shorten the gradients, taken as one vector, to `clip`; returns how long they were."""
        weights = self.model.parameters()
        norm: Any = torch.nn.utils.clip_grad_norm_(weights, self.recipe.clip)
        if self.sharded:
            norm = norm.full_tensor()
        return float(norm)

    def apply(self, share: float, norm: float) -> None:
        """Update the weights. The norm is the same on all ranks: all of them step, or none."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["full_rate"] * share
            if math.isfinite(norm):
                optimizer.step()
            optimizer.zero_grad()


def shard_model(model: Any, device: str, world: int) -> None:
    """Cut each layer's weights over the processes, and then the rest of the model's (FSDP2).

    The model comes in main memory: a device holds one layer in full at a time, and never all.
    """
    mesh = init_device_mesh(device, (world,))
    parts = model.modules()
    layers = next(part for part in parts if isinstance(part, torch.nn.ModuleList))
    for part in [*layers, model]:
        fully_shard(part, mesh=mesh)


class Run:
    """A run's folder and where it stands: lock, checkpoints, log, a polite end."""

    def __init__(self, recipe: Recipe, accelerator: Any, tokenizer: Any) -> None:
        self.recipe = recipe
        self.folder = recipe.place("folder")
        self.tokenizer = tokenizer
        self.accelerator = accelerator
        self.is_main = accelerator.is_main_process
        self.callbacks: list[Any] = []
        self.hub: callbacks.HubPush | None = None
        self.stopping = False
        self.asked = False
        self.stop_file = Path(os.environ.get(STOP_FILE) or os.devnull)
        self.unwritten = b""
        # What the machine that begins a run decides, it decides for all that go on with it.
        precision: str = recipe.precision
        if precision == "auto":
            dtype = choose_dtype(accelerator.device.type).value
            precision = str(dtype).removeprefix("torch.")
        self.progress: dict[str, Any] = {
            "step": 0,
            "log_bytes": 0,
            "precision": precision,
            "threads": choose_threads(recipe.threads).value,
            "micro": recipe.micro,
        }

    @property
    def step(self) -> int:
        """The number of steps that are done."""
        return self.progress["step"]

    @property
    def ends_here(self) -> bool:
        """Whether the run has taken its last step, or was asked to stop."""
        if self.stopping:
            return True
        return self.step >= self.recipe.steps

    def is_due(self, every: int | None) -> bool:
        """Whether something that happens every so many steps, and at the end, happens now."""
        if every is None:
            return False
        return self.ends_here or self.step % every == 0

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder, which two runs at once would spoil."""
        lock = FileLock(self.folder.with_name(f".{self.folder.name}.lock"))
        try:
            if self.is_main:
                with plain_disk_errors(self.folder):
                    self.folder.mkdir(parents=True, exist_ok=True)
                lock.acquire(timeout=0)
            yield
        except Timeout as error:
            what = "another process trains in this folder"
            fix = "wait for it, or choose another folder"
            raise CourseError(what, self.folder, fix) from error
        finally:
            lock.release()

    @contextlib.contextmanager
    def stoppable(self) -> Iterator[None]:
        """Take Ctrl-C and SIGTERM for a wish to stop."""
        previous = {}
        # Only the main thread may.
        with contextlib.suppress(ValueError):
            for kind in (signal.SIGINT, signal.SIGTERM):
                previous[kind] = signal.signal(kind, self.stop)
        try:
            yield
        finally:
            for kind, handler in previous.items():
                signal.signal(kind, handler)

    def stop(self, *_: Any) -> None:
        """Save after this step and leave; one process that is asked twice leaves at once."""
        # To many, Ctrl-C comes twice: from the terminal, and from their launcher.
        if self.asked and self.accelerator.num_processes == 1:
            raise KeyboardInterrupt
        self.asked = True

    def agree(self, loss: torch.Tensor) -> float:
        """The mean loss of all ranks; and they stop together, if one of them was asked to."""
        asked = self.asked or (self.is_main and self.stop_file.is_file())
        pair = torch.stack([loss, loss.new_tensor(asked)])
        mean, wish = self.accelerator.reduce(pair, "mean").tolist()
        self.stopping = wish > 0
        return mean

    def find_checkpoint(self, tokens: str | None) -> Path | None:
        """The checkpoint to go on from; the first rank looks, and all take up what it finds."""
        path = None
        folder = self.folder
        if self.is_main:
            recipe = self.recipe.model_dump(mode="json")
            with plain_disk_errors(folder):
                path = checkpoints.newest_checkpoint(folder)
                self.take_up(path, {"recipe": recipe, "tokens": tokens})
        path, self.progress = broadcast_object_list([path, self.progress])
        return path

    def take_up(self, path: Path | None, facts: dict) -> None:
        """Stand where a checkpoint of this run stands, and write down what the run is."""
        place = self.folder / "recipe.json"
        if path:
            old = read_json(place) or facts
            theirs = {**old["recipe"], "token store": old["tokens"]}
            ours = {**facts["recipe"], "token store": facts["tokens"]}
            for name, value in ours.items():
                if name not in FREE and value != theirs.get(name):
                    what = f"the folder holds another run: {name} {theirs.get(name)!r}, not {value!r}"
                    fix = "choose another folder, or delete this one"
                    raise CourseError(what, self.folder, fix)
            self.progress |= read_json(path / checkpoints.PROGRESS)
            # What was learned of the memory is kept, unless the recipe says otherwise by now.
            if theirs["micro"] != ours["micro"]:
                self.progress["micro"] = ours["micro"]
        write_json(place, facts)

    def save(self, step: Step) -> None:
        """A checkpoint; a full disk costs this one and not the run, unless it is the last."""
        path = None
        parts = (step.model, step.optimizers, self.tokenizer, self.progress)
        try:
            path = checkpoints.save_checkpoint(self.folder, *parts)
        except CourseError as error:
            if self.ends_here:
                raise
            what = f"no checkpoint at step {self.step}, the run goes on"
            tqdm.write(f"{what}: {error}")
        self.accelerator.wait_for_everyone()
        in_use = None
        if path and self.hub:
            in_use = self.hub.push(path, wait=self.ends_here)
        if path and self.is_main:
            checkpoints.drop_checkpoints(self.folder, self.recipe.keep, in_use)

    def log(self, kind: str, **values: Any) -> None:
        """One line in `log.jsonl`, and its figures for trackers; on a full disk it waits for the next."""
        if not self.is_main:
            return
        line = {"kind": kind, "step": self.step, **values}
        self.unwritten += json.dumps(line).encode() + b"\n"
        with (self.folder / "log.jsonl").open("ab", buffering=0) as file:
            # What lies behind is torn, or of steps that are taken again.
            size = min(file.tell(), self.progress["log_bytes"])
            file.truncate(size)
            with contextlib.suppress(OSError):
                if file.write(self.unwritten) == len(self.unwritten):
                    size = file.tell()
                    self.unwritten = b""
            file.truncate(size)
        self.progress["log_bytes"] = size
        figures = {}
        for name, value in values.items():
            if isinstance(value, (int, float)):
                figures[f"{kind}/{name}"] = value
        self.accelerator.log(figures, step=self.step)


def make_accelerator(recipe: Recipe) -> Any:
    """The device and the other processes, as the launcher says; precision is the recipe's business."""
    # Where no accelerator can be used, accelerate must be told so, or each process is alone.
    cpu = os.environ.get("ACCELERATE_USE_CPU") == "true"
    cpu = cpu or not (torch.cuda.is_available() or torch.mps.is_available())
    trackers = recipe.log_to or None
    folder = recipe.place("folder")
    accelerator = Accelerator(
        cpu=cpu, mixed_precision="no", log_with=trackers, project_dir=folder
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
    model = build_model(recipe, run.tokenizer)
    positions = getattr(model.config, "max_position_embeddings", block)
    if positions < block:
        what = f"blocks have {block} tokens, the model has {positions} positions"
        fix = f"set the model's positions to {block}"
        raise CourseError(what, "the recipe", fix)
    device = run.accelerator.device
    world = run.accelerator.num_processes
    if recipe.shard and world > 1:
        shard_model(model, device.type, world)
        return model
    return model.to(device)


def pretrain(recipe: Recipe) -> None:
    """Train by a recipe, from its beginning or from where its folder stands."""
    accelerator = make_accelerator(recipe)
    tokenizer = AutoTokenizer.from_pretrained(find_input(recipe, "tokenizer"))
    run = Run(recipe, accelerator, tokenizer)
    with run.locked(), run.stoppable():
        step = begin(run)
        while not run.ends_here:
            advance(run, step)
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
    run.accelerator.init_trackers("pretraining")
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
    try:
        loss, norm = step.take(number, share)
    except Exception as error:
        if not should_reduce_batch_size(error):
            raise
        # Some weights may have moved and others not.
        what = "memory ran out; all since the last checkpoint is lost"
        where = f"step {number + 1}, {step.micro} rows at once"
        fix = f"set micro={max(1, step.micro // 2)}, or take a smaller model"
        raise CourseError(what, where, fix) from error
    run.progress |= {"step": number + 1, "micro": step.micro}
    seconds = time.perf_counter() - began
    result = {"loss": loss, "norm": norm, "rate": share, "seconds": seconds}
    for callback in run.callbacks:
        callback(run, step, result)
    if run.is_due(recipe.save_every):
        run.save(step)


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
