"""Sharded runs: what each rank holds, checkpoints for another number of ranks, a rank that is lost."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from small_runs import (  # noqa: F401
    calm,
    check_ended,
    checkpoint_names,
    inputs,
    losses,
    recipe,
    train_on,
    weights,
)
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import DTensor

from stages import run as runs
from stages import training
from stages import training_callbacks as callbacks
from stages.recipe import Recipe
from stages.run import Run
from stages.step import Step
from stages.training import is_of_exchange, pretrain
from stages.training_callbacks import find_stragglers

pytestmark = pytest.mark.slow
forks = pytest.mark.skipif(
    sys.platform != "linux", reason="what is changed in a rank travels by fork"
)


def watch_memory(recipe: Recipe) -> None:
    """Train, and look at what this rank has of model and gradients behind each piece of a step."""
    real_exchange = Step.exchange
    real_build = training.build_model
    halves = []
    places = []

    def exchange(step: Step, last: bool) -> Any:
        if last:
            for parameter in step.model.parameters():
                gradient = parameter.grad
                assert isinstance(gradient, DTensor)
                assert gradient.dtype == torch.float32
                halves.append(gradient.to_local().numel() / gradient.numel())
            whole = sum(t.numel() for t in step.model.parameters())
            mine = sum(t.to_local().numel() for t in step.model.parameters())
            assert mine < 0.6 * whole
        return real_exchange(step, last)

    def build(*arguments: Any) -> Any:
        model = real_build(*arguments)
        places.append(next(model.parameters()).device.type)
        return model

    Step.exchange = exchange  # type: ignore[method-assign]
    training.build_model = build
    pretrain(recipe)
    first = torch.distributed.get_rank() == 0
    assert places == (["meta", "cpu"] if first else ["meta"]), places
    assert halves, "gradients were looked at"
    assert max(halves) <= 0.6, "between two pieces a rank has its part only"


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_a_rank_never_keeps_a_whole_model_or_gradient(
    recipe: Recipe, calm: Recipe, precision: str
) -> None:
    """Two pieces a step and rank, and every other thing that spares memory."""
    spare = {"micro": 1, "recompute": True, "loss_chunk": 24, "save_beside": True}
    sharded = recipe.change(**spare, shard=True, precision=precision)
    check_ended(train_on(2, sharded, watch_memory))
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
    check_ended(train_on(2, sharded.change(steps=4)))
    for ranks in (1, 2, 4):
        there = sharded.change(folder=f"{recipe.folder}-{ranks}")
        shutil.copytree(sharded.place("folder"), there.place("folder"))
        check_ended(train_on(ranks, there))
        assert losses(there) == pytest.approx(losses(whole), abs=3e-3), ranks
        mine, theirs = weights(there), weights(whole)
        gaps = [(mine[name] - theirs[name]).abs().max() for name in theirs]
        assert max(gaps) < 0.02


# a rank that is lost ----------------------------------------------------------------------------


def lose(how: Callable[[], object], where: str) -> Callable[[Recipe], None]:
    """Training in which the second rank does something in step 6, and in a step's `where`."""
    real = getattr(Step, where)

    def acting(step: Step, *arguments: Any) -> Any:
        if step.run.step == 5:
            for group in (None, step.run.hosts):
                # From here on only, so that a slow machine is not taken for a silent one.
                _set_pg_timeout(timedelta(seconds=5), group)
            if step.rank == 1:
                how()
        return real(step, *arguments)

    def train(recipe: Recipe) -> None:
        setattr(Step, where, acting)
        pretrain(recipe)

    return train


def end_in_silence() -> None:
    os._exit(3)


def hang() -> None:
    threading.Event().wait()


@forks
@pytest.mark.parametrize("shard", [False, True], ids=["replicas", "shards"])
@pytest.mark.parametrize("how", [end_in_silence, hang])
def test_a_rank_that_is_lost_is_told_and_the_run_goes_on_later(
    recipe: Recipe, calm: Recipe, shard: bool, how: Callable[[], object]
) -> None:
    """Before its gradients are exchanged."""
    both = recipe.change(shard=shard)
    first, _ = train_on(2, both, lose(how, "forward_backward"))
    assert first.startswith("rank 1 is gone, or silent for too long")
    assert "step 6, rank 0" in first
    assert "goes on from the last checkpoint" in first
    check_ended(train_on(2, both))
    assert losses(both) == pytest.approx(losses(calm), abs=2e-3)


@forks
@pytest.mark.parametrize("how", [end_in_silence, hang])
def test_a_rank_that_is_lost_behind_a_step_is_told_too(
    recipe: Recipe, how: Callable[[], object]
) -> None:
    """In the callbacks, and where checkpoints are gathered, ranks wait for each other as well."""
    often = recipe.change(evaluate_every=5, save_every=5)
    first, _ = train_on(2, often, lose_in_evaluation(how))
    assert first.startswith("rank 1 is gone, or silent for too long")
    assert "step 5, rank 0" in first
    assert checkpoint_names(often) == []


def lose_in_evaluation(how: Callable[[], object]) -> Callable[[Recipe], None]:
    """Training in which the second rank is lost while held-out rows are judged."""
    real = callbacks.sum_losses

    def lost(*arguments: Any) -> Any:
        _set_pg_timeout(timedelta(seconds=5))
        if torch.distributed.get_rank() == 1:
            how()
        return real(*arguments)

    def train(recipe: Recipe) -> None:
        callbacks.sum_losses = lost
        pretrain(recipe)

    return train


def check_patience(recipe: Recipe) -> None:
    """Train, and look how long each group waits for a silent rank."""
    real = Run.call_roll

    def call_roll(run: Run) -> None:
        cpu = torch.device("cpu")
        own = [run.hosts, run.savers]
        groups = [torch.distributed.group.WORLD, *own]
        waits = [group._get_backend(cpu).options._timeout for group in groups]
        assert waits == [runs.PATIENCE * 1.2, *[runs.PATIENCE] * 2]
        real(run)

    Run.call_roll = call_roll  # type: ignore[method-assign]
    pretrain(recipe)


@forks
def test_nobody_waits_longer_than_is_stated(recipe: Recipe) -> None:
    check_ended(train_on(2, recipe.change(steps=1), check_patience))


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
