"""Run every comparison, print one table, write `build/bench.json`: `python -m benchmarks [NAME…]`.

A module of this folder has `rows()`, or in `PARTS` several functions like it; each returns or yields
rows as `timing.row` makes them. When one part fails, its row says why, and the others go on.
`race`, `ladder` and `board` are the race's own commands: see benchmarks/race.py.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import benchmarks
from benchmarks.timing import Row
from course.checkout import commit
from utils.artifacts import write_json
from utils.errors import CourseError, build_folder
from utils.machine import machine_facts

HEADS = ("", "what", "ours", "peers", "ratio", "bar", "measured")
NO_BENCHMARKS = ("__main__", "harness", "record", "timing")
# Commands of their own, which take an hour, or nothing but a file.
RACE = ("race", "ladder", "board")


def choose_modules(names: list[str]) -> list[str]:
    """The modules that are named, or all that there are."""
    modules = [module.name for module in pkgutil.iter_modules(benchmarks.__path__)]
    known = [name for name in modules if name not in NO_BENCHMARKS]
    known = [name for name in known if not name.startswith("race")]
    for name in names:
        if name not in known:
            fix = f"choose of {', '.join(known)}"
            raise CourseError(f"there is no benchmark {name!r}", fix=fix)
    return names or known


def parts_of(name: str) -> list[Callable[[], Iterable[Row]]]:
    """The functions of a module that measure."""
    module = importlib.import_module(f"benchmarks.{name}")
    return list(getattr(module, "PARTS", None) or [module.rows])


def measure(name: str) -> Iterator[Row]:
    """The rows of one module; where a part fails, a row that says why."""
    try:
        parts = parts_of(name)
    except Exception as error:
        yield failed_row(name, error)
        return
    for part in parts:
        try:
            yield from part()
        except Exception as error:
            yield failed_row(f"{name}.{part.__name__}", error)


def failed_row(id: str, error: Exception) -> Row:
    """A row in place of those that could not be measured.

    >>> failed_row("loader", ValueError("no such store"))["what"]
    'failed: ValueError: no such store'
    """
    message = f"{type(error).__name__}: {error}".splitlines()[0]
    return {
        "id": id,
        "what": f"failed: {message}",
        "unit": "",
        "ours": None,
        "peers": {},
        "ratio": None,
        "bar": "–",
        "holds": False,
        "measured": "now",
        "error": str(error),
    }


def cells_of(row: Row) -> tuple[str, ...]:
    """One row as texts."""
    peers = ", ".join(
        f"{name} {value:,.4g}" for name, value in row["peers"].items()
    )
    ours = "–" if row["ours"] is None else f"{row['ours']:,.4g} {row['unit']}"
    ratio = "–" if row["ratio"] is None else f"{row['ratio']:.2f}"
    return (
        "✔" if row["holds"] else "✘",
        f"{row['id']}: {row['what']}",
        ours,
        peers or "–",
        ratio,
        str(row["bar"]),
        row.get("measured", "now"),
    )


def format_table(rows: list[Row]) -> str:
    """The rows as aligned text."""
    lines = [HEADS, *map(cells_of, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = []
    for line in lines:
        padded = [
            text.ljust(width) for text, width in zip(line, widths, strict=True)
        ]
        texts.append("  ".join(padded).rstrip())
    return "\n".join(texts)


def run(names: list[str]) -> list[Row]:
    """Every row; the file is written after each one, so that a break costs only what is to come."""
    rows: list[Row] = []
    build_folder().mkdir(parents=True, exist_ok=True)
    machine: dict[str, Any] = {**machine_facts(), "commit": commit()}
    write_json(build_folder() / "bench-machine.json", machine)
    for name in choose_modules(names):
        start = time.perf_counter()
        for row in measure(name):
            rows.append(row)
            write_json(build_folder() / "bench.json", rows)
        print(
            f"{name}: {time.perf_counter() - start:.0f} s",
            file=sys.stderr,
            flush=True,
        )
    return rows


def main(names: list[str]) -> int:
    """Print the table; 1 if a part failed. A bar that is not reached is marked, and no failure."""
    if names and names[0] in RACE:
        from benchmarks import race

        return race.command(names)
    try:
        rows = run(names)
    except CourseError as error:
        print(error, file=sys.stderr)
        return 1
    print(format_table(rows))
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
