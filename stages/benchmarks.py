"""Published questions on which language models are judged, read from files on this machine.

A question is an `Item`: a context, its possible endings and the number of the true one. The sample
is the same on every machine and for every seed: the first rows of one fixed shuffle, so that a
small sample is the beginning of a larger one.
"""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.errors import CourseError

Row = dict[str, Any]
# Where each set lies inside the asset `benchmarks`: a folder of Arrow files, or lines of JSON.
PLACES = {
    "hellaswag": "hellaswag/none/validation",
    "piqa": "piqa/plain_text/validation",
    "lambada": "lambada/bpb_0shot/requests.jsonl.gz",
    "gsm8k": "gsm8k/gold_bpb_5shot/requests.jsonl.gz",
}


@dataclass(frozen=True)
class Item:
    """A context, its possible endings, and the number of the true one."""

    context: str
    endings: tuple[str, ...]
    answer: int


def read_rows(folder: str | Path, name: str) -> list[Row]:
    """All rows of a set, as its authors wrote them and in their order."""
    if name not in PLACES:
        fix = f"choose one of {', '.join(PLACES)}"
        raise CourseError(f"there is no set {name!r}", "stages/benchmarks.py", fix)
    place = Path(folder) / PLACES[name]
    if place.is_dir():
        from datasets import load_from_disk

        return load_from_disk(str(place)).to_list()
    with gzip.open(place, "rt", encoding="utf-8") as lines:
        return [json.loads(line)["doc"] for line in lines]


def sample_rows(folder: str | Path, name: str, many: int) -> list[Row]:
    """The first rows of one fixed shuffle: a small sample is the beginning of a larger one."""
    rows = read_rows(folder, name)
    random.Random(0).shuffle(rows)
    return rows[:many]


def read_items(folder: str | Path, name: str, many: int) -> list[Item]:
    """A stated sample of LAMBADA, HellaSwag or PIQA: the first `many` of one fixed shuffle."""
    if name not in TO_ITEM:
        fix = f"choose one of {', '.join(TO_ITEM)}"
        raise CourseError(f"{name!r} has no endings to choose from", fix=fix)
    return [TO_ITEM[name](row) for row in sample_rows(folder, name, many)]


def lambada_item(row: Row) -> Item:
    """A passage without its last word; that word is the only ending."""
    word = row["answers_text"][0]
    return Item(row["query"], (f" {word}",), 0)


def hellaswag_item(row: Row) -> Item:
    """What is done and its beginning, and four ways in which it might go on."""
    beginning = f"{row['ctx_a']} {row['ctx_b'].capitalize()}"
    context = clean(f"{row['activity_label']}: {beginning}")
    endings = tuple(f" {clean(ending)}" for ending in row["endings"])
    return Item(context, endings, int(row["label"]))


def piqa_item(row: Row) -> Item:
    """A goal of daily life, and two ways to reach it of which one works."""
    endings = (f" {row['sol1']}", f" {row['sol2']}")
    return Item(f"Question: {row['goal']}\nAnswer:", endings, row["label"])


def clean(text: str) -> str:
    """Take out the marks that the source WikiHow left in HellaSwag.

    >>> clean("How to fold a shirt [title] Lay it flat. [step] Use a table.")
    'How to fold a shirt. Lay it flat. Use a table.'
    """
    text = text.strip().replace(" [title]", ". ")
    text = re.sub(r"\[.*?\]", "", text)
    return text.replace("  ", " ")


TO_ITEM: dict[str, Callable[[Row], Item]] = {
    "lambada": lambada_item,
    "hellaswag": hellaswag_item,
    "piqa": piqa_item,
}


def read_tasks(folder: str | Path) -> list[Row]:
    """The tasks of MBPP in their file's order, each with its program and tests."""
    [place] = Path(folder).glob("codex_mbpp/*/requests.jsonl.gz")
    with gzip.open(place, "rt", encoding="utf-8") as lines:
        return [json.loads(line)["doc"] for line in lines]


def read_passages(folder: str | Path, many: int, least: int = 600) -> list[str]:
    """Passages of Wikipedia that BoolQ's questions are about, each once and of some length."""
    from datasets import load_from_disk

    rows = load_from_disk(str(Path(folder) / "boolq/none/validation"))
    passages = list(dict.fromkeys(rows["passage"]))
    long = [passage for passage in passages if len(passage) >= least]
    random.Random(0).shuffle(long)
    return long[:many]
