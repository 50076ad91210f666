"""Floor 4: from documents to blocks of constant length, in any order, from any place, at once.

    texts -> write_store -> open_store -> Split -> Loader -> rows of block + 1 tokens

Each split is one stream: an end token, then every document with one behind it. Row k is the tokens
k*block … (k+1)*block, both included: it shares a token with its neighbour, so that as inputs and
targets (`split_rows`) the rows predict each token once. Shards are mapped, never read whole.
"""
from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from utils.errors import CourseError
from utils.artifacts import hash_json, read_json, write_json
from stages.tokenizer import BulkEncoder

HEADER, FORMAT, AGAIN = "store.json", 1, "run lesson 08 again"
WINDOW = 2**20  # tokens gathered at a time: two megabytes, which a cache holds


def hash_tokenizer(tokenizer: Any) -> str:
    """A hash of all that decides the ids: not of padding, which a call to a tokenizer changes."""
    engine = json.loads(tokenizer.backend_tokenizer.to_str())
    state = {key: part for key, part in engine.items() if key not in ("padding", "truncation")}
    return hash_json([state, tokenizer.eos_token_id])


def write_shards(folder: Path, split: str, pieces: Iterable[np.ndarray], last: np.ndarray,
                 most: int) -> list[str]:
    """Cut a stream into files of `most` tokens, each after the token before it; their names."""
    names, room = [], 0
    with contextlib.ExitStack() as opened:
        for ids in pieces:
            while len(ids):
                if not room:
                    opened.close()
                    names.append(f"{split}-{len(names):05}.bin")
                    file = opened.enter_context((folder / names[-1]).open("wb"))
                    file.write(last.tobytes())
                    room = most
                part, ids = ids[:room], ids[room:]
                file.write(part.tobytes())
                room, last = room - len(part), part[-1:]
    return names


def write_split(folder: Path, split: str, texts: Iterable[str], encode: BulkEncoder,
                stop: np.ndarray, most: int) -> dict[str, Any]:
    """Encode the texts of one split, `stop` behind each; returns what the header says of it."""
    texts, lengths, sizes = iter(texts), [], []

    def pieces() -> Iterator[np.ndarray]:
        while batch := list(itertools.islice(texts, 128)):
            sizes.append(sum(len(text.encode()) for text in batch))
            for ids in encode(batch):
                lengths.append(len(ids) + 1)
                yield np.append(ids.astype(stop.dtype), stop)

    shards = write_shards(folder, split, pieces(), stop, most)
    if not lengths:
        raise CourseError(f"the split {split!r} has no documents", folder, "choose other sources")
    np.save(folder / f"{split}.starts.npy", np.cumsum([0, *lengths[:-1]]))
    return {"tokens": sum(lengths), "documents": len(lengths), "bytes": sum(sizes),
            "shards": shards}


