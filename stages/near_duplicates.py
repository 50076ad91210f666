"""Floor 1: what a document looks like from far away, by NumPy over its bytes.

Words are hashed without being cut out: with `H` the running sum of `byte * P**position` modulo
2**64, the hash of a word is `(H[end] - H[start]) / P**start`, and an odd `P` can be divided by. A
signature keeps the least of each of 128 hashes of a set: two sets agree in a share of places close
to their Jaccard similarity. Bands of 8 places find the pairs that are worth comparing.
"""
from __future__ import annotations

import functools
import random
import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

WIDTH, BAND = 128, 8  # places of a signature, and places that must agree for a first look
ODD = np.uint64(0x9E3779B97F4A7C15)
SPACE, LOWER, UPPER, DIGIT, OTHER = range(5)
KINDS = np.full(256, OTHER, np.uint8)
KINDS[list(b" \t\n\r\f\v")] = SPACE
KINDS[list(b"abcdefghijklmnopqrstuvwxyz_") + list(range(128, 256))] = LOWER
KINDS[list(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ")] = UPPER
KINDS[list(b"0123456789")] = DIGIT
IN_WORD = (KINDS != SPACE) & (KINDS != OTHER)


class Measures(NamedTuple):
    """What the filters ask of a document."""

    longest: int  # the longest line
    mean: float  # the mean line
    letters: float  # share of letters and digits
    per_piece: float  # bytes for a run of letters, capitals, digits or of one sign


def measure(data: bytes) -> Measures:
    """Measure a document that is not empty.

    >>> measure(b"x = 1\\nyes()")
    Measures(longest=5, mean=5.0, letters=0.455, per_piece=1.833)
    """
    codes = np.frombuffer(data, np.uint8)
    kinds = KINDS[codes]
    ends = np.concatenate(([-1], np.flatnonzero(codes == ord("\n")), [len(codes)]))
    lines = ends[1:] - ends[:-1] - 1
    counts = np.bincount(kinds, minlength=5)
    new = (kinds[1:] != kinds[:-1]) | ((kinds[1:] == OTHER) & (codes[1:] != codes[:-1]))
    pieces = 1 + np.count_nonzero(new & (kinds[1:] != SPACE))
    letters = counts[LOWER] + counts[UPPER] + counts[DIGIT] - np.count_nonzero(codes == ord("_"))
    return Measures(int(lines.max()), round(float(lines.mean()), 3),
                    round(float(letters / len(codes)), 3), round(len(codes) / int(pieces), 3))


@functools.cache
def powers(base: int, size: int) -> np.ndarray:
    """The first powers of a number, modulo 2**64."""
    return np.multiply.accumulate(np.r_[np.uint64(1), np.full(size - 1, base, np.uint64)])


def mix(hashes: np.ndarray) -> np.ndarray:
    """Spread every bit of a hash over all of them."""
    hashes = (hashes ^ (hashes >> np.uint64(32))) * ODD
    return hashes ^ (hashes >> np.uint64(29))


def word_hashes(data: bytes) -> np.ndarray:
    """A 64-bit hash of every word, in order; a word is a run of letters, digits and `_`.

    >>> first, second, third = word_hashes(b"def f(def")
    >>> bool(first == third), bool(first == second)
    (True, False)
    """
    codes = np.frombuffer(data, np.uint8)
    words = np.concatenate(([False], IN_WORD[codes], [False]))
    edges = np.flatnonzero(words[1:] != words[:-1])
    starts, ends = edges[::2], edges[1::2]
    size = 1 << max(len(data), 1 << 20).bit_length()
    sums = np.zeros(len(codes) + 1, np.uint64)
    np.cumsum(codes * powers(int(ODD), size)[: len(codes)], out=sums[1:])
    return mix((sums[ends] - sums[starts]) * powers(pow(int(ODD), -1, 2**64), size)[starts])


def shingles(hashes: np.ndarray, length: int) -> np.ndarray:
    """A hash of every `length` neighbours; of all of them where there are fewer."""
    length = max(1, min(length, len(hashes)))
    last = len(hashes) - length + 1
    total = np.zeros(last, np.uint64)
    for offset in range(length):
        total = total * ODD + hashes[offset : offset + last]
    return mix(total)


@functools.cache
def multipliers(seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Odd 64-bit factors and offsets: with 32-bit ones the hashes would all rank words alike."""
    pairs = np.random.default_rng(seed).integers(0, 2**64, (2, WIDTH, 1), np.uint64)
    return pairs[0] | np.uint64(1), pairs[1]


def signature(hashes: np.ndarray) -> np.ndarray:
    """The least of each of 128 hashes over a set: 512 bytes, whatever the size of the document."""
    factor, offset = multipliers()
    hashes = np.sort(hashes)
    hashes = np.r_[hashes[:1], hashes[1:][hashes[1:] != hashes[:-1]]]  # faster than np.unique
    least = np.full(WIDTH, 2**32 - 1, np.uint32)
    for start in range(0, len(hashes), 512):
        block = (hashes[start : start + 512] * factor + offset) >> np.uint64(32)
        least = np.minimum(least, block.min(axis=1).astype(np.uint32))
    return least


def similar_pairs(signatures: np.ndarray, threshold: float = 0.85) -> list[tuple[int, int, float]]:
    """Pairs (later, earlier, similarity) of rows that agree in a share of at least `threshold`."""
    found = [np.zeros((0, 2), np.int64)]
    for start in range(0, WIDTH, BAND):
        keys = shingles(signatures[:, start : start + BAND].T.astype(np.uint64), BAND)[0]
        order = np.argsort(keys, kind="stable")
        same = np.r_[False, keys[order][1:] == keys[order][:-1]]
        first = np.maximum.accumulate(np.where(same, 0, np.arange(len(order))))
        later = np.flatnonzero(same)
        found += [np.c_[order[later], order[first[later]]], np.c_[order[later], order[later - 1]]]
    later, earlier = np.unique(np.concatenate(found), axis=0).T
    alike = [float((signatures[a] == signatures[b]).mean()) for a, b in zip(later, earlier)]
    return [(int(a), int(b), s) for a, b, s in zip(later, earlier, alike) if s >= threshold]


def repeats(pairs: Iterable[tuple[int, int, float]]) -> dict[int, int]:
    """Which rows go, and the earlier one each repeats: one that stays, so that no chain forms.

    >>> repeats([(1, 0, 0.9), (2, 1, 0.9)])
    {1: 0}
    """
    gone: dict[int, int] = {}
    for later, earlier, _ in sorted(pairs):
        if earlier not in gone:
            gone.setdefault(later, earlier)
    return gone


def member(hashes: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Which hashes are in a sorted table; for many small questions to one large table.

    >>> member(np.array([3, 9]), np.array([1, 3, 5])).tolist()
    [True, False]
    """
    places = np.searchsorted(table, hashes)
    return table[np.minimum(places, len(table) - 1)] == hashes if len(table) else places < 0


def jaccard(left: set, right: set) -> float:
    """What two sets share of what they hold together.

    >>> jaccard({1, 2, 3}, {2, 3, 4})
    0.5
    """
    return len(left & right) / len(left | right)


def plant(texts: list[str], seed: int,
          share: float = 0.02) -> tuple[list[str], set[tuple[int, int]]]:
    """Texts with a lightly edited copy of each (a pair to find) and a heavily edited one (a decoy).

    Only texts that are far from each other are taken, so that every other pair is wrong to report.
    """
    draw, words, taken = random.Random(seed), [], []
    for text in texts:
        own = set(re.findall(r"\w+", text))
        if all(jaccard(own, other) < 0.5 for other in words):
            words.append(own)
            taken.append(text)
    strange = [line for text in taken for line in text.splitlines(True) if line.strip()]

    def edit(text: str, share: float) -> str:
        lines = text.splitlines(True)
        for place in draw.sample(range(len(lines)), max(1, int(share * len(lines)))):
            line = draw.choice(strange)
            lines[place] = draw.choice(["", line, lines[place] + line])
        name = draw.choice(re.findall(r"[a-z_]{4,}", text) or ["x"])
        return re.sub(rf"\b{name}\b", f"{name}_2", "".join(lines))

    planted = taken + [edit(text, share) for text in taken] + [edit(text, 0.4) for text in taken]
    return planted, {(i + len(taken), i) for i in range(len(taken))}
