"""Checkpoints and the log beside them survive kills, torn bytes and other models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import GPT2, calm, checkpoint_names, inputs, losses, recipe  # noqa: F401
from transformers import AutoModelForCausalLM, AutoTokenizer

from stages import checkpoints
from stages.recipe import Recipe, build_model, make_optimizers
from stages.tokens import Loader, open_store
from stages.training_callbacks import sum_losses
from utils.errors import ROOT, CourseError


def build(recipe: Recipe) -> tuple[Any, list[Any]]:
    model = build_model(recipe, AutoTokenizer.from_pretrained(recipe.tokenizer))
    return model, make_optimizers(model, recipe)


def newest(recipe: Recipe) -> Path:
    return checkpoints.list_checkpoints(recipe.place("folder"))[-1]


def test_a_checkpoint_is_a_model_like_any_other(calm: Recipe, inputs: Path) -> None:
    path = newest(calm)
    model = AutoModelForCausalLM.from_pretrained(path)
    assert len(AutoTokenizer.from_pretrained(path)) == model.config.vocab_size
    validation = open_store(inputs / "tokens")["validation"]
    total, count = sum_losses(model, Loader(validation, 4, calm.seed, stop=21))
    assert float(total / count) == pytest.approx(
        losses(calm, "validation")[12], abs=1e-6
    )
    assert not [
        file for file in path.iterdir() if file.suffix in (".pt", ".bin", ".pkl")
    ]


def test_what_is_loaded_is_what_was_saved(calm: Recipe, tmp_path: Path) -> None:
    model, optimizers = build(calm)
    progress = checkpoints.load_checkpoint(newest(calm), model, optimizers)
    assert progress["step"] == 12
    tokenizer = AutoTokenizer.from_pretrained(calm.tokenizer)
    again = checkpoints.save_checkpoint(
        tmp_path, model, optimizers, tokenizer, progress
    )
    for name in (checkpoints.WEIGHTS, checkpoints.STATE):
        assert (again / name).read_bytes() == (newest(calm) / name).read_bytes()


@pytest.mark.parametrize(
    "changes", [{"hidden_size": 64}, {"num_hidden_layers": 3}, GPT2]
)
def test_a_checkpoint_of_another_model_is_refused_and_touches_nothing(
    calm: Recipe,
    changes: dict[str, Any],
) -> None:
    other = (
        Recipe(**{**vars(calm), "model": GPT2})
        if changes is GPT2
        else calm.change(model=changes)
    )
    model, optimizers = build(other)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(CourseError, match="another model"):
        checkpoints.load_checkpoint(newest(calm), model, optimizers)
    assert all(
        torch.equal(old, new) for old, new in zip(before, model.parameters())
    )


def make_checkpoints(folder: Path, found: dict[int, object]) -> None:
    for step, loss in found.items():
        path = folder / f"checkpoint-{step:06}"
        path.mkdir()
        text = (
            loss if isinstance(loss, str) else json.dumps({"validation_loss": loss})
        )
        (path / checkpoints.PROGRESS).write_text(text)


@pytest.mark.parametrize(
    ("keep", "left"),
    [(1, [4, 12]), (2, [4, 8, 12]), (9, [4, 8, 12]), (None, [4, 8, 12])],
)
def test_the_newest_and_the_best_are_left(
    tmp_path: Path, keep: int | None, left: list[int]
) -> None:
    make_checkpoints(tmp_path, {4: 1.0, 8: 3.0, 12: 2.0})
    checkpoints.drop_checkpoints(tmp_path, keep, None)
    assert [path.name for path in checkpoints.list_checkpoints(tmp_path)] == [
        f"checkpoint-{step:06}" for step in left
    ]


@pytest.mark.parametrize(
    "loss", [float("nan"), None, "{", "[]", '{"validation_loss": "x"}', "3"]
)
def test_a_loss_that_is_no_number_is_never_the_best(
    tmp_path: Path, loss: object
) -> None:
    make_checkpoints(tmp_path, {4: loss, 8: 3.0, 12: 4.0})
    checkpoints.drop_checkpoints(tmp_path, 1, None)
    names = [path.name for path in checkpoints.list_checkpoints(tmp_path)]
    assert names == ["checkpoint-000008", "checkpoint-000012"]


def test_a_folder_in_use_is_not_dropped(tmp_path: Path) -> None:
    make_checkpoints(tmp_path, {4: 9.0, 8: 3.0, 12: 2.0})
    checkpoints.drop_checkpoints(tmp_path, 1, in_use=tmp_path / "checkpoint-000004")
    names = [path.name for path in checkpoints.list_checkpoints(tmp_path)]
    assert names == ["checkpoint-000004", "checkpoint-000012"]


# shards

SHARDS = """
import sys, torch
from pathlib import Path
from safetensors.torch import load_file
from torch.distributed import barrier, destroy_process_group, get_rank
from torch.distributed import init_process_group
from transformers import AutoTokenizer
from stages import checkpoints
from stages.recipe import Recipe, build_model, make_optimizers
from stages.sharding import gather_to_first, shard_model

