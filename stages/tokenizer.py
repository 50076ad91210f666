"""Byte-level BPE, trained in seconds and applied to a corpus in bulk.

A tokenizer of this kind is two things: a regular expression that cuts text into pieces, and a table
of tokens, in the order they were learned, by which the bytes of a piece are joined. So the table may
be learned by one program (`rustbpe`), saved by a second (`tokenizers`), applied by a third (`tiktoken`).
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from utils.artifacts import hash_json
from utils.errors import CourseError

END = "<|endoftext|>"
PAD = "<pad>"

# How text is cut into pieces; no token crosses a cut. GPT-2's pattern; nanochat's, which is GPT-4's
# with two digits and not three; two for code, where a word takes one sign before it (`.append`): "code"
# cuts after line breaks and keeps an indentation whole, "lines" joins them to the next indentation.
PATTERNS = {
    # GPT-2's own, with what needs no look ahead in one group, which the trainer's engine
    # finds in one pass: it then counts the pieces in a quarter less time
    "gpt2": r"(?:'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+)"
    r"|\s+(?!\S)|\s+",
    "nanochat": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "code": r"[^\s\p{L}\p{N}]?\p{L}+| \p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]+(?:\r?\n)*"
    r"|(?:[ \t]*\r?\n)+|[ \t]+|\s+",
    "lines": r"[^\s\p{L}\p{N}]?\p{L}+| \p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]+(?:\r?\n[ \t]*)*"
    r"|(?:\r?\n[ \t]*)+|\s{1,128}(?!\S)|\s+",
}


def train_bpe(
    texts: Iterable[str], vocabulary: int, pattern: str = PATTERNS["code"]
) -> Any:
    """A transformers tokenizer of `vocabulary` tokens, the end of a document and padding included.

    >>> len(train_bpe(["def f(x):\\n    return x\\n"] * 9, 262))
    262
    """
    return from_ranks(learn_ranks(texts, vocabulary - 2, pattern), pattern)


def learn_ranks(texts: Iterable[str], count: int, pattern: str) -> dict[bytes, int]:
    """The 256 bytes, then the `count - 256` most useful joins in the order they were learned.

    >>> list(learn_ranks(["the theme"], 258, PATTERNS["code"]))[256:]
    [b'he', b'the']
    """
    import rustbpe

    if count < 256:
        what = f"{count} tokens cannot spell all bytes"
        raise CourseError(what, fix="ask for 258 or more")
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(iter(texts), count, pattern=pattern)
    learned = trainer.get_mergeable_ranks()
    ranks = {}
    for token, rank in learned:
        ranks[bytes(token)] = rank
    if len(ranks) < count:
        what = f"the text has only {len(ranks)} different joins, not {count}"
        raise CourseError(what, fix="train on more text, or ask for fewer tokens")
    return ranks


def join_pieces(
    piece: bytes, ranks: dict[bytes, int], below: float = math.inf
) -> list[bytes]:
    """Byte-pair encoding of one piece, by the definition: join the best pair, again and again.

    >>> join_pieces(b"abcab", {b"ab": 3, b"abc": 4})
    [b'abc', b'ab']
    """
    parts = [piece[i : i + 1] for i in range(len(piece))]
    while len(parts) > 1:
        pairs = itertools.pairwise(parts)
        unions = [ranks.get(left + right, below) for left, right in pairs]
        best = min(unions)
        if best >= below:
            break
        place = unions.index(best)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts


def recover_merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The pair behind each token, recovered by applying all the earlier joins to its own bytes.

    >>> table = {b"a": 0, b"b": 1, b"c": 2, b"ab": 3, b"abc": 4}
    >>> recover_merges(table)
    [(b'a', b'b'), (b'ab', b'c')]
    """
    tokens = sorted(ranks, key=ranks.__getitem__)
    merges = _merges_behind(tuple(tokens))
    return list(merges)


# whoever makes a tokenizer mostly encodes with it next, and both need the merges
@functools.lru_cache(maxsize=4)
def _merges_behind(tokens: tuple[bytes, ...]) -> list[tuple[bytes, bytes]]:
    ranks = {token: rank for rank, token in enumerate(tokens)}
    merges = []
    for token, rank in ranks.items():
        parts = join_pieces(token, ranks, below=rank)
        if len(parts) > 2:
            what = f"the token {token!r} is not the union of two earlier ones"
            raise CourseError(what)
        if len(parts) == 2:
            merges.append((parts[0], parts[1]))
    return merges


@functools.cache
def byte_letters() -> dict[int, str]:
    """GPT-2's table: the printable letter that stands for each byte in a vocabulary file.

    >>> [byte_letters()[byte] for byte in b"a \\n"]
    ['a', 'Ġ', 'Ċ']
    """
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return bytes_to_unicode()


def spell(token: bytes) -> str:
    """Bytes as a vocabulary file spells them: `spell(b" if")` is `'Ġif'`."""
    return token.decode("latin-1").translate(byte_letters())


