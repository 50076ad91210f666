"""A compiled step: it learns what a plain one learns, in copies of a model too, and goes on to the bit."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_runs import (  # noqa: F401
    calm,
    check_ended,
    check_same_bits,
    inputs,
    losses,
    recipe,
    train_on,
    weights,
)
from torch._dynamo.backends.distributed import DDPOptimizer

from stages.recipe import Recipe
from stages.step import Step
from stages.training import pretrain

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux", reason="what is changed in a rank travels by fork"
    ),
]


def count_buckets(recipe: Recipe) -> None:
    """Train with buckets of some kilobytes: what is compiled must be cut where they end."""
    torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = 20_000
    real_copy = torch.nn.parallel.DistributedDataParallel.__init__
    real_compile = DDPOptimizer.compile_fn
    counts = []

    def copy(*arguments: Any, **options: Any) -> None:
        real_copy(*arguments, **options, bucket_cap_mb=0.02)

    def compile_parts(self: DDPOptimizer, *arguments: Any) -> Any:
        compiled = real_compile(self, *arguments)
        counts.append(len(self.buckets))
        return compiled

    torch.nn.parallel.DistributedDataParallel.__init__ = copy  # type: ignore[method-assign]
    DDPOptimizer.compile_fn = compile_parts  # type: ignore[method-assign]
    pretrain(recipe)
    assert counts, "the exchange of copies was compiled around"
    assert min(counts) > 1, counts


def test_copies_of_a_compiled_model_train_like_one_process(
    recipe: Recipe, calm: Recipe
) -> None:
    """In two pieces, of which the first is not exchanged."""
    check_ended(train_on(2, recipe.change(compile=True, micro=1), count_buckets))
    for kind in ("step", "validation"):
        assert losses(recipe, kind) == pytest.approx(losses(calm, kind), abs=2e-3)


def kill_at(number: int) -> Callable[[Recipe], None]:
    """Training that is killed in a step."""
    real = Step.forward_backward

    def killing(step: Step, here: int) -> Any:
        if here == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(step, here)

    def train(recipe: Recipe) -> None:
        Step.forward_backward = killing  # type: ignore[method-assign]
        pretrain(recipe)

    return train


def test_a_step_that_is_compiled_at_resume_goes_on_to_the_same_bits(
    recipe: Recipe,
) -> None:
    """Each time in another process, with dropout, in pieces, in bfloat16."""
    noisy = recipe.change(model={"attention_dropout": 0.3}, compile=True, micro=2)
    noisy = noisy.change(precision="bfloat16")
    twin = noisy.change(folder=recipe.folder + "-twin")
    check_ended(train_on(1, twin))
    train_on(1, noisy, kill_at(7))
    assert max(losses(noisy)) == 7
    check_ended(train_on(1, noisy))
    check_same_bits(noisy, twin)
