"""Training and encoding against the usual ways, on the environment's own Python source.

`rows()` gives one row a claim; `python -m benchmarks.tokenization` prints them.
"""
from __future__ import annotations

import os
import re
import statistics
import sysconfig
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import utils  # noqa: F401  (offline, before transformers)
from stages import tokenizer as tokenization
from stages.tokenizer import BulkEncoder, characters_per_token, PATTERNS

VOCABULARY = 32_768
LEARN, ENCODE = 30_000_000, 8_000_000  # characters


def is_written_by_hand(text: str) -> bool:
    """The corpus's coarsest filters: not generated, no table of data, no gigantic line."""
    longest = max(map(len, text.splitlines()), default=0)
    generated = re.search(r"(?i)generated (by|from|automatically)|auto-?generated", text[:500])
    return longest < 1000 and not generated and sum(map(str.isalnum, text)) > 0.4 * len(text)


def source_texts() -> tuple[list[str], list[str]]:
    """Text to learn from and, from other packages, text to encode."""
    root = Path(sysconfig.get_paths()["purelib"])
    texts: tuple[list[str], list[str]] = ([], [])
    sizes = [0, 0]
    for path in sorted(root.rglob("*.py"), key=lambda path: zlib.crc32(path.name.encode())):
        # whole packages are held out, not files
        held_out = zlib.crc32(path.relative_to(root).parts[0].encode()) % 10 < 2
        if 1000 < path.stat().st_size < 200_000 and sizes[held_out] < (LEARN, ENCODE)[held_out]:
            text = path.read_text(encoding="utf-8", errors="replace")
            if is_written_by_hand(text):
                texts[held_out].append(text)
                sizes[held_out] += len(text)
    return texts


def interleaved(ways: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median seconds of each way, all run in turn, so that a busy moment meets them all."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, work in ways.items():
            start = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def row(id: str, what: str, unit: str, ours: float, peers: dict[str, float], bar: float,
        honest: bool = True, digits: int = 1) -> dict[str, Any]:
    """One row: the ratio is ours over the first peer, and the claim holds if it reaches the bar."""
    ratio = ours / next(iter(peers.values()))
    return {"id": id, "what": what, "unit": unit, "ours": round(ours, digits),
            "peers": {name: round(value, digits) for name, value in peers.items()},
            "ratio": round(ratio, 4), "bar": bar, "holds": bool(honest and ratio >= bar)}


def training_rows(learn: list[str], encode: list[str]) -> list[dict[str, Any]]:
    """Speed of training with GPT-2's rule, and compression of the two results."""
    rule, made = PATTERNS["gpt2"], {}
    blank = tokenization.blank_tokenizer(rule)

    def library() -> None:
        made["library"] = blank.train_new_from_iterator(learn, VOCABULARY, show_progress=False)

    def ours() -> None:
        made["ours"] = tokenization.train_bpe(learn, VOCABULARY, rule)

    seconds = interleaved({"ours": ours, "library": library}, 3)
    megabytes = sum(len(text.encode()) for text in learn) / 1e6
    fits = {name: characters_per_token(BulkEncoder(t), encode) for name, t in made.items()}
    course = BulkEncoder(tokenization.train_bpe(learn, VOCABULARY))
    fits["code"] = characters_per_token(course, encode)
    no_worse = fits["ours"] >= 0.999 * fits["library"]
    return [
        row("tokenizer-training", f"BPE training to {VOCABULARY:,}, conversion included", "MB/s",
            megabytes / seconds["ours"],
            {"train_new_from_iterator": megabytes / seconds["library"]}, 2, no_worse),
        row("tokenizer-compression", "held-out packages, same rule, faster trainer's merges",
            "characters per token", fits["ours"], {"train_new_from_iterator": fits["library"]},
            0.999, digits=4),
        row("tokenizer-rule", "held-out packages, the course's rule; the classic text has 3.62",
            "characters per token", fits["code"],
            {"classic text": 3.62, "GPT-2's rule": fits["ours"]}, 1, digits=3)]


def encoding_row(learn: list[str], encode: list[str]) -> dict[str, Any]:
    """Speed of bulk encoding on two threads; it counts only if every id is the same."""
    tokenizer = tokenization.train_bpe(learn, VOCABULARY)
    bulk, engine = BulkEncoder(tokenizer, threads=2), tokenizer.backend_tokenizer
    same = [ids.tolist() for ids in bulk(encode)] == tokenizer(encode)["input_ids"]
    seconds = interleaved({
        "ours": lambda: bulk(encode),
        "tokenizer(list)": lambda: tokenizer(encode)["input_ids"],
        "encode_batch_fast": lambda: [e.ids for e in engine.encode_batch_fast(encode)],
        "tiktoken batch, lists": lambda: bulk.encoding.encode_ordinary_batch(encode, num_threads=2),
    }, 5)
    megabytes = sum(len(text.encode()) for text in encode) / 1e6
    speed = {name: megabytes / time_ for name, time_ in seconds.items()}
    return row("bulk-encoding", f"{VOCABULARY:,} tokens, 2 threads, identical ids", "MB/s",
               speed.pop("ours"), speed, 4, same)


def rows() -> list[dict[str, Any]]:
    """Every claim of the room, measured now."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    os.environ.setdefault("RAYON_NUM_THREADS", "2")
    learn, encode = source_texts()
    return [encoding_row(learn, encode), *training_rows(learn, encode)]


if __name__ == "__main__":
    for line in rows():
        print(line)
