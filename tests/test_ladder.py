"""Every rung of lesson 12's ladder: predicted on tensors without contents, and measured."""

from __future__ import annotations

import contextlib
import functools
import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Adafactor

from stages.chunked_loss import chunk_loss
from stages.eight_bit import AdamW8bit
from stages.memory import measure_peak, predict_memory
from tests.test_memory import cells_of
from utils.show import format_bytes

CELLS = ["rung", "build", "step", "step-2", "session", "fake-session"]
CELLS += ["selective-rung"]
RUNGS: dict[str, dict[str, Any]] = {
    "classic": {},
    "accumulation": {"micro": 1},
    "checkpointing": {"checkpointing": "all"},
    "selective checkpointing": {"checkpointing": "selective"},
    "chunked loss": {"chunk": 64},
    "bf16": {"dtype": torch.bfloat16},
    "Adafactor": {"optimizer": "adafactor"},
    "8-bit AdamW": {"optimizer": "adamw8"},
    "SDPA": {"attention": "sdpa"},
    "all of them": {
        "micro": 1,
        "checkpointing": "all",
        "dtype": torch.bfloat16,
        "attention": "sdpa",
        "optimizer": "adamw8",
        "chunk": 64,
    },
}


def chunk(model: Any, rung: Any) -> None:
    """As the lesson prepares a model for a chunked loss."""
    if rung.chunk:
        chunk_loss(model, rung.chunk)


@pytest.fixture(scope="module")
def lesson() -> dict[str, Any]:
    """The lesson's own functions, at a small size."""
    names: dict[str, Any] = {"torch": torch, "nn": torch.nn, "device": "cpu"}
    names |= {"F": torch.nn.functional, "SEED": 0, "tokenizer": range(2048)}
    names |= {"width": 128, "layers": 4, "batch": 4, "RUNGS": {}}
    names |= {"rows": torch.zeros(4, 257, dtype=torch.long)}
    exec(cells_of("12", *CELLS), names)
    names["PREPARE"]["chunk"] = chunk
    plain = functools.partial(
        Adafactor, lr=1e-3, scale_parameter=False, relative_step=False
    )
    names["OPTIMIZERS"] |= {"adafactor": plain, "adamw8": AdamW8bit}
    return names


@pytest.mark.parametrize("name", RUNGS)
def test_a_rung_is_predicted_within_five_percent(lesson, name):
    rung = lesson["Rung"](**RUNGS[name])
    predicted = predict_memory(lambda: lesson["fake_session"](rung)).peak
    measured = measure_peak(lambda: lesson["session"](rung))
    assert predicted == pytest.approx(measured, rel=0.05)


@pytest.fixture(scope="module")
def gradients_of(lesson) -> Any:
    """The gradients of a rung, as one long vector."""
    torch.manual_seed(0)
    rows = torch.randint(2048, (4, 257))

    def compute(**settings: Any) -> torch.Tensor:
        rung = lesson["Rung"](**settings)
        model, _ = lesson["build"](rung)
        lesson["gradients"](model, rung, rows)
        return torch.cat([weight.grad.flatten() for weight in model.parameters()])

    return compute


# A rung that saves memory by computing something else is no rung.
@pytest.mark.parametrize(
    "name",
    [
        "accumulation",
        "checkpointing",
        "selective checkpointing",
        "chunked loss",
        "SDPA",
    ],
)
def test_a_rung_computes_the_same_gradients(gradients_of, name):
    classic = gradients_of()
    off = (gradients_of(**RUNGS[name]) - classic).norm() / classic.norm()
    assert off < 1e-4


# What the lesson says of each: less memory than the classic recipe, however small the model.
@pytest.mark.parametrize(
    "name", [name for name in RUNGS if name not in ("classic", "bf16")]
)
def test_a_rung_saves_memory(lesson, name):
    peaks = [
        predict_memory(lambda settings=settings: lesson["fake_session"](
            lesson["Rung"](**settings)
        )).peak
        for settings in ({}, RUNGS[name])
    ]  # fmt: skip
    assert peaks[1] < 0.97 * peaks[0]


@pytest.fixture
def batch(lesson) -> Any:
    """What the lesson prints of the largest batch under a budget, at a profile."""

    def find(budget: float | None, profile: str = "smoke") -> str:
        at = SimpleNamespace(pick=lambda **sizes: sizes[profile])
        names = lesson | {"BUDGET": budget, "lesson": at, "functools": functools}
        names |= {"predict_memory": predict_memory, "format_bytes": format_bytes}
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(cells_of("12", "largest-run"), names)
        return printed.getvalue()

    return find


def test_a_budget_below_one_sequence_is_told(batch):
    assert "0 sequences fit into 1 MB: 1 would take" in batch(1e6)


def test_the_largest_batch_fills_its_budget(lesson, batch):
    def need(count: int) -> int:
        rung = lesson["Rung"](attention="sdpa", micro=count)
        return predict_memory(lambda: lesson["fake_session"](rung, count)).peak

    three = need(3)
    assert batch(three).startswith("3 sequences")
    assert batch(three - 1).startswith("2 sequences")


@pytest.mark.slow
def test_no_budget_is_above_the_search(batch):
    assert not batch(5e9).startswith("64 sequences")


def test_the_clock_starts_when_the_device_is_done():
    """A device that queues its work: only waiting for it lets the time pass."""
    clock, queue = [0], [0]

    def wait() -> None:
        clock[0] += queue.pop()
        queue.append(0)

    def work(seconds: int) -> None:
        queue[0] += seconds

    def session(rung: object) -> tuple[None, None]:
        work(5)
        return None, None

    cuda = SimpleNamespace(synchronize=wait)
    names: dict[str, Any] = {"device": "cuda", "torch": SimpleNamespace(cuda=cuda)}
    names |= {"session": session, "take_step": lambda *a: work(1), "rows": None}
    exec(cells_of("12", "ladder-time"), names)
    assert names["seconds"](None, clock=lambda: clock[0]) == 1
