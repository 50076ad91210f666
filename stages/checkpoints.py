"""Floor 3: checkpoints: complete or absent, found again by their hash, and never a pickle.

    folder/checkpoint-000200/  model.safetensors, config.json, the tokenizer, optimizer.safetensors,
                               progress.json, manifest.json

Each is a folder that `from_pretrained` reads. It is written aside, sealed and renamed, so a process
killed at any moment leaves whole checkpoints only.
"""
from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor, distribute_tensor

from utils.artifacts import damage, read_json, read_manifest, sealed, write_json

NAMED = re.compile(r"checkpoint-(\d+)")
STATE, PROGRESS = "optimizer.safetensors", "progress.json"


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as it is, or gathered from all ranks where each holds a part: then all must call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def spread(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, if `like` is spread over ranks; else the tensor."""
    if isinstance(like, DTensor) and tensor.shape == like.shape:
        return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)
    return tensor


def pack_state(optimizers: list[Any], keep: bool = True) -> dict[str, torch.Tensor]:
    """The tensors of optimizers' states, by number of optimizer, parameter and name.

    Every rank calls it, for each may hold a part; those that do not write (`keep`) keep nothing.
    """
    found = {}
    for number, optimizer in enumerate(optimizers):
        for index, parts in optimizer.state_dict()["state"].items():
            for name, value in parts.items():
                if torch.is_tensor(value):
                    gathered = whole(value).detach()
                    if keep:
                        found[f"{number}.{index}.{name}"] = gathered.cpu().contiguous().clone()
    return found


def unpack_state(optimizers: list[Any], tensors: dict[str, torch.Tensor]) -> None:
    """Put packed tensors back."""
    for number, optimizer in enumerate(optimizers):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        state: dict[int, dict[str, torch.Tensor]] = {}
        for key, value in tensors.items():
            owner, index, name = key.split(".", 2)
            if int(owner) == number:
                state.setdefault(int(index), {})[name] = spread(value, parameters[int(index)])
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def save_checkpoint(folder: Path, model: Any, state: dict[str, torch.Tensor],
                    weights: dict[str, torch.Tensor], tokenizer: Any, progress: dict[str, Any]) -> Path:
    """Write and seal the checkpoint of a step."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # one for each save would be many lines
    target = folder / f"checkpoint-{progress['step']:06}"
    with sealed(target, {"step": progress["step"]}) as aside:
        model.save_pretrained(aside, state_dict=weights)
        tokenizer.save_pretrained(aside)
        save_file(state, aside / STATE)
        write_json(aside / PROGRESS, progress)
    return target


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    found = [path for path in folder.glob("checkpoint-*") if NAMED.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(NAMED.fullmatch(path.name)[1]))


def newest_checkpoint(folder: Path) -> tuple[Path | None, dict[Path, str]]:
    """The newest whole checkpoint, and what was wrong with those that are newer."""
    wrong: dict[Path, str] = {}
    for path in reversed(list_checkpoints(folder)):
        manifest = read_manifest(path)
        said = damage(path, manifest) if manifest else "manifest.json has gone"
        if not said:
            return path, wrong
        wrong[path] = said
    return None, wrong


def load_checkpoint(path: Path, model: Any, optimizers: list[Any]) -> dict[str, Any]:
    """Put weights and optimizer states back; returns the progress."""
    weights, own = load_file(path / "model.safetensors"), model.state_dict()
    weights = {name: spread(value, own.get(name, value)) for name, value in weights.items()}
    missing, unknown = model.load_state_dict(weights, strict=False)
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    if unknown or set(missing) - tied:
        raise ValueError(f"{path.name} is of another model: {sorted({*unknown, *missing} - tied)[:3]}")
    unpack_state(optimizers, load_file(path / STATE))
    return read_json(path / PROGRESS)


def loss_of(path: Path) -> float:
    """The validation loss of a checkpoint; infinite where it has none that can be read."""
    try:
        loss = json.loads((path / PROGRESS).read_text(encoding="utf-8"))["validation_loss"]
    except (OSError, ValueError, KeyError):
        return math.inf
    return loss if loss is not None and math.isfinite(loss) else math.inf


def drop_checkpoints(folder: Path, keep: int) -> None:
    """Keep the newest ones (0: all) and the one with the lowest validation loss; drop the others."""
    found = list_checkpoints(folder)
    for path in set(found[:-keep]) - {min(found, key=loss_of, default=None)}:
        shutil.rmtree(path)


def set_aside(path: Path) -> Path:
    """Move a damaged checkpoint out of the way of those to come; nothing is lost."""
    other = path.with_name(f".damaged-{path.name}")
    shutil.rmtree(other, ignore_errors=True)
    return path.rename(other)


def forget_after(log: Path, step: int) -> None:
    """Drop the lines of a log that a resumed run will write again."""
    if log.exists():
        lines = [line for line in log.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
        kept = [line for line in lines if json.loads(line)["step"] <= step]
        log.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
