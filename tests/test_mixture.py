"""Each test tries to break one promise of stores that are read as one."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stages.mixture import write_mixture
from stages.order import count_before, take_turns
from stages.tokenizer import train_bpe
from stages.tokens import Loader, Mixture, Split, open_store, write_store
from utils.artifacts import sealed
from utils.errors import ROOT, CourseError

TEXTS = [
    path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "utils").glob("*.py"))
]
BLOCK = 32


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe(TEXTS, 600)


@pytest.fixture(scope="module")
def stores(tokenizer, tmp_path_factory):
    """Three sealed stores of different sizes; the last has no validation."""
    folder = tmp_path_factory.mktemp("stores")
    parts = {"one": TEXTS[:4], "two": TEXTS[4:7], "three": TEXTS[7:9]}
    for name, texts in parts.items():
        splits = {"train": texts, "validation": TEXTS[:1]}
        if name == "three":
            del splits["validation"]
        with sealed(folder / name, {}) as aside:
            write_store(aside, splits, tokenizer, BLOCK)
    return [folder / name for name in parts]


def mix(folder, sources):
    with sealed(folder, {}) as aside:
        write_mixture(aside, sources)
    return folder


def bytes_of(batches):
    return [row.numpy().tobytes() for batch in batches for row in batch]


def rows_of(split):
    rows = split.gather(np.arange(split.tokens // BLOCK)).astype(np.int64)
    return [row.tobytes() for row in rows]


# the turns ---------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=5))
def test_a_turn_has_each_source_as_often_as_asked_and_evenly_spread(rows):
    whose = take_turns(rows)
    assert np.bincount(whose).tolist() == rows
    for source, count in enumerate(rows):
        so_far = np.cumsum(whose == source)
        even = np.arange(1, len(whose) + 1) * count / len(whose)
        assert abs(so_far - even).max() <= len(rows)
    assert count_before(whose).max() == max(rows) - 1


sizes = st.lists(
    st.tuples(
        st.lists(st.integers(1, 30), min_size=1, max_size=3), st.integers(1, 5)
    ),
    min_size=1,
    max_size=4,
)


class Numbered(Split):
    """A split whose row n is known by the store's number and by n."""

    def __len__(self):
        return self.tokens

    def gather(self, rows):
        assert ((rows >= 0) & (rows < self.tokens)).all()
        named = np.stack([np.full(len(rows), self.documents), rows], 1)
        return named


def make_mixture(plan):
    counter = itertools.count()
    header = {"block": 1, "dtype": "<i8"}
    sources = []
    for counts, rows in plan:
        splits = [
            Numbered(Path(), "train", header, count, next(counter), 1, [])
            for count in counts
        ]
        sources.append((splits, rows))
    total = sum(sum(counts) for counts, _ in plan)
    return Mixture(Path(), "train", header, total, 1, 1, [], sources)


@settings(deadline=None)
@given(sizes, st.integers(0, 2**32 - 1))
def test_every_source_is_whole_in_each_of_its_epochs(plan, seed):
    mixture = make_mixture(plan)
    turn = sum(rows for _, rows in plan)
    turns = 3 * max(sum(counts) for counts, _ in plan)
    rows = mixture.gather(mixture.rows_at(np.arange(turns * turn), seed))
    stores = iter(range(100))
    for counts, share in plan:
        numbers = [next(stores) for _ in counts]
        everything = {(n, r) for n, c in zip(numbers, counts) for r in range(c)}
        mine = [tuple(row) for row in rows.tolist() if row[0] in numbers]
        assert len(mine) == turns * share
        size = len(everything)
        for start in range(0, len(mine) - size + 1, size):
            assert set(mine[start : start + size]) == everything


