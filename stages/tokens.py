"""From documents to blocks of constant length, in any order, from any place, at once.

    texts -> write_store -> open_store -> Split -> Loader -> rows of block + 1 tokens

Each split is one stream: an end token, then every document with one behind it. Row k is the tokens
k*block … (k+1)*block, both included: it shares a token with its neighbour, so that as inputs and
targets (`split_rows`) the rows predict each token once. Shards are mapped, never read whole.
Several stores are read as one where `stages.mixture` says so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from pydantic import BaseModel, Field, StringConstraints
from torch.utils.data import IterableDataset, get_worker_info

from stages import evaluation
from stages.mixture import MIXTURE, read_mixture
from stages.order import count_before, shuffle_epochs, take_turns
from stages.order import permute as permute
from stages.tokenizer import BulkEncoder
from stages.tokenizer import hash_tokenizer as hash_tokenizer
from utils.artifacts import write_json
from utils.errors import CourseError
from utils.lesson import PUBLISHED_BY

HEADER = "store.json"
AGAIN = f"run lesson {PUBLISHED_BY['tokens']} again"
# Documents encoded at a time; tokens gathered at a time: two megabytes, which a cache holds.
ENCODED_TOGETHER = 128
GATHERED_TOGETHER = 2**20
# A number in a header; the bound is that of an index.
Count = Annotated[int, Field(ge=0, lt=2**60)]
Size = Annotated[int, Field(ge=1, lt=2**60)]
Texts = dict[str, Iterable[str]]


class SplitHeader(BaseModel, strict=True, extra="forbid"):
    """What the header says of one split."""

    tokens: Size
    documents: Size
    bytes: Count
    shards: list[Annotated[str, StringConstraints(pattern=r"^[\w-]+\.bin$")]]


class StoreHeader(BaseModel, strict=True, extra="forbid"):
    """What a reader of a store must know; anything else in the file is an error."""

    format: Literal[1]
    tokenizer: str
    vocabulary: Size
    end: Count
    dtype: Literal["<u2", "<u4"]
    block: Size
    shard_blocks: Size
    splits: dict[str, SplitHeader]


def write_store(
    folder: Path, splits: Texts, tokenizer: Any, block: int, shard: int = 2**28
) -> dict[str, Any]:
    """Fill `folder`, which `lesson.publish` or `sealed` moves into place; returns the header."""
    encode = BulkEncoder(tokenizer)
    # a document that spells out <|endoftext|> holds letters, not an end
    encode.allowed = set()
    dtype = np.dtype("<u2" if len(tokenizer) <= 2**16 else "<u4")
    end = np.array([tokenizer.eos_token_id], dtype)
    shard_blocks = max(1, shard // block)
    facts = {}
    for name, texts in splits.items():
        counts = {"tokens": 0, "documents": 0, "bytes": 0}
        stream = encode_stream(texts, encode, end, counts)
        shards = write_shards(folder, name, stream, end, shard_blocks * block)
        if not shards:
            what = f"the split {name!r} has no documents"
            raise CourseError(what, folder, "choose other sources")
        facts[name] = {**counts, "shards": shards}
    header = {
        "format": 1,
        "tokenizer": hash_tokenizer(tokenizer),
        "vocabulary": len(tokenizer),
        "end": tokenizer.eos_token_id,
        "dtype": dtype.str,
        "block": block,
        "shard_blocks": shard_blocks,
        "splits": facts,
    }
    # last: a folder without a header is no store
    write_json(folder / HEADER, header)
    return header


def encode_stream(
    texts: Iterable[str],
    encode: BulkEncoder,
    end: np.ndarray,
    counts: dict[str, int],
) -> Iterator[np.ndarray]:
    """The ids of all texts, `end` behind each, some texts at a time; adds to `counts`."""
    rest = iter(texts)
    while batch := list(itertools.islice(rest, ENCODED_TOGETHER)):
        parts = []
        for text, ids in zip(batch, encode(batch)):
            counts["bytes"] += len(text.encode())
            parts += [ids, end]
        stream = np.concatenate(parts).astype(end.dtype)
        counts["documents"] += len(batch)
        counts["tokens"] += len(stream)
        yield stream


def write_shards(
    folder: Path,
    split: str,
    stream: Iterable[np.ndarray],
    end: np.ndarray,
    most: int,
) -> list[str]:
    """Cut a stream into files of `most` tokens, each after the token before it; their names."""
    names: list[str] = []
    before = end
    room = 0
    for ids in stream:
        while len(ids):
            if room == 0:
                names.append(f"{split}-{len(names):05}.bin")
                (folder / names[-1]).write_bytes(before.tobytes())
                room = most
            part = ids[:room]
            ids = ids[room:]
            with (folder / names[-1]).open("ab") as file:
                file.write(part.tobytes())
            before = part[-1:]
            room -= len(part)
    return names


def open_store(folder: Path, tokenizer: Any = None) -> dict[str, Split]:
    """The splits of a token store, if it is complete and was made with this tokenizer.

    A folder that names several stores (`stages.mixture.write_mixture`) is opened as one.
    """
    if (folder / MIXTURE).is_file():
        return open_mixture(folder, tokenizer)
    try:
        content = (folder / HEADER).read_bytes()
        header = StoreHeader.model_validate_json(content).model_dump()
    except (OSError, ValueError) as error:
        what = "there is no whole token store of format 1"
        raise CourseError(what, folder, AGAIN) from error
    if tokenizer is not None and hash_tokenizer(tokenizer) != header["tokenizer"]:
        theirs = f"{header['vocabulary']:,} tokens, hash {header['tokenizer']}"
        ours = f"{len(tokenizer):,} tokens, hash {hash_tokenizer(tokenizer)}"
        what = f"the token store was made with another tokenizer ({theirs}; not {ours})"
        raise CourseError(what, folder, AGAIN)
    splits = header["splits"].items()
    return {name: Split(folder, name, header, **facts) for name, facts in splits}


@dataclass(frozen=True)
class Split:
    """The rows of one split: `len()` of them, any number at once by `gather`.

    `tokens` are those to predict: of the documents, and an end token for each. `bytes` are those
    of the text.
    """

    folder: Path
    name: str
    header: dict[str, Any]
    tokens: int
    documents: int
    bytes: int
    shards: list[str]

    def __len__(self) -> int:
        return self.tokens // self.header["block"]

    def rows_at(self, positions: np.ndarray, seed: int) -> np.ndarray:
        """The numbers of the rows at these positions of an endless stream of epochs."""
        return shuffle_epochs(positions, len(self), seed)

    @cached_property
    def streams(self) -> list[np.ndarray]:
        """The tokens of each shard, mapped; what is written to them does not reach the file."""
        dtype = np.dtype(self.header["dtype"])
        full = self.header["shard_blocks"] * self.header["block"]
        starts = range(0, self.tokens, full)
        if len(self.shards) != len(starts):
            raise CourseError(f"{self.name!r} lacks a shard", self.folder, AGAIN)
        streams = []
        for start, name in zip(starts, self.shards):
            path = self.folder / name
            size = (min(full, self.tokens - start) + 1) * dtype.itemsize
            if not path.is_file() or path.stat().st_size != size:
                what = f"{name} is missing or cut off"
                raise CourseError(what, self.folder, AGAIN)
            streams.append(np.asarray(np.memmap(path, dtype, mode="c")))
        return streams

    @cached_property
    def tables(self) -> list[np.ndarray]:
        """Each shard as rows of block + 1 tokens, which overlap by one: a view, not a copy."""
        block = self.header["block"]
        tables = []
        for stream in self.streams:
            if len(stream) > block:
                view = sliding_window_view(stream, block + 1, writeable=True)
                tables.append(view[::block])
        return tables

    def gather(self, rows: np.ndarray) -> np.ndarray:
        """The rows with these numbers, in this order."""
        # First, because it holds the files to the header.
        tables = self.tables
        shape = (len(rows), self.header["block"] + 1)
        result = np.empty(shape, self.header["dtype"])
        shards, places = np.divmod(rows, self.header["shard_blocks"])
        for shard in np.unique(shards):
            here = shards == shard
            result[here] = tables[shard][places[here]]
        return result

    @property
    def tail(self) -> np.ndarray:
        """The tokens after the last row, and the one before them: what no row predicts."""
        rest = self.tokens % self.header["block"]
        return self.streams[-1][-1 - rest :]

    def bits_per_byte(self, loss: float) -> float:
        """A mean loss in nats a token, as bits for each byte of the text."""
        return evaluation.bits_per_byte(loss, self.tokens, self.bytes)


@dataclass(frozen=True)
class Mixture(Split):
    """Splits of several stores in turn; `sources` has those of each source, and its rows in a turn.

    Row numbers go through all stores. Each source is an endless stream of its own epochs; `len()`
    is the number of positions after which the first of them begins again.
    """

    sources: list[tuple[list[Split], int]] = field(default_factory=list)

    def __len__(self) -> int:
        whose = take_turns([rows for _, rows in self.sources])
        return min(
            size // rows * self.turn + int(np.flatnonzero(whose == k)[size % rows])
            for k, (size, rows) in enumerate(self.sizes)
        )

    @property
    def turn(self) -> int:
        """The rows of one turn."""
        return sum(rows for _, rows in self.sources)

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Of each source all its rows, and those of a turn."""
        return [(sum(map(len, splits)), rows) for splits, rows in self.sources]

    def rows_at(self, positions: np.ndarray, seed: int) -> np.ndarray:
        """The numbers of the rows at these positions; each source has an order of its own."""
        whose = take_turns([rows for _, rows in self.sources])
        before = count_before(whose)
        turns, places = np.divmod(positions, self.turn)
        result = np.empty_like(positions)
        start = 0
        for number, (size, rows) in enumerate(self.sizes):
            here = whose[places] == number
            own = turns[here] * rows + before[places[here]]
            result[here] = start + shuffle_epochs(own, size, seed + number)
            start += size
        return result

    def gather(self, rows: np.ndarray) -> np.ndarray:
        """The rows with these numbers, in this order."""
        splits = [split for part, _ in self.sources for split in part]
        ends = np.cumsum([len(split) for split in splits])
        shape = (len(rows), self.header["block"] + 1)
        result = np.empty(shape, self.header["dtype"])
        owners = np.searchsorted(ends, rows, side="right")
        for owner in np.unique(owners):
            here = owners == owner
            inside = rows[here] - ends[owner]
            result[here] = splits[owner].gather(inside + len(splits[owner]))
        return result

    def bits_per_byte(self, loss: float) -> float:
        """A mean loss over rows in turn, in nats a token, as bits for each byte of their text."""
        size = 0.0
        for splits, rows in self.sources:
            tokens = sum(split.tokens for split in splits)
            size += rows * sum(split.bytes for split in splits) / tokens
        return loss / math.log(2) * self.turn / size


