"""Near duplicates by MinHash: documents become sets of words, sets become signatures, by NumPy.

Words are hashed without being cut out: with `H` the running sum of `byte * P**position` modulo
2**64, the hash of a word is `(H[end] - H[start]) / P**start`, and an odd `P` can be divided by. Two
signatures agree in a share of places close to the Jaccard similarity of their sets.
"""

from __future__ import annotations

import functools
import string
from collections.abc import Iterable, Sequence

import numpy as np

Pair = tuple[int, int, float]
# Places of a signature, and how many in a row must agree before two signatures are compared.
WIDTH = 128
BAND = 8
ODD = np.uint64(0x9E3779B97F4A7C15)
# Odd 64-bit factors, and offsets: with 32-bit factors the hashes would all rank words alike.
FACTORS, OFFSETS = np.random.default_rng(1).integers(
    0, 2**64, (2, WIDTH, 1), np.uint64
)
FACTORS = FACTORS | np.uint64(1)
IN_WORD = np.zeros(256, bool)
IN_WORD[list((string.ascii_letters + string.digits + "_").encode())] = True
IN_WORD[128:] = True


def scramble(hashes: np.ndarray) -> np.ndarray:
    """Let every bit of a hash depend on all of its bits."""
    hashes = (hashes ^ (hashes >> np.uint64(32))) * ODD
    return hashes ^ (hashes >> np.uint64(29))


@functools.cache
def powers(base: int, size: int) -> np.ndarray:
    """The first powers of a number, modulo 2**64."""
    factors = np.full(size, base, np.uint64)
    factors[0] = 1
    return np.multiply.accumulate(factors)


def word_hashes(data: bytes) -> np.ndarray:
    """A 64-bit hash of every word, in order; a word is a run of letters, digits and `_`.

    >>> first, second, third = word_hashes(b"def f(def")
    >>> bool(first == third), bool(first == second)
    (True, False)
    """
    codes = np.frombuffer(data, np.uint8)
    in_word = np.concatenate(([False], IN_WORD[codes], [False]))
    edges = np.flatnonzero(in_word[1:] != in_word[:-1])
    starts = edges[::2]
    ends = edges[1::2]
    # A power of two, so that few tables of powers are ever made.
    size = 1 << max(len(data), 1 << 20).bit_length()
    sums = np.zeros(len(codes) + 1, np.uint64)
    np.cumsum(codes * powers(int(ODD), size)[: len(codes)], out=sums[1:])
    inverse = pow(int(ODD), -1, 2**64)
    words = (sums[ends] - sums[starts]) * powers(inverse, size)[starts]
    return scramble(words)


def combine(rows: Sequence[np.ndarray] | np.ndarray) -> np.ndarray:
    """One hash for each column of several rows of hashes."""
    total = np.zeros(len(rows[0]), np.uint64)
    for row in rows:
        total = total * ODD + row
    return scramble(total)


def shingles(hashes: np.ndarray, length: int) -> np.ndarray:
    """A hash of every `length` neighbours; of all of them where there are fewer.

    >>> len(shingles(word_hashes(b"one two three four"), 3))
    2
    """
    length = max(1, min(length, len(hashes)))
    count = len(hashes) - length + 1
    return combine([hashes[offset : offset + count] for offset in range(length)])


def signature(hashes: np.ndarray) -> np.ndarray:
    """The least of each of 128 hashes over a set: 512 bytes, whatever the size of the document.

    >>> one = signature(word_hashes(b"def area(width, height)"))
    >>> two = signature(word_hashes(b"def area(height, width)"))
    >>> bool((one == two).all())
    True
    """
    hashes = np.sort(hashes)
    # Each word once; `np.unique` would take three times as long.
    first = np.flatnonzero(hashes[1:] != hashes[:-1]) + 1
    hashes = np.concatenate([hashes[:1], hashes[first]])
    least = np.full(WIDTH, 2**32 - 1, np.uint32)
    for start in range(0, len(hashes), 512):
        block = (hashes[start : start + 512] * FACTORS + OFFSETS) >> np.uint64(32)
        least = np.minimum(least, block.min(axis=1).astype(np.uint32))
    return least


def candidates(band: np.ndarray) -> np.ndarray:
    """Rows (later, earlier) of documents whose places in a band are all equal: a bucket.

    Of each bucket every document is paired with the first one and with the one before it: a bucket
    of a thousand copies then costs two thousand pairs, not half a million.

    >>> candidates(np.array([[7], [5], [7], [7]])).tolist()
    [[2, 0], [3, 0], [2, 0], [3, 2]]
    """
    keys = combine(band.T.astype(np.uint64))
    order = np.argsort(keys, kind="stable")
    ranked = keys[order]
    places = 1 + np.flatnonzero(ranked[1:] == ranked[:-1])
    later = order[places]
    first = order[np.searchsorted(ranked, ranked[places])]
    before = order[places - 1]
    pairs = [np.stack([later, first], 1), np.stack([later, before], 1)]
    return np.concatenate(pairs)


def similar_pairs(signatures: np.ndarray) -> list[Pair]:
    """Pairs (later, earlier, similarity) of signatures that agree in 85% of their places or more.

    Only `candidates` are compared. A pair missed in one band mostly meets in another.
    """
    bands = [signatures[:, start : start + BAND] for start in range(0, WIDTH, BAND)]
    found = np.concatenate([candidates(band) for band in bands])
    compared = np.unique(found, axis=0)
    pairs = []
    for later, earlier in compared.tolist():
        similarity = float((signatures[later] == signatures[earlier]).mean())
        if similarity >= 0.85:
            pairs.append((later, earlier, similarity))
    return pairs


def repeats(pairs: Iterable[Pair]) -> dict[int, int]:
    """Which rows go, and the earlier one each repeats: one that stays, so that no chain forms.

    >>> repeats([(1, 0, 0.9), (2, 1, 0.9)])
    {1: 0}
    """
    gone: dict[int, int] = {}
    pairs = sorted(pairs)
    for pair in pairs:
        later, earlier, _ = pair
        if earlier not in gone:
            gone.setdefault(later, earlier)
    return gone
