"""What lesson 13 builds by hand does what its prose says, and its own checks can fail."""

from __future__ import annotations

from typing import Any

import lesson_cells
import numpy as np
import pandas as pd
import pytest


def run(wanted: str, **names: Any) -> dict[str, Any]:
    return lesson_cells.run_cells("13", wanted, names)


def test_the_rule_takes_the_lowest_mean() -> None:
    choose = run("choose")["choose"]
    assert (
        choose({1e-5: [0.69, 0.70], 1e-4: [0.50, 0.51], 1e-3: [0.60, 0.61]}) == 1e-4
    )


def test_the_rule_prefers_the_smaller_rate_within_one_standard_error() -> None:
    choose = run("choose")["choose"]
    near = {1e-5: [0.53, 0.53], 1e-4: [0.45, 0.55], 1e-3: [0.60, 0.61]}
    assert choose(near) == 1e-5
    near[1e-5] = [0.58, 0.58]
    assert choose(near) == 1e-4


def test_the_search_finds_rows_that_hold_a_key_and_each_of_them() -> None:
    names = {
        "shelf": "abcd\nxyz\nzabc",
        "sst2": pd.DataFrame({"key": ["abc", "q"]}),
        "near": pd.Series([True, False]),
        "movies": pd.DataFrame({"key": ["abcd", "xyz", "zabc"]}),
    }
    names["lesson"] = type("L", (), {"record": lambda self, name, value: None})()
    found = run("remove", **names)
    assert found["leaks"] == [0, 2]
    assert list(found["cleaned"].key) == ["xyz"]


def drawn(hits: np.ndarray) -> np.ndarray:
    code = lesson_cells.cell("13", "hand").split("hits = np.array")[0]
    names: dict[str, Any] = {"np": np, "SEED": 42}
    exec(code, names)
    return names["draws"](hits)


def test_draws_hold_the_sentences() -> None:
    hits = np.random.default_rng(0).random((1, 400)) < 0.8
    spread = drawn(hits).std()
    assert spread == pytest.approx(np.sqrt(0.8 * 0.2 / 400), rel=0.1)


def test_draws_hold_the_seeds_too() -> None:
    rows = np.ones((2, 100), dtype=bool)
    rows[1] = False
    assert drawn(rows).std() == pytest.approx(0.5 / np.sqrt(2), rel=0.05)


TOYS = "tiny toy-train curve weighted weighted-2"


@pytest.fixture
def toys(tmp_path) -> dict[str, Any]:
    from datasets import Dataset

    places = (str(tmp_path / str(number)) for number in range(99))
    names: dict[str, Any] = {"SEED": 42, "places": places, "Dataset": Dataset}
    names["lesson"] = type("L", (), {"record": lambda self, name, value: None})()
    code = lesson_cells.cell("13", "pad")
    exec(code, names)
    return names


def test_a_loss_of_ones_is_the_built_in_one(toys) -> None:
    run(f"{TOYS} toy-equal", **toys)


@pytest.mark.parametrize(
    "right, wrong",
    [
        ('reduction="sum"', 'reduction="mean"'),
        ("(num_items_in_batch or len(labels))", "2"),
    ],
)
def test_a_wrong_loss_is_noticed(toys, monkeypatch, right, wrong) -> None:
    cell = lesson_cells.cell

    def changed(lesson: str, name: str) -> str:
        source = cell(lesson, name)
        if name == "weighted-2":
            assert source.count(right) == 1
            return source.replace(right, wrong)
        return source

    monkeypatch.setattr(lesson_cells, "cell", changed)
    with pytest.raises(AssertionError):
        run(f"{TOYS} toy-equal", **toys)
