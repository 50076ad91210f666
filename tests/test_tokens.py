"""Each test tries to break one promise of stages/tokens.py."""

from __future__ import annotations

import copy
import itertools
import json
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from stages import tokens
from stages.memory import run_fresh
from stages.tokenizer import END, BulkEncoder, train_bpe
from stages.tokens import (
    Loader,
    Split,
    open_store,
    permute,
    split_rows,
    write_shards,
    write_store,
)
from utils.artifacts import sealed
from utils.errors import ROOT, CourseError

SOURCES = [
    path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "utils").glob("*.py"))
]
BLOCK = 64


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe(SOURCES, 600)


@pytest.fixture(
    scope="module", params=[2**28, 1000, 1], ids=["one shard", "many", "tiny"]
)
def store(request, tokenizer, tmp_path_factory):
    """The sources of `utils` in one shard, in several, and in one for each row."""
    folder = tmp_path_factory.mktemp("store")
    few = SOURCES if request.param > 1 else SOURCES[:4]
    splits = {"train": iter(few), "test": few[:1]}
    write_store(folder, splits, tokenizer, BLOCK, shard=request.param)
    return open_store(folder, tokenizer), few


def stream_of(texts, tokenizer):
    """The stream by definition: an end token, then each document and an end token."""
    end = tokenizer.eos_token_id
    ids = tokenizer(texts, split_special_tokens=True)["input_ids"]
    return np.array([end, *itertools.chain(*([*each, end] for each in ids))])


# the store --------------------------------------------------------------------------------------


def test_rows_and_tail_are_the_stream_each_token_predicted_once(store, tokenizer):
    split, texts = store[0]["train"], store[1]
    stream = stream_of(texts, tokenizer)
    assert split.tokens == len(stream) - 1
    assert len(split) == split.tokens // BLOCK
    rows = split.gather(np.arange(len(split)))
    said = np.concatenate([rows[:, 1:].ravel(), split.tail[1:]])
    seen = np.concatenate([rows[:, :-1].ravel(), split.tail[:-1]])
    assert np.array_equal(said, stream[1:]) and np.array_equal(seen, stream[:-1])


def test_any_order_of_rows_any_number_of_times(store):
    split = store[0]["train"]
    all_rows = split.gather(np.arange(len(split)))
    asked = np.random.default_rng(0).integers(0, len(split), 500)
    assert np.array_equal(split.gather(asked), all_rows[asked])


def test_counts_are_those_of_the_text(store):
    split, texts = store[0]["train"], store[1]
    assert split.documents == len(texts)
    assert split.bytes == sum(len(text.encode()) for text in texts)


def test_bits_per_byte_of_a_uniform_guess(store):
    split = store[0]["train"]
    bits = split.bits_per_byte(np.log(600))
    assert bits == pytest.approx(split.tokens * np.log2(600) / split.bytes)


def test_a_document_cannot_forge_its_end(tokenizer, tmp_path):
    text = "x = '<|endoftext|>' + '<pad>'\n"
    write_store(tmp_path, {"train": [text]}, tokenizer, 4)
    stream = open_store(tmp_path)["train"].streams[0]
    assert (
        stream == tokenizer.eos_token_id
    ).sum() == 2 and tokenizer.pad_token_id not in stream
    assert tokenizer.decode(stream[1:-1]) == text


def test_a_view_of_the_file_and_not_a_copy(store):
    split = store[0]["train"]
    table, stream = split.tables[0], split.streams[0]
    assert np.shares_memory(table, stream)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "error"
        )  # torch warns of arrays that it must not write to
        tensor = torch.from_numpy(table)
    assert tensor.data_ptr() == table.ctypes.data
    before = (split.folder / split.shards[0]).read_bytes()
    table[0, 0] += 1
    assert (split.folder / split.shards[0]).read_bytes() == before
    assert tensor[0, 0].item() == table[0, 0]
    table[0, 0] -= 1


def test_wide_ids_for_a_large_vocabulary(tokenizer, tmp_path):
    class Large(type(tokenizer)):
        def __len__(self):
            return 2**16 + 1

    large = Large(tokenizer_object=tokenizer.backend_tokenizer, eos_token=END)
    assert write_store(tmp_path, {"train": ["a b"]}, large, 1)["dtype"] == "<u4"
    assert open_store(tmp_path)["train"].streams[0].dtype == np.uint32


