"""An entry of the race: what one file says, what is refused, and the board that it is added to."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from benchmarks import race_rules as rules
from stages.race_recipe import hash_recipe
from utils.artifacts import hash_json, read_json, write_json
from utils.errors import ROOT, CourseError

BOARD = ROOT / "results" / "leaderboard.json"
Facts = dict[str, Any]


class Fixed(BaseModel):
    """Named fields of the right kinds, no more and no fewer."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class RunFacts(Fixed):
    """One run of a recipe: what it took, and bits per byte. `test` is None in a rehearsal."""

    seed: int
    cpu_seconds: float
    start_seconds: float
    turns: int
    steps: int
    tokens: int
    tokens_per_second: float
    validation: float
    test: float | None


class Entry(Fixed):
    """What the command writes. Whoever reads it can make it again from commit and recipe."""

    rules: int
    idea: str
    rehearsal: bool
    budget: float
    corpus: str
    recipe: Facts
    pattern: str
    recipe_hash: str
    machine: dict[str, str]
    commit: str
    runs: list[RunFacts]
    validation: float
    test: float | None
    # The compressors on the bytes that the model was judged on, those of `judged_on`.
    judged_on: str
    bytes: int
    compressors: dict[str, dict[str, float]]
    seal: str


def seal_entry(facts: Facts) -> Facts:
    """The facts with a hash of them, so that a change shows. It is no signature."""
    content = {name: value for name, value in facts.items() if name != "seal"}
    return {**content, "seal": hash_json(content)}


def read_entry(path: Path) -> Entry:
    """The entry of a file, if it is whole and as it was written."""
    try:
        facts = read_json(path)
        entry = Entry(**facts)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        what = f"{place} of the entry: {first['msg'].lower()}"
        raise CourseError(what, path, "let the race write it again") from None
    except (OSError, ValueError, TypeError) as error:
        what = "there is no entry that can be read"
        fix = "name the file that `python -m benchmarks race` has written"
        raise CourseError(what, path, fix) from error
    if seal_entry(facts)["seal"] != entry.seal:
        what = "the entry was changed after the race had written it"
        raise CourseError(what, path, "let the race write it again")
    return entry


def why_not(entry: Entry) -> tuple[str, str]:
    """Why an entry is not admitted, and what to do; two empty texts if it is."""
    seeds = [run.seed for run in entry.runs]
    used = max((run.cpu_seconds for run in entry.runs), default=0.0)
    most = rules.BUDGET * (1 + rules.GRACE)
    figures = [entry.validation, entry.test]
    for run in entry.runs:
        figures += [run.validation, run.test]
    again = "let the race run again, without changes"
    if entry.rehearsal or entry.budget != rules.BUDGET:
        what = f"a rehearsal of {entry.budget:g} CPU seconds is no entry"
        return what, "leave --budget out"
    if entry.rules != rules.VERSION:
        what = f"it ran under the rules {entry.rules}, now they are {rules.VERSION}"
        return what, "let it run under today's rules"
    if entry.commit == "unknown" or entry.commit.endswith("-dirty"):
        what = f"it ran on {entry.commit}, which nobody can check out"
        return what, "commit first, then let it run"
    if entry.corpus != rules.CORPUS:
        what = f"it ran on the corpus {entry.corpus[:12]}, not {rules.CORPUS[:12]}"
        return what, f"python -m course fetch {rules.ASSET} --again"
    if sorted(seeds) != sorted(rules.SEEDS):
        what = f"it has the seeds {seeds}, and {list(rules.SEEDS)} are wanted"
        return what, "let the race run to its end"
    if used > most:
        what = f"a run used {used:,.0f} CPU seconds, over the {rules.BUDGET:,.0f}"
        return what, again
    if not all(value and math.isfinite(value) for value in figures):
        return "a run has no bits per byte", again
    if hash_recipe(entry.recipe, entry.pattern) != entry.recipe_hash:
        return "its recipe is not the one that its hash is of", again
    return "", ""


def read_board(path: Path = BOARD) -> Facts:
    """The board, with a list of entries in any case."""
    board = read_json(path) or {}
    return {**board, "entries": board.get("entries", [])}


def admit(path: Path, board_path: Path = BOARD) -> Entry:
    """Check an entry and add it to the board, best first; refuse with a plain error."""
    entry = read_entry(path)
    what, fix = why_not(entry)
    board = read_board(board_path)
    for other in board["entries"]:
        if other["recipe_hash"] == entry.recipe_hash:
            what = f"this recipe is on the board already, as {other['idea']!r}"
            fix = "change the recipe; the test packages are read once for each"
        elif other["idea"] == entry.idea:
            what = f"there is an entry with the name {entry.idea!r} on the board"
            fix = "give the recipe another name: idea, in its table [race]"
    if what:
        raise CourseError(what, path, fix)
    entries = [*board["entries"], entry.model_dump(mode="json")]
    board["entries"] = sorted(entries, key=lambda row: row["test"])
    board["rules"] = rules.VERSION
    write_json(board_path, board)
    return entry


def format_board(board: Facts) -> str:
    """The entries as lines of text, best first, with the best compressors of the first one's bytes.

    >>> print(format_board({"entries": []}))
    there is no entry yet
    """
    rows = [entry_cells(entry) for entry in board["entries"]]
    if not rows:
        return "there is no entry yet"
    heads = (
        "test",
        "validation",
        "seeds apart",
        "CPU s",
        "tokens",
        "commit",
        "idea",
    )
    lines = [heads, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = []
    for line in lines:
        cells = [text.rjust(width) for text, width in zip(line, widths)]
        # The last column is words.
        texts.append("  ".join([*cells[:-1], line[-1]]))
    return "\n".join(texts)


def entry_cells(entry: Facts) -> tuple[str, ...]:
    """One entry as texts."""
    tests = [run["test"] for run in entry["runs"]]
    seconds = [run["cpu_seconds"] for run in entry["runs"]]
    tokens = [run["tokens"] for run in entry["runs"]]
    return (
        f"{entry['test']:.4f}",
        f"{entry['validation']:.4f}",
        f"{max(tests) - min(tests):.4f}",
        f"{max(seconds):,.0f}",
        f"{max(tokens):,}",
        entry["commit"],
        entry["idea"],
    )
