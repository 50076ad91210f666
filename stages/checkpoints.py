"""Checkpoints: complete or absent, known by their hash, and never a pickle.

    folder/checkpoint-000200/  model.safetensors, config.json, the tokenizer, optimizer.safetensors,
                               progress.json, manifest.json

Each is a folder for `from_pretrained`, written aside, sealed and renamed: a kill leaves whole ones only.
"""

from __future__ import annotations

import json
import math
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor, distribute_tensor
from tqdm import tqdm
from transformers.utils import logging

from utils.artifacts import damage, read_json, read_manifest, sealed, write_json
from utils.errors import CourseError

WEIGHTS = "model.safetensors"
STATE = "optimizer.safetensors"
PROGRESS = "progress.json"
Tensors = dict[str, torch.Tensor]


def shard(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor that all ranks have read; of this rank's shard only, if `like` is one."""
    if isinstance(like, DTensor) and tensor.shape == like.shape:
        mesh, places = like.device_mesh, like.placements
        full = tensor.to(like.device)
        tensor = distribute_tensor(full, mesh, places, src_data_rank=None)
    # A view would keep the full tensor in memory, or the file that it was read from.
    return tensor.clone()


def gather_to_first(tensors: Tensors) -> Tensors:
    """Full tensors in the first rank's main memory, {} on the others; all ranks must call."""
    alone = not torch.distributed.is_initialized()
    first = alone or torch.distributed.get_rank() == 0
    full = {}
    for name, tensor in tensors.items():
        # One at a time: no device ever holds more than one of them in full.
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        if first:
            full[name] = tensor.detach().cpu().contiguous()
    return full


def state_tensors(optimizers: list[Any]) -> Tensors:
    """The tensors of optimizers' states, by number of optimizer, number of parameter, and name."""
    tensors = {}
    for number, optimizer in enumerate(optimizers):
        state = optimizer.state_dict()["state"]
        for index, parts in state.items():
            for name, value in parts.items():
                key = f"{number}.{index}.{name}"
                tensors[key] = value
    return tensors


def restore_state(optimizers: list[Any], tensors: Tensors) -> None:
    """Put such tensors back, each rank its shard of them."""
    states: list[Any] = [defaultdict(dict) for _ in optimizers]
    for key, tensor in tensors.items():
        number, index, name = key.split(".", 2)
        groups = optimizers[int(number)].param_groups
        parameters = [p for group in groups for p in group["params"]]
        own = shard(tensor, parameters[int(index)])
        states[int(number)][int(index)][name] = own
    for optimizer, state in zip(optimizers, states):
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def save_checkpoint(
    folder: Path, model: Any, optimizers: list[Any], tokenizer: Any, progress: Any
) -> Path:
    """Gather, write and seal the checkpoint of a step; all ranks must call, the first one writes."""
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


def load_checkpoint(path: Path, model: Any, optimizers: list[Any]) -> Any:
    """Put weights and optimizer states back, each rank its shard; returns the progress."""
    own = model.state_dict()
    saved = load_file(path / WEIGHTS)
    for name in model.all_tied_weights_keys:
        own.pop(name)
        saved.pop(name, None)
    shapes = {(name, tensor.shape) for name, tensor in own.items()}
    others = shapes ^ {(name, tensor.shape) for name, tensor in saved.items()}
    if others:
        what = f"the checkpoint is of another model: see {min(others)[0]}"
        fix = "take the recipe it was made with, or another folder"
        raise CourseError(what, path, fix)
    with torch.no_grad():
        for name, tensor in saved.items():
            own[name].copy_(shard(tensor, own[name]))
    restore_state(optimizers, load_file(path / STATE))
    return read_json(path / PROGRESS)


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    steps = {}
    for path in folder.glob("checkpoint-*"):
        number = path.name.removeprefix("checkpoint-")
        if number.isdecimal():
            steps[int(number)] = path
    return [steps[number] for number in sorted(steps)]


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest undamaged checkpoint; damaged ones that are newer are set aside, and nothing is lost."""
    for path in reversed(list_checkpoints(folder)):
        manifest = read_manifest(path) or {}
        # Every byte is hashed: a training state is believed only as it was written.
        problem = damage(path, manifest, full=True)
        if not problem:
            return path
        aside = path.with_name(f".damaged-{path.name}")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        said = f"skipped a damaged checkpoint, {path.name}: {problem}"
        tqdm.write(f"{said}; it is now {aside.name}")
    return None


def validation_loss(path: Path) -> float:
    """The validation loss of a checkpoint; infinite where it has none that can be read."""
    try:
        progress = json.loads((path / PROGRESS).read_bytes())
        loss = progress["validation_loss"]
        return float(loss) if math.isfinite(loss) else math.inf
    except (OSError, ValueError, KeyError, TypeError):
        return math.inf


def drop_checkpoints(folder: Path, keep: int | None, in_use: Path | None) -> None:
    """Keep the newest ones (None: all), the best one, and one in use; drop the others."""
    paths = list_checkpoints(folder)
    best = min(paths, key=validation_loss, default=None)
    older = paths[:-keep] if keep else []
    for path in older:
        if path not in (best, in_use):
            # Out of sight first: a process killed while it removes files leaves no half checkpoint.
            hidden = path.with_name(f".dropped-{path.name}")
            shutil.rmtree(path.rename(hidden))