def test_another_tokenizer_is_refused_and_padding_does_not_make_another(
    store, tokenizer
):
    folder = store[0]["train"].folder
    tokenizer(
        SOURCES[:2], padding=True, truncation=True, max_length=9
    )  # leaves its mark in the engine
    open_store(folder, tokenizer)
    other = train_bpe(SOURCES[::-1] * 2, 601)
    with pytest.raises(
        CourseError, match=r"another tokenizer.*600 tokens.*601 tokens"
    ):
        open_store(folder, other)
    moved = train_bpe(SOURCES, 600)
    moved.eos_token = moved.pad_token
    with pytest.raises(CourseError, match="another tokenizer"):
        open_store(folder, moved)


def test_what_is_not_whole_is_named(tokenizer, tmp_path):
    with pytest.raises(CourseError, match="no whole token store"):
        open_store(tmp_path)
    with pytest.raises(CourseError, match="no documents"):
        write_store(tmp_path, {"train": []}, tokenizer, 4)
    with pytest.raises(CourseError, match="no whole token store"):
        open_store(tmp_path)
    write_store(tmp_path, {"train": SOURCES[:1]}, tokenizer, 100_000)
    with pytest.raises(CourseError, match="shorter than one block"):
        Loader(open_store(tmp_path)["train"], 1, seed=1)
    file = tmp_path / "train-00000.bin"
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(CourseError, match="train-00000.bin is missing or cut off"):
        open_store(tmp_path)["train"].gather(np.array([0]))
    header = json.loads((tmp_path / "store.json").read_text())
    (tmp_path / "store.json").write_text(json.dumps({**header, "format": 0}))
    with pytest.raises(CourseError, match="format 1"):
        open_store(tmp_path)


WRITER = """
import sys
from pathlib import Path
from stages.tokenizer import train_bpe
from stages.tokens import write_store
from utils.artifacts import sealed
tokenizer = train_bpe(["def f(x): return x\\n"] * 9, 262)
def endless():
    for number in range(10**9):
        if number == 10_000:
            print("writing", flush=True)
        yield "x = 1\\n" * 200
with sealed(Path(sys.argv[1]), {}) as folder:
    write_store(folder, {"train": endless()}, tokenizer, 64)
"""


def test_a_killed_writer_leaves_the_old_store(tokenizer, tmp_path):
    target = tmp_path / "tokens"
    with sealed(target, {}) as folder:
        write_store(folder, {"train": SOURCES[:2]}, tokenizer, BLOCK)
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(target)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as writer:
        assert writer.stdout.readline() == "writing\n"
        writer.kill()
    assert open_store(target, tokenizer)["train"].documents == 2


# the order --------------------------------------------------------------------------------------


@given(st.integers(1, 5000), st.integers(0, 2**64), st.integers(0, 2**32))
def test_it_is_a_permutation(size, seed, epoch):
    rows = permute(np.arange(size), size, seed, epoch)
    assert np.array_equal(np.sort(rows), np.arange(size))


@given(st.integers(2, 2**60), st.integers(0, 2**32), st.data())
def test_it_stays_inside_and_apart_at_any_size(size, seed, data):
    places = data.draw(
        st.lists(st.integers(0, size - 1), min_size=1, max_size=20, unique=True)
    )
    rows = permute(np.array(places), size, seed)
    assert len(set(rows.tolist())) == len(places)
    assert rows.min() >= 0 and rows.max() < size


def test_each_place_is_computed_alone_and_for_ever():
    size = 1_000_003
    places = np.array([0, 1, 999_999, 1_000_002, 31_337])
    alone = [int(permute(np.array([place]), size, 42)[0]) for place in places]
    assert permute(places, size, 42).tolist() == alone
    assert alone == [int(v) for v in permute(np.arange(size), size, 42)[places]]
    # a resumed run needs the order of the run before it, on any machine: this may never change
    assert permute(np.arange(8), 8, 42).tolist() == [5, 7, 4, 6, 1, 2, 0, 3]


def test_epochs_and_seeds_differ():
    first, second, third = (
        permute(np.arange(5000), 5000, *key) for key in ((1, 0), (1, 1), (2, 0))
    )
    for one, other in itertools.combinations(
        (first, second, third, np.arange(5000)), 2
    ):
        assert (one == other).sum() < 10


