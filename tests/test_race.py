"""The race: a fixed text, a budget that nothing escapes, a test that is read once, a board."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from race_small import (  # noqa: F401
    BUDGET,
    RECIPE,
    Killed,
    Sealed,
    corpus,
    entry,
    made,
    small,
    start_run,
)

from benchmarks import __main__ as bench
from benchmarks import race, race_corpus, race_entry, race_train
from benchmarks import race_rules as rules
from stages import checkpoints, race_recipe
from stages.recipe import Recipe
from stages.tokens import Loader, open_store
from utils.artifacts import read_json, write_json
from utils.errors import CourseError

# the text ---------------------------------------------------------------------------------------


def test_the_packages_are_those_of_the_asset_and_none_is_in_two_splits():
    names = [name for group in rules.PACKAGES.values() for name in group]
    assert len(set(names)) == len(names) == 17
    assert (rules.BUDGET, rules.GRACE) == (1080, 0.01)
    assert rules.SEEDS == (42, 43)


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    packages = {"train": ("one",), "validation": ("two",), "test": ("three",)}
    monkeypatch.setattr(rules, "PACKAGES", packages)
    for name in ("one", "two", "three"):
        folder = tmp_path / "shelf" / name
        folder.mkdir(parents=True)
        (folder / "a.py").write_text(f"# {name}\n" * 300)
    return tmp_path / "shelf"


def test_a_changed_byte_a_moved_file_and_a_new_one_change_the_hash(shelf):
    before = race_corpus.read_corpus(shelf).hash
    assert race_corpus.read_corpus(shelf).hash == before
    hashes = {before}
    (shelf / "one" / "b.py").write_text("x = 1\n" * 300)
    hashes.add(race_corpus.read_corpus(shelf).hash)
    (shelf / "one" / "b.py").write_text("x = 2\n" * 300)
    hashes.add(race_corpus.read_corpus(shelf).hash)
    (shelf / "one" / "b.py").rename(shelf / "two" / "b.py")
    hashes.add(race_corpus.read_corpus(shelf).hash)
    assert len(hashes) == 4


def test_a_text_that_was_trained_on_is_not_judged(shelf):
    (shelf / "three" / "b.py").write_bytes((shelf / "one" / "a.py").read_bytes())
    splits = race_corpus.read_corpus(shelf).splits
    assert [len(splits[name]) for name in rules.PACKAGES] == [1, 1, 1]
    assert splits["test"] == ["# three\n" * 300]


def test_stubs_tables_and_what_is_no_text_take_no_part(shelf):
    (shelf / "one" / "b.py").write_text("x = 1")
    (shelf / "one" / "c.py").write_text("x = 1\n" * 100_000)
    (shelf / "one" / "d.py").write_bytes(b"\xff" * 5000)
    assert len(race_corpus.read_corpus(shelf).splits["train"]) == 1


def test_another_corpus_is_refused(shelf, monkeypatch):
    monkeypatch.setattr(race_corpus, "asset", lambda name: str(shelf))
    with pytest.raises(CourseError, match=r"not a7dfa26322d6(.|\n)*--again"):
        race_corpus.open_corpus()


def test_pieces_are_spread_over_all_texts_and_must_be_enough():
    texts = ["a" * 1000, "b" * 50, "c" * 1000]
    pieces = race_corpus.cut_pieces(texts, count=10, size=100)
    assert [piece[0] for piece in pieces] == ["a"] * 5 + ["c"] * 5
    assert {len(piece) for piece in pieces} == {100}
    with pytest.raises(CourseError, match="20 pieces of 100 characters, not 21"):
        race_corpus.cut_pieces(texts, count=21, size=100)


def test_a_compressor_reads_the_blocks_that_the_run_has_read(small, corpus):
    entrant = race_recipe.read_entrant(small)
    recipe = race_corpus.make_store(corpus, entrant.recipe, "code")
    tokenizer = race.AutoTokenizer.from_pretrained(recipe.tokenizer)
    split = open_store(Path(recipe.tokens), tokenizer)["train"]
    batches = iter(Loader(split, recipe.rows, 42))
    rows = torch.cat([next(batches) for _ in range(3)])[:, 1:]
    wanted = b"".join(race_corpus.spell(tokenizer, rows.numpy()))
    assert race_corpus.text_read(recipe, tokenizer, 42, 3) == wanted
    endless = race_corpus.text_read(recipe, tokenizer, 42, 10**6)
    size = sum(len(text.encode()) for text in corpus.splits["train"])
    # Every block once, however often the run has read it.
    assert 0.95 * size < len(endless) < 1.05 * size


def test_bits_per_byte_are_those_of_every_byte(small, corpus):
    """A model that finds all tokens equally likely needs log2 of their number for each."""
    entrant = race_recipe.read_entrant(small)
    recipe = race_corpus.make_store(corpus, entrant.recipe, "code")
    tokenizer = race.AutoTokenizer.from_pretrained(recipe.tokenizer)
    model = race_train.build_model(recipe, tokenizer)
    for weights in model.parameters():
        torch.nn.init.zeros_(weights)
    pieces = race_corpus.pieces_of(corpus, "validation")
    tokens = sum(len(tokenizer(piece)["input_ids"]) for piece in pieces)
    size = sum(len(piece.encode()) for piece in pieces)
    assert (
        max(len(tokenizer(piece)["input_ids"]) for piece in pieces) > recipe.block
    )
    wanted = tokens * torch.log2(torch.tensor(float(len(tokenizer)))) / size
    bits = race.bits_per_byte(model, tokenizer, pieces, recipe)
    assert bits == pytest.approx(float(wanted), rel=1e-5)


# the budget -------------------------------------------------------------------------------------

BURN = """
import subprocess, sys, time
if sys.argv[1] == "child":
    subprocess.run([sys.executable, "-c", sys.argv[2], "burn", ""], check=True)
