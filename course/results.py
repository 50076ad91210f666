"""What became of each lesson at its last run, one file a lesson, and whether it still holds."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from course.notebooks import calls, code_cells, select
from course.verdicts import refusals
from utils import artifacts
from utils.errors import ROOT, build_folder
from utils.profiles import Profile

Facts = dict[str, Any]
CHECKOUT = Path(__file__).resolve().parent.parent
# What runs leave in results/; the other records there are read by lessons.
RUNS = {"smoke.json", "laptop.json", "places.json"}
SUFFIXES = {".py", ".toml", ".txt", ".yaml", ".json", ".sbatch"}


@dataclass
class Result:
    """What became of one lesson; "interrupted" until we know better."""

    name: str
    status: str = "interrupted"
    seconds: float = 0.0
    peak_bytes: int | None = None  # where the system tells it
    cell: int = 0
    cells: int = 0
    error: str = ""
    fingerprint: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    artifacts: dict[str, str] = field(default_factory=dict)
    reused: bool = False


def run_folder(profile: Profile) -> Path:
    """Where the executed notebooks of a profile and their results are kept."""
    return build_folder() / "run" / profile.name


def page_of(name: str, profile: Profile) -> Path:
    """Where the report keeps the page of a lesson."""
    return build_folder() / "report" / profile.name / f"{name}.html"


def write_result(result: Result, profile: Profile) -> None:
    """Keep a result."""
    path = run_folder(profile) / f"{result.name}.json"
    artifacts.write_json(path, asdict(result))


def read_result(name: str, profile: Profile) -> Result | None:
    """The last result of a lesson, or None where there is none that can be read."""
    with contextlib.suppress(ValueError, TypeError):
        return Result(**artifacts.read_json(run_folder(profile) / f"{name}.json"))
    return None


def results_of(profile: Profile) -> list[Result]:
    """The last result of each lesson that is still there, in reading order."""
    results = [read_result(path.stem, profile) for path in select()]
    return [result for result in results if result is not None]


def recorded(profile: str) -> Facts:
    """What lessons cost where they were recorded, by number."""
    record = artifacts.read_json(ROOT / "results" / f"{profile}.json")
    return record["notebooks"] if record else {}


@functools.cache
def shared_fingerprint() -> str:
    """What every lesson depends on: the code it may import or launch, the packages, the pins."""
    files = [CHECKOUT / "assets.txt"]
    kept = sorted((ROOT / "results").glob("*.json"))
    files += [path for path in kept if path.name not in RUNS]
    for name in ("utils", "stages", "launch", "benchmarks"):
        found = sorted((CHECKOUT / name).rglob("*"))
        files += [path for path in found if path.suffix in SUFFIXES]
    hashes = [artifacts.hash_file(path) for path in files if path.exists()]
    # The names of these folders hold name and version, and reading them takes no time.
    installed = set()
    for place in sys.path:
        installed |= {path.name for path in Path(place or ".").glob("*.dist-info")}
    assets = os.environ.get("COURSE_ASSETS", "packaged")
    return artifacts.hash_json([hashes, sorted(installed), sys.version, assets])


def fingerprint(path: Path, parameters: Facts) -> str:
    """What a lesson's result depends on, its artifacts apart."""
    own = [code_cells(path), refusals(path.name[:2])]
    return artifacts.hash_json([own, shared_fingerprint(), parameters])


def hash_of(name: str, profile: Profile) -> str:
    """The content hash of an artifact; empty where it is not whole."""
    shelf = build_folder() / "artifacts" / profile.name
    folder = shelf / name
    manifest = artifacts.read_manifest(folder)
    if manifest is None or artifacts.damage(folder, manifest):
        return ""
    return manifest["hash"]


def artifacts_of(path: Path, profile: Profile) -> dict[str, str]:
    """The hash of each artifact that a lesson takes or makes."""
    names = calls(path, "need") + calls(path, "publish")
    return {name: hash_of(name, profile) for name in names}


def still_holds(result: Result, mark: str, path: Path, profile: Profile) -> bool:
    """Whether a lesson passed, and nothing that it depends on or made has changed since."""
    if result.status != "passed" or result.fingerprint != mark:
        return False
    executed = run_folder(profile) / path.name
    page = page_of(path.stem, profile)
    if not executed.exists() or not page.exists():
        return False
    return artifacts_of(path, profile) == result.artifacts