def oddity(one, other, cells=20):
    """How far pairs of numbers are from chance, in standard deviations (chi-squared)."""
    table = np.histogram2d(one, other, cells)[0]
    expected = table.sum() / cells**2
    freedom = (cells - 1) ** 2
    return abs(((table - expected) ** 2 / expected).sum() - freedom) / np.sqrt(
        2 * freedom
    )


def test_it_looks_like_chance():
    places = np.arange(100_000)
    for seed in range(5):
        rows = permute(places, len(places), seed)
        for one, other in (
            (places, rows),
            (rows[:-1], rows[1:]),
            (rows[:-7], rows[7:]),
        ):
            assert oddity(one, other) < 5
        assert (
            np.abs(np.diff(rows)) == 1
        ).sum() < 15  # by chance, two stay neighbours
    # permutations too, but with a pattern: as they lie, backwards, shuffled inside blocks only
    blockwise = np.lexsort((rows, places // 64))
    regular = places * 38_603 % len(places)
    for order in (places, places[::-1], blockwise, regular):
        assert oddity(order[:-1], order[1:]) > 1000


# the loader -------------------------------------------------------------------------------------


def numbers(loader, split):
    """The number of each row that a loader gives, found by its content."""
    names = {
        row.tobytes(): k
        for k, row in enumerate(
            split.gather(np.arange(len(split))).astype(np.int64)
        )
    }
    return [[names[row.numpy().tobytes()] for row in batch] for batch in loader]


@pytest.mark.parametrize(
    "batch,world", [(1, 1), (3, 1), (4, 2), (5, 3), (7, 4), (1000, 2)]
)
def test_every_row_once_over_ranks_and_workers_for_ragged_sizes(
    store, batch, world
):
    split = store[0]["train"]
    seen = []
    for rank, workers in itertools.product(range(world), (0, 2)):
        loader = Loader(split, batch, 42, stop=len(split), rank=rank, world=world)
        many = (
            numbers(DataLoader(loader, batch_size=None, num_workers=workers), split)
            if workers and batch in (3, 5)
            else numbers(loader, split)
        )
        if workers:
            assert many == numbers(
                loader, split
            )  # workers take turns: nothing is seen of them
        else:
            seen += [row for some in many for row in some]
    assert sorted(seen) == list(range(len(split)))


def test_a_step_has_the_same_rows_on_any_number_of_ranks(store):
    split, steps = store[0]["train"], 2 * len(store[0]["train"]) // 12
    alone = [
        sorted(b)
        for b in numbers(itertools.islice(Loader(split, 12, 7), steps), split)
    ]
    for world in (2, 3, 4):
        ranks = [
            numbers(
                itertools.islice(
                    Loader(split, 12 // world, 7, rank=r, world=world), steps
                ),
                split,
            )
            for r in range(world)
        ]
        assert [sorted(itertools.chain(*step)) for step in zip(*ranks)] == alone


def test_every_epoch_is_whole_though_batches_straddle_them(store):
    split = store[0]["train"]
    endless = itertools.chain.from_iterable(
        numbers(itertools.islice(Loader(split, 5, 3), len(split)), split)
    )
    rows = list(endless)
    epochs = [rows[i * len(split) : (i + 1) * len(split)] for i in range(5)]
    assert all(sorted(epoch) == list(range(len(split))) for epoch in epochs)
    assert len(split) < 5 or epochs[0] != epochs[1]


@pytest.mark.parametrize("done", [0, 1, 13, 400])
def test_resuming_goes_on_where_it_stopped(store, done):
    split = store[0]["train"]
    loader = Loader(split, 4, 42)
    whole = list(itertools.islice(loader, done + 5))[done:]
    resumed = list(itertools.islice(Loader(split, 4, 42, start=done * 4), 5))
    assert all(
        torch.equal(one, other) for one, other in zip(whole, resumed, strict=True)
    )


def test_resuming_far_away_reads_no_row_before(store, monkeypatch):
    split = store[0]["train"]
    asked = []
    monkeypatch.setattr(tokens, "GATHERED_TOGETHER", 4 * BLOCK)
    monkeypatch.setattr(
        Split, "gather", lambda self, rows: asked.append(rows) or np.zeros((4, 2))
    )
    next(iter(Loader(split, 4, 42, start=10**15)))
    place, epoch = 10**15 % len(split), 10**15 // len(split)
    assert [len(rows) for rows in asked] == [4]
    assert asked[0][0] == permute(np.array([place]), len(split), 42, epoch)[0]


def test_a_loader_with_nothing_left_ends(store):
    split = store[0]["train"]
    assert list(Loader(split, 4, 1, stop=0)) == []
    assert list(Loader(split, 4, 1, start=len(split), stop=len(split))) == []
    assert [len(b) for b in Loader(split, len(split) - 1, 1, stop=len(split))] == [
        len(split) - 1,
        1,
    ]


def test_a_kept_batch_is_not_overwritten(store):
    batches = list(itertools.islice(Loader(store[0]["train"], 4, 42), 9))
    copies = [
        batch.clone()
        for batch in itertools.islice(Loader(store[0]["train"], 4, 42), 9)
    ]
    assert all(torch.equal(one, other) for one, other in zip(batches, copies))
    batches[0].zero_()
    assert torch.equal(next(iter(Loader(store[0]["train"], 4, 42))), copies[0])


def private_growth(path: str, tokens: int) -> int:
    """Bytes of private memory that walking through a store of so many tokens costs."""
    from pathlib import Path

    from stages.tokens import Loader, Split
    from utils.machine import memory_of

    folder = Path(path)
    header = {"dtype": "<u2", "block": 1024, "shard_blocks": 2**18}
    split = Split(folder, "train", header, tokens, 1, tokens, ["train-00000.bin"])
    loader = iter(Loader(split, 16, 42))
    next(loader)
    before = memory_of()["private"]
    for _ in range(tokens // 16 // 1024):
        next(loader)
    return memory_of()["private"] - before


def test_private_memory_does_not_grow_with_the_store(tmp_path):
    tokens = 50_000_000
    with (tmp_path / "train-00000.bin").open("wb") as file:
        file.truncate(2 * (tokens + 1))
    assert (
        run_fresh(private_growth, str(tmp_path), tokens).result < 20e6
    )  # the store has 100 MB


# for the model ----------------------------------------------------------------------------------


def test_the_models_own_loss_takes_the_rows():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    )
    rows = torch.randint(50, (3, 17))
    loss = model(**split_rows(rows)).loss
    logits = model(rows[:, :-1]).logits
    assert torch.allclose(
        loss,
        torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), rows[:, 1:].flatten()
        ),
    )
    assert torch.allclose(
        loss, model(rows, labels=rows).loss
    )  # the library's shift, by another way


# properties -------------------------------------------------------------------------------------


def counted_split(
    folder: Path, rows: int, rest: int, block: int, shard_blocks: int
) -> Split:
    """A split whose stream counts 0, 1, 2 …: row k begins with k * block."""
    count = rows * block + rest
    stream = np.arange(count + 1, dtype="<u4")
    shards = write_shards(
        folder, "train", [stream[1:]], stream[:1], shard_blocks * block
    )
    header = {"dtype": "<u4", "block": block, "shard_blocks": shard_blocks}
    return Split(folder, "train", header, count, 1, count, shards)


sizes = st.fixed_dictionaries(
    {
        "rows": st.integers(1, 60),
        "rest": st.integers(0, 1),
        "block": st.integers(2, 5),
        "shard_blocks": st.integers(1, 80),
    }
)


@settings(deadline=None)
@given(
    sizes=sizes,
    batch=st.integers(1, 9),
    world=st.integers(1, 5),
    workers=st.integers(1, 3),
    group=st.integers(1, 4),
    start=st.integers(0, 200),
    length=st.integers(0, 200),
)
def test_each_position_once_over_ranks_and_workers(
    sizes, batch, world, workers, group, start, length
):
    """Whatever the batch, ranks, workers, start and stop: so every row once an epoch."""
    taken = []
    with (
        tempfile.TemporaryDirectory() as scratch,
        pytest.MonkeyPatch.context() as patch,
    ):
        split = counted_split(Path(scratch), **sizes)
        patch.setattr(tokens, "GATHERED_TOGETHER", group * batch * sizes["block"])
        for rank, worker in itertools.product(range(world), range(workers)):
            info = SimpleNamespace(id=worker, num_workers=workers)
            patch.setattr(tokens, "get_worker_info", lambda info=info: info)
            stop = start + length
            for rows in Loader(
                split, batch, 7, start, stop, rank=rank, world=world
            ):
                assert (rows.diff() == 1).all()
                taken += (rows[:, 0] // sizes["block"]).tolist()
        expected = Loader(split, 1, 7).rows_at(np.arange(start, start + length))
    assert sorted(taken) == sorted(expected.tolist())
    if start == 0 and length % sizes["rows"] == 0:
        assert sorted(taken) == sorted(
            [*range(sizes["rows"])] * (length // sizes["rows"])
        )


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.text(), min_size=1, max_size=9),
    st.integers(1, 9),
    st.integers(1, 40),
)
def test_texts_come_back_from_the_rows(tokenizer, texts, block, shard):
    with tempfile.TemporaryDirectory() as scratch:
        write_store(Path(scratch), {"train": texts}, tokenizer, block, shard)
        split = open_store(Path(scratch), tokenizer)["train"]
        rows = split.gather(np.arange(len(split)))
        targets = np.concatenate([rows[:, 1:].ravel(), split.tail[1:]])
    assert split.documents == len(texts)
    ends = np.flatnonzero(targets == tokenizer.eos_token_id)
    parts = np.split(targets, ends + 1)[:-1]
    encode = BulkEncoder(tokenizer)
    assert [encode.decode(part[:-1]) for part in parts] == texts


HEADER = {
    "format": 1,
    "tokenizer": "0123456789abcdef",
    "vocabulary": 600,
    "end": 598,
    "dtype": "<u2",
    "block": 4,
    "shard_blocks": 3,
    "splits": {
        "train": {
            "tokens": 25,
            "documents": 1,
            "bytes": 30,
            "shards": ["train-00000.bin", "train-00001.bin", "train-00002.bin"],
        }
    },
}
numbers_of_any_kind = (
    st.integers(-(2**70), 2**70) | st.integers(-3, 30) | st.floats()
)
anything = st.recursive(
    st.none()
    | st.booleans()
    | numbers_of_any_kind
    | st.text(max_size=9)
    | st.just("../secret.bin"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
)


def read_everything(folder: Path) -> None:
    for split in open_store(folder).values():
        loader = Loader(split, 2, 1, stop=5)
        assert sum(len(batch) for batch in loader) == 5
        assert len(split.tail) >= 1


@pytest.fixture(scope="module")
def small_store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    stream = np.arange(26, dtype="<u2")
    write_shards(folder, "train", [stream[1:]], stream[:1], 12)
    (folder / "store.json").write_text(json.dumps(HEADER))
    read_everything(folder)
    return folder


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.tuples(st.sampled_from([*HEADER, "more"]), anything), max_size=2),
    st.data(),
)
def test_a_header_of_any_content_is_read_or_refused(small_store, changes, data):
    header = copy.deepcopy(HEADER)
    facts = header["splits"]["train"]
    for name, value in changes:
        header[name] = value
    if data.draw(st.booleans()):
        facts[data.draw(st.sampled_from([*facts, "more"]))] = data.draw(anything)
    (small_store / "store.json").write_text(json.dumps(header))
    try:
        read_everything(small_store)
    except CourseError:
        # As text, because in Python True is 1.
        assert json.dumps(header) != json.dumps(HEADER)


@given(
    st.binary(max_size=40) | anything.map(lambda value: json.dumps(value).encode())
)
def test_a_header_that_is_none_is_refused(small_store, content):
    (small_store / "store.json").write_bytes(content)
    with pytest.raises(
        CourseError, match=r"no whole token store(.|\n)*run lesson 08 again"
    ):
        open_store(small_store)


@pytest.mark.parametrize(
    "wrong", [{"batch": 0}, {"start": -1}, {"rank": 2, "world": 2}, {"world": 0}]
)
def test_a_loader_without_sense_is_refused(store, wrong):
    with pytest.raises(CourseError, match="rank from 0 to world - 1"):
        Loader(store[0]["train"], **{"batch": 1, "seed": 1, **wrong})
