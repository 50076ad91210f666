"""Fine-tuning a small language model on completions: only what it shall write is learned."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from transformers import get_linear_schedule_with_warmup

from stages.sampling import START

IGNORED = -100  # the label of what is not learned
Row = tuple[list[int], list[int]]


def encode(
    tokenizer: Any,
    prompt: str,
    completion: str,
) -> Row:
    """Token ids of a prompt with its completion, and the labels: only the completion's are learned."""
    asked = tokenizer(START + prompt, add_special_tokens=False)["input_ids"]
    # A line at the margin is what ends a function when it is sampled.
    text = completion + "\n\n\n" + START
    learned = tokenizer(text, add_special_tokens=False)["input_ids"]
    labels = [IGNORED] * len(asked)
    return asked + learned, labels + learned


def collate(rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    """Rows of any length as one batch, padded on the right.

    >>> collate([([5, 6], [-100, 6]), ([7], [7])])["labels"].tolist()
    [[-100, 6], [7, -100]]
    """
    longest = max(len(ids) for ids, _ in rows)
    shape = (len(rows), longest)
    batch = {
        "input_ids": torch.zeros(shape, dtype=torch.long),
        "labels": torch.full(shape, IGNORED),
        "attention_mask": torch.zeros(shape, dtype=torch.long),
    }
    for place, (ids, labels) in enumerate(rows):
        batch["input_ids"][place, : len(ids)] = torch.tensor(ids)
        batch["labels"][place, : len(ids)] = torch.tensor(labels)
        batch["attention_mask"][place, : len(ids)] = 1
    return batch


def tune(
    model: Any,
    rows: Sequence[Row],
    rate: float,
    steps: int,
    seed: int,
    batch: int = 32,
) -> list[float]:
    """Train all weights on encoded rows, with warm-up and a fall to zero: the loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    schedule = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
    draw, losses = random.Random(seed), []
    model.train()
    for _ in range(steps):
        inputs = collate(draw.choices(rows, k=batch))
        inputs = {name: part.to(model.device) for name, part in inputs.items()}
        loss = model(**inputs, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    return losses
