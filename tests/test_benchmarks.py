"""`make bench`: its table is complete whatever fails, and says what was measured when."""

from __future__ import annotations

import json
import sys
from types import ModuleType

import pytest

from benchmarks import __main__ as bench
from benchmarks import packing, timing, tokenization
from utils.artifacts import sealed
from utils.errors import CourseError

KEYS = {"id", "what", "unit", "ours", "peers", "ratio", "bar", "holds", "measured"}


@pytest.fixture(autouse=True)
def build(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_BUILD", str(tmp_path))
    return tmp_path


def module_with(monkeypatch, name, **members):
    module = ModuleType(f"benchmarks.{name}")
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, module.__name__, module)


def good_row(id="good"):
    return timing.row(id, "a pass", "MB/s", 90, {"theirs": 30}, bar=2)


def test_a_part_that_fails_says_why_and_the_rest_goes_on(
    build, monkeypatch, capsys
):
    def half():
        yield good_row("before")
        raise CourseError("the store is missing", "build/tokens", "run lesson 08")

    def other():
        return [good_row("after")]

    module_with(monkeypatch, "one", PARTS=(half, other))
    module_with(
        monkeypatch,
        "two",
        rows=lambda: [timing.row("old", "x", "s", 1, {}, 2, False, "recorded")],
    )
    monkeypatch.setattr(
        bench, "choose_modules", lambda names: ["one", "two", "gone"]
    )
    assert bench.main([]) == 1
    rows = json.loads((build / "bench.json").read_text())
    assert [row["id"] for row in rows] == [
        "before",
        "one.half",
        "after",
        "old",
        "gone",
    ]
    assert all(set(row) >= KEYS for row in rows)
    assert "run lesson 08" in rows[1]["error"]
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 6
    assert "failed: CourseError: the store is missing" in table[2]
    assert table[4].endswith("recorded")
    assert "commit" in json.loads((build / "bench-machine.json").read_text())


def test_a_bar_that_is_not_reached_is_no_failure(monkeypatch, capsys):
    module_with(
        monkeypatch,
        "one",
        rows=lambda: [timing.row("slow", "x", "s", 1, {"theirs": 1}, 2)],
    )
    monkeypatch.setattr(bench, "choose_modules", lambda names: ["one"])
    assert bench.main([]) == 0
    assert "✘" in capsys.readouterr().out


def test_a_benchmark_that_is_not_there_is_named(capsys):
    assert bench.main(["tokenisation"]) == 1
    assert (
        "choose of corpus, inference, memory, muon, packing"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "ours,peers,bar,options,holds,text",
    [
        (20, {"a": 10, "b": 1}, 2, {}, True, ">= 2 x"),
        (19, {"a": 10, "b": 1}, 2, {}, False, ">= 2 x"),
        (19, {"a": 10}, 2, {"higher_is_better": False}, True, "<= 2 x"),
        (
            19,
            {"a": 10},
            20,
            {"higher_is_better": False, "bar_on": "ours"},
            True,
            "<= 20 MB",
        ),
        (21, {}, 20, {"higher_is_better": False}, False, "<= 20 MB"),
        (20, {"a": 1}, 2, {"valid": False}, False, ">= 2 x"),
    ],
)
def test_a_bar_bounds_the_ratio_to_the_first_peer_or_our_own_figure(
    ours, peers, bar, options, holds, text
):
    row = timing.row("id", "what", "MB", ours, peers, bar, **options)
    assert (row["holds"], row["bar"]) == (holds, text)


def test_works_take_turns_and_the_warm_up_is_not_counted():
    turns = []
    ticks = iter(range(100))
    works = [lambda: turns.append("a"), lambda: turns.append("b") or next(ticks)]
    seconds = timing.interleaved(
        *works, repeats=2, warm_up=1, clock=lambda: next(ticks)
    )
    assert "".join(turns) == "ababab"
    assert seconds == [1, 2]


def test_the_lessons_on_the_road_run_once_before_an_artifact_is_taken(
    build, monkeypatch
):
    folder = build / "artifacts" / "smoke"
    commands = []

    def pretend(command, **options):
        commands.append(command)
        with sealed(folder / "tokens", {"settings": {}, "inputs": {}}) as place:
            (place / "x").write_text("tokens")

    monkeypatch.setattr(timing.subprocess, "run", pretend)
    timing.artifact.cache_clear()
    assert timing.artifact("tokens") == folder / "tokens"
    assert timing.artifact("tokens") and len(commands) == 1
    assert commands[0][3:6] == ["run", "--only", "03,07,08"]
    with pytest.raises(
        CourseError, match=r"'pretrained' could not be made(.|\n)*ONLY=03,07,08,09"
    ):
        timing.artifact("pretrained")
    timing.artifact.cache_clear()


@pytest.mark.slow
def test_our_own_rows_at_a_small_size():
    (speed,) = packing.speed_rows(tokens=packing.SMALL // 50, repeats=1)
    (memory,) = packing.memory_rows(100_000, 200_000, repeats=1)
    (bulk,) = tokenization.encoding_rows(600, 200_000, 50_000)
    rows = [speed, memory, bulk, *tokenization.training_rows(600, 200_000, 50_000)]
    assert all(set(row) == KEYS and row["ours"] is not None for row in rows)
    assert memory["bar"] == "<= 20 MB"
    assert bulk["peers"]["tokenizer(list)"] > 0
