"""Each test tries to break one promise of stages/tokens.py or stages/tokens.py."""
from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from stages import tokenizer as tokenization, tokens as packing
from utils.errors import CourseError, ROOT
from utils.artifacts import sealed
from stages.memory import run_fresh
from stages.tokens import Loader, open_store, restart_positions, split_rows
from stages.tokens import permute

SOURCES = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "utils").glob("*.py"))]
BLOCK = 64


@pytest.fixture(scope="module")
def tokenizer():
    return tokenization.train_bpe(SOURCES, 600)


@pytest.fixture(scope="module", params=[2**28, 1000, 1], ids=["one shard", "many", "tiny"])
def store(request, tokenizer, tmp_path_factory):
    """The sources of `utils` in one shard, in several, and in one for each row."""
    folder = tmp_path_factory.mktemp("store")
    few = SOURCES if request.param > 1 else SOURCES[:4]
    splits = {"train": iter(few), "test": few[:1]}
    packing.write_store(folder, splits, tokenizer, BLOCK, shard=request.param)
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


def test_counts_are_those_of_the_text(store, tokenizer):
    split, texts = store[0]["train"], store[1]
    assert split.documents == len(texts) == len(split.starts)
    assert split.bytes == sum(len(text.encode()) for text in texts)
    stream = np.concatenate([split.streams[0], *(shard[1:] for shard in split.streams[1:])])
    first = int(split.starts[2]) + 1
    assert tokenizer.decode(stream[first: int(split.starts[3])]) == texts[2]
    assert stream[first - 1] == tokenizer.eos_token_id


def test_bits_per_byte_of_a_uniform_guess(store):
    split = store[0]["train"]
    bits = split.bits_per_byte(np.log(600))
    assert bits == pytest.approx(split.tokens * np.log2(600) / split.bytes)


def test_a_document_cannot_forge_its_end(tokenizer, tmp_path):
    text = "x = '<|endoftext|>' + '<pad>'\n"
    packing.write_store(tmp_path, {"train": [text]}, tokenizer, 4)
    stream = open_store(tmp_path)["train"].streams[0]
    assert (stream == tokenizer.eos_token_id).sum() == 2 and tokenizer.pad_token_id not in stream
    assert tokenizer.decode(stream[1:-1]) == text


def test_a_view_of_the_file_and_not_a_copy(store):
    split = store[0]["train"]
    table, stream = split.tables[0], split.streams[0]
    assert np.shares_memory(table, stream)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of arrays that it must not write to
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
    large = Large(tokenizer_object=tokenizer.backend_tokenizer, eos_token=tokenization.END)
    assert packing.write_store(tmp_path, {"train": ["a b"]}, large, 1)["dtype"] == "<u4"
    assert open_store(tmp_path)["train"].streams[0].dtype == np.uint32


def test_another_tokenizer_is_refused_and_padding_does_not_make_another(store, tokenizer):
    folder = store[0]["train"].folder
    tokenizer(SOURCES[:2], padding=True, truncation=True, max_length=9)  # leaves its mark in the engine
    open_store(folder, tokenizer)
    other = tokenization.train_bpe(SOURCES[::-1] * 2, 601)
    with pytest.raises(CourseError, match=r"another tokenizer.*600 tokens.*601 tokens"):
        open_store(folder, other)
    moved = tokenization.train_bpe(SOURCES, 600)
    moved.eos_token = moved.pad_token
    with pytest.raises(CourseError, match="another tokenizer"):
        open_store(folder, moved)


def test_what_is_not_whole_is_named(tokenizer, tmp_path):
    with pytest.raises(CourseError, match="no whole token store"):
        open_store(tmp_path)
    with pytest.raises(CourseError, match="no documents"):
        packing.write_store(tmp_path, {"train": []}, tokenizer, 4)
    with pytest.raises(CourseError, match="no whole token store"):
        open_store(tmp_path)
    packing.write_store(tmp_path, {"train": SOURCES[:1]}, tokenizer, 100_000)
    with pytest.raises(CourseError, match="shorter than one block"):
        Loader(open_store(tmp_path)["train"], 1, seed=1)
    file = tmp_path / "train-00000.bin"
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(CourseError, match="train-00000.bin is missing or cut off"):
        open_store(tmp_path)["train"].streams
    header = json.loads((tmp_path / "store.json").read_text())
    (tmp_path / "store.json").write_text(json.dumps({**header, "format": 0}))
    with pytest.raises(CourseError, match="format 1"):
        open_store(tmp_path)