def open_mixture(folder: Path, tokenizer: Any) -> dict[str, Split]:
    """The splits of a mixture; a source that lacks a split, or has no row of it, takes no turn there."""
    sources = []
    for stores, rows in read_mixture(folder).values():
        opened = [open_store(store, tokenizer) for store in stores]
        sources.append((opened, rows))
    everything = [splits for opened, _ in sources for splits in opened]
    headers = [split.header for splits in everything for split in splits.values()]
    for fact in ("tokenizer", "vocabulary", "end", "dtype", "block"):
        values = sorted({str(header[fact]) for header in headers})
        if len(values) > 1:
            what = f"the stores of a mixture differ in {fact}: {', '.join(values)}"
            raise CourseError(what, folder, "write them alike")
    names = dict.fromkeys(name for splits in everything for name in splits)
    return {name: mix_split(folder, name, headers[0], sources) for name in names}


def mix_split(folder: Path, name: str, header: dict, opened: list) -> Split:
    """One split of a mixture, of the stores that have rows of it."""
    sources = []
    counts = {"tokens": 0, "documents": 0, "bytes": 0}
    for stores, rows in opened:
        splits = [one[name] for one in stores if name in one and len(one[name])]
        if splits:
            sources.append((splits, rows))
        for split in splits:
            for fact in counts:
                counts[fact] += getattr(split, fact)
    if not sources:
        what = f"{name!r} is shorter than one block in all stores"
        raise CourseError(what, folder, AGAIN)
    return Mixture(folder, name, header, **counts, shards=[], sources=sources)


