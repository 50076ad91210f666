"""What lesson 08 says of the libraries without a cell that shows it."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace

import lesson_cells
import nbformat
import numpy as np
import pytest
import torch
from accelerate import skip_first_batches
from datasets import IterableDataset
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.data import DataLoader
from torch.utils.data import IterableDataset as TorchIterable

from stages.tokens import Split
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


class Indexed:
    """Rows by number; it counts how many were read."""

    reads = 0

    def __len__(self) -> int:
        return 8000

    def __getitem__(self, row: int) -> int:
        self.reads += 1
        return row


class Plain(Indexed, TorchIterable):
    """The same rows as a stream."""

    def __iter__(self) -> Iterator[int]:
        return (self[row] for row in range(len(self)))


@pytest.mark.parametrize(("rows", "reads"), [(Indexed(), 4), (Plain(), 4004)])
def test_skipped_batches_are_read_only_from_a_stream(
    rows: Indexed, reads: int
) -> None:
    loader = skip_first_batches(DataLoader(rows, batch_size=4), 1000)
    assert next(iter(loader))[0] == 4000
    assert rows.reads == reads


class Twice(TorchIterable):
    """Does not ask which worker it is in."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class TwiceWithLength(Twice):
    def __len__(self) -> int:
        return 10


@pytest.mark.parametrize("asked", [False, True])
def test_doubled_rows_warn_only_who_has_asked_for_the_length(
    asked: bool, recwarn: pytest.WarningsRecorder
) -> None:
    loader = DataLoader(TwiceWithLength(), batch_size=None, num_workers=2)
    if asked:
        len(loader)
    assert sorted(map(int, loader)) == sorted([*range(10)] * 2)
    warned = [w for w in recwarn if "Length of IterableDataset" in str(w.message)]
    assert bool(warned) == asked


# What the lesson's quotation leaves out: fill a buffer with two documents, then hand it on.
FULL = """
if buffer_len == 2:
    break
"""
FILL = """
buffer.append(next(iterator))
buffer_len += 1
"""
LOADER = """
def load(self):
    iterator = iter(self.dataset)
    more_examples = True
"""


def quoted_loader(documents: list[str]) -> Iterator[list[str]]:
    """The rows of the loader that the lesson quotes."""
    note = lesson_cells.cell("08", "group-note")
    loop = textwrap.indent(note.split("```python\n")[1].split("```")[0], " " * 4)
    for spaces, line in ((12, FULL), (16, FILL)):
        lines = textwrap.indent(line.strip(), " " * spaces)
        loop = loop.replace(" " * spaces + "...", lines, 1)
    names = {}
    exec(LOADER + loop + " " * 8 + "yield buffer\n", names)
    return names["load"](SimpleNamespace(dataset=documents))


def evaluate(rows: Iterable[list[str]], max_eval_steps: int) -> Iterator[list[str]]:
    for step, row in enumerate(rows):
        yield row
        if 0 < max_eval_steps <= step:
            break


def test_the_quoted_loader_goes_on_past_the_end_of_its_data() -> None:
    documents = ["a", "b", "c"]
    rows = [*islice(evaluate(quoted_loader(documents), -1), 300)]
    assert len(rows) == 300
    assert [*chain(*rows)] == documents * 200
    assert len([*islice(evaluate(quoted_loader(documents), 5), 300)]) == 6


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_keeps_documents_apart() -> None:
    number = torch.tensor([0] * 32 + [1] * 32)

    def rule(batch, head, query, key):
        return (query >= key) & (number[query] == number[key])

    tiles = create_block_mask(rule, None, None, 64, 64, "cpu", BLOCK_SIZE=16)
    mask = torch.ones(64, 64).tril().bool() & (number[:, None] == number)
    query, key = torch.randn(2, 1, 2, 64, 16)
    # With these values the result is the weights themselves.
    value = torch.eye(64).expand(1, 2, 64, 64)
    weights = flex_attention(query, key, value, block_mask=tiles)
    masked = scaled_dot_product_attention(query, key, value, attn_mask=mask)
    assert torch.allclose(weights, masked, atol=1e-6)
    assert weights[:, :, 32:, :32].count_nonzero() == 0
    # Of sixteen tiles it keeps the three of each document on and below the diagonal.
    assert tiles.to_dense().sum() == 6


def test_a_file_serves_blocks_half_as_long(tmp_path: Path) -> None:
    stream = np.arange(65, dtype="<u2")
    stream.tofile(tmp_path / "train.bin")
    header = {"dtype": "<u2", "block": 16, "shard_blocks": 4}
    whole = Split(tmp_path, "train", header, 64, 1, 1, ["train.bin"])
    halved = replace(whole, header={**header, "block": 8, "shard_blocks": 8})
    assert (len(whole), len(halved)) == (4, 8)
    both = halved.gather(np.arange(2))
    first = whole.gather(np.arange(1))[0]
    assert np.array_equal(np.append(both[0], both[1, 1:]), first)


def test_the_drawing_of_contexts_holds_the_text_of_its_cell() -> None:
    drawing = (NOTEBOOKS / "images/08_contexts.svg").read_text(encoding="utf-8")
    tokens = re.findall(r'font-family="monospace"[^>]*>([^<]+)<', drawing)
    # five lines of 1 … 5 tokens of context, each with its answer
    text = "".join(tokens[-6:]).replace("␣", " ")
    path = NOTEBOOKS / "08_from_text_to_batches.ipynb"
    cells = nbformat.read(path, as_version=4).cells
    source = next(cell.source for cell in cells if cell.id == "contexts")
    assert f'"{text}"' in source
