"""Random batches of 16 x 1024 tokens: the course's loader beside others, in speed and in memory.

`rows()` gives one row a claim; `python -m benchmarks packing` prints them.
"""
from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stages.memory import run_fresh
from utils.machine import private_memory_name as measure
from stages.tokens import Loader, open_store, Split

BLOCK, BATCH, VOCABULARY = 1024, 16, 4096
SMALL, LARGE = 10_000_000, 1_000_000_000  # tokens
SHARD = 2**28 // BLOCK  # blocks of a shard
BARS = {"speed": 10, "private": 20}  # times nanoGPT's way; megabytes


def write_stream(folder: Path, tokens: int) -> Split:
    """A token store of random ids; a large one repeats the same ten million."""
    ids = np.random.default_rng(42).integers(0, VOCABULARY, SMALL).astype("<u2")
    names, left = [], tokens
    while left:
        names.append(f"train-{len(names):05}.bin")
        count = min(left, SHARD * BLOCK)
        with (folder / names[-1]).open("wb") as file:
            for start in range(0, count + 1, SMALL):
                file.write(ids[: count + 1 - start].tobytes())
        left -= count
    header = {"dtype": "<u2", "block": BLOCK, "shard_blocks": SHARD}
    facts = {"tokens": tokens, "documents": 1, "bytes": 4 * tokens, "shards": names}
    (folder / "split.json").write_text(json.dumps([header, facts]))
    return Split(folder, "train", header, **facts)


def nanogpt_batches(path: Path, block: int = BLOCK) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """nanoGPT's manner: open the map for each batch, random places, convert and stack each row."""
    while True:
        data = np.memmap(path, dtype=np.uint16, mode="r")
        places = torch.randint(len(data) - block, (BATCH,))
        inputs = [torch.from_numpy(data[i: i + block].astype(np.int64)) for i in places]
        targets = [torch.from_numpy(data[i + 1: i + 1 + block].astype(np.int64)) for i in places]
        yield torch.stack(inputs), torch.stack(targets)


def classic_batches(corpus: Path, tokenizer: Path, block: int) -> Iterator[torch.Tensor]:
    """The classic iterable dataset: read texts, encode them one by one, cut a buffer into blocks."""
    from transformers import AutoTokenizer

    from stages.tokenizer import read_texts

    encode, buffer = AutoTokenizer.from_pretrained(tokenizer), []
    for text in read_texts(corpus, "train"):
        buffer += [*encode(text)["input_ids"], encode.eos_token_id]
        whole = len(buffer) // (BATCH * block) * BATCH * block
        for start in range(0, whole, BATCH * block):
            yield torch.tensor(buffer[start: start + BATCH * block]).view(BATCH, block)
        buffer = buffer[whole:]


def datasets_batches(split: Split, folder: Path) -> Iterator[dict[str, torch.Tensor]]:
    """The `datasets` library in torch format behind a shuffling DataLoader, from an Arrow file."""
    import datasets
    import pyarrow as pa

    block = split.header["block"]
    count = min(len(split), 10_000) * block
    table = pa.array(split.streams[0][:count].astype(np.int32))
    rows = pa.FixedSizeListArray.from_arrays(table, block)
    path = folder / "rows.arrow"
    with pa.OSFile(str(path), "wb") as sink:
        schema = pa.schema({"input_ids": rows.type})
        with pa.ipc.new_stream(sink, schema) as writer:
            writer.write_batch(pa.record_batch([rows], schema=schema))
    dataset = datasets.Dataset.from_file(str(path)).with_format("torch")
    generator = torch.Generator().manual_seed(42)
    while True:
        yield from torch.utils.data.DataLoader(dataset, BATCH, shuffle=True, generator=generator)


def row_by_row(split: Split) -> Iterator[torch.Tensor]:
    """A mapped file and one buffer, filled row by row."""
    stream, generator = split.streams[0], np.random.default_rng(42)
    while True:
        buffer = torch.empty(BATCH, BLOCK + 1, dtype=torch.int64)
        for out, row in zip(buffer.numpy(), generator.integers(0, len(split), BATCH)):
            out[:] = stream[row * BLOCK: (row + 1) * BLOCK + 1]
        yield buffer


