"""A race of seconds, for the tests of the race: a small text, a small model, a clock that ticks."""

from __future__ import annotations

import pytest

from benchmarks import race, race_corpus, race_train
from benchmarks import race_rules as rules
from stages import race_recipe
from utils.artifacts import read_json, write_json
from utils.errors import ROOT

BUDGET = 60.0
RECIPE = """
vocabulary = 300
block = 32
rows = 2
precision = "float32"
[model]
model_type = "nanochat"
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 1
num_attention_heads = 1
max_position_embeddings = 32
tie_word_embeddings = true
final_logit_softcapping = "none"
"""


class Killed(BaseException):
    """What nobody may catch."""


class Sealed(dict):
    """The splits of a corpus, of which `test` may not be opened."""

    def __getitem__(self, name):
        assert name != "test", "the test packages were read"
        return super().__getitem__(name)


@pytest.fixture(scope="module")
def corpus():
    paths = sorted((ROOT / "utils").glob("*.py"))
    texts = [path.read_text(encoding="utf-8") for path in paths]
    splits = {"train": texts[4:], "validation": texts[:2], "test": texts[2:4]}
    return race_corpus.Corpus(splits, rules.CORPUS)


@pytest.fixture
def small(tmp_path, monkeypatch, corpus):
    """A race of seconds: a small text, a small model, and a clock that ticks when it is asked."""
    monkeypatch.setenv("COURSE_BUILD", str(tmp_path / "build"))
    monkeypatch.setattr(rules, "PIECES", 6)
    monkeypatch.setattr(rules, "PIECE", 100)
    monkeypatch.setattr(rules, "BUDGET", BUDGET)
    # A tick is a second here, so that the last step is not within one in a hundred.
    monkeypatch.setattr(rules, "GRACE", 0.05)
    monkeypatch.setattr(race_corpus, "open_corpus", lambda: corpus)
    monkeypatch.setattr(race, "clean_commit", lambda: "c0ffee")
    ticks = iter(range(10**6))
    monkeypatch.setattr(race_train, "own_seconds", lambda: next(ticks) - start[0])
    start = [0]

    def in_place(folder, env):
        """Each run begins its own clock, as each process does."""
        start[0] += race_train.own_seconds()
        return race_train.main(str(folder))

    monkeypatch.setattr(race, "start_child", in_place)
    path = tmp_path / "mine.toml"
    path.write_text(RECIPE)
    return path


@pytest.fixture(scope="module")
def made():
    """What was made already."""
    return {}


@pytest.fixture
def entry(small, made):
    """The entry of a whole race, which is run once."""
    if not made:
        made.update(read_json(race.race(small)))
    path = small.parent / "entry.json"
    write_json(path, made)
    return path


def start_run(small, corpus, budget=BUDGET):
    entrant = race_recipe.read_entrant(small)
    recipe = race_corpus.make_store(corpus, entrant.recipe, "code")
    folder = small.parent / "run"
    folder.mkdir(exist_ok=True)
    return race_train.Racer(recipe, folder), budget
