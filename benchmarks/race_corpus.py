"""The text of the race: read from pinned archives, held to one hash, cut into pieces to be judged."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from benchmarks import race_rules as rules
from stages import tokenizer as tokenizers
from stages import tokens as token_store
from stages.recipe import Recipe
from stages.tokens import Loader, open_store
from utils import artifacts
from utils.assets import asset
from utils.errors import CourseError, build_folder

# What a recipe gets that asks for no tokens of its own.
VOCABULARY, BLOCK = 4096, 256


@dataclass(frozen=True)
class Corpus:
    """The documents of each split, and the hash of them all."""

    splits: dict[str, list[str]]
    hash: str


def read_corpus(folder: Path) -> Corpus:
    """The corpus below a folder: each text once, in the order of the paths."""
    splits = {}
    digest = hashlib.sha256()
    seen: set[bytes] = set()
    for split, packages in rules.PACKAGES.items():
        texts = []
        for package in packages:
            for path in sorted((folder / package).rglob("*.py")):
                data = path.read_bytes()
                mark = hashlib.sha256(data).digest()
                if mark in seen or not is_text(data):
                    continue
                seen.add(mark)
                digest.update(split.encode() + mark)
                texts.append(data.decode())
        splits[split] = texts
    return Corpus(splits, digest.hexdigest())


def is_text(data: bytes) -> bool:
    """Whether a file takes part: of a middle size, and UTF-8.

    >>> is_text(b"x = 1"), is_text(b"x = 1" * 1000), is_text(bytes([255]) * 5000)
    (False, True, False)
    """
    if not rules.SMALLEST <= len(data) <= rules.LARGEST:
        return False
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def open_corpus() -> Corpus:
    """The corpus of the race, if it is the one that the rules name."""
    folder = Path(asset(rules.ASSET))
    corpus = read_corpus(folder)
    if corpus.hash != rules.CORPUS:
        what = (
            f"the corpus has the hash {corpus.hash[:12]}, not {rules.CORPUS[:12]}"
        )
        fix = f"python -m course fetch {rules.ASSET} --again; and undo changes of race_rules.py"
        raise CourseError(what, folder, fix)
    return corpus


def cut_pieces(texts: Iterable[str], count: int, size: int) -> list[str]:
    """So many pieces of `size` characters, spread evenly over the texts, in their order.

    >>> cut_pieces(["abcdefg", "xyz"], count=2, size=2)
    ['ab', 'ef']
    """
    every = []
    for text in texts:
        whole = len(text) - len(text) % size
        every += [text[start : start + size] for start in range(0, whole, size)]
    if len(every) < count:
        what = f"there are {len(every)} pieces of {size} characters, not {count}"
        raise CourseError(what, "the held-out packages", "ask for fewer")
    return [every[number * len(every) // count] for number in range(count)]


def pieces_of(corpus: Corpus, split: str) -> list[str]:
    """The pieces of a split on which everybody is judged."""
    return cut_pieces(corpus.splits[split], rules.PIECES, rules.PIECE)


def make_store(corpus: Corpus, recipe: Recipe, pattern: str) -> Recipe:
    """The recipe with places of a tokenizer and tokens, which are made where they are missing."""
    vocabulary = recipe.vocabulary or VOCABULARY
    block = recipe.block or BLOCK
    texts = corpus.splits["train"]
    name = f"{corpus.hash[:8]}-{vocabulary}-{pattern}"
    shelf = build_folder() / "race" / "tokens" / name
    trained = shelf / "tokenizer"
    if artifacts.read_manifest(trained) is None:
        learned = tokenizers.train_bpe(
            texts, vocabulary, tokenizers.PATTERNS[pattern]
        )
        with artifacts.sealed(trained, {}) as folder:
            learned.save_pretrained(folder)
    place = shelf / f"blocks-of-{block}"
    if artifacts.read_manifest(place) is None:
        tokenizer = AutoTokenizer.from_pretrained(trained)
        with artifacts.sealed(place, {}) as folder:
            token_store.write_store(folder, {"train": texts}, tokenizer, block)
    return recipe.change(
        tokens=str(place),
        tokenizer=str(trained),
        vocabulary=vocabulary,
        block=block,
    )


def text_read(recipe: Recipe, tokenizer: Any, seed: int, steps: int) -> bytes:
    """The text that a run has read in so many steps, block by block; each block counts once."""
    split = open_store(Path(recipe.tokens), tokenizer)["train"]
    loader = Loader(split, recipe.rows, seed)
    count = min(steps * recipe.rows, len(split))
    numbers = loader.rows_at(np.arange(count))
    blocks = split.gather(numbers)[:, 1:]
    return b"".join(spell(tokenizer, blocks))


def spell(tokenizer: Any, blocks: Sequence[np.ndarray]) -> list[bytes]:
    """The bytes of each block of tokens; the end of a document is a line break."""
    texts = tokenizer.batch_decode(blocks)
    end = tokenizer.eos_token
    # A character cut by the edge of a block is lost: no more than that.
    whole = [text.replace(end, "\n").replace("\ufffd", "") for text in texts]
    return [text.encode() for text in whole]
