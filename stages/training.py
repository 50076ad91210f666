"""The training loop, the same on one CPU, one GPU, in a notebook and on a cluster.

    python -m stages.training launch/recipes/modern.toml steps=200 folder=mine
    accelerate launch --config_file launch/ddp.yaml -m stages.training launch/recipes/...
    notebook_launcher(pretrain, (recipe,), num_processes=2)

    recipe -> Step (one update) -> Run (folder, checkpoints, log) -> callbacks (all the rest)

What a step sees follows from its number: rows and noise are computed from the seed and kept nowhere.
So a run that goes on, after a kill or on other machines, needs weights, optimizers and a number.
"""

from __future__ import annotations

import ast
import contextlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout
from torch.distributed.tensor import DTensor
from tqdm.auto import tqdm

from stages import checkpoints
from stages import training_callbacks as callbacks
from stages.recipe import (
    Recipe,
    build_model,
    flops_per_token,
    make_optimizers,
    share_of_rate,
)
from stages.tokens import Loader, Split, open_store, split_rows
from utils.artifacts import plain_disk_errors, read_json, read_manifest, write_json
from utils.errors import CourseError, build_folder
from utils.machine import choose_dtype, choose_threads, set_seed


class Step:
    """One update: gradients of a step's rows, clipped, and applied. All ranks take it together."""

    def __init__(
        self,
        accelerator: Any,
        model: Any,
        optimizers: list[torch.optim.Optimizer],
        split: Split,
        *,
        rows: int,
        micro: int,
        clip: float,
        seed: int,
        precision: str,
        compile: bool = False,
    ) -> None:
        self.accelerator = accelerator
        self.device = accelerator.device
        self.model = model
        self.optimizers = optimizers
        self.split = split
        self.rows = rows
        self.clip = clip
        self.seed = seed
        self.dtype = getattr(torch, precision)
        self.micro = self.fit_micro(micro)
        self.sharded = isinstance(next(model.parameters()), DTensor)
        trained: Any = torch.compile(model) if compile else model
        # Shards exchange their gradients by themselves, copies of a model by DDP.
        self.trained = trained if self.sharded else accelerator.prepare(trained)
        # It lifts the small gradients of float16; switched off, it passes everything through.
        half = self.dtype == torch.float16
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=half)
        self.go_to(0)

    def fit_micro(self, wanted: int) -> int:
        """The largest number of rows up to `wanted` into which a rank's share can be cut evenly."""
        world = self.accelerator.num_processes
        share, rest = divmod(self.rows, world)
        if rest:
            what = f"{self.rows} rows a step cannot be shared by {world} processes"
            raise CourseError(
                what, "rows in the recipe", f"make it a multiple of {world}"
            )
        return next(
            size for size in range(min(wanted, share), 0, -1) if share % size == 0
        )

    def go_to(self, number: int) -> None:
        """Let the next rows be those of this step, in pieces of `micro` rows."""
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        start = number * self.rows
        loader = Loader(
            self.split, self.micro, self.seed, start, rank=rank, world=world
        )
        self.batches = iter(loader)

    def autocast(self) -> Any:
        """Matrix products in the run's precision."""
        narrow = self.dtype != torch.float32
        return torch.autocast(self.device.type, self.dtype, enabled=narrow)

    def take(self, number: int, share: float) -> tuple[float, float]:
        """Step `number`, at a share of the full rate: the loss over all ranks, the gradients' norm."""
        loss = self.compute_gradients(number)
        with plain_memory_errors(number):
            norm = self.clip_gradients()
            self.apply(share, norm)
        return float(self.accelerator.reduce(loss, "mean")), norm

    def compute_gradients(self, number: int) -> torch.Tensor:
        """Forward and backward; where memory runs out, again from the start in halves of the rows."""
        while True:
            try:
                return self.forward_backward(number)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                # Alone, one can try again; other ranks would wait for this one in an exchange.
                alone = self.accelerator.num_processes == 1
                if not alone or self.micro == 1:
                    what = "memory ran out" if alone else "a rank ran out of memory"
                    where = f"step {number + 1}, {self.micro} rows at once"
                    fix = f"set micro={max(1, self.micro // 2)}, or take a smaller model"
                    raise CourseError(what, where, fix) from error
            self.halve_micro(number)

    def halve_micro(self, number: int) -> None:
        """Halve the rows of a micro-batch; a step still has as many rows."""
        from accelerate.utils.memory import clear_device_cache

        self.model.zero_grad()
        clear_device_cache(garbage_collection=True)
        before = self.micro
        self.micro = self.fit_micro(self.micro // 2)
        tqdm.write(
            f"out of memory: {self.micro} rows at once from here on, not {before}; "
            f"a step still has {self.rows}"
        )
        self.go_to(number)

    def forward_backward(self, number: int) -> torch.Tensor:
        """Gradients of the mean loss over this rank's rows of a step; returns that loss."""
        torch.manual_seed(
            noise_seed(self.seed, number, self.accelerator.process_index)
        )
        pieces = self.rows // (self.accelerator.num_processes * self.micro)
        total = torch.zeros((), device=self.device)
        for piece in range(pieces):
            rows = next(self.batches)
            if self.device.type == "cuda":
                rows = rows.pin_memory()
            with self.exchange(last=piece == pieces - 1):
                with self.autocast():
                    parts = split_rows(rows.to(self.device, non_blocking=True))
                    loss = self.trained(**parts, use_cache=False).loss / pieces
                self.scaler.scale(loss).backward()
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
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        return float(checkpoints.gather(norm))

    def apply(self, share: float, norm: float) -> None:
        """Update the weights. The norm is the same on all ranks: all of them step, or none."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["full_rate"] * share
            if math.isfinite(norm):
                self.scaler.step(optimizer)
            optimizer.zero_grad()
        self.scaler.update()


def noise_seed(seed: int, number: int, rank: int) -> int:
    """A seed for the noise of a step (dropout) on a rank, the same on any machine.

    >>> noise_seed(42, 0, 0) == noise_seed(42, 0, 0) != noise_seed(42, 0, 1)
    True
    """
    return int(
        np.random.SeedSequence([seed, number, rank]).generate_state(1, np.uint64)[0]
        >> 1
    )


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out: the machine's, or a GPU's."""
    from accelerate.utils.memory import should_reduce_batch_size

    return isinstance(error, MemoryError) or should_reduce_batch_size(error)


@contextlib.contextmanager
def plain_memory_errors(number: int) -> Iterator[None]:
    """End the run if memory runs out here: some weights may have moved and others not."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        what = "memory ran out while the update was applied; the weights in memory are lost"
        fix = "free some, or take a smaller model; a run goes on from its last checkpoint"
        raise CourseError(what, f"step {number + 1}", fix) from error


def shard_model(model: Any, device: str, world: int) -> None:
    """Cut each layer's weights over the processes, and then the rest of the model's (FSDP2).

    The model comes in main memory: a device holds one layer in full at a time, and never all.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device, (world,))
    layers = next(
        part for part in model.modules() if isinstance(part, torch.nn.ModuleList)
    )
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


