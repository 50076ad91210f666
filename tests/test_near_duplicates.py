"""Tries to break the finder of near duplicates: hashes, signatures, pairs, chains."""

import random
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.corpus import jaccard, plant
from stages import near_duplicates


def code(name: str, lines: int = 60) -> str:
    """A document of its own: most of its words occur in no other."""
    return "".join(
        f"{name}_{i} = {name}_call_{i}({name}, {i})\n" for i in range(lines)
    )


def signature_of(text: str) -> np.ndarray:
    return near_duplicates.signature(near_duplicates.word_hashes(text.encode()))


def test_words_have_equal_hashes_exactly_when_they_are_equal():
    draw = random.Random(2)
    # Seven letters of ten are parts of words. More than 2**20 of them, so that tables grow.
    data = "".join(draw.choices("aB1_é" * 7 + " .\n(" * 4, k=1_200_000)).encode()
    words = re.findall(rb"[a-zA-Z0-9_\x80-\xff]+", data)
    hashes = near_duplicates.word_hashes(data).tolist()
    assert len(words) == len(hashes)
    assert len(set(words)) == len(set(zip(words, hashes))) == len(set(hashes))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_have_a_hash_for_each_word(data):
    words = re.findall(rb"[a-zA-Z0-9_\x80-\xff]+", data)
    hashes = near_duplicates.word_hashes(data)
    assert len(hashes) == len(words)
    assert near_duplicates.signature(hashes).shape == (near_duplicates.WIDTH,)
    for length in (1, 3, 10):
        runs = near_duplicates.shingles(hashes, length)
        assert len(runs) == max(len(words) - length + 1, min(len(words), 1))


def test_the_hash_of_a_run_depends_on_its_words_and_their_order():
    def run(text: str) -> int:
        return int(
            near_duplicates.shingles(near_duplicates.word_hashes(text.encode()), 3)[
                0
            ]
        )

    assert run("one two three") == run("one  two,three")
    assert (
        len({run("one two three"), run("three two one"), run("one two four")}) == 3
    )


def test_signatures_estimate_jaccard_and_do_not_rank_words_alike():
    rng = np.random.default_rng(3)
    errors = []
    for share in np.linspace(0, 1, 41):
        shared = int(400 * share)
        one = rng.integers(0, 2**64, 400, np.uint64)
        two = np.concatenate(
            [one[:shared], rng.integers(0, 2**64, 400 - shared, np.uint64)]
        )
        truth = jaccard(set(one.tolist()), set(two.tolist()))
        estimate = (
            near_duplicates.signature(one) == near_duplicates.signature(two)
        ).mean()
        errors.append(abs(truth - estimate))
    assert np.mean(errors) < 0.035
    assert (near_duplicates.signature(np.zeros(0, np.uint64)) == 2**32 - 1).all()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_a_bucket_is_paired_with_its_first_and_with_the_one_before(keys):
    pairs = {
        tuple(pair)
        for pair in near_duplicates.candidates(np.array([keys]).T).tolist()
    }
    expected = set()
    for later, key in enumerate(keys):
        earlier = [place for place in range(later) if keys[place] == key]
        if earlier:
            expected |= {(later, earlier[0]), (later, earlier[-1])}
    assert pairs == expected


def test_planted_edits_are_found_and_decoys_are_not():
    texts, hidden = plant([code(f"name{i}", 40 + i) for i in range(80)], 5)
    assert len(hidden) == 80
    signatures = np.stack([signature_of(text) for text in texts])
    pairs = {
        (later, earlier)
        for later, earlier, _ in near_duplicates.similar_pairs(signatures)
    }
    assert len(pairs & hidden) / 80 >= 0.95
    assert len(pairs & hidden) / len(pairs) >= 0.95
    near = np.array(
        [[(one == two).mean() for two in signatures] for one in signatures]
    )
    every = set(zip(*np.nonzero(np.tril(near >= 0.85, -1))))
    assert pairs <= every
    assert len(pairs) >= 0.98 * len(every)


def test_one_document_has_no_pair_and_a_thousand_copies_have_few():
    assert near_duplicates.similar_pairs(signature_of(code("one"))[None]) == []
    copies = np.stack([signature_of(code("one"))] * 1000)
    pairs = near_duplicates.similar_pairs(copies)
    assert len(pairs) == 2 * 999 - 1
    assert near_duplicates.repeats(pairs) == dict.fromkeys(range(1, 1000), 0)


@settings(max_examples=300, deadline=None)
@given(
    st.sets(
        st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(
            lambda pair: pair[0] > pair[1]
        )
    )
)
def test_what_goes_repeats_one_that_stays(pairs):
    gone = near_duplicates.repeats(
        (later, earlier, 0.9) for later, earlier in pairs
    )
    for later, earlier in gone.items():
        assert (later, earlier) in pairs
        assert earlier not in gone
    for later, earlier in pairs:
        assert later in gone or earlier in gone, "a pair stays whole"


@pytest.mark.parametrize("seed", range(3))
def test_planted_texts_are_as_many_as_they_say(seed):
    texts, hidden = plant([code(f"name{i}") for i in range(10)] * 2, seed)
    assert len(texts) == 30
    assert all(texts[copy] != texts[original] for copy, original in hidden)
