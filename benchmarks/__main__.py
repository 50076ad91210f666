"""Run every comparison, print one table, write `build/bench.json`: `python -m benchmarks [NAME…]`.

Each module of this folder has `rows()`, which returns a list of
`{"id", "what", "unit", "ours", "peers": {name: value}, "ratio", "bar", "holds"}`.
"""
from __future__ import annotations

import importlib
import pkgutil
import sys
import time
from typing import Any

import benchmarks
from utils import artifacts as folders, machine as common


def run(names: list[str]) -> list[dict[str, Any]]:
    """The rows of the named modules, or of all."""
    modules = [m.name for m in pkgutil.iter_modules(benchmarks.__path__) if m.name != "__main__"]
    unknown = sorted(set(names) - set(modules))
    if unknown:
        raise common.CourseError(f"there is no benchmark {unknown[0]}", fix=f"choose of {', '.join(modules)}")
    rows = []
    for name in names or modules:
        start = time.perf_counter()
        found = importlib.import_module(f"benchmarks.{name}").rows()
        print(f"{name}: {len(found)} rows, {time.perf_counter() - start:.0f} s", file=sys.stderr)
        rows += found
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as aligned text."""
    lines = [("", "what", "ours", "best peer", "ratio", "bar")]
    for row in rows:
        peers = ", ".join(f"{name} {value:,.4g}" for name, value in row["peers"].items()) or "–"
        ratio = "–" if row["ratio"] is None else f"{row['ratio']:.2f}"
        lines.append(("✔" if row["holds"] else "✘", row["what"], f"{row['ours']:,.4g} {row['unit']}",
                      peers, ratio, str(row["bar"])))
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(text.ljust(w) for text, w in zip(line, widths)).rstrip() for line in lines)


def main() -> int:
    """Print the table and keep the figures with the machine that made them."""
    try:
        rows = run(sys.argv[1:])
    except common.CourseError as error:
        print(error, file=sys.stderr)
        return 1
    common.build_folder().mkdir(parents=True, exist_ok=True)
    folders.write_json(common.build_folder() / "bench.json", rows)
    folders.write_json(common.build_folder() / "bench-machine.json", common.machine_facts())
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
