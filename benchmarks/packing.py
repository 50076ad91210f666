"""Random batches of 16 x 1024 tokens: the course's loader beside others, in speed and in memory."""

from __future__ import annotations

import functools
import itertools
import json
import statistics
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch

from benchmarks.timing import Row, interleaved, row
from stages.memory import FreshRun, run_fresh
from stages.tokens import Loader, Split
from utils.machine import private_memory_name

BLOCK = 1024
BATCH = 16
VOCABULARY = 4096
# Tokens of the two stores.
SMALL = 10_000_000
LARGE = 1_000_000_000
# Blocks of a shard.
SHARD = 2**28 // BLOCK


def write_stream(folder: Path, tokens: int) -> Split:
    """A token store of random ids; a large one repeats the same ten million."""
    ids = np.random.default_rng(42).integers(0, VOCABULARY, SMALL).astype("<u2")
    names = []
    left = tokens
    while left:
        names.append(f"train-{len(names):05}.bin")
        count = min(left, SHARD * BLOCK)
        with (folder / names[-1]).open("wb") as file:
            for start in range(0, count + 1, SMALL):
                file.write(ids[: count + 1 - start].tobytes())
        left -= count
    header = {"dtype": "<u2", "block": BLOCK, "shard_blocks": SHARD}
    facts = {"tokens": tokens, "documents": 1, "bytes": 4 * tokens, "shards": names}
    (folder / "split.json").write_text(json.dumps([header, facts]), "utf-8")
    return Split(folder, "train", header, tokens, 1, 4 * tokens, names)


def nanogpt_batches(path: Path) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """nanoGPT's manner: open the map for each batch, random places, convert and stack each row."""
    while True:
        data = np.memmap(path, dtype=np.uint16, mode="r")
        places = torch.randint(len(data) - BLOCK, (BATCH,))
        inputs = [
            torch.from_numpy(data[i : i + BLOCK].astype(np.int64)) for i in places
        ]
        targets = [
            torch.from_numpy(data[i + 1 : i + 1 + BLOCK].astype(np.int64))
            for i in places
        ]
        yield torch.stack(inputs), torch.stack(targets)


def datasets_batches(
    split: Split, folder: Path
) -> Iterator[dict[str, torch.Tensor]]:
    """The `datasets` library in torch format behind a shuffling DataLoader, from an Arrow file."""
    import datasets
    import pyarrow as pa

    tokens = split.streams[0][: len(split) * BLOCK].astype(np.int32)
    rows = pa.FixedSizeListArray.from_arrays(pa.array(tokens), BLOCK)
    batch = pa.record_batch([rows], names=["input_ids"])
    path = folder / "rows.arrow"
    with (
        pa.OSFile(str(path), "wb") as sink,
        pa.ipc.new_stream(sink, batch.schema) as writer,
    ):
        writer.write_batch(batch)
    dataset = datasets.Dataset.from_file(str(path)).with_format("torch")
    generator = torch.Generator().manual_seed(42)
    while True:
        yield from torch.utils.data.DataLoader(
            dataset, BATCH, shuffle=True, generator=generator
        )


def row_by_row(split: Split) -> Iterator[torch.Tensor]:
    """A mapped file and one buffer, filled row by row."""
    stream = split.streams[0]
    generator = np.random.default_rng(42)
    while True:
        buffer = torch.empty(BATCH, BLOCK + 1, dtype=torch.int64)
        rows = generator.integers(0, len(split), BATCH)
        for place, start in enumerate(rows * BLOCK):
            buffer.numpy()[place] = stream[start : start + BLOCK + 1]
        yield buffer


def take(batches: Iterator[object], count: int) -> None:
    """Draw so many batches and drop them."""
    for _ in itertools.islice(batches, count):
        pass


def speed_rows(tokens: int = SMALL, repeats: int = 7) -> Iterable[Row]:
    """Tokens a second in random order, one thread, every batch a new tensor of int64."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        split = write_stream(folder, tokens)
        ways: dict[str, Iterator[object]] = {
            "ours": iter(Loader(split, BATCH, 42)),
            "nanoGPT's manner": nanogpt_batches(folder / split.shards[0]),
            "datasets, torch format": datasets_batches(split, folder),
            "row by row": row_by_row(split),
        }
        counts = {name: 600 if name == "ours" else 100 for name in ways}
        works = [functools.partial(take, ways[name], counts[name]) for name in ways]
        seconds = interleaved(*works, repeats=repeats)
    speed = {}
    for name, value in zip(ways, seconds, strict=True):
        speed[name] = counts[name] * BATCH * BLOCK / value / 1e6
    ours = speed.pop("ours")
    what = f"batches of {BATCH} x {BLOCK:,} tokens, random order"
    return [row("loader-speed", what, "M tokens/s", ours, speed, bar=20)]


def read_all(folder: str, way: str) -> int:
    """Every row of a store once, in random order; the tokens that were given."""
    import json
    from pathlib import Path

    import numpy as np
    import torch

    from stages.tokens import Loader, Split

    torch.set_num_threads(1)
    header, facts = json.loads(Path(folder, "split.json").read_text("utf-8"))
    if way == "loaded":
        shards = [
            np.fromfile(Path(folder, name), "<u2") for name in facts["shards"]
        ]
        return sum(len(shard) - 1 for shard in shards)
    split = Split(Path(folder), "train", header, **facts)
    batches = Loader(split, 16, 42, stop=len(split))
    return sum(len(batch) for batch in batches) * header["block"]


def growth(runs: list[dict[str, FreshRun]], kind: str) -> float:
    """Megabytes more with the large store than with the small one: the median of the runs."""
    return statistics.median(
        (getattr(run["large"], kind) - getattr(run["small"], kind)) / 1e6
        for run in runs
    )


def memory_rows(
    small: int = SMALL, large: int = LARGE, repeats: int = 3
) -> Iterable[Row]:
    """Private memory of a whole pass through a store a hundred times larger."""
    sizes = {"small": small, "large": large}
    runs: dict[str, list[dict[str, FreshRun]]] = {"mapped": [], "loaded": []}
    with tempfile.TemporaryDirectory() as scratch:
        folders = {name: Path(scratch, name) for name in sizes}
        for name, folder in folders.items():
            folder.mkdir()
            write_stream(folder, sizes[name])
        for _, way in itertools.product(range(repeats), runs):
            run = {
                name: run_fresh(read_all, str(folder), way)
                for name, folder in folders.items()
            }
            runs[way].append(run)
    complete = True
    for run, (name, size) in itertools.product(runs["mapped"], sizes.items()):
        complete = complete and run[name].result == size // BLOCK * BLOCK
    what = f"growth of {private_memory_name()} of a pass, {small:,} to {large:,} tokens"
    ours = growth(runs["mapped"], "private")
    peers = {
        "loaded": growth(runs["loaded"], "private"),
        "ours, as RSS": growth(runs["mapped"], "resident"),
    }
    claim = row(
        "loader-memory",
        what,
        "MB",
        ours,
        peers,
        bar=20,
        higher_is_better=False,
        bar_on="ours",
        valid=complete,
    )
    return [claim]


PARTS = (speed_rows, memory_rows)
