"""Floor 3: byte-level BPE, trained in seconds, measured, and applied to a corpus in bulk.

A tokenizer of this kind is two things. A regular expression cuts the text into pieces; a table of
tokens, in the order they were learned, says how the bytes of one piece are joined: always the pair
whose union is lowest in the table, until no union is in it. Whoever keeps to both gives the same
ids. So the table may be learned by one program (`rustbpe`), saved by a second (`tokenizers`) and
applied by a third (`tiktoken`). Why bother: see `benchmarks/tokenization.py`.
"""
from __future__ import annotations

import functools
import itertools
import json
import os
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from utils.errors import CourseError

END, PAD = "<|endoftext|>", "<pad>"

# How text is cut into pieces; no token crosses a cut. GPT-2's rule; GPT-4's, with two digits and
# not three; two for code, where a word takes one sign before it (`.append`): "code" cuts after a
# line break and keeps an indentation whole, "lines" joins a line's end to the next indentation.
PATTERNS = {
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "gpt4": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}"
            r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "code": r"[^\s\p{L}\p{N}]?\p{L}+| \p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]+(?:\r?\n)*"
            r"|(?:[ \t]*\r?\n)+|[ \t]+|\s+",
    "lines": r"[^\s\p{L}\p{N}]?\p{L}+| \p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]+(?:\r?\n[ \t]*)*"
             r"|(?:\r?\n[ \t]*)+|\s{1,128}(?!\S)|\s+",
}


def read_texts(corpus: Path, split: str, megabytes: float = float("inf")) -> Iterator[str]:
    """Documents of one split, about so many megabytes of it: a fair sample.

    A document is in or out by a checksum of its content: nothing is shuffled or held in memory, a
    second pass gives the same documents, and a larger sample contains the smaller one.
    """
    import pyarrow.parquet as parquet

    files = sorted(corpus.glob(f"{split}-*.parquet"))
    if not files:
        raise CourseError(f"the corpus has no split {split!r}", corpus, "run lesson 03 again")
    sizes = parquet.read_table(files, columns=["size"])["size"].to_numpy()
    limit = min(megabytes * 1e6 / sizes.sum(), 1) * 2**32
    for file in files:
        for batch in parquet.ParquetFile(file).iter_batches(256, columns=["content"]):
            for text in batch["content"].to_pylist():
                if zlib.crc32(text.encode()) < limit:
                    yield text


def train_bpe(texts: Iterable[str], vocabulary: int, pattern: str = PATTERNS["code"]) -> Any:
    """A transformers tokenizer of `vocabulary` tokens, the end of a document and padding included.

    >>> len(train_bpe(["def f(x):\\n    return x\\n"] * 9, 262))
    262
    """
    return from_ranks(learn_ranks(texts, vocabulary - 2, pattern), pattern)


def learn_ranks(texts: Iterable[str], count: int, pattern: str) -> dict[bytes, int]:
    """The 256 bytes, then the `count - 256` most useful joins in the order they were learned."""
    import rustbpe

    if count < 256:
        raise CourseError(f"{count} tokens cannot spell all bytes", fix="ask for 258 or more")
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(iter(texts), count, pattern=pattern)
    ranks = {bytes(token): rank for token, rank in trainer.get_mergeable_ranks()}
    if len(ranks) < count:
        what = f"the text has only {len(ranks)} different joins, not {count}"
        raise CourseError(what, fix="train on more text, or ask for a smaller vocabulary")
    return ranks


