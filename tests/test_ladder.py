"""Every rung of lesson 12's ladder: predicted on tensors without contents, and measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Adafactor

from stages.memory import measure_peak, predict_memory
from tests.test_memory import cells_of

CELLS = ["rung", "build", "build-2", "step", "step-2", "session"]
CELLS += ["adam8-pack", "adam8-pack-2", "adam8", "lora-hand", "lora-add"]
RUNGS: dict[str, dict[str, Any]] = {
    "classic": {},
    "accumulation": {"micro": 1},
    "checkpointing": {"checkpointing": True},
    "bf16": {"dtype": torch.bfloat16},
    "Adafactor": {"optimizer": "adafactor"},
    "8-bit AdamW": {"optimizer": "adamw8"},
    "SDPA": {"attention": "sdpa"},
    "LoRA": {"lora": 8},
    "all of them": {
        "micro": 1,
        "checkpointing": True,
        "dtype": torch.bfloat16,
        "attention": "sdpa",
        "optimizer": "adamw8",
    },
}


def adafactor(parameters: Any) -> Any:
    """As the lesson's rung has it."""
    return Adafactor(
        parameters, lr=1e-3, scale_parameter=False, relative_step=False
    )


@pytest.fixture(scope="module")
def lesson() -> dict[str, Any]:
    """The lesson's own functions, at a small size."""
    names: dict[str, Any] = {"torch": torch, "nn": torch.nn, "device": "cpu"}
    names |= {"F": torch.nn.functional, "SEED": 0, "tokenizer": range(2048)}
    names |= {"width": 128, "layers": 4, "batch": 4}
    names |= {"rows": torch.zeros(4, 257, dtype=torch.long)}
    exec(cells_of("12", *CELLS), names)
    names["OPTIMIZERS"] |= {"adafactor": adafactor, "adamw8": names["AdamW8bit"]}
    return names


@pytest.mark.parametrize("name", RUNGS)
def test_a_rung_is_predicted_within_five_percent(lesson, name):
    rung = lesson["Rung"](**RUNGS[name])
    predicted = predict_memory(lambda: lesson["fake_session"](rung)).peak
    measured = measure_peak(lambda: lesson["session"](rung))
    assert predicted == pytest.approx(measured, rel=0.05)
