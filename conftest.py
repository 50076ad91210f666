"""Tests run at the smallest profile, offline, in a build folder of their own."""

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("COURSE_PROFILE", "smoke")
os.environ.setdefault("COURSE_BUILD", str(Path(__file__).parent / "build" / "test"))
# Test processes side by side have a core each: threads that share one wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# The sandbox's inside can be imported where there are namespaces.
caged = ["stages/cage/*", "stages/grading.py"]
collect_ignore_glob = [] if sys.platform == "linux" else caged


def pytest_configure(config: pytest.Config) -> None:
    """Name the mark of tests that a learner's own solved exercise may turn red."""
    config.addinivalue_line(
        "markers", "release: looks at what is committed; only with -m release"
    )


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leave those tests out unless they are asked for."""
    if "release" in config.option.markexpr:
        return
    left_out = [item for item in items if item.get_closest_marker("release")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