def recover_merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The pair behind each token, found by applying all the earlier joins to its own bytes.

    >>> table = {b"a": 0, b"b": 1, b"c": 2, b"ab": 3, b"abc": 4}
    >>> recover_merges(table)
    [(b'a', b'b'), (b'ab', b'c')]
    """
    return list(pairs_of(tuple(sorted(ranks, key=ranks.get))))


@functools.lru_cache(maxsize=4)  # who makes a tokenizer mostly encodes with it next
def pairs_of(tokens: tuple[bytes, ...]) -> list[tuple[bytes, bytes]]:
    """`recover_merges` for tokens in the order they were learned; the order is all that counts."""
    ranks, merges = {token: rank for rank, token in enumerate(tokens)}, []
    for token, rank in ranks.items():
        if len(token) > 1:
            parts = join_pieces(token, ranks, below=rank)
            if len(parts) != 2:
                raise CourseError(f"the token {token!r} is not the union of two earlier ones")
            merges.append((parts[0], parts[1]))
    return merges


def join_pieces(piece: bytes, ranks: dict[bytes, int], below: float = float("inf")) -> list[bytes]:
    """Byte-pair encoding of one piece, by the definition: join the best pair, again and again.

    >>> join_pieces(b"abcab", {b"ab": 3, b"abc": 4})
    [b'abc', b'ab']
    """
    parts = [piece[i:i + 1] for i in range(len(piece))]
    while len(parts) > 1:
        unions = [ranks.get(left + right, below) for left, right in zip(parts, parts[1:])]
        if min(unions) >= below:
            break
        place = unions.index(min(unions))
        parts[place:place + 2] = [parts[place] + parts[place + 1]]
    return parts


@functools.cache
def byte_letters() -> dict[int, str]:
    """GPT-2's table: the printable letter that stands for each byte in a vocabulary file.

    >>> [byte_letters()[byte] for byte in b"a \\n"]
    ['a', 'Ġ', 'Ċ']
    """
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}


def spell(token: bytes) -> str:
    """Bytes as a vocabulary file spells them: `spell(b" if")` is `'Ġif'`."""
    return "".join(map(byte_letters().get, token))


def from_ranks(ranks: dict[bytes, int], pattern: str) -> Any:
    """A transformers tokenizer with this table; `<|endoftext|>` and `<pad>` come last."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    merges = [(spell(left), spell(right)) for left, right in recover_merges(ranks)]
    vocabulary = {spell(token): rank for token, rank in ranks.items()}
    engine = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    engine.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    engine.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=engine, eos_token=END, pad_token=PAD)
    assert len(tokenizer) == len(ranks) + 2  # some constructors give an empty one in silence
    return tokenizer


def blank_tokenizer(pattern: str) -> Any:
    """A tokenizer that knows the bytes and no join: what `train_new_from_iterator` starts from."""
    return from_ranks({bytes([byte]): byte for byte in range(256)}, pattern)


def read_ranks(tokenizer: Any) -> dict[bytes, int]:
    """The table of a byte-level BPE tokenizer, without its added tokens."""
    codes = {letter: byte for byte, letter in byte_letters().items()}
    added = tokenizer.get_added_vocab()
    tokens = tokenizer.get_vocab().items()
    return {bytes(map(codes.get, token)): rank for token, rank in tokens if token not in added}


def read_pattern(tokenizer: Any) -> str | None:
    """The regular expression that cuts a tokenizer's text, or None if it cuts in another way."""
    steps = json.loads(tokenizer.backend_tokenizer.to_str())["pre_tokenizer"] or {}
    steps = steps.get("pretokenizers", [steps])
    last = steps.pop()
    if last.get("type") != "ByteLevel" or last["add_prefix_space"]:
        return None
    if last["use_regex"] or len(steps) != 1:
        return PATTERNS["gpt2"] if last["use_regex"] and not steps else None
    isolated = {"type": "Split", "behavior": "Isolated", "invert": False}
    return steps[0]["pattern"].get("Regex") if isolated.items() <= steps[0].items() else None


