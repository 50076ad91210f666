"""What a general compressor makes of a text, alone and after it has read another one.

A language model has read millions of tokens of like text before it is judged; a compressor starts
empty. So each is asked twice: for the text by itself, and for what the text adds behind the training
text, in one stream. How much of that stream a compressor can still use is its window:

    gzip    32 kB, so that of the training text next to nothing is left
    bz2     blocks of 900 kB, each for itself: the last, begun block is all that helps
    xz      a dictionary of 64 MiB at -9e: everything, if both texts together are shorter
    zstd    everything, because its window is set to the length of the stream
"""

from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Callable

Compress = Callable[[bytes], bytes]
# zstd takes windows of 2^10 to 2^31 bytes.
SMALLEST_WINDOW, LARGEST_WINDOW = 10, 31


def with_gzip(data: bytes) -> bytes:
    """`gzip -9`."""
    return gzip.compress(data, 9, mtime=0)


def with_bz2(data: bytes) -> bytes:
    """`bzip2 -9`."""
    return bz2.compress(data, 9)


def with_xz(data: bytes) -> bytes:
    """`xz -9e`."""
    return lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)


def with_zstd(data: bytes) -> bytes:
    """`zstd -19 --long`, with a window that holds all of the data."""
    import zstandard

    bits = max(SMALLEST_WINDOW, min(len(data).bit_length(), LARGEST_WINDOW))
    parameters = zstandard.ZstdCompressionParameters.from_level(
        19, window_log=bits, enable_ldm=True
    )
    return zstandard.ZstdCompressor(compression_params=parameters).compress(data)


COMPRESSORS: dict[str, Compress] = {
    "gzip -9": with_gzip,
    "bzip2 -9": with_bz2,
    "xz -9e": with_xz,
    "zstd -19 --long": with_zstd,
}


def plain_bits(compress: Compress, text: bytes) -> float:
    """Bits per byte of a text by itself.

    >>> round(plain_bits(with_xz, b"abcd" * 1000), 2)
    0.19
    """
    return 8 * len(compress(text)) / len(text)


def primed_bits(compress: Compress, read: bytes, text: bytes) -> float:
    """Bits per byte that a text adds to a stream in which `read` stands before it.

    >>> import random
    >>> noise = random.Random(0).randbytes(10_000)
    >>> plain_bits(with_xz, noise) > 8, primed_bits(with_xz, noise, noise) < 0.2
    (True, True)
    """
    before = len(compress(read))
    after = len(compress(read + text))
    return 8 * (after - before) / len(text)


def measure(text: bytes, read: bytes) -> dict[str, dict[str, float]]:
    """Bits per byte of every compressor, plain and primed.

    >>> sorted(measure(b"abcd" * 1000, b"abcd")["primed"]) == sorted(COMPRESSORS)
    True
    """
    plain = {}
    primed = {}
    for name, compress in COMPRESSORS.items():
        plain[name] = round(plain_bits(compress, text), 4)
        primed[name] = round(primed_bits(compress, read, text), 4)
    return {"plain": plain, "primed": primed}
