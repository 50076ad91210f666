"""A run in a process of its own is the recipe's run, and its failure is told."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from small_runs import check_same_bits, inputs, losses, recipe  # noqa: F401

from stages import processes
from stages.launch import start_method
from stages.recipe import Recipe
from stages.training import parse_changes, pretrain
from utils.errors import ROOT, CourseError

MODERN = ROOT / "launch" / "recipes" / "modern.toml"
forks = pytest.mark.skipif(
    start_method().value != "fork", reason="this system does not fork"
)


def test_a_command_line_says_the_whole_recipe() -> None:
    changes = {
        "steps": 7,
        "prompts": ["def ", "class A:\n    x = 'y'"],
        "keep": None,
    }
    changes |= {"compile": False, "folder": "a folder/b", "log_to": ["tensorboard"]}
    model = {"hidden_size": 64, "final_logit_softcapping": 15.0}
    wanted = Recipe.load(MODERN).change(**changes, model=model)
    words = processes.command_of(wanted, MODERN)
    assert words[:3] == ["-m", "stages.training", str(MODERN)]
    assert len(words) == 3 + len(changes) + len(model), "no more than what differs"
    assert Recipe.load(MODERN, **parse_changes(words[3:])) == wanted


def test_a_model_that_lacks_what_the_file_sets_is_refused(recipe: Recipe) -> None:
    with pytest.raises(CourseError, match="lacks initializer_range"):
        processes.command_of(recipe, MODERN)


def test_several_gpus_get_a_process_each() -> None:
    words = processes.command_of(Recipe.load(MODERN), MODERN, world=4)
    assert words[1] == "torch.distributed.run" and "--nproc_per_node=4" in words
    assert words[-2:] == ["stages.training", str(MODERN)]


def test_a_log_is_read_as_far_as_it_is_written(recipe: Recipe) -> None:
    assert processes.read_log(recipe) == []
    folder = recipe.place("folder")
    folder.mkdir(parents=True)
    whole = '{"kind": "step", "step": 1}\n{"kind": "validation", "step": 1}\n'
    (folder / "log.jsonl").write_text(whole + '{"kind": "st', encoding="utf-8")
    assert processes.read_log(recipe) == [{"kind": "step", "step": 1}]
    assert len(processes.read_log(recipe, "validation")) == 1


@forks
def test_a_fork_trains_and_a_killed_one_goes_on(recipe: Recipe) -> None:
    calm = recipe.change(folder=recipe.folder + "-calm")
    assert processes.fork(pretrain, calm).join() is None
    child = processes.fork(pretrain, recipe)
    end = time.monotonic() + 60
    while len(processes.read_log(recipe)) < 6 and time.monotonic() < end:
        time.sleep(0.001)
    child.kill()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    again = processes.fork(pretrain, recipe)
    again.join()
    assert again.exitcode == 0
    assert losses(recipe) == losses(calm)
    check_same_bits(recipe, calm)


@forks
def test_what_a_fork_says_is_not_said_here(
    recipe: Recipe,
    capfd: pytest.CaptureFixture,
) -> None:
    processes.fork(lambda given: print("from", given.steps), recipe).join()
    assert capfd.readouterr().out == ""
    words = recipe.place("folder") / processes.WORDS
    assert words.read_text(encoding="utf-8") == "from 12\n"


def test_a_run_that_fails_is_told_with_its_last_words(
    recipe: Recipe,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    words = ["-c", "import sys; sys.exit('no tokens here')"]
    monkeypatch.setattr(processes, "command_of", lambda *given: words)
    with pytest.raises(CourseError, match="status 1: no tokens here"):
        processes.train_apart(recipe, MODERN)


@pytest.mark.slow
def test_a_run_apart_is_the_run_of_this_process(recipe: Recipe) -> None:
    whole = recipe.change(model={"initializer_range": 0.04})
    here = whole.change(folder=recipe.folder + "-here")
    pretrain(here)
    processes.train_apart(whole, MODERN)
    assert losses(whole) == losses(here)
