"""The board of the race: what it admits, what it refuses, and the recipes that come with it."""

from __future__ import annotations

import tomllib

import pytest
import torch
from race_small import BUDGET, RECIPE, corpus, entry, made, small  # noqa: F401

from benchmarks import __main__ as bench
from benchmarks import (
    pretraining,
    race,
    race_corpus,
    race_entry,
    race_train,
)
from course import checkout
from stages import race_recipe
from stages.recipe import Recipe
from utils.artifacts import read_json, write_json
from utils.errors import CourseError

# the board --------------------------------------------------------------------------------------


def rewrite(path, **changes):
    """The entry as the race would have written it with other facts."""
    facts = {**read_json(path), **changes}
    write_json(path, race_entry.seal_entry(facts))


def test_an_entry_is_added_best_first(entry, small):
    board = small.parent / "board.json"
    write_json(board, {"race": [1], "entries": []})
    race_entry.admit(entry, board)
    facts = read_json(entry)
    recipe = {**facts["recipe"], "rate": 0.5}
    mark = race_recipe.hash_recipe(recipe, "code")
    better = {"idea": "better", "test": 0.5, "recipe": recipe, "recipe_hash": mark}
    rewrite(entry, **better)
    race_entry.admit(entry, board)
    written = read_json(board)
    assert [row["idea"] for row in written["entries"]] == ["better", "mine"]
    assert written["race"] == [1], "what else is on the board stays"
    lines = race_entry.format_board(written).splitlines()
    assert len(lines) == 3 and lines[1].endswith("better")


def runs_with(path, **changes):
    first, second = read_json(path)["runs"]
    return [first, {**second, **changes}]