@settings(deadline=None)
@given(sizes, st.integers(0, 2**32 - 1), st.integers(0, 10**15), st.integers(1, 60))
def test_any_place_is_computed_alone(plan, seed, start, length):
    mixture = make_mixture(plan)
    positions = np.arange(start, start + length)
    together = mixture.rows_at(positions.copy(), seed)
    alone = [mixture.rows_at(np.array([place]), seed)[0] for place in positions]
    assert together.tolist() == alone


@settings(deadline=None)
@given(sizes)
@example([([22], 5), ([5], 1), ([5], 1), ([5], 1)])
def test_its_length_is_where_the_first_source_begins_again(plan):
    mixture = make_mixture(plan)
    seen = [
        tuple(row)
        for row in mixture.gather(
            mixture.rows_at(np.arange(len(mixture)), 1)
        ).tolist()
    ]
    assert len(set(seen)) == len(seen)
    longer = mixture.gather(mixture.rows_at(np.arange(len(mixture) + 1), 1))
    assert len({tuple(row) for row in longer.tolist()}) < len(longer)


# on the disk -------------------------------------------------------------------------------------


def test_a_store_in_parts_is_read_as_one(stores, tokenizer, tmp_path):
    parts = open_store(mix(tmp_path / "mix", {"all": (stores, 1)}), tokenizer)
    train = parts["train"]
    singles = [open_store(store)["train"] for store in stores]
    assert len(train) == sum(map(len, singles))
    epoch = bytes_of(Loader(train, 7, 42, stop=len(train)))
    assert sorted(epoch) == sorted(itertools.chain(*map(rows_of, singles)))
    assert train.documents == 9 and train.bytes == sum(s.bytes for s in singles)


def test_three_rows_of_one_and_one_of_the_other(stores, tokenizer, tmp_path):
    sources = {"code": (stores[:2], 3), "prose": (stores[2:], 1)}
    split = open_store(mix(tmp_path / "mix", sources), tokenizer)["train"]
    known = set(rows_of(open_store(stores[2])["train"]))
    batches = list(itertools.islice(Loader(split, 8, 42), 20))
    for batch in batches:
        assert sum(row in known for row in bytes_of([batch])) == 2
    # the row of prose is the one that its own loader would give, in its order
    alone = bytes_of(
        itertools.islice(Loader(open_store(stores[2])["train"], 1, 43), 40)
    )
    assert [row for row in bytes_of(batches) if row in known] == alone


@pytest.mark.parametrize("done", [0, 1, 13, 400])
def test_going_on_reads_what_would_have_been_read(stores, tmp_path, done):
    sources = {"code": (stores[:2], 3), "prose": (stores[2:], 2)}
    split = open_store(mix(tmp_path / "mix", sources))["train"]
    whole = itertools.islice(Loader(split, 4, 42), done, done + 5)
    ranks = [Loader(split, 2, 42, done * 4, rank=rank, world=2) for rank in (0, 1)]
    for batch, one, two in zip(whole, *map(iter, ranks)):
        assert torch.equal(batch, torch.stack([one, two], 1).flatten(0, 1))


def test_a_source_without_a_split_takes_no_turn_there(stores, tmp_path):
    sources = {"code": (stores[:1], 1), "prose": (stores[2:], 1)}
    held_out = open_store(mix(tmp_path / "mix", sources))["validation"]
    assert len(held_out) == len(open_store(stores[0])["validation"])


def test_a_part_without_a_whole_row_is_left_out(stores, tokenizer, tmp_path):
    with sealed(tmp_path / "short", {}) as aside:
        write_store(aside, {"train": ["x"]}, tokenizer, BLOCK)
    short = [tmp_path / "short"]
    both = open_store(
        mix(tmp_path / "mix", {"a": (stores[:1], 1), "b": (short, 1)})
    )
    assert len(both["train"]) == len(open_store(stores[0])["train"])
    alone = mix(tmp_path / "alone", {"b": (short, 1)})
    with pytest.raises(CourseError, match="shorter than one block in all stores"):
        open_store(alone)


