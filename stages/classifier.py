"""The training of a text classifier, by one loop for every launcher.

    accelerate launch --multi_gpu --num_processes 2 -m stages.classifier recipe.json losses.json
    torchrun --standalone --nproc_per_node 2 -m stages.classifier recipe.json losses.json

The same recipe gives the same losses on one process and on many: the batch is that of all together,
the order is that of the file, and a last batch of fewer rows is weighed by its rows.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from accelerate import Accelerator
from pydantic import Field
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    get_linear_schedule_with_warmup,
)

from stages.launch import rank_device, require_world
from stages.recipe import Plan, decay_groups
from utils.artifacts import write_json
from utils.errors import CourseError
from utils.machine import set_seed


class ClassifierRecipe(Plan):
    """What is trained, and on what; not where it runs."""

    weights: str  # folder of a model with a head, and of its tokenizer
    rows: str  # parquet file of `text` and `label`, in the order of training
    batch: int = Field(8, gt=0)  # rows of a step, over all processes together
    rate: float = Field(5e-5, gt=0)
    warmup: int = Field(4, ge=0)  # steps
    decay: float = Field(0.01, ge=0)
    # Above zero, only one process gives the same losses.
    dropout: float = Field(0.0, ge=0, lt=1)
    length: int = Field(32, gt=0)  # tokens of a text; the rest is cut
    seed: int = Field(42, ge=0)
    processes: int = Field(1, gt=0)  # that must have been started
    save: str = ""  # folder for the model and its tokenizer, if they shall be saved

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        if self.batch % self.processes:
            what = f"{self.batch} rows cannot be shared evenly by {self.processes} processes"
            fix = "choose a batch that the number of processes divides"
            raise CourseError(what, "batch and processes of the recipe", fix)


def make_classifier(recipe: ClassifierRecipe) -> Any:
    """The pretrained encoder with its head, in float32; its embeddings are not trained."""
    model = AutoModelForSequenceClassification.from_pretrained(
        recipe.weights,
        dtype=torch.float32,
        hidden_dropout_prob=recipe.dropout,
        attention_probs_dropout_prob=recipe.dropout,
    )
    model.base_model.embeddings.requires_grad_(False)
    return model.train()


def make_loader(recipe: ClassifierRecipe) -> Any:
    """One process's batches in the order of the file, each padded to its longest row."""
    tokenizer = AutoTokenizer.from_pretrained(recipe.weights)
    table = pq.read_table(recipe.rows, columns=["text", "label"]).to_pydict()
    columns = tokenizer(table["text"], truncation=True, max_length=recipe.length)
    columns["labels"] = table["label"]
    rows: Any = [dict(zip(columns, values)) for values in zip(*columns.values())]
    share = recipe.batch // recipe.processes
    return DataLoader(rows, share, collate_fn=DataCollatorWithPadding(tokenizer))


def shared_loss(losses: Any, first: int, rows: int, world: int) -> Any:
    """This process's part of the mean loss of a batch that is spread over `world` processes.

    The process has the batch's rows from `first` on. A last batch is filled up to full size, and
    only its first `rows` are real. Gradients are averaged over processes, hence the factor `world`.

    >>> [shared_loss(torch.tensor([4.0, 2.0]), first, rows=3, world=2).item() for first in (0, 2)]
    [4.0, 2.6666667461395264]
    """
    real = max(0, rows - first)
    return losses[:real].sum() * world / rows


def train(recipe: ClassifierRecipe) -> list[float]:
    """Train by the recipe on all processes of this run; the loss of each step, the same on each."""
    require_world(recipe.processes)
    for path in (Path(recipe.weights), Path(recipe.rows)):
        if not path.exists():
            what = "the recipe names a file that is not here"
            raise CourseError(what, path, "mend the path")
    accelerator = Accelerator(cpu=rank_device().type == "cpu")
    set_seed(recipe.seed)
    model = make_classifier(recipe)
    loader = make_loader(recipe)
    groups = decay_groups(model, recipe.decay)
    optimizer = torch.optim.AdamW(groups, lr=recipe.rate, fused=True)
    total = len(loader.dataset)
    steps = math.ceil(total / recipe.batch)
    # The schedule is not prepared: it would step once for each process.
    schedule = get_linear_schedule_with_warmup(optimizer, recipe.warmup, steps)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    first = accelerator.process_index * recipe.batch // recipe.processes
    history = []
    for step, batch in enumerate(loader):
        labels = batch.pop("labels")
        logits = model(**batch).logits
        losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        rows = min(recipe.batch, total - step * recipe.batch)
        loss = shared_loss(losses, first, rows, recipe.processes)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        history.append(accelerator.reduce(loss.detach(), "mean").item())
    if recipe.save:
        # Of weights that are sharded (FSDP, ZeRO-3) no process has all: they gather them together.
        weights = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            whole = accelerator.unwrap_model(model)
            whole.save_pretrained(recipe.save, state_dict=weights)
            tokenizer = AutoTokenizer.from_pretrained(recipe.weights)
            tokenizer.save_pretrained(recipe.save)
        accelerator.wait_for_everyone()
    return history


def main(recipe_file: str, losses_file: str) -> None:
    """Train by the recipe in a JSON file; the main process writes the losses to another."""
    fields = json.loads(Path(recipe_file).read_text(encoding="utf-8"))
    losses = train(ClassifierRecipe(**fields))
    if os.environ.get("RANK", "0") == "0":
        write_json(Path(losses_file), losses)


if __name__ == "__main__":
    main(*sys.argv[1:])