REFUSED = {
    "dirty": (lambda path: {"commit": "c0ffee-dirty"}, "nobody can check out"),
    "unknown": (lambda path: {"commit": "unknown"}, "nobody can check out"),
    "corpus": (lambda path: {"corpus": "0" * 64}, "ran on the corpus 000000000000"),
    "rules": (lambda path: {"rules": 0}, "under the rules 0"),
    "budget": (lambda path: {"budget": 2 * BUDGET}, "is no entry"),
    "over": (
        lambda path: {"runs": runs_with(path, cpu_seconds=BUDGET * 1.06)},
        "used 64 CPU seconds, over the 60",
    ),
    "one seed": (lambda path: {"runs": read_json(path)["runs"][:1]}, "seeds .42."),
    "a seed twice": (lambda path: {"runs": runs_with(path, seed=42)}, "42, 42"),
    "another seed": (lambda path: {"runs": runs_with(path, seed=7)}, "42, 7"),
    "no test": (lambda path: {"runs": runs_with(path, test=None)}, "no bits"),
    "recipe": (lambda path: {"recipe": {"rate": 1}}, "the one that its hash is of"),
    "nothing": (lambda path: {"runs": []}, "are wanted"),
    "a field": (lambda path: {"best": True}, "best of the entry"),
    "a kind": (lambda path: {"test": "low"}, "test of the entry"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_entry_is_refused_with_a_reason(kind, entry, small):
    board = small.parent / "board.json"
    change, reason = REFUSED[kind]
    rewrite(entry, **change(entry))
    with pytest.raises(CourseError, match=reason):
        race_entry.admit(entry, board)
    assert not board.exists()


def test_a_change_by_hand_is_noticed(entry, small):
    facts = read_json(entry)
    write_json(entry, {**facts, "test": facts["test"] - 0.1})
    with pytest.raises(CourseError, match="was changed after the race"):
        race_entry.admit(entry, small.parent / "board.json")


def test_within_the_last_step_the_budget_holds(entry, small):
    rewrite(entry, runs=runs_with(entry, cpu_seconds=BUDGET * 1.04))
    assert race_entry.admit(entry, small.parent / "board.json")


def test_one_recipe_and_one_name_are_entered_once(entry, small):
    board = small.parent / "board.json"
    race_entry.admit(entry, board)
    with pytest.raises(CourseError, match="on the board already, as 'mine'"):
        race_entry.admit(entry, board)
    recipe = {**read_json(entry)["recipe"], "rate": 0.5}
    mark = race_recipe.hash_recipe(recipe, "code")
    rewrite(entry, recipe=recipe, recipe_hash=mark)
    with pytest.raises(CourseError, match="an entry with the name 'mine'"):
        race_entry.admit(entry, board)


@pytest.mark.parametrize("content", [None, "", "{", "[]", "3"])
def test_what_is_no_file_of_an_entry_is_refused(tmp_path, content, capsys):
    path = tmp_path / "entry.json"
    if content is not None:
        path.write_text(content)
    assert bench.main(["board", str(path)]) == 1
    assert "next:" in capsys.readouterr().err


def test_the_committed_board_holds_what_the_rules_admit(capsys):
    assert bench.main(["board"]) == 0
    assert capsys.readouterr().out
    for row in race_entry.read_board()["entries"]:
        assert race_entry.why_not(race_entry.Entry(**row)) == ("", "")


def test_the_bars_are_held_to_the_best_entry(monkeypatch):
    bits = {"plain": {"xz": 2.0, "bzip2": 1.9}, "primed": {"xz": 1.7}}
    board = {
        "entries": [
            {"idea": "ours", "test": 1.32, "compressors": bits},
            {"idea": "classic, well set", "test": 1.5, "compressors": bits},
        ]
    }
    monkeypatch.setattr(race_entry, "read_board", lambda: board)
    rows = {row["id"]: row for row in pretraining.board_rows()}
    assert list(rows) == ["race-plain", "race-primed", "race-classic-well-set"]
    assert [row["holds"] for row in rows.values()] == [True, True, False]
    assert rows["race-plain"]["peers"] == {"bzip2": 1.9}
    assert {row["measured"] for row in rows.values()} == {"recorded"}
    board["entries"] = []
    assert list(pretraining.board_rows()) == []


# the recipes ------------------------------------------------------------------------------------

RUNGS = sorted(race.LADDER.glob("[0-9]*.toml"))
CHANGED = {
    "02": {"vocabulary", "pattern"},
    "03": {"n_embd", "n_head"},
    "04": {"resid_pdrop", "embd_pdrop", "attn_pdrop"},
    "05": {"precision"},
    "06": {"attention"},
    "07": {"rate"},
    "08": {"compile"},
    "09": {"schedule", "warmup"},
    "10": {"weight_decay"},
    "11": {"initializer_range"},
    "12": {"optimizer"},
    "13": {"rate"},
}


def flat(path):
    entrant = race_recipe.read_entrant(path)
    facts = entrant.facts()
    sizes = facts.pop("model")
    return {**facts, **sizes, "pattern": entrant.pattern}


def test_a_rung_of_the_ladder_changes_one_thing():
    assert len(RUNGS) == 14
    for below, path in zip(RUNGS, RUNGS[1:]):
        old, new = flat(below), flat(path)
        changed = {name for name in old | new if old.get(name) != new.get(name)}
        if path.name[:2] in CHANGED:
            assert changed == CHANGED[path.name[:2]], path.name
    assert changed >= {"model_type"} and not changed & set(Recipe.model_fields)


def test_the_ladder_leads_from_the_classic_recipe_to_ours():
    classic = race_recipe.read_entrant(race.LADDER.parent / "classic.toml").facts()
    first = race_recipe.read_entrant(RUNGS[0])
    assert first.facts() == {**classic, "vocabulary": 32_768}
    assert first.pattern == "gpt2"
    ours = race_recipe.read_entrant(race.LADDER.parent / "modern.toml").facts()
    last = race_recipe.read_entrant(RUNGS[-1]).facts()
    assert last == {**ours, "vocabulary": 4096}


def test_every_recipe_of_the_race_makes_a_model(small, corpus):
    ideas = set()
    tokenizer = race_corpus.tokenizers.train_bpe(corpus.splits["train"], 300)
    for path in race.LADDER.glob("*.toml"):
        entrant = race_recipe.read_entrant(path)
        ideas.add(entrant.idea)
        with torch.device("meta"):
            model = race_train.build_model(entrant.recipe, tokenizer)
        assert race_train.make_optimizers(model, entrant.recipe)
        assert tomllib.loads(path.read_text(encoding="utf-8"))["race"]["base"]
    assert len(ideas) == len(list(race.LADDER.glob("*.toml")))


@pytest.mark.parametrize(
    "text,reason",
    [
        ("[race]\nwidth = 3", "has no 'width'"),
        ('[race]\npattern = "mine"', "no pattern 'mine'"),
        ("rows = 0", "rows is 0"),
        ("rows =", "cannot be read"),
        ('[race]\nbase = "gone.toml"', "cannot be read"),
    ],
)
def test_a_recipe_that_is_none_is_refused(tmp_path, text, reason):
    path = tmp_path / "mine.toml"
    path.write_text(
        text if "[model]" in text else f"{text}\n[model]\nn_layer = 1\n"
    )
    with pytest.raises(CourseError, match=reason):
        race_recipe.read_entrant(path)


def test_auto_is_decided_and_written_down(small):
    recipe = race_recipe.read_entrant(small).recipe.change(precision="auto")
    assert race.decide_precision(recipe).precision in ("float32", "bfloat16")


def test_the_ladder_is_written_beside_the_entries(small, monkeypatch):
    board = small.parent / "board.json"
    ladder = small.parent / "ladder"
    ladder.mkdir()
    (ladder / "01_one.toml").write_text(RECIPE)
    (ladder / "02_two.toml").write_text('rate = 1e-3\n[race]\nbase = "01_one.toml"')
    monkeypatch.setattr(race, "LADDER", ladder)
    monkeypatch.setattr(race_entry, "BOARD", board)
    monkeypatch.setattr(race_entry.read_board, "__defaults__", (board,))
    monkeypatch.setattr(race, "commit", checkout.commit)
    race.climb(30)
    written = read_json(board)["ladder"]
    assert [rung["idea"] for rung in written["rungs"]] == ["01_one", "02_two"]
    assert all(
        run["test"] is None for rung in written["rungs"] for run in rung["runs"]
    )
