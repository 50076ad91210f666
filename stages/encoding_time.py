"""What the time of an encoder goes into: programs that do a part of its work, and their figure.

The library cuts a text, makes a string of each pre-token, spells it in letters and merges. One
that stops earlier takes less time, and the difference is what the next step costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import pyplot as plt

from utils.show import COLOURS, show_figure

Work = Callable[[], list[list[int]]]
PROGRAMS = ("encode_batch_fast", "tiktoken")


def without_bpe(texts: Sequence[str], steps: Any) -> Work:
    """The library with these pre-tokenizers, and one look-up for each pre-token in place of BPE.

    A `Split` that removes what it finds leaves no pre-token: it only searches.

    >>> from tokenizers.pre_tokenizers import Split
    >>> without_bpe(["a b"], Split(" ", "isolated"))(), without_bpe([" "], Split(" ", "removed"))()
    ([[0, 0, 0]], [[]])
    """
    from tokenizers import Tokenizer, models

    stripped = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    stripped.pre_tokenizer = steps
    return lambda: [found.ids for found in stripped.encode_batch_fast(texts)]


def without_merges(texts: Sequence[str], pattern: str) -> Work:
    """tiktoken with a table of every pre-token of these texts, so that each takes one look-up.

    >>> without_merges(["to be or to"], r" ?[a-z]+")()
    [[3, 0, 1, 2]]
    """
    import regex
    import tiktoken

    different: set[str] = set()
    for text in texts:
        different.update(regex.findall(pattern, text))
    ranks = {piece.encode(): rank for rank, piece in enumerate(sorted(different))}
    stripped = tiktoken.Encoding(
        "stripped", pat_str=pattern, mergeable_ranks=ranks, special_tokens={}
    )
    return lambda: [stripped.encode_ordinary(text) for text in texts]


def draw_parts(seconds: Mapping[str, float]) -> None:
    """Two bars, of the library and of tiktoken, divided into what each step takes.

    `seconds` has the time of each program under the names that lesson 07 gives them.
    """
    strings = seconds["strings"] - seconds["search"]
    letters = seconds["letters"] - seconds["strings"]
    merges = seconds["encode_batch_fast"] - seconds["letters"]
    rival_merges = seconds["tiktoken"] - seconds["look-ups"]
    parts = {
        "search (tiktoken: and look-ups)": (seconds["search"], seconds["look-ups"]),
        "strings": (strings, 0.0),
        "letters": (letters, 0.0),
        "merges": (merges, rival_merges),
    }
    figure, axes = plt.subplots(figsize=(7, 2.4))
    done = np.zeros(2)
    told = []
    for (name, pair), colour in zip(parts.items(), COLOURS):
        share = np.array(pair) / seconds["encode_batch_fast"]
        axes.barh(PROGRAMS, share, left=done, color=colour, label=name)
        done += share
        told.append(f"{name} {share[0]:.0%} and {share[1]:.0%}")
    axes.set(xlabel="share of the time of encode_batch_fast")
    axes.xaxis.set_major_formatter("{x:.0%}")
    axes.invert_yaxis()
    axes.legend(loc="lower right", frameon=False)
    alt = "Two bars of parts, encode_batch_fast and tiktoken, in shares of the first one's"
    show_figure(figure, alt=f"{alt} time: {', '.join(told)}")
