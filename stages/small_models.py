"""Small language models that judge a vocabulary: the same computing for each, bits per byte of one text.

The loop is that of lesson 09 without everything that makes a run safe. A text's bits per byte
are its whole loss in bits over its bytes, so that models with different tokens can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stages.recipe import Recipe, build_model, flops_per_token, make_optimizers
from stages.tokenizer import BulkEncoder
from stages.tokens import encode_stream

# Parts of the computing, after each of which a model is judged.
PARTS = (1 / 4, 1 / 2, 1)
# Sightings that every token is given beforehand, so that none is impossible.
GIVEN = 0.1


@dataclass(frozen=True)
class Judged:
    """What a vocabulary led to: bits per byte after each part of the computing.

    `bits` are the model's, `frequencies` those of a predictor that counted the tokens which the
    model had read by then.
    """

    bits: list[float]
    frequencies: list[float]
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
    recipe = _small_recipe(width, layers, block).change(seed=seed)
    model = build_model(recipe, tokenizer)
    cost = flops_per_token(model, block) * rows * block
    looks = [round(budget / cost * part) for part in PARTS]
    bits = []
    frequencies = []
    counts = torch.zeros(len(tokenizer))
    draw = torch.Generator().manual_seed(seed)
    batches = [_draw_batch(ids, rows, block, draw) for _ in range(looks[-1])]
    for step, batch in enumerate(_train_steps(model, recipe, batches), 1):
        counts += torch.bincount(batch.flatten(), minlength=len(counts))
        if step in looks:
            bits.append(_model_bits(model, yard_ids, block) / size)
            frequencies.append(frequency_bits(counts, yard_ids) / size)
    tokens = looks[-1] * rows * block
    read = tokens * sum(map(len, texts)) / len(ids)
    return Judged(bits, frequencies, read)


def frequency_bits(counts: torch.Tensor, ids: torch.Tensor) -> float:
    """Bits of `ids` for a predictor that knows only how often each token was seen.

    >>> frequency_bits(torch.tensor([2, 2]), torch.tensor([0, 1, 1]))
    3.0
    """
    seen = counts + GIVEN
    losses = -torch.log2(seen / seen.sum())
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


def _draw_batch(
    ids: torch.Tensor, rows: int, block: int, draw: torch.Generator
) -> torch.Tensor:
    """Blocks of the text from random places."""
    starts = torch.randint(len(ids) - block, (rows, 1), generator=draw)
    return ids[starts + torch.arange(block)]


def _train_steps(
    model: Any, recipe: Recipe, batches: Iterable[torch.Tensor]
) -> Iterator[torch.Tensor]:
    """Train on one batch after the other; gives each back after its step."""
    optimizers = make_optimizers(model, recipe)
    for batch in batches:
        model(batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        yield batch


@torch.no_grad()
def _model_bits(model: Any, ids: torch.Tensor, block: int) -> float:
    """Bits of all the ids, from the mean loss of those that fill whole blocks."""
    blocks = ids[: len(ids) // block * block].view(-1, block)
    total = 0.0
    for some in blocks.split(16):
        total += model(some, labels=some).loss.item() * len(some)
    return total / len(blocks) / math.log(2) * len(ids)
