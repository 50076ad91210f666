"""Floor 3: what fine-tuning lessons share: documented functions, and a loop for every launcher.

    accelerate launch --multi_gpu --num_processes 2 -m stages.classifier plan.json losses.json
    torchrun --standalone --nproc_per_node 2 -m stages.classifier plan.json losses.json

The same plan gives the same losses on one process and on many: the batch is that of all processes
together, the order is that of the file, and a last batch of fewer rows is weighed by its rows.
"""
from __future__ import annotations

import ast
import json
import os
import sys
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Plan:
    """The training of a text classifier, its word vectors apart, but not where it runs."""

    weights: str            # folder of a model with a head, and of its tokenizer
    rows: str               # parquet file of `text` and `label`, in the order of training
    batch: int = 8          # rows of all processes together
    rate: float = 5e-5
    warmup: int = 4         # steps
    decay: float = 0.01
    dropout: float = 0.0    # processes draw different noise: above zero, only one gives the same
    length: int = 32        # tokens, the rest is cut
    seed: int = 42
    processes: int = 1      # that must have been started
    save: str = ""          # folder for the model and its tokenizer, if they shall be kept


def decay_groups(model: Any, decay: float) -> list[dict[str, Any]]:
    """Weight decay for matrices and embeddings; none for biases and norms, which are vectors."""
    wide = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    thin = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
    return [{"params": wide, "weight_decay": decay}, {"params": thin, "weight_decay": 0.0}]


def make_classifier(plan: Plan) -> Any:
    """The pretrained encoder with a fresh head, in float32; its table of words stays as it is."""
    import torch
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(
        plan.weights, dtype=torch.float32, hidden_dropout_prob=plan.dropout,
        attention_probs_dropout_prob=plan.dropout).train()
    model.base_model.embeddings.requires_grad_(False)  # as lesson 13 does
    return model


def make_loader(plan: Plan, share: int) -> Any:
    """Batches of `share` rows in the order of the file, padded to their longest."""
    import pyarrow.parquet as pq
    from torch.utils.data import DataLoader
    from transformers import AutoTokenizer, DataCollatorWithPadding

    tokenizer = AutoTokenizer.from_pretrained(plan.weights)
    table = pq.read_table(plan.rows, columns=["text", "label"]).to_pydict()
    columns = tokenizer(table["text"], truncation=True, max_length=plan.length)
    columns["labels"] = table["label"]
    rows = [dict(zip(columns, values)) for values in zip(*columns.values())]
    return DataLoader(rows, share, collate_fn=DataCollatorWithPadding(tokenizer))


def shared_loss(losses: Any, first: int, rows: int, world: int) -> Any:
    """This process's part of the mean over the `rows` of a global batch, of which it holds some.

    A last batch is filled up with rows that do not count. The gradients of the processes are
    averaged, hence the factor `world`.

    >>> import torch
    >>> [shared_loss(torch.tensor([4.0, 2.0]), first, 3, 2).item() for first in (0, 2)]
    [4.0, 2.6666667461395264]
    """
    return losses[: max(0, rows - first)].sum() * world / rows


def train(plan: Plan) -> list[float]:
    """Train by the plan on all processes of this run; the loss of each step, the same on each."""
    import torch
    from accelerate import Accelerator
    from transformers import AutoTokenizer, get_linear_schedule_with_warmup

    from utils.errors import CourseError
    from utils.machine import set_seed
    from stages.launch import rank_device, require_world

    require_world(plan.processes)
    if plan.batch % plan.processes:
        raise CourseError(f"{plan.batch} rows cannot be shared evenly by {plan.processes} processes",
                          "plan.batch", "choose a batch that the number of processes divides")
    accelerator = Accelerator(cpu=rank_device().type == "cpu")
    world, share = plan.processes, plan.batch // plan.processes
    set_seed(plan.seed)
    model, loader, told = make_classifier(plan), make_loader(plan, share), []
    total, first = len(loader.dataset), accelerator.process_index * share
    optimizer = torch.optim.AdamW(decay_groups(model, plan.decay), lr=plan.rate, fused=True)
    steps = -(-total // plan.batch)
    schedule = get_linear_schedule_with_warmup(optimizer, plan.warmup, steps)  # not prepared: below
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for step, batch in enumerate(loader):
        real = min(plan.batch, total - step * plan.batch)
        scores = model(**{k: v for k, v in batch.items() if k != "labels"}).logits
        losses = torch.nn.functional.cross_entropy(scores, batch["labels"], reduction="none")
        loss = shared_loss(losses, first, real, world)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()  # a prepared one would step once for each process
        optimizer.zero_grad()
        told.append(accelerator.reduce(loss.detach(), "mean").item())
    if plan.save and accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(plan.save)
        AutoTokenizer.from_pretrained(plan.weights).save_pretrained(plan.save)
    return told


def main(plan: str, answer: str) -> None:
    """Train by a plan in a JSON file; the main process writes the losses to another."""
    losses = train(Plan(**json.loads(Path(plan).read_text(encoding="utf-8"))))
    if os.environ.get("RANK", "0") == "0":
        Path(answer).write_text(json.dumps(losses), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