class Run:
    """A run's folder and where it stands: lock, checkpoints, log, a polite end."""

    def __init__(self, recipe: Recipe, accelerator: Any, tokenizer: Any) -> None:
        self.folder = recipe.place("folder")
        self.steps = recipe.steps
        self.keep = recipe.keep
        self.tokenizer = tokenizer
        self.accelerator = accelerator
        self.is_main = accelerator.is_main_process
        self.progress: dict[str, Any] = {"step": 0}
        self.callbacks: list[callbacks.Callback] = []
        self.stopping = False
        self.unwritten = b""

    @property
    def step(self) -> int:
        """The number of steps that are done."""
        return self.progress["step"]

    @property
    def ends_here(self) -> bool:
        """Whether the run has taken its last step, or was asked to stop."""
        return self.stopping or self.step >= self.steps

    def is_due(self, every: int | None) -> bool:
        """Whether something that happens every so many steps, and at the end, happens now."""
        return every is not None and (self.ends_here or self.step % every == 0)

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
            fix = "wait for it, or choose another folder"
            raise CourseError(
                "another process trains in this folder", self.folder, fix
            ) from error
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
        """Save after this step and leave; at once if asked twice, or if many ranks had to agree."""
        if self.stopping or self.accelerator.num_processes > 1:
            raise KeyboardInterrupt
        self.stopping = True

    def find_checkpoint(self, recipe: Recipe, tokens: str | None) -> Path | None:
        """The checkpoint to go on from; the first rank looks, and all take up what it finds."""
        from accelerate.utils import broadcast_object_list

        found = [None, None]
        if self.is_main:
            with plain_disk_errors(self.folder):
                found = list(self._look_for_checkpoint(recipe, tokens))
        path, self.progress = broadcast_object_list(found)
        return path

    def _look_for_checkpoint(
        self, recipe: Recipe, tokens: str | None
    ) -> tuple[Any, Any]:
        path, damaged = checkpoints.newest_checkpoint(self.folder)
        progress = first_progress(recipe, self.accelerator.device.type)
        if path:
            old = read_json(self.folder / "recipe.json")
            if old:
                self._compare(recipe, tokens, old)
            progress |= read_json(path / checkpoints.PROGRESS)
            if old and old["recipe"].get("micro") != recipe.micro:
                progress["micro"] = recipe.micro
        for bad, problem in damaged.items():
            aside = checkpoints.set_aside(bad).name
            tqdm.write(
                f"skipped a damaged checkpoint, {bad.name}: {problem}; it is now {aside}"
            )
        checkpoints.forget_after(self.folder / "log.jsonl", progress["step"])
        write_json(
            self.folder / "recipe.json", {"recipe": vars(recipe), "tokens": tokens}
        )
        return path, progress

    def _compare(
        self, recipe: Recipe, tokens: str | None, old: dict[str, Any]
    ) -> None:
        differs = recipe.differences(old["recipe"])
        if not differs and old["tokens"] != tokens:
            differs = "the token store is another one"
        if differs:
            fix = "choose another folder, or delete this one"
            raise CourseError(
                f"the folder holds another run: {differs}", self.folder, fix
            )

    def save(self, step: Step) -> None:
        """A checkpoint; a full disk costs this one and not the run, unless it is the last."""
        parts = (step.model, step.optimizers, self.tokenizer, self.progress)
        try:
            path = checkpoints.save_checkpoint(self.folder, *parts)
            for callback in self.callbacks:
                callback.after_save(self, path)
            self.drop_old()
        except CourseError as error:
            if self.ends_here:
                raise
            tqdm.write(
                f"no checkpoint at step {self.step}, the run goes on: {error}"
            )
        self.accelerator.wait_for_everyone()

    def drop_old(self) -> None:
        """Drop the checkpoints that need not be kept and are not in use."""
        if self.is_main:
            in_use = {
                path for callback in self.callbacks for path in callback.in_use
            }
            checkpoints.drop_checkpoints(self.folder, self.keep, in_use)

    def log(self, kind: str, **values: Any) -> None:
        """One line in `log.jsonl`; on a full disk it waits for the next."""
        if not self.is_main:
            return
        line = {"kind": kind, "step": self.step, **values}
        self.unwritten += json.dumps(line).encode() + b"\n"
        with (self.folder / "log.jsonl").open("ab", buffering=0) as file:
            size = file.tell()
            try:
                written = file.write(self.unwritten)
            except OSError:
                written = 0
            if written == len(self.unwritten):
                self.unwritten = b""
            else:
                file.truncate(size)
        for callback in self.callbacks:
            callback.after_line(self, line)


