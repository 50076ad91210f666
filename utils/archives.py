"""Archives from outside, unpacked without trust: no name leaves its folder, no bomb fills the disk."""

from __future__ import annotations

import errno
import shutil
import tarfile
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

from utils.errors import CourseError

MOST_BYTES = 2_000_000_000  # an archive that unpacks to more is refused


def unpack(archive: Path, patterns: list[str], folder: Path, strip: int = 0) -> int:
    """Unpack the files that match, without their first `strip` folders; returns how many there were.

    A pattern `outer!inner` reaches into an archive that lies in the archive. Nothing is ever run.
    """
    count = 0
    with tempfile.TemporaryDirectory(dir=folder, prefix=".unpack-") as scratch:
        _extract(archive, Path(scratch))
        for pattern in patterns:
            outer, _, inner = pattern.partition("!")
            found = Path(scratch).glob(outer)
            for path in sorted(found):
                if path.is_symlink() or not path.is_file():
                    continue
                if inner:
                    count += unpack(path, [inner], folder, strip)
                    continue
                parts = path.relative_to(scratch).parts
                target = folder.joinpath(*parts[strip:])
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(path, target)
                count += 1
    return count


def _extract(archive: Path, scratch: Path) -> None:
    """Extract a zip or a tar; whatever is wrong with it is an error that names it."""
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as opened:
                infos = opened.infolist()
                refuse_hostile({info.filename: info.file_size for info in infos})
                opened.extractall(scratch)
        else:
            with tarfile.open(archive) as opened:
                refuse_hostile({info.name: info.size for info in opened})
                for member in opened:
                    _extract_file(opened, member, scratch)
    # A damaged archive fails in as many ways as there are formats.
    except Exception as error:
        if getattr(error, "errno", None) not in (None, errno.EINVAL):
            raise  # the disk's fault, not its own
        what = f"{archive.name} cannot be unpacked: {error}"
        raise CourseError(what, archive.name, "do not use this archive") from error


def _extract_file(
    archive: tarfile.TarFile, member: tarfile.TarInfo, to: Path
) -> None:
    """Extract a plain file and nothing else, because a link could lead out of the folder.

    `TarFile.extractall` has its filters only from Python 3.11.4 on.
    """
    content = archive.extractfile(member) if member.isfile() else None
    if content is None:
        return
    target = to / member.name
    target.parent.mkdir(parents=True, exist_ok=True)
    with content, target.open("wb") as copy:
        shutil.copyfileobj(content, copy)


def refuse_hostile(sizes: dict[str, int]) -> None:
    """Raise if a member's name points out of its folder, or if all together are too large.

    >>> refuse_hostile({"../outside": 1})
    Traceback (most recent call last):
    ValueError: it holds a name that leaves its folder: '../outside'
    """
    for name in sizes:
        path = PurePosixPath(name.replace("\\", "/"))
        if path.is_absolute() or ".." in path.parts or ":" in str(path):
            raise ValueError(f"it holds a name that leaves its folder: {name!r}")
    if sum(sizes.values()) > MOST_BYTES:
        raise ValueError(f"it unpacks to over {MOST_BYTES / 1e9:.0f} GB")
