"""Small language models that judge a vocabulary: the same computing for each, bits per byte of one text.

The loop is that of lesson 09 without everything that makes a run safe. A text's bits per byte
are its whole loss in bits over its bytes, so that models with different tokens can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stages.recipe import Recipe, build_model, flops_per_token, make_optimizers
from stages.tokenizer import BulkEncoder
from stages.tokens import encode_stream

PARTS = (1 / 4, 1 / 2, 1)  # of the computing, after which a model is judged


@dataclass(frozen=True)
class Judged:
    """What a vocabulary led to: bits per byte after each part of the computing, and without a model."""

    bits: list[float]
    frequencies: float
    characters_read: float


def train_small(
    tokenizer: Any,
    texts: Sequence[str],
    yard: str,
    budget: float,
    width: int,
    layers: int,
    block: int,
    rows: int,
    seed: int = 42,
) -> Judged:
    """Train a small model for `budget` operations, and judge it on the text `yard`.

    Each step reads `rows` random blocks of `block` tokens, so a model whose vocabulary makes a
    step dearer takes fewer of them.
    """
    encode = BulkEncoder(tokenizer)
    end = np.array([tokenizer.eos_token_id])
    ids = _to_stream(encode, texts, end)
    yard_ids = _to_stream(encode, [yard], end)
    size = len(yard.encode())
    recipe = _small_recipe(width, layers, block)
    model = build_model(recipe, tokenizer)
    cost = flops_per_token(model, block) * rows * block
    looks = [round(budget / cost * part) for part in PARTS]
    bits = []
    for step in _train_steps(model, recipe, ids, looks[-1], (rows, block), seed):
        if step in looks:
            bits.append(_model_bits(model, yard_ids, block) / size)
    tokens = looks[-1] * rows * block
    read = tokens * sum(map(len, texts)) / len(ids)
    return Judged(bits, frequency_bits(ids, yard_ids, len(tokenizer)) / size, read)


def frequency_bits(
    train: torch.Tensor, ids: torch.Tensor, vocabulary: int
) -> float:
    """Bits of `ids` for a predictor that knows only how frequent each token is in `train`.

    >>> frequency_bits(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 1]), 2)
    3.0
    """
    counts = torch.bincount(train, minlength=vocabulary) + 1.0
    losses = -torch.log2(counts / counts.sum())
    return losses[ids].sum().item()


def _to_stream(
    encode: BulkEncoder, texts: Sequence[str], end: np.ndarray
) -> torch.Tensor:
    counts = dict.fromkeys(["bytes", "documents", "tokens"], 0)
    stream = encode_stream(texts, encode, end, counts)
    return torch.from_numpy(np.concatenate(list(stream)))


def _small_recipe(width: int, layers: int, block: int) -> Recipe:
    shape = {
        "model_type": "nanochat",
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64,
        "max_position_embeddings": block,
        "tie_word_embeddings": True,
        "initializer_range": 0.04,
        "final_logit_softcapping": None,
    }
    facts = {"model": shape, "rate": 1e-2, "matrix_rate": 0.03}
    return Recipe.model_validate(facts)


def _train_steps(
    model: Any,
    recipe: Recipe,
    ids: torch.Tensor,
    steps: int,
    shape: tuple[int, int],
    seed: int,
) -> Iterator[int]:
    """Train on random blocks; gives back control after each step."""
    rows, block = shape
    optimizers = make_optimizers(model, recipe)
    draw = torch.Generator().manual_seed(seed)
    for step in range(1, steps + 1):
        starts = torch.randint(len(ids) - block, (rows, 1), generator=draw)
        batch = ids[starts + torch.arange(block)]
        model(batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        yield step


@torch.no_grad()
def _model_bits(model: Any, ids: torch.Tensor, block: int) -> float:
    """Bits of all the ids, from the mean loss of those that fill whole blocks."""
    blocks = ids[: len(ids) // block * block].view(-1, block)
    total = 0.0
    for some in blocks.split(16):
        total += model(some, labels=some).loss.item() * len(some)
    return total / len(blocks) / math.log(2) * len(ids)
