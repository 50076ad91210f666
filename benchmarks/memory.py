"""Does the memory of a full pass grow with the corpus? Mapped, streamed and loaded, in turn."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from stages.memory import run_fresh
from utils.machine import private_memory_name as measure

MB = 1_000_000
SIZES = (40, 640)  # megabytes on disk
BAR = 60  # megabytes of private memory, from the smallest size to the largest
WAYS = ("mapped", "streamed", "loaded")


def write_corpus(path: Path, size: int) -> str:
    """An Arrow file of random documents, no byte of which repeats."""
    import numpy as np
    import pyarrow as pa

    schema, generator = (
        pa.schema({"content": pa.string()}),
        np.random.default_rng(42),
    )
    with (
        pa.OSFile(str(path), "wb") as sink,
        pa.ipc.new_stream(sink, schema) as writer,
    ):
        while sink.tell() < size:
            documents = [generator.bytes(10_000).hex() for _ in range(200)]
            writer.write_batch(
                pa.record_batch([pa.array(documents)], schema=schema)
            )
    return str(path)


def read_all(path: str, way: str) -> int:
    """Characters of the corpus, every one of them read."""
    import datasets
    from datasets.table import InMemoryTable

    if way == "streamed":
        rows = datasets.load_dataset(
            "arrow", data_files=path, split="train", streaming=True
        )
    elif way == "mapped":
        rows = datasets.Dataset.from_file(path)
    else:  # with a fingerprint of its own: computing one would copy the table several times
        rows = datasets.Dataset(InMemoryTable.from_file(path), fingerprint="loaded")
    return sum(
        sum(map(len, batch["content"])) for batch in rows.iter(batch_size=100)
    )


def growth(kind: str, runs: list[dict[int, object]]) -> float:
    """Megabytes more at the largest size than at the smallest: the median of the repetitions."""
    more = [
        getattr(run[SIZES[1]], kind) - getattr(run[SIZES[0]], kind) for run in runs
    ]
    return round(statistics.median(more) / MB, 1)


def rows(repeats: int = 3) -> list[dict]:
    """The bar on memory: what a sixteen times larger corpus costs, in private memory."""
    runs: dict[str, list[dict]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        paths = {
            size: write_corpus(Path(folder, f"{size}.arrow"), size * MB)
            for size in SIZES
        }
        for _ in range(repeats):
            for way in WAYS:
                runs[way].append(
                    {size: run_fresh(read_all, paths[size], way) for size in SIZES}
                )
    for size in SIZES:
        read = {run[size].result for way in WAYS for run in runs[way]}
        assert len(read) == 1, f"the ways did not read the same: {read}"
    ours, loaded = (
        growth("private", runs["mapped"]),
        growth("private", runs["loaded"]),
    )
    peers = {
        "streamed": growth("private", runs["streamed"]),
        "loaded": loaded,
        "mapped, as RSS": growth("resident", runs["mapped"]),
    }
    return [
        {
            "id": "memory-of-a-pass",
            "what": f"growth of {measure()} of a mapped pass, {SIZES[0]} to {SIZES[1]} MB",
            "unit": "MB",
            "ours": ours,
            "peers": peers,
            "ratio": round(ours / loaded, 3),
            "bar": f"<= {BAR} MB",
            "holds": ours <= BAR,
        }
    ]


if __name__ == "__main__":
    print(rows())
