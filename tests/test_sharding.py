"""Sharded runs: what each rank holds, checkpoints for another number of ranks, a rank that is lost."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from small_runs import (  # noqa: F401
    calm,
    inputs,
    launch,
    log_lines,
    losses,
    recipe,
    weights,
    write_recipe,
)

from stages.recipe import Recipe
from stages.training import is_of_exchange, pretrain
from stages.training_callbacks import find_stragglers
from utils.errors import ROOT

pytestmark = pytest.mark.slow


def torchrun(ranks: int) -> tuple[str, ...]:
    start = ("-m", "torch.distributed.run", "--standalone")
    return (*start, f"--nproc_per_node={ranks}")


def run_script(
    text: str, recipe: Recipe, path: Path
) -> subprocess.CompletedProcess:
    """Train on two ranks by a script that has changed something of the engine."""
    path.write_text(text)
    command = [sys.executable, *torchrun(2), str(path), str(write_recipe(recipe))]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=500, check=False
    )


WATCHED = """
import sys, torch
from stages import training
from torch.distributed.tensor import DTensor
real = training.Step.exchange
halves = []
def exchange(step, last):
    if last:
        for parameter in step.model.parameters():
            gradient = parameter.grad
            assert isinstance(gradient, DTensor) and gradient.dtype == torch.float32
            halves.append(gradient.to_local().numel() / gradient.numel())
        whole = sum(t.numel() for t in step.model.parameters())
        mine = sum(t.to_local().numel() for t in step.model.parameters())
        assert mine < 0.6 * whole
    return real(step, last)
training.Step.exchange = exchange
build = training.build_model
places = []
def watched(*arguments):
    model = build(*arguments)
    places.append(next(model.parameters()).device.type)
    return model
training.build_model = watched
training.pretrain(training.Recipe.load(sys.argv[1]))
rank = torch.distributed.get_rank()
assert places == (["meta", "cpu"] if rank == 0 else ["meta"]), places
assert halves, "gradients were looked at"
assert max(halves) <= 0.6, "between two pieces a rank has its part of the gradients only"
"""


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_a_rank_never_keeps_a_whole_model_or_gradient(
    recipe: Recipe, calm: Recipe, tmp_path: Path, precision: str
) -> None:
    """Two pieces a step and rank, and every other thing that spares memory."""
    spare = {"micro": 1, "recompute": True, "loss_chunk": 24, "save_beside": True}
    sharded = recipe.change(**spare, shard=True, precision=precision)
    done = run_script(WATCHED, sharded, tmp_path / "watched.py")
    assert done.returncode == 0, done.stderr[-3000:]
    near = 2e-3 if precision == "float32" else 0.05
    for kind in ("step", "validation"):
        assert losses(sharded, kind) == pytest.approx(losses(calm, kind), abs=near)
    written = recipe.place("folder") / "checkpoint-000012" / "optimizer"
    assert len(list(written.iterdir())) == 2, "each rank writes its part"
    mine, theirs = weights(sharded), weights(calm)
    assert mine.keys() == theirs.keys()


def test_a_checkpoint_of_two_ranks_goes_on_with_one_two_and_four(
    recipe: Recipe,
) -> None:
    sharded = recipe.change(shard=True, schedule="constant")
    whole = sharded.change(folder=recipe.folder + "-whole")
    pretrain(whole)
    launch(sharded.change(steps=4), start=torchrun(2))
    for ranks in (1, 2, 4):
        there = sharded.change(folder=f"{recipe.folder}-{ranks}")
        shutil.copytree(sharded.place("folder"), there.place("folder"))
        launch(there, start=torchrun(ranks))
        assert losses(there) == pytest.approx(losses(whole), abs=3e-3), ranks
        mine, theirs = weights(there), weights(whole)
        gaps = [(mine[name] - theirs[name]).abs().max() for name in theirs]
        assert max(gaps) < 0.02


LOST = """
import os, sys
from stages import training
real = training.Step.forward_backward
def lost(step, number):
    if number == 5 and step.rank == 1:
        os._exit(3)
    return real(step, number)
training.Step.forward_backward = lost
sys.exit(training.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("shard", [False, True])
def test_a_rank_that_is_lost_is_told_and_the_run_goes_on_later(
    recipe: Recipe, calm: Recipe, tmp_path: Path, shard: bool
) -> None:
    both = recipe.change(shard=shard)
    done = run_script(LOST, both, tmp_path / "lost.py")
    assert done.returncode != 0
    assert "is gone, or silent for too long" in done.stderr
    assert "step 6, rank 0" in done.stderr
    launch(both, start=torchrun(2))
    assert losses(both) == pytest.approx(losses(calm), abs=2e-3)


def test_other_errors_are_not_taken_for_a_lost_rank() -> None:
    assert not is_of_exchange(RuntimeError("shapes cannot be multiplied"))
    assert not is_of_exchange(ValueError("gloo"))
    assert is_of_exchange(
        RuntimeError("[gloo/transport] Connection closed by peer")
    )


def test_a_slow_rank_is_named() -> None:
    assert find_stragglers([100.0, 100.0]) == ""
    assert find_stragglers([100.0, 90.0, 80.0]) == ""
    assert "rank 1 computes at 50%" in find_stragglers([100.0, 50.0, 100.0])
    assert find_stragglers([7.0]) == ""
