"""Checkpoints: complete or absent, known by their hash, and never a pickle.

    folder/checkpoint-000200/  model.safetensors, config.json, the tokenizer, optimizer.safetensors,
                               progress.json, manifest.json

Each is a folder for `from_pretrained`, written aside, sealed and renamed: a kill leaves whole ones only.
Of a sharded model each process writes its part of the optimizer's state, into `optimizer/`; any number
of processes reads either form, each what it needs.
"""

from __future__ import annotations

import json
import math
import shutil
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed import broadcast_object_list
from torch.distributed import checkpoint as distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor
from tqdm import tqdm
from transformers.utils import logging

from stages.sharding import Tensors, gather_to_first, is_sharded
from utils.artifacts import damage, read_json, read_manifest, sealed, write_json
from utils.errors import CourseError

WEIGHTS = "model.safetensors"
STATE = "optimizer.safetensors"
SHARDS = "optimizer"
PROGRESS = "progress.json"
# What a model is used without.
OF_TRAINING = [STATE, f"{SHARDS}/*", PROGRESS]


def weight_tensors(model: Any) -> Tensors:
    """The weights of a model; one that has two names is there once."""
    tensors = model.state_dict()
    for name in model.all_tied_weights_keys:
        tensors.pop(name)
    return tensors


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
    """Put such tensors back."""
    states: list[Any] = [defaultdict(dict) for _ in optimizers]
    for key, tensor in tensors.items():
        number, index, name = key.split(".", 2)
        states[int(number)][int(index)][name] = tensor
    for optimizer, state in zip(optimizers, states):
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def save_checkpoint(
    folder: Path, model: Any, optimizers: list[Any], tokenizer: Any, progress: Any
) -> Path:
    """Write and seal the checkpoint of a step; all ranks must call."""
    return prepare_checkpoint(folder, model, optimizers, tokenizer, progress)()


def prepare_checkpoint(
    folder: Path,
    model: Any,
    optimizers: list[Any],
    tokenizer: Any,
    progress: Any,
    group: Any = None,
    copy: bool = False,
) -> Callable[[], Path]:
    """Take what a checkpoint holds, and give back a function that writes it; all ranks must call both.

    With `copy` the function may run in a thread, while the training goes on.
    """
    target = folder / f"checkpoint-{progress['step']:06}"
    progress = dict(progress)
    weights = gather_to_first(weight_tensors(model))
    state = state_tensors(optimizers)
    sharded = is_sharded(model)
    first = bool(weights)
    if not sharded:
        state = gather_to_first(state)
    if copy:
        weights = copy_all(weights)
        state = copy_all(state)

    def fill(aside: Path) -> None:
        # A bar for each save would be many lines.
        logging.disable_progress_bar()
        model.save_pretrained(aside, state_dict=weights)
        tokenizer.save_pretrained(aside)
        if not sharded:
            save_file(state, aside / STATE)
        write_json(aside / PROGRESS, progress)

    def write() -> Path:
        if not first:
            if sharded:
                write_shards(None, state, group)
            return target
        with sealed(target, {"step": progress["step"]}) as aside:
            if sharded:
                write_shards(aside / SHARDS, state, group)
            fill(aside)
        return target

    return write


def copy_all(tensors: Tensors) -> Tensors:
    """Copies in main memory, which the next step does not change."""
    copies = {}
    for name, tensor in tensors.items():
        copy = tensor.detach().to("cpu", copy=True)
        copies[name] = copy
    return copies


def write_shards(folder: Path | None, state: Tensors, group: Any) -> None:
    """Write each rank's part of a state, into the folder that the first rank names."""
    named = [folder]
    broadcast_object_list(named, src=0, group=group)
    place = str(named[0])
    writer = distributed.HuggingFaceStorageWriter(
        place,
        save_distributed=True,
    )
    try:
        distributed.save(
            state,
            storage_writer=writer,
            process_group=group,
        )
    except CheckpointException as error:
        failures = [failure for failure, _ in error.failures.values()]
        raise failures[0] from error


def read_tensors(folder: Path, tensors: Tensors) -> None:
    """Fill tensors from the safetensors files of a folder: of a shard its own part is read."""
    place = str(folder)
    reader = distributed.HuggingFaceStorageReader(place)
    with warnings.catch_warnings():
        # Each rank reads for itself, and is warned of it.
        warnings.simplefilter("ignore", UserWarning)
        distributed.load(
            tensors,
            storage_reader=reader,
            no_dist=True,
        )


def entries_of(folder: Path, of_state: bool) -> dict[str, Any]:
    """Sizes and types of the tensors in a folder's files: of an optimizer's state, or of a model."""
    place = str(folder)
    reader = distributed.HuggingFaceStorageReader(place)
    metadata = reader.read_metadata()
    chosen = {}
    for name, entry in metadata.state_dict_metadata.items():
        # A state's names begin with the number of its optimizer.
        number, _, _ = name.partition(".")
        if number.isdecimal() == of_state:
            chosen[name] = entry
    return chosen


def load_checkpoint(path: Path, model: Any, optimizers: list[Any]) -> Any:
    """Put weights and optimizer states back, each rank its shard; returns the progress."""
    own = weight_tensors(model)
    saved = entries_of(path, of_state=False)
    for name in model.all_tied_weights_keys:
        saved.pop(name, None)
    shapes = {(name, tensor.shape) for name, tensor in own.items()}
    others = shapes ^ {(name, entry.size) for name, entry in saved.items()}
    if others:
        what = f"the checkpoint is of another model: see {min(others)[0]}"
        fix = "take the recipe it was made with, or another folder"
        raise CourseError(what, path, fix)
    read_tensors(path, own)
    place = path / SHARDS if (path / SHARDS).is_dir() else path
    state = empty_state(optimizers, entries_of(place, of_state=True))
    read_tensors(place, state)
    restore_state(optimizers, state)
    return read_json(path / PROGRESS)


def empty_state(optimizers: list[Any], entries: dict[str, Any]) -> Tensors:
    """Tensors for the states of a checkpoint; of a sharded parameter's, this rank's shards."""
    tensors = {}
    for key, entry in entries.items():
        number, index, _ = key.split(".", 2)
        groups = optimizers[int(number)].param_groups
        parameters = [p for group in groups for p in group["params"]]
        like = parameters[int(index)].detach()
        if isinstance(like, DTensor) and entry.size == like.shape:
            tensors[key] = torch.empty_like(like)
        else:
            tensors[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
    return tensors


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