while sys.argv[1] == "burn" and time.process_time() < 0.6:
    pass
if sys.argv[1] == "child":
    print("done", flush=True)
    sys.stdin.read()
"""


def test_processes_of_processes_count_while_they_live_and_when_they_are_done():
    before = race_train.own_seconds() + race_train.living_seconds()
    command = [sys.executable, "-c", BURN, "child", BURN]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as child:
        assert child.stdout.readline().strip() == b"done"
        # The one that burned has ended, and its parent lives.
        assert race_train.living_seconds() > 0.5
        assert race_train.own_seconds() + race_train.living_seconds() > before + 0.5
        child.stdin.close()
        child.wait()
    assert race_train.living_seconds() < 0.5
    assert race_train.own_seconds() > before + 0.5


def test_a_clock_counts_a_compiler_that_lives(monkeypatch):
    monkeypatch.setattr(race_train, "own_seconds", lambda: 10.0)
    monkeypatch.setattr(race_train, "living_seconds", lambda: 7.0)
    assert race_train.Clock(budget=100, before=5.0).spent() == 22.0


def test_the_rate_follows_the_clock_from_warming_up_to_its_end():
    recipe = Recipe(model={}, warmup=0.1, cooldown=0.5)
    clock = race_train.Clock(budget=110, used=10)
    shares = [clock.progress(spent) for spent in (10, 60, 110, 300)]
    assert shares == [0, 0.5, 1, 1]
    assert race_train.rate_at(recipe, 0.05) == pytest.approx(0.5, abs=1e-3)
    assert race_train.rate_at(recipe, 1.0) == pytest.approx(0, abs=1e-3)


def test_a_run_ends_with_its_budget_and_leaves_one_checkpoint(
    small, corpus, monkeypatch
):
    monkeypatch.setattr(race_train, "SAVE_EVERY", 10.0)
    racer, budget = start_run(small, corpus)
    result = race_train.train(racer, budget)
    assert budget <= result["cpu_seconds"] <= budget + 3
    assert result["steps"] > 20
    assert result["tokens"] == result["steps"] * 2 * 32
    assert len(checkpoints.list_checkpoints(racer.folder)) == 1


def test_compiling_is_paid_for_and_moves_no_weight(small, corpus):
    racer, _ = start_run(small, corpus)
    racer.resume()
    before = {
        name: value.clone() for name, value in racer.model.state_dict().items()
    }
    racer.compile()
    for name, value in racer.model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(weights.grad is None for weights in racer.model.parameters())


def test_a_killed_run_goes_on_with_the_seconds_it_had_used(
    small, corpus, monkeypatch
):
    monkeypatch.setattr(race_train, "SAVE_EVERY", 10.0)
    racer, budget = start_run(small, corpus)
    take = racer.take

    def killed(share):
        if racer.step == 30:
            raise Killed
        take(share)

    monkeypatch.setattr(racer, "take", killed)
    with pytest.raises(Killed):
        race_train.train(racer, budget)
    path = checkpoints.newest_checkpoint(racer.folder)
    saved = read_json(path / checkpoints.PROGRESS)
    assert 10 <= saved["step"] <= 30
    ticks = iter(range(999))
    monkeypatch.setattr(race_train, "own_seconds", lambda: next(ticks))
    again, _ = start_run(small, corpus)
    shares = []
    take_again = again.take
    monkeypatch.setattr(
        again, "take", lambda share: shares.append(again.step) or take_again(share)
    )
    result = race_train.train(again, budget)
    assert shares[0] == saved["step"]
    assert (result["turns"], result["carried"]) == (2, saved["cpu"])
    assert budget <= result["cpu_seconds"] <= budget + 3
    # A step of this clock takes a whole second, the last one too.
    left = math.ceil(budget - saved["cpu"])
    assert 0 < result["steps"] - saved["step"] <= left
    assert saved["share"] > 0.2


def test_a_run_whose_start_eats_the_budget_says_so(small, corpus):
    racer, _ = start_run(small, corpus)
    with pytest.raises(CourseError, match=r"before the first step(.|\n)*compile"):
        race_train.train(racer, 0.0)


def test_a_model_with_too_few_positions_is_refused(small, corpus):
    small.write_text(RECIPE.replace("block = 32", "block = 64"))
    with pytest.raises(CourseError, match="blocks have 64 tokens, the model 32"):
        start_run(small, corpus)


# the command ------------------------------------------------------------------------------------


def test_a_rehearsal_is_marked_and_reads_no_test_package(
    small, corpus, monkeypatch, capsys
):
    sealed = race_corpus.Corpus(Sealed(corpus.splits), corpus.hash)
    monkeypatch.setattr(race_corpus, "open_corpus", lambda: sealed)
    assert bench.main(["race", str(small), "--budget", "30"]) == 0
    said = capsys.readouterr().out
    assert "on validation, a rehearsal" in said
    facts = read_json(Path(said.splitlines()[-1]))
    assert (facts["rehearsal"], facts["test"]) == (True, None)
    assert [run["test"] for run in facts["runs"]] == [None, None]
    assert facts["judged_on"] == "validation"
    with pytest.raises(
        CourseError, match="a rehearsal of 30 CPU seconds is no entry"
    ):
        race_entry.admit(Path(said.splitlines()[-1]), small.parent / "board.json")


def test_a_rehearsal_of_the_full_budget_is_one_still(small):
    place = race.race(small, budget=BUDGET)
    with pytest.raises(CourseError, match="is no entry"):
        race_entry.admit(place, small.parent / "board.json")


def test_an_entry_names_all_that_it_takes_to_make_it_again(entry, small):
    facts = read_json(entry)
    assert facts["commit"] == "c0ffee"
    assert [run["seed"] for run in facts["runs"]] == list(rules.SEEDS)
    assert facts["test"] == pytest.approx(
        sum(run["test"] for run in facts["runs"]) / 2, abs=1e-4
    )
    assert facts["recipe"]["vocabulary"] == 300
    assert not set(facts["recipe"]) & race_recipe.DECIDED
    assert {"torch", "processor"} <= set(facts["machine"])
    assert set(facts["compressors"]) == {"plain", "primed"}
    assert str(small.parent) not in json.dumps(facts)
    two = [run["validation"] for run in facts["runs"]]
    assert two[0] != two[1], "two seeds are two runs"


def test_a_race_that_was_interrupted_takes_up_the_seed_that_is_done(
    small, monkeypatch
):
    trained = []
    real = race_train.train

    def once(racer, budget):
        trained.append(racer.recipe.seed)
        if trained == [42, 43]:
            raise Killed
        return real(racer, budget)

    monkeypatch.setattr(race_train, "train", once)
    with pytest.raises(Killed):
        race.race(small)
    place = race.race(small)
    assert trained == [42, 43, 43]
    assert [run["seed"] for run in read_json(place)["runs"]] == [42, 43]


def test_what_was_begun_on_another_commit_is_not_gone_on_with(small, monkeypatch):
    race.race(small)
    monkeypatch.setattr(race, "clean_commit", lambda: "0ddba11")
    with pytest.raises(CourseError, match="began with another commit: c0ffee"):
        race.race(small)


def test_an_entry_wants_a_clean_commit_before_it_begins(small, monkeypatch):
    def dirty():
        raise CourseError("a record is of a commit, and files have changed: x.py")

    monkeypatch.setattr(race, "clean_commit", dirty)
    assert bench.main(["race", str(small)]) == 1
    assert not (small.parent / "build" / "race").exists()


def test_each_run_compiles_from_nothing_and_counts_it(small, corpus, monkeypatch):
    seen = []

    def look(folder, env):
        place = Path(env["TORCHINDUCTOR_CACHE_DIR"])
        seen.append(place.exists())
        place.mkdir()
        result = {"cpu_seconds": 5.0, "carried": 0.0}
        write_json(folder / race_train.RESULT, result)
        return 0

    monkeypatch.setattr(race, "start_child", look)
    waited = iter([100.0, 140.0])
    monkeypatch.setattr(race, "waited_seconds", lambda: next(waited))
    folder = small.parent / "compiles"
    (folder / "compiled").mkdir(parents=True)
    recipe = race_recipe.read_entrant(small).recipe
    assert race.run_seed(recipe, folder, 10)["cpu_seconds"] == 40.0
    assert seen == [False]


def test_a_run_that_fails_is_no_result(small, monkeypatch, capsys):
    small.write_text(RECIPE.replace("block = 32", "block = 64"))
    assert bench.main(["race", str(small), "--budget", "30"]) == 1
    said = capsys.readouterr().err
    assert "the model 32 positions" in said
    assert "the run of seed 42 ended before its end" in said


@pytest.mark.parametrize("budget", ["0", "-5", "nan", "inf"])
def test_a_budget_that_is_none_is_refused(small, budget, capsys):
    assert bench.main(["race", str(small), f"--budget={budget}"]) == 1
    assert "CPU seconds is none" in capsys.readouterr().err


@pytest.mark.slow
def test_a_real_rehearsal_in_its_own_process(tmp_path, monkeypatch, corpus):
    monkeypatch.setenv("COURSE_BUILD", str(tmp_path))
    monkeypatch.setattr(race_corpus, "open_corpus", lambda: corpus)
    monkeypatch.setattr(rules, "PIECES", 4)
    path = tmp_path / "mine.toml"
    path.write_text(RECIPE)
    facts = read_json(race.race(path, budget=20))
    assert [run["cpu_seconds"] >= 20 for run in facts["runs"]] == [True, True]
