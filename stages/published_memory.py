"""The memory of BERT-large on a V100, as it was published in 2022, predicted without a GPU.

    ROWS                nine rows of the reference notes: their label, the run that was meant, MiB
    predict_rows()      the peaks of all of them, from tensors without contents
    row_cells(row, …)   a row for a table, with the memory of an NVIDIA GPU if one is here

The figures are those of transformers' documentation, measured by NVML; three labels of the notes say
something else than the run they name. `CONTEXT` is what the card held before the model came.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Adafactor, BertConfig, BertForSequenceClassification

from stages.eight_bit import AdamW8bit
from stages.memory import driver_bytes, fake_tensors

CONTEXT = 1343
MIB = 2**20
TOKENS = 512


@dataclass(frozen=True)
class Run:
    """How a step was taken. Without an optimizer the model was loaded and nothing else."""

    rows: int = 4
    optimizer: str = "adamw"
    checkpointing: bool = False
    half: bool = False


@dataclass(frozen=True)
class Row:
    """A row of the notes: what it says, what was run where that differs, and MiB."""

    label: str
    said: Run | None  # None for data alone: nothing on the card but its context
    published: int
    meant: Run | None = None

    @property
    def run(self) -> Run:
        """The run that the figure is of."""
        run = self.meant or self.said
        assert run is not None, "a row has a run"
        return run


ONE = Run(rows=1)
SAVING = replace(ONE, checkpointing=True)
ROWS = [
    Row("dummy data", None, 2631, Run(0, "")),
    Row("batch 4", Run(), 14949),
    Row("batch 4, 8-bit Adam", Run(optimizer="adamw8"), 13085),
    Row("batch 4, Adafactor", Run(optimizer="adafactor"), 12295),
    Row("batch 4, fp16", Run(half=True), 13939),
    Row("batch 4, fp16, checkpointing", Run(checkpointing=True, half=True), 7275,
        replace(SAVING, half=True)),
    Row("batch 1, accumulation 4", ONE, 8681),
    Row("the same, checkpointing", SAVING, 6775),
    Row("the same, fp16, accelerate", replace(SAVING, half=True), 5363,
        replace(SAVING, half=True, optimizer="adamw8")),
]  # fmt: skip


def gpu_dropout(
    x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    """A GPU keeps the mask of a dropout in one byte an element, where a CPU keeps four."""
    if not training or p == 0:
        return x
    return torch.native_dropout(x, p, True)[0]


softmax = F.softmax
layer_norm = F.layer_norm


def gpu_softmax(x: torch.Tensor, dim: int = -1, **rest: Any) -> torch.Tensor:
    """In mixed precision a GPU computes it in 32 bits."""
    return softmax(x.float(), dim)


def gpu_layer_norm(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    """This too."""
    return layer_norm(x.float(), *rest)


def as_on_a_gpu() -> Any:
    """Let a CPU keep what a GPU of 2022 kept."""
    return patch.multiple(
        F, dropout=gpu_dropout, softmax=gpu_softmax, layer_norm=gpu_layer_norm
    )


def make_optimizers(model: nn.Module, name: str) -> list[torch.optim.Optimizer]:
    """As each row had them: weight after weight, and embeddings never in 8 bits."""
    if name == "":
        return []
    if name == "adafactor":
        settings = {"scale_parameter": False, "relative_step": False}
        return [Adafactor(model.parameters(), lr=1e-4, **settings)]
    if name == "adamw":
        return [torch.optim.AdamW(model.parameters(), foreach=False)]
    tables = [one for one in model.modules() if isinstance(one, nn.Embedding)]
    whole = {table.weight for table in tables}
    rest = [weight for weight in model.parameters() if weight not in whole]
    return [torch.optim.AdamW(whole, foreach=False), AdamW8bit(rest)]


def build_bert() -> Any:
    """BERT-large with a head for two classes, as in 2022: eager attention and dropout."""
    config = BertConfig(
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        use_cache=False,
    )
    config._attn_implementation = "eager"
    # The contents are of no interest, and drawing them takes time on a real device.
    with patch.object(BertForSequenceClassification, "init_weights"):
        return BertForSequenceClassification(config).train()


def zero_gradients(model: nn.Module) -> None:
    """Gradients were filled with zeros between steps, and not freed."""
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)


def forward_backward(model: Any, run: Run) -> None:
    """One piece of a batch."""
    model.activation_checkpointing_disable()
    if run.checkpointing:
        model.activation_checkpointing_enable()
    device = model.device
    ids = torch.zeros(run.rows, TOKENS, dtype=torch.long, device=device)
    answers = torch.zeros(run.rows, dtype=torch.long, device=device)
    with torch.autocast(device.type, torch.float16, enabled=run.half):
        loss = model(input_ids=ids, labels=answers).loss
    loss.backward()


def step_optimizers(model: nn.Module, run: Run) -> list[torch.optim.Optimizer]:
    """One update, after which all averages are there; they live as long as what is returned."""
    zero_gradients(model)
    optimizers = make_optimizers(model, run.optimizer)
    for optimizer in optimizers:
        optimizer.step()
    return optimizers


def states_of(run: Run) -> tuple[int, int]:
    """Bytes that stay behind the first update of a run, and the most on the way there."""
    with fake_tensors() as live:
        model = build_bert()
        optimizers = step_optimizers(model, run) if run.optimizer else []
        stays = live.now
        del optimizers
        return stays, live.peak


def rises_of(runs: Iterable[Run]) -> dict[Run, int]:
    """Bytes that forward and backward add at their peak, of runs that differ in nothing else."""
    rises = {}
    with fake_tensors() as live:
        model = build_bert()
        zero_gradients(model)
        for run in runs:
            before = live.peak = live.now
            forward_backward(model, run)
            rises[run] = live.peak - before
    return rises


def predict_mib(runs: Iterable[Run]) -> dict[Run, float]:
    """MiB on the card at the peak of each run, its context among them.

    What a pass adds does not depend on the optimizer, and the states do not depend on the pass. So each
    is counted once, and a peak is the larger of two sums.

    >>> {run.rows: round(mib) for run, mib in predict_mib([Run(0, "")]).items()}
    {0: 2621}
    """
    wanted = set(runs)
    passes = {replace(run, optimizer="adamw") for run in wanted if run.optimizer}
    rises: dict[Run, int] = {}
    with as_on_a_gpu():
        kinds = sorted({run.optimizer for run in wanted})
        states = {kind: states_of(Run(optimizer=kind)) for kind in kinds}
        if passes:
            rises = rises_of(passes)
    predicted = {}
    for run in wanted:
        stays, built = states[run.optimizer]
        added = rises.get(replace(run, optimizer="adamw"), 0)
        predicted[run] = CONTEXT + max(stays + added, built) / MIB
    return predicted


def predict_rows() -> dict[Run | None, float]:
    """MiB of all runs that a row says or means; of data alone the context is all."""
    wanted = {run for row in ROWS for run in (row.said, row.run) if run}
    data_alone: dict[Run | None, float] = {None: float(CONTEXT)}
    return data_alone | predict_mib(wanted)


def row_cells(
    row: Row, predicted: dict[Run | None, float], device: str
) -> dict[str, str | int]:
    """A row for a table: published, predicted as labelled and as documented, and here on a card."""
    cells: dict[str, str | int] = {"the notes say": row.label, "MiB": row.published}
    for name, run in (("as labelled", row.said), ("as documented", row.run)):
        error = predicted[run] / row.published - 1
        cells[name] = f"{predicted[run]:,.0f} ({error:+.1%})"
    if device == "cuda" and row.run.rows:
        driver, lived = measure_mib(row.run)
        cells["this card: driver, live"] = f"{driver:,.0f}, {lived:,.0f}"
    return cells


def measure_mib(run: Run) -> tuple[float, float]:
    """MiB more than before on this machine's GPU: by its driver, and by torch's allocator."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    driver = driver_bytes()
    lived = torch.cuda.memory_allocated()
    with torch.device("cuda"):
        model = build_bert()
    optimizers = step_optimizers(model, run)
    forward_backward(model, run)
    torch.cuda.synchronize()
    driver = driver_bytes() - driver
    lived = torch.cuda.max_memory_allocated() - lived
    del optimizers
    return driver / MIB, lived / MIB
