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
        names = ", ".join(PLACES)
        what = f"there is no set {name!r}"
        raise CourseError(what, "stages/benchmarks.py", f"choose one of {names}")
    place = Path(folder, PLACES[name])
    if place.is_dir():
        return read_table(place)
    return read_documents(place)


def read_table(place: Path) -> list[Row]:
    """The rows of a data set that `save_to_disk` has written."""
    from datasets import load_from_disk

    table = load_from_disk(str(place))
    return table.to_list()


def read_documents(place: Path) -> list[Row]:
    """What each line of a packed file holds under `doc`."""
    rows = []
    with gzip.open(place, "rt", encoding="utf-8") as lines:
        for line in lines:
            request = json.loads(line)
            rows.append(request["doc"])
    return rows


def sample_rows(folder: str | Path, name: str, many: int) -> list[Row]:
    """The first rows of one fixed shuffle: a small sample is the beginning of a larger one."""
    rows = read_rows(folder, name)
    noise = random.Random(0)
    noise.shuffle(rows)
    return rows[:many]


def read_items(folder: str | Path, name: str, many: int) -> list[Item]:
    """A stated sample of LAMBADA, HellaSwag or PIQA: the first `many` of one fixed shuffle."""
    if name not in TO_ITEM:
        names = ", ".join(TO_ITEM)
        what = f"{name!r} has no endings to choose from"
        raise CourseError(what, fix=f"choose one of {names}")
    to_item = TO_ITEM[name]
    rows = sample_rows(folder, name, many)
    return [to_item(row) for row in rows]


def lambada_item(row: Row) -> Item:
    """A passage without its last word; that word is the only ending."""
    context = row["query"]
    [word, *_] = row["answers_text"]
    return Item(context, (f" {word}",), answer=0)


def hellaswag_item(row: Row) -> Item:
    """What is done and its beginning, and four ways in which it might go on."""
    activity = row["activity_label"]
    first = row["ctx_a"]
    second = row["ctx_b"].capitalize()
    context = clean(f"{activity}: {first} {second}")
    endings = [f" {clean(ending)}" for ending in row["endings"]]
    answer = int(row["label"])
    return Item(context, tuple(endings), answer)


def piqa_item(row: Row) -> Item:
    """A goal of daily life, and two ways to reach it of which one works."""
    goal = row["goal"]
    context = f"Question: {goal}\nAnswer:"
    first = f" {row['sol1']}"
    second = f" {row['sol2']}"
    answer = row["label"]
    return Item(context, (first, second), answer)


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
    files = Path(folder).glob("codex_mbpp/*/requests.jsonl.gz")
    [place] = files
    return read_documents(place)


def read_passages(folder: str | Path, many: int, least: int = 600) -> list[str]:
    """Passages of Wikipedia that BoolQ's questions are about, each once and of some length."""
    rows = read_table(Path(folder, "boolq/none/validation"))
    passages = []
    for row in rows:
        passage = row["passage"]
        if len(passage) >= least:
            passages.append(passage)
    unique = list(dict.fromkeys(passages))
    noise = random.Random(0)
    noise.shuffle(unique)
    return unique[:many]
