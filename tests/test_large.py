"""One command makes a large model; here it is rehearsed, interrupted, and given wrong things."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from stages import corpus, large, large_data, large_figures, sources
from stages.recipe import Recipe
from stages.tokenizer import train_bpe
from stages.tokens import open_store, write_store
from tests.conftest import POSIX
from utils.artifacts import sealed
from utils.errors import ROOT, CourseError

TEXTS = [
    path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "utils").glob("*.py"))
]
FORECAST = ((1e9, 2e9), (2e8, 5e8), large_figures.MACHINES["H100"])


def command(folder, *changes):
    rehearsal = ["gpt2-110m", "--rehearse", "--folder", str(folder), *changes]
    return [sys.executable, "-m", "stages.large", *rehearsal]


def start(folder, **options):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(
        command(folder, "steps=12"), cwd=ROOT, env=environment, **pipes, **options
    )


# the whole ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    """A rehearsal killed behind its tokenizer, and what the same command then says: twice."""
    folder = tmp_path_factory.mktemp("large") / "run"
    first = ""
    with start(folder) as child:
        for line in child.stdout:
            first += line
            if line.startswith("tokens: making it"):
                child.kill()
    assert (folder / "tokenizer" / "manifest.json").exists(), first
    corpus_made = (folder / "corpus" / "manifest.json").stat().st_mtime_ns
    texts = []
    for _ in range(2):
        with start(folder) as child:
            texts.append(child.communicate()[0])
        assert child.returncode == 0, texts[-1]
    assert (folder / "corpus" / "manifest.json").stat().st_mtime_ns == corpus_made
    return folder, first, texts


@POSIX
@pytest.mark.slow
def test_it_goes_on_where_it_was_killed(rehearsal):
    folder, first, (second, third) = rehearsal
    assert "tokenizer: making it" in first
    assert "training:" not in first
    for name in ("corpus", "tokenizer"):
        assert f"{name}: there and whole" in second
    assert "evaluation: making it" in second
    for name in ("corpus", "tokenizer", "tokens", "evaluation"):
        assert f"{name}: there and whole" in third
    steps = list(large_figures.log_lines(folder / "training", "step"))
    assert [line["step"] for line in steps] == list(range(1, 13))


@POSIX
@pytest.mark.slow
def test_it_says_before_what_the_report_says_after(rehearsal):
    folder, first, _ = rehearsal
    for word in (
        "model",
        "text",
        "tokens",
        "steps",
        "hours",
        "disk",
        "memory",
        "loss",
    ):
        assert f"\n{word} " in first
    report = (folder / "report.md").read_text()
    rows = [line.split("|")[1:4] for line in report.splitlines() if "|" in line]
    came = {what.strip(): (before, after) for what, before, after in rows[2:]}
    judged = json.loads((folder / "evaluation" / "evaluation.json").read_text())
    assert float(came["bits per byte"][1]) == round(judged["bits per byte"], 3)
    assert 1 < judged["bits per byte"] < 9 and judged["loss"] < 6.5
    store = open_store(folder / "tokens")["train"]
    low, high = map(float, came["tokens, M"][0].split(" to "))
    assert low < store.tokens / 1e6 < high
    assert came["steps"][1].strip() == "12"
    assert store.header["vocabulary"] == 512 and store.header["block"] == 64


@POSIX
@pytest.mark.slow
@pytest.mark.parametrize(
    "changes,words",
    [
        (
            ["vocabulary=600"],
            "tokenizer cannot be used: it was made with vocabulary 512",
        ),
        (["block=32"], "tokens cannot be used: it was made with block 64, not 32"),
    ],
)
def test_what_is_there_and_something_else_is_refused(
    rehearsal, changes, words, capsys
):
    arguments = command(rehearsal[0], *changes)[3:]
    assert large.main(arguments) == 1
    error = capsys.readouterr().err
    assert words in error
    assert f"this goes on: python -m stages.large {' '.join(arguments)}" in error


@POSIX
@pytest.mark.slow
def test_a_damaged_result_is_named(rehearsal, tmp_path, capsys):
    shutil.copytree(rehearsal[0], tmp_path / "run")
    with next((tmp_path / "run" / "corpus").glob("train-*.parquet")).open(
        "ab"
    ) as file:
        file.write(b"x")
    assert large.main(command(tmp_path / "run")[3:]) == 1
    assert (
        "corpus cannot be used: train-00000.parquet has changed"
        in capsys.readouterr().err
    )


# what it is given --------------------------------------------------------------------------------


def own_store(folder, vocabulary, block):
    tokenizer = train_bpe(TEXTS, vocabulary)
    tokenizer.save_pretrained(folder / "tokenizer")
    with sealed(folder / "tokens", {}) as aside:
        splits = {"train": TEXTS, "validation": TEXTS[:2], "test": TEXTS[2:4]}
        write_store(aside, splits, tokenizer, block)
    return [f"tokens={folder / 'tokens'}", f"tokenizer={folder / 'tokenizer'}"]


@pytest.mark.parametrize("vocabulary,block", [(512, 32), (520, 64)])
def test_a_store_that_does_not_fit_the_recipe_is_refused(
    tmp_path, vocabulary, block, capsys
):
    own = own_store(tmp_path, vocabulary, block)
    arguments = command(tmp_path / "run", *own)[3:]
    assert large.main(arguments) == 1
    name, here = ("block", "32") if block == 32 else ("vocabulary", "520")
    assert f"tokens, here it is {here}" in (error := capsys.readouterr().err)
    assert f"wants a {name} of" in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["gpt2-110"], "did you mean 'gpt2-110m'?"),
        (["classic", "--plan"], "names no vocabulary and no block"),
        (["gpt2-110m"], "there is no GPU here"),
        (["gpt2-110m", "--plan", "--card", "abacus"], "does not know abacus"),
        (["gpt2-110m", "tokens=here"], "tokenizer=FOLDER"),
        (["gpt2-110m", "stepps=3"], "did you mean 'steps'?"),
        (
            ["gpt2-110m", "--packages", "nowhere.txt"],
            "list of packages cannot be read",
        ),
    ],
)
def test_bad_input_is_told_plainly(arguments, words, monkeypatch, capsys):
    monkeypatch.setattr(large, "count_cards", lambda: 0)
    assert large.main(arguments) == 1
    error = capsys.readouterr().err
    assert words in error and "Traceback" not in error


def test_a_disk_that_is_too_small_is_refused_before_anything_is_done(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(
        large.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 8, 1)
    )
    assert large.main(command(tmp_path / "run")[3:]) == 1
    assert "GB at least are needed" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_step_that_fails_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    """The name of the second package is none; the first is kept."""
    monkeypatch.setattr(large, "count_cards", lambda: 1)
    monkeypatch.setattr(sources, "fetch_wheel", small_wheel(sources.fetch_wheel))
    names = tmp_path / "names.txt"
    names.write_text("# ours\nsmall==1.0\n../evil\n")
    arguments = ["gpt2-110m", "--packages", str(names), "--card", "H100"]
    arguments += ["--folder", str(tmp_path / "run")]
    assert large.main(arguments) == 1
    said = capsys.readouterr()
    assert "'../evil' is not the name of a project" in said.err
    assert f"this goes on: python -m stages.large {' '.join(arguments)}" in said.err
    names.write_text("small==1.0\n")
    large.main(arguments)
    assert "sources/small: there and whole" in capsys.readouterr().out


def small_wheel(real):
    """In place of pip: a wheel of one package; what is no name goes to the real function."""

    def fetch(project, folder):
        if not project.startswith("small"):
            return real(project, folder)
        path = folder / "small-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("small/one.py", TEXTS[0])
            file.writestr(
                "small-1.0.dist-info/METADATA", "Name: small\nLicense: MIT\n"
            )
        return path

    return fetch


def test_fetched_sources_become_trees_with_their_licences(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "fetch_wheel", small_wheel(None))
    recipe = large.load_recipe("gpt2-110m", True, {})
    job = large_data.Job("x", recipe, "packages", ["small==1.0"], tmp_path, "")
    (step, *_) = large.data_steps(job)
    large.take(job, step)
    (tree,) = large_data.fetched_trees(job)
    assert (tree.package, tree.licence, tree.paths) == (
        "small",
        "MIT",
        ["small/one.py"],
    )
    assert not list(tmp_path.rglob("*.whl"))


def test_rows_of_the_hub_have_the_columns_of_a_corpus(tmp_path):
    facts = {
        "path": "a/b.py",
        "copies": "3",
        "size": "9",
        "hash": "-12",
        "line_max": 5,
    }
    rows = [
        {
            **facts,
            "repo_name": f"Owner{number}/it",
            "content": text,
            "license": "mit",
        }
        for number, text in enumerate(TEXTS)
    ]
    rows[1]["license"] = "gpl-3.0"
    made = list(large_data.hub_rows(rows))
    assert set(made[0]) == set(corpus.CORPUS)
    report = corpus.build_from_rows(iter(made), tmp_path)
    assert report["reasons"]["licence"] == 1 and report["kept"] > 5


# what it says ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2-110m", "gpt2-1.5b"])
def test_a_rehearsal_is_about_a_thousandth_in_steps_and_weights(name):
    recipe = large.load_recipe(name, False, {})
    small = large.load_recipe(name, True, {})
    assert recipe.steps / small.steps == 1000
    weights = [large_figures.count_parameters(one) for one in (recipe, small)]
    assert 700 < weights[0] / weights[1] < 1400
    assert small.micro == small.rows and small.save_every < small.steps


@pytest.mark.parametrize(
    "path", sorted(large.RECIPES.glob("*.toml")), ids=lambda p: p.stem
)
def test_a_written_recipe_is_the_recipe(path, tmp_path):
    recipe = Recipe.load(path, prompts=['a "b"\n', "ü"])
    assert Recipe.load(large.write_recipe(recipe, tmp_path / "r.toml")) == recipe


def test_less_text_means_fewer_steps_and_never_none():
    recipe = large.load_recipe("gpt2-110m", False, {})
    row = recipe.rows * 1024
    assert large_figures.steps_of(recipe, 1e13) == 50_000
    assert large_figures.steps_of(recipe, 100 * row) == 400
    assert large_figures.steps_of(recipe, 10) == 1


def test_a_forecast_by_hand():
    """The 110 M recipe on one H100, with so much text that all steps are taken."""
    recipe = large.load_recipe("gpt2-110m", False, {})
    text, tokens, machine = (4e10, 4e10), (1e10, 1e10), FORECAST[2]
    known = large_figures.forecast(recipe, text, tokens, machine, 1)
    assert known.steps == (50_000, 50_000)
    work = (6 * known.parameters + 12 * 12 * 768 * 1024) * 50_000 * 192 * 1024
    assert known.hours[0] == pytest.approx(work / (989e12 * 0.29) / 3600)
    assert known.hours[1] == pytest.approx(work / (989e12 * 0.08) / 3600)
    disk = 3 * 4e10 + 2 * 1e10 / 0.9 + 4 * 12 * known.parameters
    assert known.disk[0] == pytest.approx(disk)
    two = large_figures.forecast(recipe, text, tokens, machine, 2)
    assert two.hours[0] == pytest.approx(known.hours[0] / 2)


@pytest.mark.parametrize("name,cards", [("gpt2-110m", 1), ("gpt2-1.5b", 8)])
def test_the_page_says_what_the_plan_says_of_disk_and_memory(name, cards):
    recipe = large.load_recipe(name, False, {})
    source = large_figures.text_of("codeparrot-clean", recipe.vocabulary)
    known = large_figures.forecast(recipe, *source, FORECAST[2], cards)
    page = (ROOT / "launch" / "README.md").read_text(encoding="utf-8")
    (line,) = [
        line for line in page.splitlines() if line.startswith(f"| `{name}.toml`")
    ]
    assert f" {large_figures.spread(known.disk, 1e9)} GB " in line
    assert f"| {known.memory / 1e9:.1f} GB at {recipe.micro} rows" in line


def test_several_cards_are_started_by_accelerate():
    assert large.launcher(1) == [sys.executable]
    several = large.launcher(4)
    assert several[1:3] == ["-m", "accelerate.commands.launch"]
    assert several[-2:] == ["--num_processes", "4"]
    assert Path(several[several.index("--config_file") + 1]).is_file()


def test_the_text_of_rows_is_that_of_their_tokens(tmp_path):
    own_store(tmp_path, 512, 16)
    tokenizer = large_figures.load_tokenizer(tmp_path / "tokenizer")
    split = open_store(tmp_path / "tokens", tokenizer)["test"]
    text = large_figures.text_of_rows(split, tokenizer, len(split))
    assert "".join(TEXTS[2:4]).encode().startswith(text)
    assert len(text) > 0.99 * split.bytes


def test_a_training_that_stops_early_is_not_taken_for_done(tmp_path, monkeypatch):
    own_store(tmp_path, 512, 64)
    changes = {name: str(tmp_path / name) for name in ("tokens", "tokenizer")}
    recipe = large.load_recipe("gpt2-110m", True, {"steps": 5, **changes})
    job = large_data.Job("x", recipe, "own tokens", [], tmp_path / "run", "")
    monkeypatch.setattr(
        large, "launcher", lambda cards: [sys.executable, "-c", "pass"]
    )
    with pytest.raises(CourseError, match="stopped at step 0 of 5"):
        large.train(job)
    monkeypatch.setattr(
        large, "launcher", lambda cards: [sys.executable, "-c", "exit(3)"]
    )
    with pytest.raises(CourseError, match="ended with status 3"):
        large.train(job)
