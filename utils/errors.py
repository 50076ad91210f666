"""Errors that say what to do next, values with their reasons, and where things are kept."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The checkout: the folder that holds notebooks, expected and results.
ROOT = Path(os.environ.get("COURSE_ROOT") or Path(__file__).parent.parent).resolve()


class CourseError(Exception):
    """What was wrong, where, and the one thing to do next.

    >>> print(CourseError("the corpus is missing", "build/corpus", "run lesson 03"))
    the corpus is missing
      where: build/corpus
      next:  run lesson 03
    """

    def __init__(self, what: str, where: object = "", fix: str = "") -> None:
        lines = [what]
        if isinstance(where, Path):
            where = short_path(where)
        if where:
            lines.append(f"  where: {where}")
        if fix:
            lines.append(f"  next:  {fix}")
        super().__init__("\n".join(lines))

    def _render_traceback_(self) -> list[str]:
        """IPython asks for this, so that a reader sees the message and not forty lines of our insides."""
        return [f"{type(self).__name__}: {self}"]


@dataclass(frozen=True)
class Choice:
    """A value and why it was chosen; as text "cpu (no accelerator found)"."""

    value: Any
    reason: str

    def __str__(self) -> str:
        return f"{self.value} ({self.reason})".replace("torch.", "")


def short_path(path: Path) -> str:
    """A path as a reader would write it: from the checkout, or from home."""
    bases = ((ROOT, ""), (Path.home(), "~/"))
    for base, mark in bases:
        if path.is_relative_to(base):
            rest = path.relative_to(base)
            return mark + rest.as_posix()
    return str(path)


def build_folder() -> Path:
    """Where runs, artifacts and reports go: `COURSE_BUILD`, else `build/` in the checkout."""
    return Path(os.environ.get("COURSE_BUILD") or ROOT / "build").resolve()