def write_store(folder: Path, splits: dict[str, Iterable[str]], tokenizer: Any, block: int,
                shard: int = 2**28) -> dict[str, Any]:
    """Fill `folder`, which `lesson.publish` or `sealed` moves into place; returns the header."""
    encode, end = BulkEncoder(tokenizer), tokenizer.eos_token_id
    encode.allowed = set()  # a document that spells out <|endoftext|> holds letters, not an end
    dtype, blocks = np.dtype("<u2" if len(tokenizer) <= 2**16 else "<u4"), max(1, shard // block)
    done = {name: write_split(folder, name, texts, encode, np.array([end], dtype), blocks * block)
            for name, texts in splits.items()}
    facts = {"vocabulary": len(tokenizer), "end": end, "dtype": dtype.str, "block": block}
    header = {"format": FORMAT, "tokenizer": hash_tokenizer(tokenizer), **facts,
              "shard_blocks": blocks, "splits": done}
    write_json(folder / HEADER, header)  # last: a folder without it is no store
    return header


def open_store(folder: Path, tokenizer: Any = None) -> dict[str, Split]:
    """The splits of a token store, if it is whole and was made with this tokenizer."""
    header = read_json(folder / HEADER) or {}
    if header.get("format") != FORMAT:
        raise CourseError(f"there is no whole token store of format {FORMAT}", folder, AGAIN)
    if tokenizer and hash_tokenizer(tokenizer) != header["tokenizer"]:
        mine = f"{len(tokenizer):,} tokens, hash {hash_tokenizer(tokenizer)}"
        made = f"{header['vocabulary']:,} tokens, hash {header['tokenizer']}"
        raise CourseError(f"the token store was made with another tokenizer ({made}; not {mine})",
                          folder, AGAIN)
    return {name: Split(folder, name, header, **facts) for name, facts in header["splits"].items()}


@dataclass(frozen=True)
class Split:
    """The rows of one split: `len()` of them, any number at once by `gather`."""

    folder: Path
    name: str
    header: dict[str, Any]
    tokens: int  # to predict: those of the documents, and an end token for each
    documents: int
    bytes: int  # of text
    shards: list[str]

    def __len__(self) -> int:
        return self.tokens // self.header["block"]

    @cached_property
    def streams(self) -> list[np.ndarray]:
        """The tokens of each shard, mapped; what is written to them does not reach the file."""
        found, left, dtype = [], self.tokens, np.dtype(self.header["dtype"])
        for path in map(self.folder.joinpath, self.shards):
            count = min(left, self.header["shard_blocks"] * self.header["block"])
            if not path.exists() or path.stat().st_size != (count + 1) * dtype.itemsize:
                raise CourseError(f"{path.name} is missing or cut off", self.folder, AGAIN)
            found.append(np.asarray(np.memmap(path, dtype, mode="c")))
            left -= count
        return found

    @cached_property
    def tables(self) -> list[np.ndarray]:
        """Each shard as rows of block + 1 tokens, which overlap by one: a view, not a copy."""
        long, window = self.header["block"] + 1, np.lib.stride_tricks.sliding_window_view
        return [window(s, long, writeable=True)[::long - 1] for s in self.streams if len(s) >= long]

    def gather(self, rows: np.ndarray) -> np.ndarray:
        """The rows with these numbers, in this order."""
        out = np.empty((len(rows), self.header["block"] + 1), self.header["dtype"])
        shards, within = np.divmod(rows, self.header["shard_blocks"])
        for shard in np.unique(shards):
            out[shards == shard] = self.tables[shard][within[shards == shard]]
        return out

    @property
    def tail(self) -> np.ndarray:
        """The tokens after the last row, and the one before them: what no row predicts."""
        return self.streams[-1][-1 - self.tokens % self.header["block"]:]

    @cached_property
    def starts(self) -> np.ndarray:
        """The place of each document's first token among the targets; mapped."""
        return np.load(self.folder / f"{self.name}.starts.npy", mmap_mode="r")

    def bits_per_byte(self, loss: float) -> float:
        """A mean loss in nats a token, as bits for each byte of the text."""
        return loss * self.tokens / self.bytes / np.log(2)


class Loader(IterableDataset):
    """Batches of rows as int64, each epoch in a new order, from position `start` to `stop` (or on).

    A step takes `batch * world` positions, rank r every world-th: the same rows on any number of
    ranks. To resume, `start = steps * batch * world`. With `stop` the last batch is short; a rank
    may have none. In `DataLoader(loader, batch_size=None, num_workers=n)` workers take turns.
    """

    def __init__(self, split: Split, batch: int, seed: int, start: int = 0,
                 stop: int | None = None, rank: int = 0, world: int = 1) -> None:
        if not len(split):
            raise CourseError(f"{split.name!r} is shorter than one block", split.folder, AGAIN)
        self.split, self.batch, self.seed, self.start = split, batch, seed, start
        self.rank, self.world = rank, world
        self.stop = np.inf if stop is None else stop

    def rows_at(self, positions: np.ndarray) -> np.ndarray:
        """The numbers of the rows at these positions of an endless stream of epochs."""
        epochs, rows = np.divmod(positions, len(self.split))
        for epoch in np.unique(epochs):
            mine = epochs == epoch
            rows[mine] = permute(rows[mine], len(self.split), self.seed, int(epoch))
        return rows

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        many = max(1, WINDOW // (self.batch * self.split.header["block"]))  # batches at a time
        within = self.rank + self.world * np.arange(self.batch)
        for first in itertools.count(worker, workers * many):
            steps = first + workers * np.arange(many)[:, None]
            positions = self.start + (steps * self.batch * self.world + within).ravel()
            rows = self.split.gather(self.rows_at(positions[positions < self.stop]))
            for place in range(0, len(rows), self.batch):
                yield torch.from_numpy(rows[place: place + self.batch].astype(np.int64))
            if len(rows) < len(positions):
                return


def mix(numbers: np.ndarray) -> np.ndarray:
    """Scatter 64-bit numbers: each bit of a result depends on each bit of its number."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def permute(places: np.ndarray, size: int, seed: int, epoch: int = 0) -> np.ndarray:
    """Where each place of `0 … size - 1` goes: a Feistel network, walked until it is inside.

    >>> sorted(permute(np.arange(5), 5, seed=42).tolist())
    [0, 1, 2, 3, 4]
    """
    wide = math.isqrt(size - 1) + 1  # a number is a pair: left * wide + right
    high, wide = np.uint64(-(-size // wide)), np.uint64(wide)
    keys = np.random.SeedSequence([seed, epoch]).generate_state(6, np.uint64).reshape(3, 2)
    found = np.array(places, np.uint64)
    outside = np.arange(len(found))
    while len(outside):
        left, right = np.divmod(found[outside], wide)
        for one, two in keys:  # each line can be undone, by subtracting: so it is one to one
            left = (left + mix(right + one) % high) % high
            right = (right + mix(left + two) % wide) % wide
        found[outside] = left * wide + right
        outside = outside[found[outside] >= size]
    return found.astype(np.int64)


def split_rows(rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a model takes (`**`) and must say: position i of `shift_labels` follows position i.

    >>> [part.tolist() for part in split_rows(torch.tensor([[1, 2, 3]])).values()]
    [[[1, 2]], [[2, 3]], [[2, 3]]]
    """
    targets = rows[:, 1:].contiguous()  # transformers skips the loss if `labels` is not given
    return {"input_ids": rows[:, :-1], "labels": targets, "shift_labels": targets}


def restart_positions(ids: torch.Tensor, end: int) -> torch.Tensor:
    """Positions that begin again at each end token, which opens the document after it.

    >>> restart_positions(torch.tensor([[5, 6, 0, 7, 8]]), end=0).tolist()
    [[0, 1, 0, 1, 2]]
    """
    places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    return places - torch.where(ids == end, places, 0).cummax(dim=1).values
