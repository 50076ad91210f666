"""The checkout as git knows it: which commit it is, and whether a record may be made of it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from utils.errors import ROOT, CourseError

# Records themselves: several may be made one after the other.
RECORDS = ":!results"


def git(*arguments: str, root: Path = ROOT) -> str:
    """What git answers about a checkout; nothing where there is no git, or no checkout."""
    command = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8")
    except OSError:
        return ""
    return "" if done.returncode else done.stdout.strip()


def commit(root: Path = ROOT) -> str:
    """The commit of a checkout, with a mark if it was changed since."""
    described = git(
        "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*", root=root
    )
    return described or "unknown"


def date_of(name: str, root: Path = ROOT) -> str:
    """The day of a commit; nothing where git does not know it, as in a copy without its history."""
    return git("show", "--no-patch", "--format=%cs", name, root=root)


def clean_commit(root: Path = ROOT) -> str:
    """The commit that a record is of. Only what is committed can be checked out and run again."""
    name = git("rev-parse", "--short=10", "HEAD", root=root)
    if not name:
        what = "a record names its commit, and there is none here"
        raise CourseError(what, root, "commit first, in a clone made with git")
    changes = git("status", "--porcelain", "--", ".", RECORDS, root=root)
    if changes:
        lines = changes.splitlines()
        more = f" and {len(lines) - 1} more" if len(lines) > 1 else ""
        # Two letters say what has happened to the file whose name follows.
        first = lines[0].split(maxsplit=1)[-1]
        what = f"a record is of a commit, and files have changed: {first}{more}"
        raise CourseError(what, root, "commit or undo the changes first")
    return name