recipe = Recipe.load(sys.argv[1])
path = Path(sys.argv[2])
tokenizer = AutoTokenizer.from_pretrained(recipe.tokenizer)
init_process_group("gloo")
whole = build_model(recipe, tokenizer)
model = build_model(recipe, tokenizer)
shard_model(model, "cpu", 2)
sizes = [p.to_local().numel() for p in model.parameters()]
assert sum(sizes) < 0.6 * sum(p.numel() for p in whole.parameters()), "each rank has its half"
full = gather_to_first(model.state_dict())
assert (full == {}) == (get_rank() == 1), "only the first rank holds the full tensors"
for name, tensor in full.items():
    assert torch.equal(tensor, whole.state_dict()[name]), "the weights of one process"

optimizers = make_optimizers(model, recipe)
checkpoints.load_checkpoint(path, model, optimizers)
mine = [v.to_local() for v in checkpoints.state_tensors(optimizers).values() if v.ndim]
assert all(v.untyped_storage().nbytes() == v.nbytes for v in mine), "no view of a full tensor"
target = path.parent.parent / "again"
again = checkpoints.save_checkpoint(target, model, optimizers, tokenizer, {"step": 12})
barrier()  # the first rank moves it into its place
if get_rank() == 0:
    old, new = (load_file(place / checkpoints.WEIGHTS) for place in (path, again))
    assert set(new) >= set(old), "nothing is missing"
    assert all(torch.equal(old[key], new[key]) for key in old)

twin = build_model(recipe, tokenizer)
shard_model(twin, "cpu", 2)
others = make_optimizers(twin, recipe)
checkpoints.load_checkpoint(again, twin, others)
old, new = checkpoints.state_tensors(optimizers), checkpoints.state_tensors(others)
assert set(new) == set(old), "every rank finds its own states again"
local = lambda tensor: tensor.to_local() if hasattr(tensor, "to_local") else tensor
assert all(torch.equal(local(old[key]), local(new[key])) for key in old)
destroy_process_group()
"""


@pytest.mark.slow
def test_shards_hold_their_part_and_gather_to_the_first_rank(
    calm: Recipe,
    tmp_path: Path,
) -> None:
    script = tmp_path / "shards.py"
    script.write_text(SHARDS)
    fields = {
        name: value for name, value in vars(calm).items() if value is not None
    }
    sizes = {n: "none" if v is None else v for n, v in fields.pop("model").items()}
    lines = [f"{name} = {json.dumps(value)}" for name, value in fields.items()]
    lines += [
        "[model]",
        *(f"{name} = {json.dumps(value)}" for name, value in sizes.items()),
    ]
    (tmp_path / "recipe.toml").write_text("\n".join(lines))
    start = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
    ]
    paths = [str(script), str(tmp_path / "recipe.toml"), str(newest(calm))]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*start, *paths], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
