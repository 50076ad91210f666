"""An exam for finders of near duplicates: texts with edited copies that we plant ourselves."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from stages import near_duplicates
from stages.near_duplicates import jaccard


def far_apart(texts: list[str]) -> list[str]:
    """Texts of which no two share half of their words: a pair among them is wrong to report."""
    chosen: dict[str, set[str]] = {}
    for text in texts:
        own = set(re.findall(r"\w+", text))
        if all(jaccard(own, other) < 0.5 for other in chosen.values()):
            chosen[text] = own
    return list(chosen)


def edit(text: str, share: float, strange: list[str], draw: random.Random) -> str:
    """The text with a share of its lines changed, and one name renamed."""
    lines = text.splitlines(True)
    for place in draw.sample(range(len(lines)), max(1, int(share * len(lines)))):
        line = draw.choice(strange)
        lines[place] = draw.choice(["", line, lines[place] + line])
    name = draw.choice(re.findall(r"[a-z_]{4,}", text) or ["x"])
    return re.sub(rf"\b{name}\b", f"{name}_2", "".join(lines))


def plant(texts: list[str], seed: int) -> tuple[list[str], set[tuple[int, int]]]:
    """Texts with a lightly edited copy of each, to be found, and a heavily edited one, a decoy."""
    draw = random.Random(seed)
    originals = far_apart(texts)
    strange = [
        line for text in originals for line in text.splitlines(True) if line.strip()
    ]
    light = [edit(text, 0.02, strange, draw) for text in originals]
    heavy = [edit(text, 0.4, strange, draw) for text in originals]
    count = len(originals)
    return originals + light + heavy, {
        (count + number, number) for number in range(count)
    }


def pairs_of_library(
    texts: list[str], make: Callable, update: Callable, index: Any, least: float
) -> set:
    """The pairs that a MinHash library's bands report, those with at least this estimate."""
    pairs = set()
    sketches: list[Any] = []
    for number, text in enumerate(texts):
        sketch = make()
        update(sketch, set(re.findall(r"\w+", text)))
        for near in index.query(sketch):
            if sketch.jaccard(sketches[near]) >= least:
                pairs.add((number, near))
        index.insert(number, sketch)
        sketches.append(sketch)
    return pairs


def pairs_of_ours(texts: list[str]) -> set:
    """The pairs the course reports."""
    words = []
    for text in texts:
        words.append(frozenset(near_duplicates.words_of(text.encode())))
    signatures = np.stack([near_duplicates.signature(one) for one in words])
    suspects = near_duplicates.suspects(signatures)
    pairs = near_duplicates.similar_pairs(suspects, dict(enumerate(words)))
    return {(later, earlier) for later, earlier, _ in pairs}


def pairs_of_datasketch(texts: list[str], least: float = 0.85) -> set:
    """The pairs that datasketch reports, or with `least=0` its index's own answer."""
    from datasketch import MinHash, MinHashLSH

    def make() -> Any:
        return MinHash(128)

    def update(sketch: Any, words: set[str]) -> None:
        encoded = [word.encode() for word in words]
        sketch.update_batch(encoded)

    index = MinHashLSH(threshold=0.85, num_perm=128)
    return pairs_of_library(texts, make, update, index, least)


def pairs_of_rensa(texts: list[str], seed: int = 0, least: float = 0.85) -> set:
    """The pairs that rensa reports, or with `least=0` its index's own answer."""
    from rensa import RMinHash, RMinHashLSH

    def update(sketch: Any, words: set[str]) -> None:
        ordered = sorted(words)
        sketch.update(ordered)

    make = functools.partial(RMinHash, 128, seed)
    index = RMinHashLSH(0.85, 128, 16)
    return pairs_of_library(texts, make, update, index, least)
