"""Records are of commits: what has changed since, or never was committed, is refused."""

import json

import pytest

from course import checkout, report, results
from course.results import Result
from utils.errors import ROOT, CourseError
from utils.profiles import SMOKE


@pytest.fixture
def committed(course):
    """A course with one commit; its root."""
    course.add("00_a.ipynb", "1 + 1")
    course.git("init", "-q")
    course.git("add", "-A")
    course.git("commit", "-qm", "a")
    return course.root


def test_a_clean_checkout_has_a_commit(committed):
    name = checkout.clean_commit(committed)
    assert len(name) == 10 and name == checkout.commit(committed)


@pytest.mark.parametrize("name", ["README.md", "new.py"])
def test_what_is_not_committed_is_refused_and_named(committed, name):
    (committed / name).write_text("changed", encoding="utf-8")
    with pytest.raises(CourseError, match=name) as caught:
        checkout.clean_commit(committed)
    assert "commit or undo the changes first" in str(caught.value)


def test_one_record_does_not_stand_in_the_way_of_the_next(committed):
    (committed / "results").mkdir()
    (committed / "results/smoke.json").write_text("{}", encoding="utf-8")
    assert checkout.clean_commit(committed)


def test_without_git_there_is_nothing_to_record(tmp_path, monkeypatch):
    with pytest.raises(CourseError, match="there is none here"):
        checkout.clean_commit(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert checkout.commit(tmp_path) == "unknown"


def keep_one(monkeypatch, path, **facts):
    """Keep a run of one lesson that ended as these facts say."""
    mark = results.fingerprint(path, {})
    facts = {"status": "passed", "fingerprint": mark, "peak_bytes": 10**6, **facts}
    ended = Result(path.stem, **facts)
    monkeypatch.setattr(report, "results_of", lambda profile: [ended])
    monkeypatch.setattr(report, "clean_commit", lambda: "0123456789")
    monkeypatch.setattr(report, "ROOT", path.parent.parent)
    return report.keep(SMOKE, [path])


def test_memory_that_nobody_could_read_is_no_record(course, monkeypatch):
    path = course.add("00_a.ipynb", "1 + 1")
    for unknown in (None, 0):
        with pytest.raises(CourseError, match="could not be measured"):
            keep_one(monkeypatch, path, peak_bytes=unknown)
    assert not (course.root / "results").exists()
    assert keep_one(monkeypatch, path) == ["00_a.ipynb"]


def test_a_run_of_other_code_is_no_record(course, monkeypatch):
    path = course.add("00_a.ipynb", "1 + 1")
    with pytest.raises(CourseError, match="has changed since it ran"):
        keep_one(monkeypatch, path, fingerprint="of another text")


@pytest.mark.release
@pytest.mark.parametrize("profile", ["smoke", "laptop"])
def test_every_recorded_lesson_is_of_a_commit_that_can_be_checked_out(profile):
    text = (ROOT / "results" / f"{profile}.json").read_text(encoding="utf-8")
    lessons = json.loads(text)["notebooks"]
    commits = {number: lesson["commit"] for number, lesson in lessons.items()}
    assert len(commits) > 10
    assert [n for n, name in commits.items() if name.endswith("-dirty")] == []
