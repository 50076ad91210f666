"""Archives from outside, unpacked without trust: no name leaves its folder, no bomb fills the disk."""

from __future__ import annotations

import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from utils.errors import CourseError
from utils.show import format_bytes

MOST_BYTES = 2_000_000_000  # an archive that unpacks to more is refused


def unpack(archive: Path, patterns: list[str], folder: Path, strip: int = 0) -> int:
    """Unpack the files that match into `folder`, without their first `strip` folders; returns how many.

    A pattern `outer!inner` unpacks an archive that lies in the archive. Nothing unpacked is ever run.
    """
    count = 0
    with tempfile.TemporaryDirectory(dir=folder, prefix=".unpack-") as scratch:
        _extract(archive, Path(scratch))
        for pattern in patterns:
            outer, _, inner = pattern.partition("!")
            for path in _plain_files(Path(scratch), outer):
                if inner:
                    count += unpack(path, [inner], folder, strip)
                    continue
                parts = path.relative_to(scratch).parts[strip:]
                target = folder.joinpath(*parts)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(path, target)
                count += 1
    return count


def _plain_files(folder: Path, pattern: str) -> list[Path]:
    return sorted(p for p in folder.glob(pattern) if p.is_file() and not p.is_symlink())


def _extract(archive: Path, scratch: Path) -> None:
    """Extract a zip or a tar; whatever is wrong with it is an error that names it."""
    advice = "do not use this archive"
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as opened:
                members = [(info.filename, info.file_size) for info in opened.infolist()]
                refuse_hostile(members, archive.name)
                opened.extractall(scratch)
        else:
            with tarfile.open(archive) as opened:
                refuse_hostile(((info.name, info.size) for info in opened), archive.name)
                # Plain files only, because a link could lead out of the folder.
                opened.extractall(scratch, [m for m in opened if m.isfile()], filter="data")
    except CourseError:
        raise
    except OSError as error:
        if error.errno is not None:  # the disk's fault, not the archive's
            raise
        raise CourseError(f"{archive.name} cannot be unpacked: {error}", archive.name, advice) from error
    except Exception as error:  # a damaged archive fails in as many ways as there are formats
        raise CourseError(f"{archive.name} cannot be unpacked: {error}", archive.name, advice) from error


def refuse_hostile(members: Iterator[tuple[str, int]] | list[tuple[str, int]], archive: str) -> None:
    """Raise if a member's name points out of its folder, or if all together are too large."""
    total = 0
    for name, size in members:
        path = PurePosixPath(name.replace("\\", "/"))
        if path.is_absolute() or ".." in path.parts or ":" in str(path):
            what = f"{archive} holds a name that leaves its folder: {name!r}"
            raise CourseError(what, archive, "do not use this archive")
        total += size
        if total > MOST_BYTES:
            what = f"{archive} unpacks to over {format_bytes(MOST_BYTES)}"
            raise CourseError(what, archive, "do not use this archive")
