"""Errors that say what to do, and paths as a reader writes them."""

from pathlib import Path

from utils.errors import ROOT, CourseError, short_path


def test_an_error_is_what_where_and_next():
    text = str(CourseError("it broke", ROOT / "build/x", "mend it"))
    assert text == "it broke\n  where: build/x\n  next:  mend it"


def test_an_error_in_a_notebook_is_its_message_alone():
    assert CourseError("it broke")._render_traceback_() == ["CourseError: it broke"]


def test_a_path_is_written_from_the_checkout_or_from_home():
    assert short_path(ROOT / "a" / "b") == "a/b"
    assert short_path(Path.home() / "x") in ("~/x", "x")
    assert short_path(Path("/elsewhere")) == str(Path("/elsewhere"))