WRITER = """
import sys, time
from pathlib import Path
from utils import packing, tokenization
from utils.folders import sealed
tokenizer = tokenization.train_bpe(["def f(x): return x\\n"] * 9, 262)
def endless():
    for number in range(10**9):
        if number == 10_000:
            print("writing", flush=True)
        yield "x = 1\\n" * 200
with sealed(Path(sys.argv[1]), {}) as folder:
    packing.write_store(folder, {"train": endless()}, tokenizer, 64)
"""


def test_a_killed_writer_leaves_the_old_store(tokenizer, tmp_path):
    target = tmp_path / "tokens"
    with sealed(target, {}) as folder:
        packing.write_store(folder, {"train": SOURCES[:2]}, tokenizer, BLOCK)
    with subprocess.Popen([sys.executable, "-c", WRITER, str(target)], cwd=ROOT,
                          stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout.readline() == "writing\n"
        writer.kill()
    assert open_store(target, tokenizer)["train"].documents == 2


# the order --------------------------------------------------------------------------------------

@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 16, 17, 99, 100, 101, 4095, 4097, 65_537])
def test_it_is_a_permutation(size):
    for seed, epoch in ((0, 0), (42, 0), (42, 3)):
        assert np.array_equal(np.sort(permute(np.arange(size), size, seed, epoch)), np.arange(size))


def test_each_place_is_computed_alone_and_for_ever():
    size = 1_000_003
    places = np.array([0, 1, 999_999, 1_000_002, 31_337])
    alone = [int(permute(np.array([place]), size, 42)[0]) for place in places]
    assert permute(places, size, 42).tolist() == alone
    assert alone == [int(v) for v in permute(np.arange(size), size, 42)[places]]
    # a resumed run needs the order of the run before it, on any machine: this may never change
    assert permute(np.arange(8), 8, 42).tolist() == [5, 7, 4, 6, 1, 2, 0, 3]


def test_epochs_and_seeds_differ():
    first, second, third = (permute(np.arange(5000), 5000, *key) for key in ((1, 0), (1, 1), (2, 0)))
    for one, other in itertools.combinations((first, second, third, np.arange(5000)), 2):
        assert (one == other).sum() < 10