# from a recipe to a run -------------------------------------------------------------------------


def first_progress(recipe: Recipe, device: str) -> dict[str, Any]:
    """Where a run begins, and what the machine that begins it decides for all that go on with it."""
    dtype = str(choose_dtype(device).value).removeprefix("torch.")
    return {
        "step": 0,
        "validation_loss": None,
        "precision": dtype if recipe.precision == "auto" else recipe.precision,
        "threads": choose_threads(recipe.threads).value,
        "micro": recipe.micro,
    }


def make_accelerator(recipe: Recipe) -> Any:
    """The device and the other processes, as the launcher says; precision is the recipe's business."""
    from accelerate import Accelerator, DistributedType

    # Where no accelerator can be used, accelerate must be told so, or each process is alone.
    cpu = os.environ.get("ACCELERATE_USE_CPU") == "true"
    cpu = cpu or not (torch.cuda.is_available() or torch.mps.is_available())
    accelerator = Accelerator(
        cpu=cpu,
        mixed_precision="no",
        log_with=recipe.log_to or None,
        project_dir=recipe.place("folder"),
    )
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if launched != "no" and accelerator.is_main_process:
        tqdm.write(
            f"the launcher asks for {launched}; the recipe decides: {recipe.precision}"
        )
    if int(os.environ.get("WORLD_SIZE", "1")) != accelerator.num_processes:
        what = (
            "the launcher started several processes, and each believes it is alone"
        )
        raise CourseError(
            what, "the launch command", "use torchrun, or see launch/README.md"
        )
    if accelerator.distributed_type in (
        DistributedType.DEEPSPEED,
        DistributedType.FSDP,
    ):
        fix = "take launch/ddp.yaml, and shard=true in the recipe"
        raise CourseError(
            "this loop shards by itself", "the launch configuration", fix
        )
    if recipe.precision == "float16" and (
        accelerator.device.type != "cuda" or recipe.shard
    ):
        what = "float16 needs a GPU, and weights in one piece"
        raise CourseError(
            what, "precision in the recipe", "take bfloat16, float32 or auto"
        )
    return accelerator


