"""Checkpoints: complete or absent, known by their hash, and never a pickle.

    folder/checkpoint-000200/  model.safetensors, config.json, the tokenizer, optimizer.safetensors,
                               progress.json, manifest.json

Each is a folder that `from_pretrained` reads. It is written aside, sealed and renamed, so a process
that is killed at any moment leaves complete checkpoints only.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor, distribute_tensor

from utils.artifacts import (
    damage,
    plain_disk_errors,
    read_json,
    read_manifest,
    sealed,
    write_json,
)
from utils.errors import CourseError

WEIGHTS = "model.safetensors"
STATE = "optimizer.safetensors"
PROGRESS = "progress.json"


# shards -----------------------------------------------------------------------------------------


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor, where each rank holds a shard: then all ranks must call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor that all ranks have read, if `like` is sharded; else the tensor."""
    if isinstance(like, DTensor) and tensor.shape == like.shape:
        full = tensor.to(like.device)
        cut = distribute_tensor(
            full, like.device_mesh, like.placements, src_data_rank=None
        )
        # A copy: a shard that is a view would keep the full tensor in memory.
        return cut.clone()
    return tensor


def gather_to_first(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Full tensors in the first rank's main memory, and {} on the others; all ranks must call.

    They are gathered one at a time, so that no device ever holds more than one of them in full.
    """
    first = (
        not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    )
    full = {}
    for name, tensor in tensors.items():
        gathered = gather(tensor.detach())
        if first:
            full[name] = gathered.cpu().contiguous()
    return full


# the states of optimizers -----------------------------------------------------------------------


def state_tensors(optimizers: list[Any]) -> dict[str, torch.Tensor]:
    """The tensors of optimizers' states, by number of optimizer, number of parameter, and name."""
    tensors = {}
    for number, optimizer in enumerate(optimizers):
        for index, parts in optimizer.state_dict()["state"].items():
            for name, value in parts.items():
                if torch.is_tensor(value):
                    tensors[f"{number}.{index}.{name}"] = value
    return tensors


def restore_state(
    optimizers: list[Any], tensors: Iterator[tuple[str, torch.Tensor]]
) -> None:
    """Put such tensors back, each rank its shard of them."""
    states: list[dict[int, dict[str, torch.Tensor]]] = [{} for _ in optimizers]
    parameters = [
        [p for g in o.param_groups for p in g["params"]] for o in optimizers
    ]
    for key, tensor in tensors:
        number, index, name = key.split(".", 2)
        parameter = parameters[int(number)][int(index)]
        part = states[int(number)].setdefault(int(index), {})
        part[name] = shard(tensor, parameter)
    for optimizer, state in zip(optimizers, states):
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


# writing and reading ----------------------------------------------------------------------------


def save_checkpoint(
    folder: Path,
    model: Any,
    optimizers: list[Any],
    tokenizer: Any,
    progress: dict[str, Any],
) -> Path:
    """Gather, write and seal the checkpoint of a step; all ranks must call, the first one writes."""
    from transformers.utils import logging

    target = folder / f"checkpoint-{progress['step']:06}"
    weights = gather_to_first(model.state_dict())
    state = gather_to_first(state_tensors(optimizers))
    if not weights:
        return target
    # A bar for each save would be many lines.
    logging.disable_progress_bar()
    with sealed(target, {"step": progress["step"]}) as aside:
        model.save_pretrained(aside, state_dict=weights)
        tokenizer.save_pretrained(aside)
        save_file(state, aside / STATE)
        write_json(aside / PROGRESS, progress)
    return target


def read_tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a file, one at a time."""
    with safe_open(path, "pt") as file:
        names = file.keys()
        for name in names:
            # A copy: the file itself may be dropped while the run goes on.
            yield name, file.get_tensor(name).clone()


def load_weights(path: Path, model: Any) -> None:
    """Copy the weights of a file into a model of the same kind, each rank its shard of them."""
    own = model.state_dict()
    with safe_open(path, "pt") as file:
        names = file.keys()
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
    missing = (
        set(own)
        - set(shapes)
        - set(getattr(model, "all_tied_weights_keys", None) or ())
    )
    other = {
        name
        for name in shapes
        if name not in own or shapes[name] != own[name].shape
    }
    if missing or other:
        names = ", ".join(sorted(missing | other)[:3])
        fix = "take the recipe it was made with, or another folder"
        raise CourseError(
            f"the checkpoint is of another model: see {names}", path.parent, fix
        )
    with torch.no_grad():
        for name, tensor in read_tensors(path):
            own[name].copy_(shard(tensor, own[name]))


def load_checkpoint(
    path: Path, model: Any, optimizers: list[Any]
) -> dict[str, Any]:
    """Put weights and optimizer states back, each rank its shard; returns the progress."""
    load_weights(path / WEIGHTS, model)
    try:
        restore_state(optimizers, read_tensors(path / STATE))
    except (IndexError, ValueError) as error:
        what = f"the checkpoint is of other optimizers: {error}"
        raise CourseError(what, path, "take the recipe it was made with") from error
    return read_json(path / PROGRESS)


# a folder of checkpoints ------------------------------------------------------------------------


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    steps = {}
    for path in folder.glob("checkpoint-*"):
        number = path.name.removeprefix("checkpoint-")
        if re.fullmatch("[0-9]+", number):
            steps[path] = int(number)
    return sorted(steps, key=lambda path: steps[path])


def newest_checkpoint(folder: Path) -> tuple[Path | None, dict[Path, str]]:
    """The newest undamaged checkpoint, and what is wrong with those that are newer."""
    damaged: dict[Path, str] = {}
    for path in reversed(list_checkpoints(folder)):
        manifest = read_manifest(path)
        # Every byte is hashed: a training state is believed only as it was written.
        problem = (
            damage(path, manifest, full=True)
            if manifest
            else "manifest.json has gone"
        )
        if not problem:
            return path, damaged
        damaged[path] = problem
    return None, damaged


def validation_loss(path: Path) -> float:
    """The validation loss of a checkpoint; infinite where it has none that can be read."""
    try:
        loss = json.loads((path / PROGRESS).read_text(encoding="utf-8"))[
            "validation_loss"
        ]
        return float(loss) if math.isfinite(loss) else math.inf
    except (OSError, ValueError, KeyError, TypeError):
        return math.inf


def drop_checkpoints(
    folder: Path, keep: int | None, in_use: Collection[Path] = ()
) -> None:
    """Keep the newest ones (None: all), the best one, and those in use; drop the others."""
    paths = list_checkpoints(folder)
    if keep is None or len(paths) <= keep:
        return
    best = min(paths, key=validation_loss)
    for path in paths[:-keep]:
        if path != best and path not in in_use:
            # Out of sight first: a process killed while it removes files leaves no half checkpoint.
            shutil.rmtree(path.rename(path.with_name(f".dropped-{path.name}")))


def set_aside(path: Path) -> Path:
    """Move a damaged checkpoint out of the way of those to come; nothing is lost."""
    other = path.with_name(f".damaged-{path.name}")
    shutil.rmtree(other, ignore_errors=True)
    return path.rename(other)


# the log beside them ----------------------------------------------------------------------------


def step_of_line(line: bytes) -> float:
    """The step that a line of a log speaks of; infinite for one that is torn."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return math.inf


def forget_after(log: Path, step: int) -> None:
    """Drop the lines that a resumed run will write again, and torn ones, by way of a second file."""
    if not log.exists():
        return
    lines = log.read_bytes().split(b"\n")
    remaining = [line for line in lines if step_of_line(line) <= step]
    aside = log.with_name(f".{log.name}.part")
    with plain_disk_errors(log.parent), aside.open("wb") as file:
        file.write(b"".join(line + b"\n" for line in remaining))
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, log)