def oddity(one, other, cells=20):
    """How far pairs of numbers are from chance, in standard deviations (chi-squared)."""
    table = np.histogram2d(one, other, cells)[0]
    expected = table.sum() / cells**2
    freedom = (cells - 1) ** 2
    return abs(((table - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom)


def test_it_looks_like_chance():
    places = np.arange(100_000)
    for seed in range(5):
        rows = permute(places, len(places), seed)
        for one, other in ((places, rows), (rows[:-1], rows[1:]), (rows[:-7], rows[7:])):
            assert oddity(one, other) < 5
        assert (np.abs(np.diff(rows)) == 1).sum() < 15  # by chance, two stay neighbours
    regular = places * 38_603 % len(places)  # a permutation too, but one with a pattern
    assert oddity(regular[:-1], regular[1:]) > 1000


# the loader -------------------------------------------------------------------------------------

def numbers(loader, split):
    """The number of each row that a loader gives, found by its content."""
    names = {row.tobytes(): k for k, row in enumerate(split.gather(np.arange(len(split))).astype(np.int64))}
    return [[names[row.numpy().tobytes()] for row in batch] for batch in loader]


@pytest.mark.parametrize("batch,world", [(1, 1), (3, 1), (4, 2), (5, 3), (7, 4), (1000, 2)])
def test_every_row_once_over_ranks_and_workers_for_ragged_sizes(store, batch, world):
    split = store[0]["train"]
    seen = []
    for rank, workers in itertools.product(range(world), (0, 2)):
        loader = Loader(split, batch, 42, stop=len(split), rank=rank, world=world)
        many = numbers(DataLoader(loader, batch_size=None, num_workers=workers), split) if workers \
            and batch in (3, 5) else numbers(loader, split)
        if workers:
            assert many == numbers(loader, split)  # workers take turns: nothing is seen of them
        else:
            seen += [row for some in many for row in some]
    assert sorted(seen) == list(range(len(split)))


def test_a_step_has_the_same_rows_on_any_number_of_ranks(store):
    split, steps = store[0]["train"], 2 * len(store[0]["train"]) // 12
    alone = [sorted(b) for b in numbers(itertools.islice(Loader(split, 12, 7), steps), split)]
    for world in (2, 3, 4):
        ranks = [numbers(itertools.islice(Loader(split, 12 // world, 7, rank=r, world=world), steps), split)
                 for r in range(world)]
        assert [sorted(itertools.chain(*step)) for step in zip(*ranks)] == alone


def test_every_epoch_is_whole_though_batches_straddle_them(store):
    split = store[0]["train"]
    endless = itertools.chain.from_iterable(numbers(itertools.islice(Loader(split, 5, 3), len(split)), split))
    rows = list(endless)
    epochs = [rows[i * len(split): (i + 1) * len(split)] for i in range(5)]
    assert all(sorted(epoch) == list(range(len(split))) for epoch in epochs)
    assert len(split) < 5 or epochs[0] != epochs[1]


@pytest.mark.parametrize("done", [0, 1, 13, 400])
def test_resuming_goes_on_where_it_stopped(store, done):
    split = store[0]["train"]
    loader = Loader(split, 4, 42)
    whole = list(itertools.islice(loader, done + 5))[done:]
    resumed = list(itertools.islice(Loader(split, 4, 42, start=done * 4), 5))
    assert all(torch.equal(one, other) for one, other in zip(whole, resumed, strict=True))


def test_resuming_far_away_is_immediate(store):
    start = time.perf_counter()
    next(iter(Loader(store[0]["train"], 4, 42, start=10**15)))
    assert time.perf_counter() - start < 1


def test_a_loader_with_nothing_left_ends(store):
    split = store[0]["train"]
    assert list(Loader(split, 4, 1, stop=0)) == []
    assert list(Loader(split, 4, 1, start=len(split), stop=len(split))) == []
    assert [len(b) for b in Loader(split, len(split) - 1, 1, stop=len(split))] == [len(split) - 1, 1]


def test_a_kept_batch_is_not_overwritten(store):
    batches = list(itertools.islice(Loader(store[0]["train"], 4, 42), 9))
    copies = [batch.clone() for batch in itertools.islice(Loader(store[0]["train"], 4, 42), 9)]
    assert all(torch.equal(one, other) for one, other in zip(batches, copies))
    batches[0].zero_()
    assert torch.equal(next(iter(Loader(store[0]["train"], 4, 42))), copies[0])


def private_growth(path: str, tokens: int) -> int:
    """Bytes of private memory that walking through a store of so many tokens costs."""
    from pathlib import Path

    from utils.machine import memory_of
    from stages.tokens import Loader, Split
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
    assert run_fresh(private_growth, str(tmp_path), tokens).result < 20e6  # the store has 100 MB


# for the model ----------------------------------------------------------------------------------

def test_the_models_own_loss_takes_the_rows():
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=32,
                                         num_hidden_layers=1, num_attention_heads=2))
    rows = torch.randint(50, (3, 17))
    loss = model(**split_rows(rows)).loss
    logits = model(rows[:, :-1]).logits
    assert torch.allclose(loss, torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()))
    assert torch.allclose(loss, model(rows, labels=rows).loss)  # the library's shift, by another way


def test_positions_restart_at_every_end():
    ids = torch.tensor([[0, 5, 6, 0, 0, 7], [5, 5, 5, 5, 5, 0], [5, 5, 5, 5, 5, 5]])
    assert restart_positions(ids, end=0).tolist() == [[0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 0],
                                                      [0, 1, 2, 3, 4, 5]]


def test_restarted_positions_isolate_documents_in_a_model():
    """The claim of lesson 08: exact without cache and mask, and broken with either."""
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=32,
                                         num_hidden_layers=2, num_attention_heads=2)).eval()
    ids = torch.randint(1, 50, (1, 20))
    ids[0, 8] = 0
    alone = model(ids[:, 8:], use_cache=False).logits
    positions = restart_positions(ids, 0)
    packed = model(ids, position_ids=positions, use_cache=False).logits[:, 8:]
    assert torch.allclose(packed, alone, atol=1e-5)
    cached = model(ids, position_ids=positions, use_cache=True).logits[:, 8:]
    masked = model(ids, position_ids=positions, attention_mask=torch.ones_like(ids), use_cache=False)
    for leaking in (cached, masked.logits[:, 8:]):
        assert (leaking - alone).abs().max() > 1e-3