def test_bits_per_byte_are_of_the_text_that_is_read(stores, tmp_path):
    sources = {"code": (stores[:1], 3), "prose": (stores[2:], 1)}
    split = open_store(mix(tmp_path / "mix", sources))["train"]
    one, three = (open_store(store)["train"] for store in (stores[0], stores[2]))
    # a bit a token
    size = 3 * one.bytes / one.tokens + three.bytes / three.tokens
    assert split.bits_per_byte(np.log(2)) == pytest.approx(4 / size)
    alone = open_store(mix(tmp_path / "alone", {"code": (stores[:1], 5)}))["train"]
    assert alone.bits_per_byte(1.0) == pytest.approx(one.bits_per_byte(1.0))


def test_a_store_that_changed_is_refused(stores, tokenizer, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(stores[0], copy)
    folder = mix(tmp_path / "mix", {"code": ([copy], 1)})
    open_store(folder)
    shutil.rmtree(copy)
    with sealed(copy, {}) as aside:
        write_store(aside, {"train": TEXTS[:2]}, tokenizer, BLOCK)
    with pytest.raises(CourseError, match="another one than when the mixture"):
        open_store(folder)


def test_other_tokenizers_blocks_and_mixtures_are_refused(
    stores, tokenizer, tmp_path
):
    with sealed(tmp_path / "wide", {}) as aside:
        write_store(aside, {"train": TEXTS[:2]}, tokenizer, 2 * BLOCK)
    wide = mix(
        tmp_path / "mix", {"a": (stores[:1], 1), "b": ([tmp_path / "wide"], 1)}
    )
    with pytest.raises(CourseError, match="differ in block: 32, 64"):
        open_store(wide)
    other = train_bpe(TEXTS[::-1] * 2, 601)
    with sealed(tmp_path / "foreign", {}) as aside:
        write_store(aside, {"train": TEXTS[:2]}, other, BLOCK)
    foreign = mix(
        tmp_path / "two", {"a": (stores[:1], 1), "b": ([tmp_path / "foreign"], 1)}
    )
    with pytest.raises(CourseError, match="differ in tokenizer"):
        open_store(foreign)
    plain = mix(tmp_path / "plain", {"a": (stores[:1], 1)})
    with pytest.raises(CourseError, match="another tokenizer"):
        open_store(plain, other)
    nested = mix(tmp_path / "nested", {"a": ([plain], 1)})
    with pytest.raises(CourseError, match="cannot hold another"):
        open_store(nested)


@pytest.mark.parametrize(
    "sources",
    [
        {},
        {"a": ([], 1)},
        {"a": (["x"], 0)},
        {"a": (["x"], 10**6)},
        {"a": (["x"], 1.5)},
    ],
    ids=["none", "empty", "no rows", "too many rows", "a fraction"],
)
def test_what_is_no_mixture_is_refused_when_it_is_written(sources, tmp_path):
    with pytest.raises(CourseError, match="names no mixture"):
        write_mixture(
            tmp_path,
            {k: ([tmp_path / s for s in v], n) for k, (v, n) in sources.items()},
        )


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"format": 2, "sources": {}}'])
def test_a_damaged_mixture_is_named(text, tmp_path):
    (tmp_path / "mixture.json").write_text(text)
    with pytest.raises(CourseError, match="the mixture cannot be read"):
        open_store(tmp_path)


def test_it_can_be_moved_with_its_stores(stores, tokenizer, tmp_path):
    here = tmp_path / "here"
    shutil.copytree(stores[0].parent, here / "stores")
    mix(here / "mix", {"a": ([here / "stores" / "one"], 1)})
    here.rename(tmp_path / "there")
    assert len(open_store(tmp_path / "there" / "mix")["train"])
    facts = json.loads((tmp_path / "there" / "mix" / "mixture.json").read_text())
    assert facts["sources"]["a"]["stores"] == ["../stores/one"]
