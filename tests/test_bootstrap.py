"""The first cell of a notebook: on Colab it fetches and installs, elsewhere it only imports."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest

from course import bootstrap
from course.generate import TEMPLATES
from course.notebooks import select
from course.publish import absolute, project
from utils.errors import ROOT

WHERE = "\nimport importlib.util\nprint('utils from', importlib.util.find_spec('utils').origin)"


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A repository to clone that holds the course as it is on the disk, under the tag of its version."""
    place = tmp_path_factory.mktemp("published") / "repository"
    ignore = shutil.ignore_patterns(
        ".git", ".venv", "build", "__pycache__", "*.egg-info"
    )
    shutil.copytree(ROOT, place, ignore=ignore)
    commit(place, "all", f"v{project()['version']}")
    return place


def commit(place, message, tag):
    """Commit all that is in a folder and move a tag there."""
    git = ["git", "-C", str(place), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (
        ["init", "-q"],
        ["add", "-A"],
        ["commit", "-qm", message],
        ["tag", "-f", tag],
    ):
        subprocess.run([*git, *command], check=True, capture_output=True)


def run_cell(place, folder, before="", **environment):
    """Run the set-up cell in a Python that has the packages, but no checkout on its path."""
    cell = TEMPLATES.get_template("bootstrap.j2").render(**project(), number="05")
    packages = f"import sys\nsys.path.append({sysconfig.get_path('purelib')!r})\n"
    code = packages + before + cell + WHERE
    others = {n: v for n, v in os.environ.items() if n != "PYTHONPATH"}
    others |= {"GIT_CONFIG_COUNT": "1", **environment}
    others["GIT_CONFIG_KEY_0"] = f"url.{place.as_uri()}.insteadOf"
    others["GIT_CONFIG_VALUE_0"] = project()["repository"]
    command = [sys.executable, "-S", "-c", code]
    return subprocess.run(
        command, cwd=folder, env=others, text=True, capture_output=True
    )


@pytest.mark.parametrize("place", ["COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE"])
def test_on_colab_and_kaggle_the_course_is_fetched_at_its_tag(
    published, tmp_path, place
):
    later = published / "later.txt"
    later.write_text("made after the release")
    commit(published, "later", "v99")
    done = run_cell(published, tmp_path, **{place: "1"})
    later.unlink()
    commit(published, "gone", "v100")
    assert done.returncode == 0, done.stderr
    course = tmp_path / "transformers-course"
    assert f"utils from {course / 'utils'}" in done.stdout
    assert "nothing was missing" in done.stdout
    assert not (course / "later.txt").exists()


def test_a_clone_that_fails_does_not_blame_the_network(tmp_path):
    without_tag = tmp_path / "without_tag"
    subprocess.run(["git", "init", "-q", str(without_tag)], check=True)
    done = run_cell(without_tag, tmp_path, KAGGLE_KERNEL_RUN_TYPE="1")
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode and "git's reason stands above" in last
    assert "Remote branch" in done.stderr and "reached" not in last


@pytest.mark.parametrize("name", ["utils/__init__.py", "utils.py"])
def test_another_module_called_utils_does_not_win(published, tmp_path, name):
    other = tmp_path / "other"
    (other / name).parent.mkdir(parents=True)
    (other / name).write_text("")
    before = f"import sys\nsys.path.insert(0, {str(other)!r})\n"
    done = run_cell(published, tmp_path, before, COLAB_RELEASE_TAG="1")
    assert done.returncode == 0, done.stderr
    assert f"utils from {tmp_path / 'transformers-course/utils'}" in done.stdout


def test_elsewhere_nothing_is_fetched_and_the_kernel_is_named(published, tmp_path):
    done = run_cell(published, tmp_path)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode and sys.executable in last and "kernel of .venv" in last
    assert list(tmp_path.iterdir()) == []


def test_a_lesson_that_another_one_runs_fetches_nothing_again(published, tmp_path):
    places = {"COLAB_RELEASE_TAG": "1", "COURSE_RUN": "1"}
    before = f"import sys\nsys.path.insert(0, {str(published)!r})\n"
    done = run_cell(published, tmp_path, before, **places)
    assert f"utils from {published / 'utils'}" in done.stdout, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_without_a_network_kaggles_switch_is_named(tmp_path):
    done = run_cell(tmp_path / "nowhere", tmp_path, KAGGLE_KERNEL_RUN_TYPE="1")
    last = done.stderr.strip().splitlines()[-1]
    assert "On Kaggle: Settings, Internet, On" in last


def test_a_torch_outside_the_range_is_refused_at_once(capsys):
    with pytest.raises(SystemExit) as stop:
        bootstrap.refuse_torch({"torch": "2.9.1"})
    assert "torch 2.9.1" in str(stop.value) and "needs torch" in str(stop.value)
    bootstrap.refuse_torch({"torch": "2.13.0+cpu"})


def answers(*codes):
    """A pip that answers with these exit statuses, and the constraints it was given each time."""
    told = []
    left = list(codes)

    def pip(*arguments):
        told.append(Path(arguments[2]).read_text().splitlines())
        return SimpleNamespace(returncode=left.pop(0), stderr="no way\n")

    return pip, told


IMAGE = {"torch": "2.11", "datasets": "4.0", "protobuf": "5.29.6"}


def test_first_the_whole_image_is_kept(monkeypatch):
    pip, told = answers(0)
    monkeypatch.setattr(bootstrap, "pip", pip)
    bootstrap.install(["polib>=1.2"], IMAGE)
    assert told == [["torch==2.11", "datasets==4.0", "protobuf==5.29.6"]]


def test_what_the_course_names_may_change_where_it_must_and_nothing_else(
    monkeypatch,
):
    pip, told = answers(1, 0)
    monkeypatch.setattr(bootstrap, "pip", pip)
    bootstrap.install(["trl>=1.10"], IMAGE)
    assert told[1] == ["torch==2.11", "protobuf==5.29.6"]


def test_where_pip_finds_no_way_it_is_told_in_its_own_words(monkeypatch):
    pip, _ = answers(1, 1)
    monkeypatch.setattr(bootstrap, "pip", pip)
    with pytest.raises(SystemExit, match="no way"):
        bootstrap.install(["trl>=1.10"], IMAGE)


@pytest.mark.parametrize(
    "imported, restart", [({"datasets"}, True), (set(), False)]
)
def test_a_restart_is_asked_for_only_where_it_is_needed(
    monkeypatch, capsys, imported, restart
):
    now = {**IMAGE, "datasets": "4.8", "polib": "1.2"}
    monkeypatch.setattr(bootstrap, "installed", lambda: now)
    bootstrap.tell(IMAGE, imported)
    text = capsys.readouterr().out
    assert "installed: polib 1.2" in text and "changed: datasets 4.0 → 4.8" in text
    assert ("RESTART" in text) == restart


@pytest.mark.parametrize("version, removed", [("0.16.0", True), ("0.17.0", False)])
def test_a_torchao_too_old_for_peft_is_removed(monkeypatch, version, removed):
    asked = []
    image = {"torch": "2.13.0", "torchao": version}
    monkeypatch.setattr(bootstrap, "installed", lambda: image)
    monkeypatch.setattr(bootstrap, "install", lambda *given: None)
    monkeypatch.setattr(bootstrap, "pip", lambda *given: asked.append(given[0]))
    done = SimpleNamespace(returncode=0)
    monkeypatch.setattr(bootstrap.subprocess, "run", lambda *given, **options: done)
    bootstrap.main("00", set())
    assert ("uninstall" in asked) == removed


def test_a_lesson_gets_what_it_and_its_makers_import_and_no_test_tools():
    pretraining = select("09")[0]
    assert bootstrap.chain_of(pretraining) == select("03,07,08")
    lessons = [select(number)[0] for number in ("03", "16")]
    corpus, translation = [bootstrap.packages_for([path]) for path in lessons]
    assert "duckdb" in corpus and "sacrebleu" not in corpus
    assert "sacrebleu" in translation and "duckdb" not in translation
    assert not {"pytest", "ipywidgets", "trl"} & (corpus | translation)


def test_a_copy_for_colab_leads_home():
    text = (
        "![road](images/road.svg) [07](07_a.ipynb) [out](https://x.org) [up](#top)"
    )
    copy = absolute(text, "https://github.com/me/it", "v1")
    assert copy == (
        "![road](https://github.com/me/it/raw/v1/notebooks/images/road.svg) "
        "[07](https://github.com/me/it/blob/colab/notebooks/07_a.ipynb) "
        "[out](https://x.org) [up](#top)"
    )