@dataclass(eq=False)
class Loader(IterableDataset):
    """Batches of rows as int64, each epoch in a new order, from position `start` to `stop` (or on).

    A step takes `batch * world` positions, rank r every world-th: the same rows on any number of
    ranks. To resume, `start = steps * batch * world`. With `stop` the last batch is short; a rank
    may have none. In `DataLoader(loader, batch_size=None, num_workers=n)` workers take turns.
    """

    split: Split
    batch: int
    seed: int
    start: int = 0
    stop: int | None = None
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        if not len(self.split):
            what = f"{self.split.name!r} is shorter than one block"
            raise CourseError(what, self.split.folder, AGAIN)
        if self.batch < 1 or self.start < 0 or not 0 <= self.rank < self.world:
            what = f"no rows for {self.batch} at a time from {self.start}, rank {self.rank} of {self.world}"
            raise CourseError(what, fix="rank from 0 to world - 1, batch from 1")

    def rows_at(self, positions: np.ndarray) -> np.ndarray:
        """The numbers of the rows at these positions of an endless stream of epochs."""
        return self.split.rows_at(positions, self.seed)

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        stop = math.inf if self.stop is None else self.stop
        # gather several batches at a time; of the batches the workers take turns
        tokens = self.batch * self.split.header["block"]
        group = max(1, GATHERED_TOGETHER // tokens)
        mine = self.rank + self.world * np.arange(self.batch)
        for first in itertools.count(worker, workers * group):
            steps = first + workers * np.arange(group)
            starts = self.start + steps * self.batch * self.world
            positions = (starts[:, None] + mine).ravel()
            rows = self.split.gather(self.rows_at(positions[positions < stop]))
            for place in range(0, len(rows), self.batch):
                part = rows[place : place + self.batch]
                yield torch.from_numpy(part.astype(np.int64))
            if len(rows) < len(positions):
                return


def split_rows(rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a model takes (`**`) and must say: position i of `shift_labels` follows position i.

    >>> [part.tolist() for part in split_rows(torch.tensor([[1, 2, 3]])).values()]
    [[[1, 2]], [[2, 3]], [[2, 3]]]
    """
    targets = rows[:, 1:].contiguous()
    # transformers computes no loss if `labels` is not given
    return {"input_ids": rows[:, :-1], "labels": targets, "shift_labels": targets}
