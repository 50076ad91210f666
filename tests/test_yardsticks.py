"""The compressors that a model must beat: plain, and after reading what the model has read."""

import random
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages import yardsticks
from stages.yardsticks import COMPRESSORS, plain_bits, primed_bits

NAMES = sorted(COMPRESSORS)
# What a stream's own head and end may cost, in bits.
SLACK = 8 * 64


def noise(size, seed=0):
    return random.Random(seed).randbytes(size)


@pytest.mark.parametrize("name", NAMES)
def test_noise_cannot_be_pressed_and_one_letter_can(name):
    compress = COMPRESSORS[name]
    assert 7.9 < plain_bits(compress, noise(20_000)) < 8.3
    assert plain_bits(compress, b"a" * 20_000) < 0.1


@pytest.mark.parametrize("name", NAMES)
@given(st.binary(min_size=200, max_size=4000))
@settings(max_examples=20, deadline=None)
def test_to_have_read_nothing_is_to_be_plain(name, text):
    compress = COMPRESSORS[name]
    empty = 8 * len(compress(b"")) / len(text)
    gap = plain_bits(compress, text) - primed_bits(compress, b"", text)
    assert gap == pytest.approx(empty)


@pytest.mark.parametrize("name", NAMES)
@given(st.binary(min_size=500, max_size=3000), st.binary(max_size=3000))
@settings(max_examples=20, deadline=None)
def test_to_have_read_does_little_harm(name, text, read):
    compress = COMPRESSORS[name]
    harm = primed_bits(compress, read, text) - plain_bits(compress, text)
    # Its tables are made for both texts together, which costs a little.
    assert harm * len(text) < SLACK + 0.1 * 8 * len(text)


@pytest.mark.parametrize(
    "name,between,helps",
    [
        ("gzip -9", 1_000, True),
        ("gzip -9", 100_000, False),
        ("bzip2 -9", 1_000, True),
        ("bzip2 -9", 1_000_000, False),
        ("xz -9e", 1_000_000, True),
        ("zstd -19 --long", 1_000_000, True),
    ],
)
def test_what_was_read_helps_as_far_back_as_the_window_reaches(
    name, between, helps
):
    text = noise(10_000, seed=1)
    read = text + noise(between, seed=2)
    bits = primed_bits(COMPRESSORS[name], read, text)
    assert (bits < 6) == helps, bits


def test_zstd_looks_back_over_more_than_its_level_would():
    text = noise(20_000, seed=1)
    read = text + noise(12_000_000, seed=2)
    assert primed_bits(COMPRESSORS["zstd -19 --long"], read, text) < 1


def test_xz_is_the_program_xz():
    text = b"".join(b"line %d\n" % number for number in range(9999))
    try:
        done = subprocess.run(["xz", "-9e"], input=text, capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no xz here")
    assert abs(len(done.stdout) - len(yardsticks.with_xz(text))) < 16


def test_every_compressor_is_measured_on_the_same_bytes():
    text = noise(1000)
    bits = yardsticks.measure(text, noise(1000))
    assert {way: sorted(values) for way, values in bits.items()} == {
        "plain": NAMES,
        "primed": NAMES,
    }
    assert bits["primed"]["xz -9e"] < 1 < bits["plain"]["xz -9e"]
