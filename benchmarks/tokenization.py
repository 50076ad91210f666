"""Training and encoding against the usual ways, on the environment's own Python source."""

from __future__ import annotations

import os
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

# before transformers, because it sets offline mode
import utils  # noqa: F401
from benchmarks.timing import Row, interleaved, row
from stages.tokenizer import PATTERNS, BulkEncoder, blank_tokenizer, train_bpe

VOCABULARY = 32_768
LIBRARY = "train_new_from_iterator"
# Characters to learn from, and to encode.
LEARN = 30_000_000
ENCODE = 8_000_000


def is_written_by_hand(text: str) -> bool:
    """The corpus's coarsest filters: not generated, no table of data, no gigantic line."""
    longest = max(map(len, text.splitlines()), default=0)
    generated = re.search(
        r"(?i)generated (by|from|automatically)|auto-?generated", text[:500]
    )
    letters = sum(map(str.isalnum, text))
    return longest < 1000 and generated is None and letters > 0.4 * len(text)


def source_texts(
    learn: int = LEARN, encode: int = ENCODE
) -> tuple[list[str], list[str]]:
    """Texts to learn from and, from other packages, texts to encode: so many characters of each."""
    root = Path(sysconfig.get_paths()["purelib"])
    texts: dict[bool, list[str]] = {False: [], True: []}
    left = {False: learn, True: encode}
    for path in sorted(
        root.rglob("*.py"), key=lambda path: zlib.crc32(path.name.encode())
    ):
        # whole packages are held out, not files
        held_out = zlib.crc32(path.relative_to(root).parts[0].encode()) % 10 < 2
        if left[held_out] <= 0 or not 1000 < path.stat().st_size < 200_000:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if is_written_by_hand(text):
            texts[held_out].append(text)
            left[held_out] -= len(text)
    return texts[False], texts[True]


def megabytes(texts: Sequence[str]) -> float:
    """How much text there is."""
    return sum(len(text.encode()) for text in texts) / 1e6


def characters_per_token(tokenizer: Any, texts: Sequence[str]) -> float:
    """Characters over tokens."""
    return sum(map(len, texts)) / sum(map(len, BulkEncoder(tokenizer)(texts)))


def encoding_rows(
    vocabulary: int = VOCABULARY, learn: int = LEARN, encode: int = ENCODE
) -> Iterator[Row]:
    """Speed of bulk encoding on two threads; it counts only if every id is the same."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    os.environ.setdefault("RAYON_NUM_THREADS", "2")
    train, texts = source_texts(learn, encode)
    tokenizer = train_bpe(train, vocabulary)
    bulk = BulkEncoder(tokenizer, threads=2)
    engine = tokenizer.backend_tokenizer
    same = [ids.tolist() for ids in bulk(texts)] == tokenizer(texts)["input_ids"]
    ways: dict[str, Callable[[], object]] = {
        "ours": lambda: bulk(texts),
        "tokenizer(list)": lambda: tokenizer(texts)["input_ids"],
        "encode_batch_fast": lambda: [
            e.ids for e in engine.encode_batch_fast(texts)
        ],
        "tiktoken batch, lists": lambda: bulk.encoding.encode_ordinary_batch(
            texts, num_threads=2
        ),
    }
    seconds = interleaved(*ways.values(), repeats=5)
    speed = dict(
        zip(ways, [megabytes(texts) / value for value in seconds], strict=True)
    )
    ours = speed.pop("ours")
    what = f"{vocabulary:,} tokens, 2 threads, identical ids"
    yield row("bulk-encoding", what, "MB/s", ours, speed, bar=8, valid=same)


def training_rows(
    vocabulary: int = VOCABULARY, learn: int = LEARN, encode: int = ENCODE
) -> Iterator[Row]:
    """Speed of training with two rules for the pieces, and compression of what comes out."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    train, texts = source_texts(learn, encode)
    size = megabytes(train)
    fits: dict[tuple[str, str], float] = {}
    for rule in ("gpt2", "code"):
        our_time, their_time = time_training(rule, train, texts, vocabulary, fits)
        what = f"BPE training to {vocabulary:,} with the rule {rule!r}, conversion included"
        no_worse = fits[rule, "ours"] >= 0.999 * fits[rule, LIBRARY]
        yield row(
            f"tokenizer-training-{rule}",
            what,
            "MB/s",
            size / our_time,
            {LIBRARY: size / their_time},
            bar=3,
            valid=no_worse,
        )
    unit = "characters per token"
    gpt2, code = fits["gpt2", "ours"], fits["code", "ours"]
    what = "held-out packages, same rule, faster trainer's merges"
    peers = {LIBRARY: fits["gpt2", LIBRARY]}
    yield row("tokenizer-compression", what, unit, gpt2, peers, bar=0.999)
    what = "held-out packages, the course's rule; the classic text has 3.62"
    peers = {"classic text": 3.62, "GPT-2's rule": gpt2}
    yield row("tokenizer-rule", what, unit, code, peers, bar=1)


def time_training(
    rule: str,
    train: list[str],
    texts: list[str],
    vocabulary: int,
    fits: dict[tuple[str, str], float],
) -> list[float]:
    """Seconds of our trainer and of the library's; `fits` gets what the results compress to."""
    pattern = PATTERNS[rule]
    blank = blank_tokenizer(pattern)
    trained: dict[str, Any] = {}

    def train_ours() -> None:
        trained["ours"] = train_bpe(train, vocabulary, pattern)

    def train_theirs() -> None:
        trained[LIBRARY] = blank.train_new_from_iterator(
            train, vocabulary, show_progress=False
        )

    seconds = interleaved(train_ours, train_theirs, repeats=5, warm_up=0)
    for name, tokenizer in trained.items():
        fits[rule, name] = characters_per_token(tokenizer, texts)
    return seconds


PARTS = (encoding_rows, training_rows)
