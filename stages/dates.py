"""Dates as people write them, and as a database wants them: pairs for a small translator.

draw = random.Random(0)
source, target = date_batch(known[:64], draw)
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from datetime import date

import torch
from torch.nn.utils.rnn import pad_sequence

FORMS = ["%B %d, %Y", "%d %b %Y", "%A, %d %B %Y", "%b %d %Y", "%Y, %d %B"]
LETTERS = (
    "_^ ,-0123456789abcdefghijklmnopqrstuvwxyz"  # padding, start, and the rest
)
START = 1


def all_days(seed: int) -> list[date]:
    """Every day from 1900 to 2099, in random order."""
    first = date(1900, 1, 1).toordinal()
    last = date(2099, 12, 31).toordinal()
    numbers = range(first, last + 1)
    days = [date.fromordinal(number) for number in numbers]
    draw = random.Random(seed)
    draw.shuffle(days)
    return days


def in_words(day: date, draw: random.Random) -> str:
    """A date as somebody might write it, in small letters.

    >>> in_words(date(1987, 3, 5), random.Random(1))
    '5 mar 1987'
    """
    form = draw.choice(FORMS)
    text = day.strftime(form)
    small = text.lower()
    return re.sub(r"\b0", "", small)


def ids_of(texts: Iterable[str]) -> torch.Tensor:
    """Ids of texts, letter by letter, padded on the right.

    >>> ids_of(["5 may", "-"]).tolist()
    [[10, 2, 27, 15, 39], [4, 0, 0, 0, 0]]
    """
    rows = []
    for text in texts:
        ids = [LETTERS.index(letter) for letter in text]
        row = torch.tensor(ids)
        rows.append(row)
    return pad_sequence(rows, batch_first=True)


def date_batch(
    days: list[date], draw: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids of some days as people write them, and in ISO's ten letters."""
    words = []
    forms = []
    for day in days:
        text = in_words(day, draw)
        words.append(text)
        form = day.isoformat()
        forms.append(form)
    source = ids_of(words)
    target = ids_of(forms)
    return source, target