def find_input(recipe: Recipe, name: str) -> Path:
    """The folder of the tokenizer or of the tokens; if it is not there, the lesson that makes it."""
    from utils.lesson import PUBLISHED_BY

    path = recipe.place(name)
    if not path.exists():
        profile = (
            path.parent.name if path.is_relative_to(build_folder()) else "laptop"
        )
        command = f"make run ONLY={PUBLISHED_BY[name]} PROFILE={profile}"
        fix = f"lesson {PUBLISHED_BY[name]} makes them: {command}; or set {name}=FOLDER"
        raise CourseError(f"the {name} of the recipe are not there", path, fix)
    return path


def build_step(recipe: Recipe, run: Run, split: Split) -> Step:
    """The model of a recipe, its optimizers, and the step that they take."""
    accelerator = run.accelerator
    torch.set_float32_matmul_precision("high")
    torch.set_num_threads(run.progress["threads"])
    model = build_model(recipe, run.tokenizer)
    block = split.header["block"]
    positions = getattr(model.config, "max_position_embeddings", block)
    if positions < block:
        what = f"blocks have {block} tokens, the model has {positions} positions"
        raise CourseError(
            what, "the recipe", f"set the model's positions to {block}"
        )
    if recipe.shard and accelerator.num_processes > 1:
        shard_model(model, accelerator.device.type, accelerator.num_processes)
    else:
        model.to(accelerator.device)
    return Step(
        accelerator,
        model,
        make_optimizers(model, recipe),
        split,
        rows=recipe.rows,
        micro=run.progress["micro"],
        clip=recipe.clip,
        seed=recipe.seed,
        precision=run.progress["precision"],
        compile=recipe.compile,
    )


