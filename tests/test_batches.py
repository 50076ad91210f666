"""What lesson 08 says of the libraries without a cell that shows it."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import nbformat
import numpy as np
import pytest
import torch
from datasets import IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM

from utils.errors import ROOT

NOTEBOOKS = ROOT / "notebooks"


@pytest.fixture
def made() -> list[int]:
    """The rows that a generator has produced."""
    return []


def shards_of(made: list[int], shards: list[int]) -> IterableDataset:
    def rows(shards: list[int]) -> Iterator[dict[str, int]]:
        for shard in shards:
            for place in range(100):
                made.append(100 * shard + place)
                yield {"row": made[-1]}

    return IterableDataset.from_generator(rows, gen_kwargs={"shards": shards})


@pytest.mark.parametrize(("shards", "again"), [([0], 81), ([0, 1], 81)])
def test_a_saved_state_skips_only_finished_shards(
    made: list[int], shards: list[int], again: int
) -> None:
    stream = shards_of(made, shards)
    stop = 100 * len(shards) - 20
    rows = iter(stream)
    for _ in range(stop):
        next(rows)
    state = stream.state_dict()
    made.clear()
    stream.load_state_dict(state)
    assert next(iter(stream)) == {"row": stop}
    assert len(made) == again


def gradient(model: LlamaForCausalLM, **settings: torch.Tensor) -> torch.Tensor:
    """What one more `backward` leaves in the output layer."""
    model(**settings).loss.backward()
    assert model.lm_head.weight.grad is not None
    return model.lm_head.weight.grad.clone()


def test_a_gradient_needs_the_count_of_all_small_batches() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=50, num_hidden_layers=1, **sizes)
    )
    ids = torch.randint(50, (2, 12))
    labels = ids.clone()
    labels[1, :-1] = -100
    whole = gradient(model, input_ids=ids, labels=labels)
    counts = (labels[:, 1:] != -100).sum(1)
    divisors_of = {"own": 2 * counts, "all": counts.sum().repeat(2)}
    off = {}
    for name, divisors in divisors_of.items():
        model.zero_grad()
        for row, asked, divisor in zip(ids[:, None], labels[:, None], divisors):
            part = {"input_ids": row, "labels": asked}
            found = gradient(model, **part, num_items_in_batch=divisor)
        off[name] = ((found - whole).norm() / whole.norm()).item()
    assert off["all"] < 1e-5 < 0.1 < off["own"]


def test_a_small_buffer_mixes_only_what_it_holds() -> None:
    size, wide = 10_000, 100
    draw = random.Random(0)
    stream = iter(range(size))
    buffer = [next(stream) for _ in range(size // 100)]
    order = []
    for row in stream:
        place = draw.randrange(len(buffer))
        order.append(buffer[place])
        buffer[place] = row
    rows = np.array(order + buffer)
    for far in (1, wide):
        assert np.abs(rows[far:] - rows[:-far]).mean() / size < 0.03


def test_the_drawing_of_contexts_holds_the_text_of_its_cell() -> None:
    drawing = (NOTEBOOKS / "images/08_contexts.svg").read_text(encoding="utf-8")
    tokens = re.findall(r'font-family="monospace"[^>]*>([^<]+)<', drawing)
    # five lines of 1 … 5 tokens of context, each with its answer
    text = "".join(tokens[-6:]).replace("␣", " ")
    path = NOTEBOOKS / "08_from_text_to_batches.ipynb"
    cells = nbformat.read(path, as_version=4).cells
    source = next(cell.source for cell in cells if cell.id == "contexts")
    assert f'"{text}\\n"' in source
