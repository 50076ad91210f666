"""Several token stores read as one: which they are, and whose turn it is.

    write_mixture(folder, {"python": ([one, two], 3), "prose": ([three], 1)})

A source is one store, or several that together hold one text: what a job of many workers leaves.
Of each four rows that are read here, three are of the first source and one of the second, always in
the same pattern, so that position k is somebody's row number n by arithmetic alone: nothing is drawn,
nothing must be remembered, and a run that goes on reads what it would have read.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from utils.artifacts import read_manifest, write_json
from utils.errors import CourseError

MIXTURE = "mixture.json"
# The rows of all sources in one turn, which is held as a table.
MOST_ROWS = 100_000
Sources = dict[str, tuple[list[Path], int]]


class Source(BaseModel, strict=True, extra="forbid"):
    """Stores that are read as one, from the mixture's folder on, and their rows in each turn."""

    stores: Annotated[list[str], Field(min_length=1)]
    # Of the manifests of these stores; empty for one that was not sealed.
    hashes: list[str]
    rows: Annotated[int, Field(ge=1, le=MOST_ROWS)]

    @model_validator(mode="after")
    def check_hashes(self) -> Source:
        """Each store has its hash."""
        if len(self.hashes) != len(self.stores):
            raise ValueError("as many hashes as stores are needed")
        return self


class MixtureHeader(BaseModel, strict=True, extra="forbid"):
    """The file of a mixture; anything else in it is an error."""

    format: Literal[1]
    sources: Annotated[dict[str, Source], Field(min_length=1)]


def hash_of(store: Path) -> str:
    """The content hash of a sealed folder, nothing for another one."""
    manifest = read_manifest(store) or {}
    return str(manifest.get("hash", ""))


def write_mixture(folder: Path, sources: Sources) -> dict[str, Any]:
    """Name the stores of a mixture and their rows in each turn; `sealed` moves it into place."""
    facts = {}
    for name, (stores, rows) in sources.items():
        paths = [
            Path(os.path.relpath(store, folder)).as_posix() for store in stores
        ]
        hashes = [hash_of(store) for store in stores]
        source = {"stores": paths, "hashes": hashes}
        facts[name] = source | {"rows": rows}
    header = {"format": 1, "sources": facts}
    check_mixture(header, folder)
    write_json(folder / MIXTURE, header)
    return header


def check_mixture(header: Any, folder: Path) -> MixtureHeader:
    """The header of a mixture, if it is one."""
    try:
        checked = MixtureHeader.model_validate(header)
        rows = sum(source.rows for source in checked.sources.values())
        if rows > MOST_ROWS:
            raise ValueError(f"{rows:,} rows in a turn, more than {MOST_ROWS:,}")
    except ValueError as error:
        what = f"this names no mixture of stores: {error}"
        fix = "give each source its stores and its rows in a turn, as 3 and 1"
        raise CourseError(what, folder / MIXTURE, fix) from error
    return checked


def read_mixture(folder: Path) -> dict[str, tuple[list[Path], int]]:
    """The stores of each source and its rows in a turn; stores that have changed are refused."""
    try:
        content = (folder / MIXTURE).read_bytes()
        header = MixtureHeader.model_validate_json(content)
    except (OSError, ValueError) as error:
        what = "the mixture cannot be read"
        raise CourseError(what, folder, "write it again") from error
    checked = check_mixture(header.model_dump(), folder)
    sources = {}
    for name, source in checked.sources.items():
        stores = [(folder / store).resolve() for store in source.stores]
        for store, known in zip(stores, source.hashes, strict=True):
            check_store(store, known)
        sources[name] = (stores, source.rows)
    return sources


def check_store(store: Path, known: str) -> None:
    """Refuse a store that is no longer what was mixed, and one that is a mixture itself."""
    if (store / MIXTURE).is_file():
        what = "a mixture cannot hold another one"
        raise CourseError(what, store, "name the stores of the inner one")
    if hash_of(store) != known:
        what = "this store is another one than when the mixture was written"
        fix = "write the mixture again; a run that read it cannot go on"
        raise CourseError(what, store, fix)
