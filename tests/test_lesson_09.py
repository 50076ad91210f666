"""The pieces of lesson 09 in its own cells: as they are, and with one line broken.

As they are, they equal the library's. Broken, the lesson's own asserts must refuse them. What the
lesson reads from results/ it can read with every record and with none.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lesson_cells
import pytest
import torch
from matplotlib import pyplot as plt
from small_runs import BLOCK, inputs, small_recipe  # noqa: F401
from transformers import AutoTokenizer

from benchmarks.race_entry import RunFacts
from stages.tokens import Loader, open_store

PIECES = "small ex1-check muon-hand muon-equal"


class Quiet:
    """A lesson that takes everything and keeps the figures."""

    profile = SimpleNamespace(name="smoke")
    device = SimpleNamespace(value="cpu")
    threads = SimpleNamespace(value=1)

    def __init__(self) -> None:
        self.figures: dict[str, float] = {}

    def pick(self, **sizes: Any) -> Any:
        return sizes["smoke"]

    def record(self, name: str, value: float, *rest: Any) -> None:
        self.figures[name] = value

    def exercise(self, name: str) -> Any:
        return lambda check: check


@pytest.fixture(scope="module")
def ground(
    inputs: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What the lesson has before its third section, of a small store."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("ground")
    modern = small_recipe(inputs, folder).change(
        optimizer="muon", model={"bos_token_id": 0}
    )
    tokenizer = AutoTokenizer.from_pretrained(inputs / "tokenizer")
    store = open_store(inputs / "tokens", tokenizer)
    names: dict[str, Any] = {"lesson": Quiet(), "SEED": 42, "block": BLOCK}
    names |= {"modern": modern, "tokenizer": tokenizer, "V": len(tokenizer)}
    names |= {"train_rows": store["train"], "validation": store["validation"]}
    names |= {"rows": next(iter(Loader(store["train"], 8, 42)))}
    names |= {
        "scratch": folder,
        "show_figure": lambda figure, alt: plt.close(figure),
    }
    names |= {
        "show_table": lambda rows, align="": names["shown"].append(list(rows))
    }
    names["shown"] = []
    return names


def run(
    wanted: str, names: dict[str, Any], **broken: tuple[str, str]
) -> dict[str, Any]:
    """Run cells, some with a text replaced; imports of the lesson do not hide what is given."""
    given = dict(names)
    exec(lesson_cells.imports("09"), given)
    given |= names
    for name in wanted.split():
        source = lesson_cells.cell("09", name)
        if name.replace("-", "_") in broken:
            find, put = broken[name.replace("-", "_")]
            if source.count(find) != 1:
                raise LookupError(f"{find!r} is not once in {name}")
            source = source.replace(find, put)
        exec(source, given)
    return given


# the pieces -------------------------------------------------------------------------------------


def test_the_pieces_are_the_librarys(ground: dict[str, Any]) -> None:
    run(f"{PIECES} muon-figure accumulate-hand accumulate-run clip-hand", ground)


@pytest.mark.parametrize(
    "find, put",
    [
        ("3.4445", "3.0"),
        ("range(5)", "range(4)"),
        ("0.05 * gradient + 0.95 * mean", "mean"),
        ("* max(1, weight.shape[0] / weight.shape[1])**0.5", ""),
        ("0.95 * state.get", "0.9 * state.get"),
        (" / wide.norm()", ""),
    ],
)
def test_another_muon_is_refused(
    ground: dict[str, Any], find: str, put: str
) -> None:
    with pytest.raises(AssertionError, match="three digits"):
        run(PIECES, ground, muon_hand=(find, put))


@pytest.mark.parametrize(
    "find, put",
    [(" / len(pieces)", ""), ("loss.backward()", "(loss * 0.99).backward()")],
)
def test_another_accumulation_is_refused(
    ground: dict[str, Any], find: str, put: str
) -> None:
    cells = f"{PIECES} muon-figure accumulate-hand accumulate-run"
    if "0.99" in put:
        # Both sides change alike: only the sum over pieces is the cell's business.
        put = "(loss * (1 if len(pieces) == 1 else 0.99)).backward()"
    with pytest.raises(AssertionError):
        run(cells, ground, accumulate_hand=(find, put))


@pytest.mark.parametrize(
    "find, put",
    [
        (
            "[g.norm() for g in gradients]",
            "[g.norm() for g in gradients[1:]]",
        ),
        ("limit / (norm + 1e-6)", "limit"),
        ("gradient *= ", "gradient = gradient * "),
    ],
)
def test_another_clipping_is_refused(
    ground: dict[str, Any], find: str, put: str
) -> None:
    cells = f"{PIECES} muon-figure accumulate-hand accumulate-run clip-hand"
    with pytest.raises(AssertionError):
        run(cells, ground, clip_hand=(find, put))


def test_one_batch_is_overfitted_by_the_sound_loop_alone(
    ground: dict[str, Any],
) -> None:
    names = run("small overfit overfit-run", ground)
    ends = {name: losses[-1] for name, losses in names["curves"].items()}
    assert min(ends, key=ends.__getitem__) == "the loop as it is"
    for find, put in (
        ("optimizer.step()", ""),
        ('if spoil != "gradients', 'if spoil == "gradients'),
    ):
        with pytest.raises(AssertionError, match="memorize"):
            run("small overfit overfit-run", ground, overfit=(find, put))


# the loop ---------------------------------------------------------------------------------------

LOOP = "small accumulate-hand clip-hand take-step train"


def by_hand(ground: dict[str, Any], **broken: tuple[str, str]) -> list[float]:
    names = run(
        f"{PIECES} muon-figure accumulate-hand accumulate-run clip-hand", ground
    )
    wanted = "take-step train"
    plan = names["small"].change(steps=6)
    names = run(wanted, {**names, "small": plan}, **broken)
    return names["train"](plan)[1]


def test_the_loop_by_hand_is_that_of_the_engine(ground: dict[str, Any]) -> None:
    from stages.processes import read_log
    from stages.training import pretrain

    plan = run("small", ground)["small"].change(
        steps=6, folder=str(ground["scratch"] / "engine"), evaluate_rows=4
    )
    pretrain(plan)
    engine = [line["loss"] for line in read_log(plan)]
    assert by_hand(ground) == pytest.approx(engine, abs=1e-3)
    for broken in (
        {"take_step": ("share * group", "group")},
        {"take_step": ("optimizer.zero_grad()", "pass")},
        {"train": ("recipe.rows, recipe.seed", "recipe.rows, recipe.seed + 1")},
    ):
        assert by_hand(ground, **broken) != pytest.approx(engine, abs=1e-3)


# what is read and what is judged ------------------------------------------------------------------


@pytest.mark.parametrize("bend, verdict", [(0.0, "holds"), (1.0, "fails")])
def test_a_power_law_is_judged(
    ground: dict[str, Any], bend: float, verdict: str, capsys: pytest.CaptureFixture
) -> None:
    sizes = [1e5, 2e5, 4e5, 8e5]
    means = [10 * size**-0.1 for size in sizes]
    means[-1] += bend * (0.98 * means[-2] - means[-1])
    found = [[mean - 0.01, mean + 0.01] for mean in means]
    run("power-fit", {**ground, "sizes": sizes, "found": found})
    assert f"The line {verdict}" in capsys.readouterr().out
    error = ground["lesson"].figures[
        "error of the power law over that of no change"
    ]
    assert (error > 1) == (verdict == "fails") and not math.isnan(error)


def a_run(bits: float) -> dict[str, Any]:
    """A run as the race writes it."""
    facts = dict.fromkeys(RunFacts.model_fields, 1)
    facts |= {"validation": bits, "test": bits, "tokens_per_second": 5000.4}
    return RunFacts(**facts).model_dump()


def test_the_ladder_is_shown_with_its_records_and_without(
    ground: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    names = {**ground, "ROOT": tmp_path, "Path": Path, "json": json}
    board = tmp_path / "results" / "leaderboard.json"
    board.parent.mkdir()
    board.write_text("{}", encoding="utf-8")
    run("ladder", names)
    said = capsys.readouterr().out
    assert (
        "python -m benchmarks ladder" in said
        and "python -m benchmarks race" in said
    )
    runs = [a_run(1.5), a_run(1.75)]
    rungs = [{"idea": "classic", "validation": 1.625, "runs": runs}]
    bits = {"plain": {"xz -9e": 1.9, "bzip2 -9": 1.8}, "primed": {"xz -9e": 1.6}}
    entry = {"idea": "modern", "test": 1.4, "runs": runs, "compressors": bits}
    facts = {"ladder": {"rungs": rungs}, "entries": [entry]}
    board.write_text(json.dumps(facts), encoding="utf-8")
    ground["shown"].clear()
    run("ladder", names)
    assert capsys.readouterr().out == ""
    (ladder,), (entry,) = ground["shown"]
    assert ladder["seeds apart"] == "0.250" and ladder["tokens/s"] == "5,000"
    assert (entry["test"], entry["plain"], entry["primed"]) == (
        "1.400",
        "1.800",
        "1.600",
    )


def test_longer_runs_are_shown_where_they_are_recorded(
    ground: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    names = {**ground, "ROOT": tmp_path, "json": json}
    (tmp_path / "results").mkdir()
    run("longer", names)
    assert capsys.readouterr().out == ""
    facts = {
        "machine": {"processor": "a processor", "gpu": "none"},
        "validation": [{"step": 9000, "bits_per_byte": 1.25}],
        "samples": [{"step": 9000, "samples": ["import os"]}],
    }
    path = tmp_path / "results" / "pretraining-hour.json"
    path.write_text(json.dumps(facts), encoding="utf-8")
    run("longer", names)
    said = capsys.readouterr().out
    assert "1.250 bits per byte" in said and "import os" in said


@pytest.mark.parametrize(
    "text, verdict",
    [
        ("def f(x):\n    x = g(x)\n    y = (", (True, True)),
        ('def f(x):\n    print(x)\n    """never closed\n    y', (True, True)),
        # what stands only in the line that is not judged, in a string or a comment, a comparison
        ("def f(x):\n    return x\n    y = (", (True, False)),
        ('def f(x):\n    """x = g(x)\n    y', (True, False)),
        ("def f(x):\n    # x = g(x)\n    return x == 1\n", (True, False)),
        ("def f(x):\n    def g(self, x):\n        return x\n", (True, False)),
        # nor what the header has
        ("def f(x=g()):\n    return x\n", (True, False)),
        ("def f(x):\n    return )\n    y = g()", (False, False)),
        ("def f(x):\nreturn x\nz", (False, False)),
        ("def f(x):\n", (False, False)),
    ],
)
def test_the_parser_judges_all_lines_but_the_last(
    ground: dict[str, Any], text: str, verdict: tuple[bool, bool]
) -> None:
    names = run("could-be", ground)
    assert names["judge"](text) == verdict


def test_a_body_ends_at_the_margin(ground: dict[str, Any]) -> None:
    first_block = run("could-be", ground)["first_block"]
    head = "def f(x):\n"
    text = head + "    return x\n\n    # more\ndef g():\n    pass\n"
    assert first_block(text, head) == head + "    return x\n\n    # more\n"


@pytest.mark.parametrize(
    "written, verdict",
    [
        # a line that was finished is judged, though the next one stands at the margin
        ("what = = )\nis", (False, False)),
        ("    return )\nx", (False, False)),
        ("    return g(x)\nx", (True, True)),
        # a body that never ends a line shows nothing
        ("what = = )", (False, False)),
    ],
)
def test_a_finished_line_before_the_margin_is_judged(
    ground: dict[str, Any], written: str, verdict: tuple[bool, bool]
) -> None:
    names = run("could-be", ground)
    head = "def f(x):\n"
    block = names["first_block"](head + written, head)
    assert names["judge"](block) == verdict