class BulkEncoder:
    """Encode many texts: the ids of `tokenizer(texts)`, as arrays, several times as fast.

    >>> [ids.tolist() for ids in BulkEncoder(blank_tokenizer(PATTERNS["code"]))(["ab", "c"])]
    [[97, 98], [99]]
    """

    def __init__(self, tokenizer: Any, threads: int | None = None) -> None:
        import tiktoken

        reason = why_not_bulk(tokenizer)
        if reason:
            raise CourseError(f"bulk encoding would not give this tokenizer's ids: {reason}",
                              fix="encode with tokenizer(texts)")
        specials = set(tokenizer.all_special_tokens) if tokenizer.split_special_tokens else set()
        self.allowed = set(tokenizer.get_added_vocab()) - specials
        self.threads = threads or getattr(os, "process_cpu_count", os.cpu_count)()
        self.pattern = read_pattern(tokenizer)
        self.encoding = tiktoken.Encoding(  # threads, no offsets, and arrays instead of lists
            "bulk", pat_str=self.pattern, mergeable_ranks=read_ranks(tokenizer),
            special_tokens=tokenizer.get_added_vocab())

    def __call__(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, in order, as arrays of uint32."""
        with ThreadPoolExecutor(self.threads) as pool:
            return list(pool.map(self.encode, texts))

    def encode(self, text: str) -> np.ndarray:
        """The ids of one text. A lone surrogate, which no file can hold, is an error."""
        text.encode()  # else it would become U+FFFD in silence
        try:
            return self.encoding.encode_to_numpy(text, allowed_special=self.allowed,
                                                 disallowed_special=())
        except ValueError as error:  # a rule with look-ahead, and a million blanks in a row
            rule = {pattern: name for name, pattern in PATTERNS.items()}.get(self.pattern, self.pattern)
            what = f"the rule {rule!r} gave up on a text of {len(text):,} characters: {error}"
            raise CourseError(what, fix="take the rule 'code' or 'lines', or tokenizer(text)") from error

    def decode(self, ids: np.ndarray) -> str:
        """The text of one array of ids."""
        return self.encoding.decode_bytes(ids.tolist()).decode()


def why_not_bulk(tokenizer: Any) -> str | None:
    """What makes a tokenizer more than a pattern and a table of joins, or None."""
    engine = json.loads(tokenizer.backend_tokenizer.to_str())
    model = engine["model"]
    if model["type"] != "BPE" or engine["normalizer"] or model["dropout"]:
        return f"its model is {model['type']}; only BPE, without normalizer or dropout, will do"
    if read_pattern(tokenizer) is None:
        return "it does not cut text by one regular expression into bytes"
    if any(t["lstrip"] or t["rstrip"] or t["single_word"] for t in engine["added_tokens"]):
        return "an added token takes the blanks beside it"
    if clash := clashing(engine["added_tokens"]):
        return "two added tokens may claim the same characters: {!r} and {!r}".format(*clash)
    if tokenizer("")["input_ids"]:
        return "it adds special tokens to every text"
    pairs = [[spell(left), spell(right)] for left, right in recover_merges(read_ranks(tokenizer))]
    if pairs != model["merges"]:
        return "the pairs it joins do not follow from the order of its ids"
    return None


def clashing(added: Sequence[dict[str, Any]]) -> tuple[str, str] | None:
    """Two added tokens between which the programs may choose differently, or None.

    At one place the library takes the longest, tiktoken any. And the library looks for all that are
    not `normalized` first, tiktoken from left to right.
    """
    for first, second in itertools.permutations(added, 2):
        one, two = first["content"], second["content"]
        reach = len(one) if first["normalized"] != second["normalized"] else 1
        if any(two.startswith(one[i:]) or one.startswith(two, i) for i in range(reach)):
            return one, two
    return None


def characters_per_token(encode: Callable[[Sequence[str]], list], texts: Sequence[str]) -> float:
    """Characters over tokens: 2.75 for `str.split` on "to be" and "or not"."""
    return sum(map(len, texts)) / sum(map(len, encode(texts)))


def missing_words(tokenizer: Any, words: Iterable[str]) -> list[str]:
    """The words that take more than one token."""
    return [word for word in words if len(tokenizer(word)["input_ids"]) > 1]


def hostile_texts(seed: int = 42, megabytes: float = 1) -> dict[str, str]:
    """Texts that break careless tokenizers, by name; the last is one line of so many megabytes."""
    draw = random.Random(seed)
    noise = draw.randbytes(50_000)
    points = [*range(0xD800), *range(0xE000, 0x110000)]
    emoji, accents = "👩‍👩‍👧‍👦 🏳️‍🌈 🇰🇷🇷🇴 1️⃣ 👍🏽 ", "Z̸̧̢̛͖̪̈́a̴l̵ e\u0301é שָׁלוֹם السَّلَام "
    newlines = "a\r\nb\rc\n\r\n\t \u2028\u2029\x85\x0b\x0c\u3000\xa0\u200b"
    return {
        "random bytes": noise.decode("latin-1") + noise.decode("utf-8", "replace"),
        "every code point of Unicode": "".join(map(chr, points)),
        "random code points": "".join(map(chr, draw.choices(points, k=20_000))),
        "emoji sequences, accents, right to left": (emoji + accents) * 200,
        "mixed newlines and blanks": newlines * 100,
        "NUL, control bytes, byte order mark": "".join(map(chr, range(32))) + "\ufeff\ufffe\uffff",
        "special tokens, letters of bytes": f"{END}{PAD} {END} <|endof{END}text|>\n{PAD} ĠĊ Ġdef",
        "blanks without end": " " * 200_000 + "x" + "\n" * 200_000 + "\t" * 200_000,
        "one word without end": "a" * 200_000 + "é" * 50_000 + "=" * 200_000,
        "one line without end": "x = [1, 'a'] ; " * int(megabytes * 1e6 / 15),
    }