def from_ranks(ranks: dict[bytes, int], pattern: str) -> Any:
    """A transformers tokenizer with this table; `<|endoftext|>` and `<pad>` come last."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    merges = [(spell(left), spell(right)) for left, right in recover_merges(ranks)]
    vocabulary = {spell(token): rank for token, rank in ranks.items()}
    engine = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    cut = pre_tokenizers.Split(Regex(pattern), "isolated")
    to_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    engine.pre_tokenizer = pre_tokenizers.Sequence([cut, to_letters])
    engine.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=engine, eos_token=END, pad_token=PAD
    )


def blank_tokenizer(pattern: str) -> Any:
    """A tokenizer that knows the bytes and no join: what `train_new_from_iterator` starts from."""
    return from_ranks({bytes([byte]): byte for byte in range(256)}, pattern)


def read_ranks(tokenizer: Any) -> dict[bytes, int]:
    """The table of a byte-level BPE tokenizer, without its added tokens."""
    byte_of = {letter: byte for byte, letter in byte_letters().items()}
    added = tokenizer.get_added_vocab()
    ranks = {}
    for token, rank in tokenizer.get_vocab().items():
        if token not in added:
            ranks[bytes(byte_of[letter] for letter in token)] = rank
    return ranks


def read_pattern(tokenizer: Any) -> str | None:
    """The regular expression that cuts a tokenizer's text, or None if it cuts in another way."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())["pre_tokenizer"] or {}
    *cuts, letters = state.get("pretokenizers") or [state]
    if letters.get("type") != "ByteLevel" or letters["add_prefix_space"]:
        return None
    if letters["use_regex"]:
        # the byte-level step cuts by itself, with GPT-2's rule
        return None if cuts else PATTERNS["gpt2"]
    isolated = {"type": "Split", "behavior": "Isolated", "invert": False}
    if len(cuts) == 1 and isolated.items() <= cuts[0].items():
        return cuts[0]["pattern"].get("Regex")
    return None


def hash_tokenizer(tokenizer: Any) -> str:
    """A hash of what decides the ids of plain text: not of padding, which a call changes."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    del state["padding"]
    del state["truncation"]
    return hash_json([state, tokenizer.eos_token_id])


class BulkEncoder:
    """Encode many texts: the ids of `tokenizer(texts)`, as arrays, several times as fast.

    >>> [ids.tolist() for ids in BulkEncoder(blank_tokenizer(PATTERNS["code"]))(["ab", "c"])]
    [[97, 98], [99]]
    """

    def __init__(self, tokenizer: Any, threads: int | None = None) -> None:
        import tiktoken

        reason = why_not_bulk(tokenizer)
        if reason:
            what = f"bulk encoding would not give this tokenizer's ids: {reason}"
            raise CourseError(what, fix="encode with tokenizer(texts)")
        added = tokenizer.get_added_vocab()
        # the added tokens that a text may spell out; an empty set keeps all of them letters
        self.allowed = set(added)
        if tokenizer.split_special_tokens:
            self.allowed -= set(tokenizer.all_special_tokens)
        self.threads = threads or getattr(os, "process_cpu_count", os.cpu_count)()
        self.pattern = read_pattern(tokenizer) or ""
        self.encoding = tiktoken.Encoding(
            "bulk",
            pat_str=self.pattern,
            mergeable_ranks=read_ranks(tokenizer),
            special_tokens=added,
        )

    def __call__(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, in order, as arrays of uint32."""
        with ThreadPoolExecutor(self.threads) as pool:
            return list(pool.map(self.encode, texts))

    def encode(self, text: str) -> np.ndarray:
        """The ids of one text. A lone surrogate, which no file can hold, is an error."""
        # without this line a surrogate would become U+FFFD in silence
        text.encode()
        try:
            return self.encoding.encode_to_numpy(
                text, allowed_special=self.allowed, disallowed_special=()
            )
        except ValueError as error:
            # a rule with look-ahead, and a million blanks in a row
            names = {pattern: name for name, pattern in PATTERNS.items()}
            rule = names.get(self.pattern, self.pattern)
            what = f"the pattern {rule!r} gave up on a text of {len(text):,} characters: {error}"
            fix = "take the pattern 'code' or 'lines', or tokenizer(text)"
            raise CourseError(what, fix=fix) from error

    def decode(self, ids: np.ndarray) -> str:
        """The text of one array of ids."""
        return self.encoding.decode_bytes(ids.tolist()).decode()


def why_not_bulk(tokenizer: Any) -> str:
    """What makes a tokenizer more than a pattern and a table of joins; nothing if it is not more."""
    engine = json.loads(tokenizer.backend_tokenizer.to_str())
    model = engine["model"]
    added = engine["added_tokens"]
    if model["type"] != "BPE" or engine["normalizer"] or model["dropout"]:
        return f"its model is {model['type']}; only BPE, without normalizer or dropout, will do"
    if read_pattern(tokenizer) is None:
        return "it does not cut text by one regular expression into bytes"
    beside = ("lstrip", "rstrip", "single_word")
    if any(token[name] for token in added for name in beside):
        return "an added token takes the blanks beside it"
    names = [token["content"] for token in added]
    for one, two in itertools.permutations(names, 2):
        # overlapping tokens: the programs would not always choose the same one
        for start in range(len(one)):
            if two.startswith(one[start:]) or one.startswith(two, start):
                return f"two added tokens may claim the same characters: {one!r} and {two!r}"
    if tokenizer("")["input_ids"]:
        return "it adds special tokens to every text"
    pairs = recover_merges(read_ranks(tokenizer))
    merges = [[spell(left), spell(right)] for left, right in pairs]
    if merges != model["merges"]:
        return "the pairs it joins do not follow from the order of its ids"
    return ""
