"""Every planted fault still is one; the program that tries them tells a good test from a bad one."""

import subprocess

import pytest

from tests.faults import planted
from tests.faults.planted import Fault
from utils.errors import ROOT, CourseError

FAULTS = planted.read_faults()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_an_entry_changes_one_line_and_its_tests_are_there(fault):
    assert fault.problem(ROOT) == ""


def test_there_are_enough_of_them_in_every_package():
    assert len({fault.id for fault in FAULTS}) == len(FAULTS) >= 50
    packages = {fault.file.split("/")[0] for fault in FAULTS}
    assert packages == {"utils", "stages", "course", "benchmarks", "notebooks"}


@pytest.fixture
def checkout(tmp_path):
    """A checkout of one function, a test that sees what it does, and one that does not."""
    (tmp_path / "double.py").write_text(
        "def double(number):\n    return 2 * number\n"
    )
    tests = "from double import double\n\n\ndef test_good():\n    assert double(3) == 6\n\n\n"
    tests += "def test_blind():\n    assert double(0) == 0\n\n\ndef test_red():\n    assert False\n"
    (tmp_path / "test_double.py").write_text(tests)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return tmp_path


def fault(test, find="2 * number"):
    return Fault(test, "double.py", find, "3 * number", [f"test_double.py::{test}"])


def test_a_fault_is_refused_only_by_a_test_that_sees_it(checkout, capsys):
    faults = [fault("test_good"), fault("test_blind"), fault("test_red")]
    results = {result["id"]: result for result in planted.try_all(faults, checkout)}
    assert {name: result["refused"] for name, result in results.items()} == {
        "test_good": True,
        "test_blind": False,
        "test_red": False,
    }
    assert "fails without it" in results["test_red"]["words"]
    assert "2 * number" in (checkout / "double.py").read_text()


@pytest.mark.parametrize(
    "wrong, problem",
    [
        (fault("test_good", find="5 * number"), "is 0 times"),
        (fault("test_good", find="number"), "is 2 times"),
        (fault("test_gone"), "there is no test_double.py::test_gone"),
    ],
)
def test_an_entry_that_no_longer_fits_is_named(checkout, wrong, problem):
    assert problem in wrong.problem(checkout)


def test_what_does_not_fit_is_never_written(checkout):
    with pytest.raises(CourseError, match="no longer fits"):
        planted.plant(fault("test_good", find="5 * number"), checkout)
    assert "2 * number" in (checkout / "double.py").read_text()