def make_callbacks(
    recipe: Recipe, run: Run, step: Step, validation: Split
) -> list[callbacks.Callback]:
    """What happens beside the run that a recipe describes."""
    block = step.split.header["block"]
    rate = (
        callbacks.matmul_rate(step.device.type, step.dtype)
        * run.accelerator.num_processes
    )
    used = flops_per_token(step.model, block) / rate
    every = (recipe.evaluate_every, recipe.save_every)
    chosen: list[callbacks.Callback] = [
        callbacks.StepLog(recipe.log_every, recipe.rows * block, used),
        callbacks.DivergenceCheck(len(run.tokenizer)),
        callbacks.Evaluation(step, validation, recipe.evaluate_rows, *every),
        callbacks.Samples(step, run.tokenizer, recipe.prompts, recipe.sample_every),
    ]
    if recipe.log_to:
        chosen.append(callbacks.Trackers(run.accelerator))
    if recipe.hub and run.is_main:
        chosen.append(callbacks.HubPush(recipe.hub, recipe.hub_public))
    return chosen


def pretrain(recipe: Recipe) -> None:
    """Train by a recipe, from its beginning or from where its folder stands."""
    from transformers import AutoTokenizer

    accelerator = make_accelerator(recipe)
    tokenizer = AutoTokenizer.from_pretrained(find_input(recipe, "tokenizer"))
    run = Run(recipe, accelerator, tokenizer)
    with run.locked(), run.stoppable():
        step = begin(run, recipe)
        while not run.ends_here:
            advance(run, step, recipe)
        finish(run)


def begin(run: Run, recipe: Recipe) -> Step:
    """The step of a run, at the place where its folder stands."""
    tokens = find_input(recipe, "tokens")
    store = open_store(tokens, run.tokenizer)
    manifest = read_manifest(tokens) or {}
    checkpoint = run.find_checkpoint(recipe, manifest.get("hash"))
    step = build_step(recipe, run, store["train"])
    if checkpoint:
        checkpoints.load_checkpoint(checkpoint, step.model, step.optimizers)
    set_seed(recipe.seed)
    run.callbacks = make_callbacks(recipe, run, step, store["validation"])
    choices = {name: run.progress[name] for name in ("precision", "threads")}
    run.log("start", **choices, processes=run.accelerator.num_processes)
    step.trained.train()
    step.go_to(run.step)
    return step


def advance(run: Run, step: Step, recipe: Recipe) -> None:
    """One step, and what is due behind it."""
    began = time.perf_counter()
    share = share_of_rate(run.step, recipe)
    scale = step.scaler.get_scale() if step.scaler.is_enabled() else None
    loss, norm = step.take(run.step, share)
    run.progress |= {"step": run.step + 1, "micro": step.micro}
    result = callbacks.StepResult(
        loss, norm, share, time.perf_counter() - began, scale
    )
    for callback in run.callbacks:
        callback.after_step(run, result)
    if run.is_due(recipe.save_every):
        run.save(step)


def finish(run: Run) -> None:
    """Wait for what goes on beside the run, and tidy up."""
    for callback in run.callbacks:
        callback.close(run)
    run.drop_old()
    if run.stopping:
        print(f"stopped at step {run.step}; the same command goes on from there")


# the program ------------------------------------------------------------------------------------


def parse_value(text: str) -> Any:
    """A value of the command line: Python's if it is one, else the text itself.

    >>> parse_value("0.5"), parse_value("adamw"), parse_value("['def ']")
    (0.5, 'adamw', ['def '])
    """
    if text in ("true", "false"):
        return text == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def parse_changes(arguments: list[str]) -> dict[str, Any]:
    """The changes of a recipe that a command line asks for.

    >>> parse_changes(["steps=5", "folder=2024", "model.n_layer=2"])
    {'model': {'n_layer': 2}, 'steps': 5, 'folder': '2024'}
    """
    changes: dict[str, Any] = {"model": {}}
    for argument in arguments:
        name, _, text = argument.partition("=")
        field = Recipe.model_fields.get(name)
        if name.startswith("model."):
            changes["model"][name.removeprefix("model.")] = parse_value(text)
        elif field and field.annotation in (str, str | None):
            changes[name] = text
        else:
            changes[name] = parse_value(text)
    return changes


def main(arguments: list[str]) -> int:
    """`RECIPE [name=value …]`; `model.name=value` reaches into the model."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(
            "python -m stages.training RECIPE.toml [name=value | model.name=value …]"
        )
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
