"""The course's Slurm script under the real Slurm, where that is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_runs import calm, inputs, recipe  # noqa: F401

from stages.recipe import Recipe
from stages.training import pretrain
from tests.cluster import slurm
from utils.errors import ROOT, CourseError


@pytest.mark.slow
@pytest.mark.skipif(slurm.missing() != "", reason=slurm.missing())
def test_a_job_that_its_limit_cuts_off_goes_on_to_the_same_bits(
    tmp_path: Path,
) -> None:
    """On nodes without GPUs; the program beside this test takes nodes that have two each."""
    result = slurm.cut_and_go_on(tmp_path, slurm.CPUS, steps=800)
    assert (
        result["cut off"]["restarts"]
        == len(result["cut off"]["started at step"]) - 1
    )
    assert result["not cut off"]["started at step"] == [0]
    assert result["cut off"]["processes"] == slurm.NODES


def test_runs_that_differ_are_told_apart(recipe: Recipe, calm: Recipe) -> None:
    pretrain(recipe.change(seed=43))
    assert slurm.same_bits(calm, calm)
    assert not slurm.same_bits(recipe, calm)


def test_the_program_refuses_a_machine_without_slurm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(slurm, "missing", lambda: "there is no slurmctld")
    assert slurm.main() == 2
    assert "no slurmctld" in capsys.readouterr().err


def test_a_record_of_a_changed_checkout_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(slurm, "missing", lambda: "")

    def refuse() -> str:
        raise CourseError("files have changed", fix="commit first")

    monkeypatch.setattr(slurm, "clean_commit", refuse)
    assert slurm.main() == 2
    assert "files have changed" in capsys.readouterr().err


def test_what_never_comes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "PATIENCE", 0)
    with pytest.raises(CourseError, match="it never came: a node"):
        slurm.wait_for(lambda: None, "a node")


@pytest.mark.skipif(sys.platform == "win32", reason="Slurm is for Linux")
def test_a_daemon_that_gives_up_is_an_error_at_once(tmp_path: Path) -> None:
    daemon = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    daemon.wait()
    with pytest.raises(CourseError, match="ended with status 3"):
        slurm.Cluster(tmp_path).is_ready([daemon])


def test_where_loopback_is_all_there_is_no_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 0, raising=False)
    monkeypatch.setattr(slurm.shutil, "which", lambda name: f"/bin/{name}")

    def alone() -> list[tuple[int, str]]:
        return [(1, "lo")]

    monkeypatch.setattr(slurm.socket, "if_nameindex", alone, raising=False)
    assert "loopback" in slurm.missing()


def test_the_script_parses_and_names_what_is_there() -> None:
    path = ROOT / "launch" / "slurm.sbatch"
    assert subprocess.run(["bash", "-n", str(path)]).returncode == 0
    text = path.read_text()
    for file in ("launch/multi_node.yaml", "launch/slurm.sbatch"):
        assert file in text
        assert (ROOT / file).exists()


@pytest.mark.release
def test_the_recorded_run_went_on_to_the_same_bits() -> None:
    record = json.loads((ROOT / "results" / "slurm.json").read_text())
    assert record["same losses and weights, bit for bit"] is True
    assert record["cut off"]["restarts"] >= 1
    assert not record["commit"].endswith("-dirty")