def way(name: str, store: Path, tokenizer: Path, corpus: Path) -> Iterator[Any]:
    """One of the ways by name, on the artifacts of a lesson and with its block size."""
    torch.set_num_threads(1)
    split = open_store(store)["train"]
    block = split.header["block"]
    if name == "datasets":
        with tempfile.TemporaryDirectory() as scratch:
            yield from datasets_batches(split, Path(scratch))
    yield from {"classic": lambda: classic_batches(corpus, tokenizer, block),
                "nanoGPT": lambda: nanogpt_batches(store / split.shards[0], block),
                "ours": lambda: Loader(split, BATCH, 42)}[name]()


def tokens_of(batch: Any) -> int:
    """How many tokens a model would learn from a batch of any of the ways."""
    if isinstance(batch, dict):
        return batch["input_ids"].numel()
    return batch[0].numel() if isinstance(batch, tuple) else batch[:, 1:].numel()


def speeds(ways: dict[str, Iterator], batches: dict[str, int], repeats: int = 7) -> dict[str, float]:
    """Millions of tokens a second of each way, all in turn: the median of the repetitions."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for name in itertools.chain(*[ways] * (repeats + 1)):
        start = time.perf_counter()
        for _ in itertools.islice(ways[name], batches[name]):
            pass
        seconds = time.perf_counter() - start
        found[name].append(batches[name] * BATCH * BLOCK / seconds / 1e6)
    return {name: statistics.median(values[1:]) for name, values in found.items()}


def speed_row() -> dict[str, Any]:
    """Tokens a second in random order, one thread, every batch a new tensor of int64."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        split = write_stream(folder, SMALL)
        ways = {"ours": iter(Loader(split, BATCH, 42)),
                "nanoGPT's manner": nanogpt_batches(folder / "train-00000.bin"),
                "datasets, torch format": datasets_batches(split, folder),
                "row by row": row_by_row(split)}
        found = speeds(ways, {name: 600 if name == "ours" else 100 for name in ways})
    ours = found.pop("ours")
    ratio = ours / found["nanoGPT's manner"]
    return {"id": "loader-speed", "what": f"batches of {BATCH} x {BLOCK:,} tokens, random order",
            "unit": "M tokens/s", "ours": round(ours, 1),
            "peers": {name: round(value, 1) for name, value in found.items()},
            "ratio": round(ratio, 2), "bar": BARS["speed"], "holds": ratio >= BARS["speed"]}


def read_all(folder: str, way: str) -> int:
    """Every row of a store once, in random order; the tokens that were given."""
    import json
    from pathlib import Path

    import numpy as np
    import torch

    from stages.tokens import Loader, Split
    torch.set_num_threads(1)
    header, facts = json.loads(Path(folder, "split.json").read_text())
    split, kept = Split(Path(folder), "train", header, **facts), []
    if way == "loaded":
        kept = [np.fromfile(Path(folder, name), "<u2") for name in facts["shards"]]
        return sum(len(shard) - 1 for shard in kept)
    return sum(batch.shape[0] for batch in Loader(split, 16, 42, stop=len(split))) * header["block"]


def memory_row(repeats: int = 3) -> dict[str, Any]:
    """Private memory of a whole pass through a store a hundred times larger."""
    sizes = {"small": SMALL, "large": LARGE}
    runs: dict[str, list[dict]] = {"mapped": [], "loaded": []}
    with tempfile.TemporaryDirectory() as scratch:
        for name, size in sizes.items():
            Path(scratch, name).mkdir()
            write_stream(Path(scratch, name), size)
        for _ in range(repeats):
            for way in runs:
                runs[way].append({name: run_fresh(read_all, str(Path(scratch, name)), way)
                                  for name in sizes})
    given = [run[name].result for run in runs["mapped"] for name in sizes]
    assert given == [size // BLOCK * BLOCK for size in sizes.values()] * repeats, given

    def growth(way: str, kind: str) -> float:
        more = [getattr(run["large"], kind) - getattr(run["small"], kind) for run in runs[way]]
        return round(statistics.median(more) / 1e6, 1)

    ours, loaded = growth("mapped", "private"), growth("loaded", "private")
    return {"id": "loader-memory", "unit": "MB", "ours": ours,
            "what": f"growth of {measure()} of a pass, {SMALL:,} to {LARGE:,} tokens",
            "peers": {"loaded": loaded, "ours, as RSS": growth("mapped", "resident")},
            "ratio": round(ours / loaded, 4), "bar": f"<= {BARS['private']} MB",
            "holds": ours <= BARS["private"]}


def rows() -> list[dict[str, Any]]:
    """Both bars, measured now."""
    return [speed_row(), memory_row()]


if __name__ == "__main__":
    for line in rows():
        print(line)
