"""Near duplicates: a short signature finds who may be alike, the sets of words decide who is.

A document is the set of its words, a word a number, and the least number under each of 128
renumberings is its MinHash signature. Two signatures agree in a share of places close to the
Jaccard similarity of their sets; only pairs that this estimate suspects are compared exactly.
"""

from __future__ import annotations

import string
import zlib
from collections.abc import Iterable, Sequence

import numpy as np

Pair = tuple[int, int, float]
Words = frozenset[bytes]
# Near duplicates share this much of their words.
NEAR = 0.85
# An estimate of 128 places has a standard error of 0.03 there: who seems this near is compared exactly.
SUSPECT = 0.75
# Places of a signature, and how many in a row must agree before two signatures are compared.
WIDTH = 128
BAND = 8
PRIME = 2**61 - 1
ODD = np.uint64(0x9E3779B97F4A7C15)
# An odd factor and an offset renumber all numbers of 32 bits, no two of them alike.
FACTORS, OFFSETS = np.random.default_rng(1).integers(
    0, 2**32, (2, WIDTH), np.uint32
)
FACTORS = FACTORS | np.uint32(1)
WORD_BYTES = {
    *(string.ascii_letters + string.digits + "_").encode(),
    *range(128, 256),
}
# What is no part of a word becomes a space.
BLANKED = bytes(byte if byte in WORD_BYTES else 32 for byte in range(256))


def scramble(hashes: np.ndarray) -> np.ndarray:
    """Let every bit of a hash depend on all of its bits."""
    for shift in (np.uint64(32), np.uint64(29)):
        hashes = (hashes ^ (hashes >> shift)) * ODD
    return hashes ^ (hashes >> np.uint64(32))


def words_of(data: bytes) -> list[bytes]:
    """The words of a text in order; a word is a run of letters, digits and `_`.

    >>> words_of(b"def f(def")
    [b'def', b'f', b'def']
    """
    return data.translate(BLANKED).split()


def word_hashes(words: Iterable[bytes]) -> np.ndarray:
    """A 64-bit hash of each word: its bytes, read as one number, modulo a prime.

    >>> first, second, third = word_hashes([b"def", b"f", b"def"])
    >>> bool(first == third), bool(first == second)
    (True, False)
    """
    numbers = [int.from_bytes(word, "big") % PRIME for word in words]
    return scramble(np.array(numbers, np.uint64))


def combine(rows: Sequence[np.ndarray] | np.ndarray) -> np.ndarray:
    """One hash for each column of several rows of hashes."""
    total = np.zeros(len(rows[0]), np.uint64)
    for row in rows:
        total = total * ODD + row
    return scramble(total)


def shingles(hashes: np.ndarray, length: int) -> np.ndarray:
    """A hash of every `length` neighbours; of all of them where there are fewer.

    >>> len(shingles(word_hashes(words_of(b"one two three four")), 3))
    2
    """
    length = max(1, min(length, len(hashes)))
    count = len(hashes) - length + 1
    return combine([hashes[offset : offset + count] for offset in range(length)])


def shingles_of(text: str, length: int) -> np.ndarray:
    """The set of a text's shingles, as a sorted array of hashes.

    >>> len(shingles_of("to be or not to be or", 3))
    4
    """
    words = words_of(text.encode())
    hashes = word_hashes(words)
    found = shingles(hashes, length)
    return np.unique(found)


def words_behind(text: str, length: int, shingle: int) -> str:
    """The words of a shingle, if the text has it.

    >>> both = shingles_of("to be or not", 3).tolist()
    >>> sorted(words_behind("to be or not", 3, shingle) for shingle in both)
    ['be or not', 'to be or']
    >>> words_behind("to be or", 3, 0)
    ''
    """
    words = words_of(text.encode())
    hashes = shingles(word_hashes(words), length)
    places = np.flatnonzero(hashes == np.uint64(shingle))
    if not len(places):
        return ""
    first = places[0]
    return b" ".join(words[first : first + length]).decode()


def in_table(hashes: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Which hashes are in a sorted table.

    >>> in_table(np.array([4, 9]), np.array([1, 4, 7])).tolist()
    [True, False]
    """
    places = np.searchsorted(table, hashes)
    places = np.minimum(places, len(table) - 1)
    return table[places] == hashes


def signature(words: Words) -> np.ndarray:
    """The least number of a set under each of 128 renumberings: 512 bytes for any document.

    >>> one = signature(frozenset(words_of(b"def area(width, height)")))
    >>> two = signature(frozenset(words_of(b"def area(height, width)")))
    >>> bool((one == two).all())
    True
    """
    numbers = np.fromiter(map(zlib.crc32, words), np.uint32, len(words))
    least = np.full(WIDTH, 2**32 - 1, np.uint32)
    for start in range(0, len(numbers), 512):
        block = numbers[start : start + 512, None] * FACTORS
        block += OFFSETS
        least = np.minimum(least, block.min(axis=0))
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


def suspects(signatures: np.ndarray) -> list[Pair]:
    """Pairs (later, earlier, estimate) of documents whose signatures look nearly alike.

    Only `candidates` are compared. A pair missed in one band mostly meets in another.
    """
    bands = [signatures[:, start : start + BAND] for start in range(0, WIDTH, BAND)]
    found = np.concatenate([candidates(band) for band in bands])
    compared = np.unique(found, axis=0)
    pairs = []
    for later, earlier in compared.tolist():
        estimate = float((signatures[later] == signatures[earlier]).mean())
        if estimate >= SUSPECT:
            pairs.append((later, earlier, estimate))
    return pairs


def jaccard(left: Iterable, right: Iterable) -> float:
    """What two sets share of what they hold together.

    >>> jaccard({1, 2, 3}, {2, 3, 4})
    0.5
    """
    left, right = set(left), set(right)
    together = left | right
    return len(left & right) / len(together) if together else 1.0


def similar_pairs(pairs: Iterable[Pair], words: dict[int, Words]) -> list[Pair]:
    """Of suspected pairs those that are near duplicates, with their exact similarity.

    >>> same, other = frozenset({b"x", b"y"}), frozenset({b"x", b"z"})
    >>> similar_pairs([(1, 0, 0.9), (2, 0, 0.9)], {0: same, 1: same, 2: other})
    [(1, 0, 1.0)]
    """
    near = []
    for later, earlier, _ in pairs:
        similarity = jaccard(words[later], words[earlier])
        if similarity >= NEAR:
            near.append((later, earlier, similarity))
    return near


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
