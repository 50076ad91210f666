"""The first cell of a notebook without a checkout: it fetches, and installs what is missing."""

import os
import shutil
import subprocess
import sys
import sysconfig

import pytest

from course import bootstrap
from course.generate import TEMPLATES
from utils.errors import ROOT

WHERE = "\nprint('utils from', importlib.util.find_spec('utils').origin)"


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A repository to clone that holds the course as it is on the disk."""
    place = tmp_path_factory.mktemp("published") / "repository"
    ignore = shutil.ignore_patterns(
        ".git", ".venv", "build", "__pycache__", "*.egg-info"
    )
    shutil.copytree(ROOT, place, ignore=ignore)
    git = ["git", "-C", str(place), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], check=True)
    return f"file://{place}"


def run_cell(url, folder, before=""):
    """Run the set-up cell in a Python that has the packages, but no checkout on its path."""
    cell = TEMPLATES.get_template("bootstrap.j2").render(
        repository=url, number="00"
    )
    packages = f"import sys\nsys.path.append({sysconfig.get_path('purelib')!r})\n"
    code = packages + before + cell + WHERE
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONPATH"
    }
    command = [sys.executable, "-S", "-c", code]
    return subprocess.run(
        command, cwd=folder, env=environment, text=True, capture_output=True
    )


def test_without_a_checkout_the_course_is_fetched(published, tmp_path):
    done = run_cell(published, tmp_path)
    assert done.returncode == 0, done.stderr
    assert (
        f"utils from {tmp_path / 'transformers-course/utils'}" in done.stdout
        and "ready" in done.stdout
    )
    assert (
        run_cell(published, tmp_path).returncode == 0
    )  # again: nothing is cloned twice


@pytest.mark.parametrize("name", ["utils/__init__.py", "utils.py"])
def test_another_module_called_utils_does_not_win(published, tmp_path, name):
    other = tmp_path / "other"
    (other / name).parent.mkdir(parents=True)
    (other / name).write_text("")
    done = run_cell(
        published, tmp_path, f"import sys\nsys.path.insert(0, {str(other)!r})\n"
    )
    assert done.returncode == 0, done.stderr
    assert f"utils from {tmp_path / 'transformers-course/utils'}" in done.stdout


def test_the_image_keeps_its_torch_and_pip_sees_to_the_rest():
    lines = [
        "torch>=99  # newer than any",
        "",
        "# why",
        "numpy>=2",
        "pytest>=8  # x",
    ]
    assert bootstrap.wanted(lines) == ["pytest>=8"]


@pytest.mark.parametrize(
    "version, removed", [("0.10.0", True), ("0.16.0", True), ("0.17.0", False)]
)
def test_a_torchao_too_old_for_peft_is_removed(monkeypatch, version, removed):
    asked = []
    monkeypatch.setattr(bootstrap, "pip", lambda *given: asked.append(given))
    monkeypatch.setattr(bootstrap.metadata, "version", lambda name: version)
    monkeypatch.setattr(bootstrap.subprocess, "run", lambda *given, **options: None)
    bootstrap.main("00")
    assert (("uninstall", "-y", "torchao") in asked) == removed
