"""Each program of stages/encoding_time.py does the part that its name says, and no more."""

from __future__ import annotations

import pytest
import regex
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

from stages import encoding_time
from stages.encoding_time import draw_parts, without_bpe, without_merges
from stages.tokenizer import PATTERNS, blank_tokenizer
from utils.errors import ROOT

CODE = PATTERNS["code"]
ODD = "def f(x):\n\n    return x  # é 밥\r\n\t\u2028 \x0b  "
TEXTS = [ODD, (ROOT / "utils" / "show.py").read_text(encoding="utf-8")]
PIECES = [len(regex.findall(CODE, text)) for text in TEXTS]


def counts(work: encoding_time.Work) -> list[int]:
    return [len(ids) for ids in work()]


def test_a_search_alone_makes_no_pre_token() -> None:
    assert counts(without_bpe(TEXTS, Split(Regex(CODE), "removed"))) == [0, 0]


def test_each_pre_token_is_looked_up_once() -> None:
    letters = blank_tokenizer(CODE).backend_tokenizer.pre_tokenizer
    cut = Split(Regex(CODE), "isolated")
    assert counts(without_bpe(TEXTS, cut)) == PIECES
    assert counts(without_bpe(TEXTS, letters)) == PIECES
    assert counts(without_merges(TEXTS, CODE)) == PIECES


def test_the_look_ahead_of_lesson_07_changes_no_cut() -> None:
    ahead = CODE + r"(?!\S)|\s+"
    assert without_merges(TEXTS, ahead)() == without_merges(TEXTS, CODE)()


def test_the_parts_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    monkeypatch.setattr(
        encoding_time, "show_figure", lambda figure, alt: told.append(alt)
    )
    library = {"search": 2.0, "strings": 5.0, "letters": 8.0}
    rival = {"look-ups": 1.0, "tiktoken": 1.5, "encode_batch_fast": 10.0}
    draw_parts({**library, **rival})
    shares = "search (tiktoken: and look-ups) 20% and 10%, strings 30% and 0%, letters 30% and 0%"
    assert told[0].endswith(f"{shares}, merges 20% and 5%")
