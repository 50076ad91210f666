"""The files around the lessons hold to one another, to the code, and to what is on disk."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata as metadata
import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from course import __main__ as command
from course import setup
from course.notebooks import code_cells, select, sizes
from tests import bare_root
from utils import assets
from utils.profiles import PROFILES

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
APACHE = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"  # apache.org's own text
MACHINES = {
    f"{system} {python}": {
        "python_version": python.rpartition(".")[0],
        "python_full_version": python,
        "sys_platform": system,
    }
    for system in ("linux", "darwin", "win32")
    for python in ("3.11.2", "3.11.9", "3.13.1", "3.14.0")
}


@functools.cache
def read(name: str) -> str:
    """A file of the repository."""
    return (ROOT / name).read_text(encoding="utf-8")


@functools.cache
def project() -> dict[str, Any]:
    """pyproject.toml."""
    return tomllib.loads(read("pyproject.toml"))


def requirements(name: str) -> list[Requirement]:
    """The requirements in a file of lines, comments and options left out."""
    lines = [
        re.sub(r"(^|\s)#.*", "", line).strip() for line in read(name).splitlines()
    ]
    return [
        Requirement(line) for line in lines if line and not line.startswith("-")
    ]


def extras() -> dict[str, list[Requirement]]:
    """The optional groups."""
    groups = project()["project"]["optional-dependencies"]
    return {
        name: [Requirement(line) for line in lines]
        for name, lines in groups.items()
    }


def pins_on(machine: str) -> dict[str, list[str]]:
    """The releases that constraints/locked.txt allows on a machine, by package."""
    pins: dict[str, list[str]] = {}
    for pin in requirements("constraints/locked.txt"):
        if pin.marker is None or Marker(str(pin.marker)).evaluate(
            MACHINES[machine]
        ):
            pins.setdefault(canonicalize_name(pin.name), []).append(
                str(pin.specifier)
            )
    return pins


def python_files(*packages: str) -> list[Path]:
    """The Python files of some packages."""
    return [
        path
        for package in packages
        for path in sorted((ROOT / package).rglob("*.py"))
    ]


# requirements -----------------------------------------------------------------------------------


def test_dependencies_have_one_source() -> None:
    facts = project()
    assert facts["project"]["dynamic"] == ["dependencies"]
    assert facts["tool"]["setuptools"]["dynamic"]["dependencies"] == {
        "file": ["requirements.txt"]
    }
    # The project is a checkout: nothing called `utils` gets into anybody's site-packages.
    assert facts["tool"]["setuptools"]["packages"] == []


def imported_by(*folders: str) -> set[str]:
    """The top-level modules that some folders import, anywhere in their code and lessons."""
    sources = []
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*")):
        if path.suffix == ".py":
            sources.append(path.read_text(encoding="utf-8"))
        elif path.suffix == ".ipynb" and "checkpoint" not in path.name:
            sources += code_cells(path)
    names = set()
    for source in sources:
        try:
            nodes = list(ast.walk(ast.parse(source)))
        except SyntaxError:
            continue
        for node in nodes:
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.add((node.module or "").split(".")[0])
    return names


@pytest.mark.parametrize(
    "folders, files",
    [
        (["utils", "stages", "course", "notebooks"], ["requirements.txt"]),
        (["tests", "benchmarks"], ["requirements.txt", "requirements-test.txt"]),
    ],
    ids=["course", "tests"],
)
def test_what_is_imported_is_declared(folders: list[str], files: list[str]) -> None:
    declared = {
        canonicalize_name(r.name) for name in files for r in requirements(name)
    }
    declared |= {
        canonicalize_name(r.name) for group in extras().values() for r in group
    }
    homes = metadata.packages_distributions()
    missing = {}
    for module in imported_by(*folders) & set(homes):
        sources = {canonicalize_name(name) for name in homes[module]}
        if not sources & declared and project()["project"]["name"] not in sources:
            missing[module] = sources
    assert missing == {}


def test_every_requirement_has_a_reason() -> None:
    lines = (read("requirements.txt") + read("requirements-test.txt")).splitlines()
    lines = [line for line in lines if re.match(r"[a-z]", line)]
    assert [line for line in lines if "  # " not in line] == []


def test_environment_takes_python_from_conda_and_the_rest_from_requirements() -> (
    None
):
    held = yaml.safe_load(read("environment.yml"))
    assert held["name"] == project()["project"]["name"]
    assert held["channels"] == ["conda-forge", "nodefaults"]
    python, pip, rest = held["dependencies"]
    wanted = ["-c constraints/locked.txt", "-r requirements.txt", "-e ."]
    assert pip == "pip" and rest == {"pip": wanted}
    name, version = python.split("=")
    assert name == "python"
    assert SpecifierSet(project()["project"]["requires-python"]).contains(version)


def test_the_package_named_pynvml_is_nowhere() -> None:
    groups = [
        requirements("requirements.txt"),
        requirements("constraints/locked.txt"),
        *extras().values(),
    ]
    names = {canonicalize_name(r.name) for group in groups for r in group}
    assert "nvidia-ml-py" in names and "pynvml" not in names
    installed = {canonicalize_name(d.name) for d in metadata.distributions()}
    assert "pynvml" not in installed, (
        "it makes every `import torch` warn: uninstall it"
    )


# constraints ------------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", MACHINES)
def test_constraints_pin_each_requirement_once_and_within_its_range(
    machine: str,
) -> None:
    pins = pins_on(machine)
    for need in requirements("requirements.txt") + requirements(
        "requirements-test.txt"
    ):
        held = pins.get(canonicalize_name(need.name), [])
        assert len(held) == 1, (
            f"{need.name} is pinned {len(held)} times on {machine}"
        )
        assert need.specifier.contains(held[0].removeprefix("==")), (
            f"{need} against {held[0]}"
        )


@pytest.mark.parametrize("machine", MACHINES)
def test_constraints_are_exact_and_do_not_contradict_themselves(
    machine: str,
) -> None:
    pins = pins_on(machine)
    assert [name for name, held in pins.items() if len(held) != 1] == []
    loose = [
        held[0]
        for held in pins.values()
        if not re.fullmatch(r"==[0-9][0-9a-z.]*", held[0])
    ]
    assert loose == [], "an exact release, without a local label such as +cpu"


def test_constraints_leave_the_optional_groups_possible() -> None:
    pins = pins_on("linux 3.13.1")
    needs = [need for group in extras().values() for need in group]
    held = [(need, pins.get(canonicalize_name(need.name))) for need in needs]
    assert [
        str(n) for n, pin in held if pin and not n.specifier.contains(pin[0][2:])
    ] == []


def test_constraints_cover_what_the_requirements_bring_along() -> None:
    locked = requirements("constraints/locked.txt")
    pins = {canonicalize_name(need.name) for need in locked}
    here = {canonicalize_name(d.name): d for d in metadata.distributions()}
    held = [need for need in locked if canonicalize_name(need.name) in here]
    other = [n for n in held if not n.specifier.contains(metadata.version(n.name))]
    if len(other) > len(held) // 10:
        pytest.skip("the releases of another list are installed here")
    direct = requirements("requirements.txt") + requirements(
        "requirements-test.txt"
    )
    todo = [canonicalize_name(need.name) for need in direct]
    seen: set[str] = set()
    while todo:
        name = todo.pop()
        if (
            name in seen
            or name not in here
            or name.startswith(("nvidia-", "cuda-", "triton"))
        ):
            continue  # torch pins its own CUDA packages
        seen.add(name)
        needs = [Requirement(line) for line in here[name].requires or []]
        todo += [
            canonicalize_name(n.name)
            for n in needs
            if n.marker is None or n.marker.evaluate({"extra": ""})
        ]
    assert len(seen) > 100, "the requirements are not installed here"
    assert sorted(seen - pins) == []


# README -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", project()["project"]["optional-dependencies"])
def test_readme_names_every_group_with_a_lesson(group: str) -> None:
    row = re.search(
        rf"^\| `{group}` \|([^|]+)\|([^|]+)\|$", read("README.md"), re.M
    )
    assert row, f"no row for {group}"
    assert re.search(r"\b\d\d\b", row[2]), f"the row of {group} names no lesson"


def test_readme_names_no_group_that_is_not_there() -> None:
    section = read("README.md").split("## Optional groups")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|", section, re.M)
    assert rows == list(project()["project"]["optional-dependencies"])
    assert set(re.findall(r"\.\[(\w+)\]", section)) <= set(rows)


def test_readme_and_makefile_know_the_same_variables() -> None:
    section = read("README.md").split("## Variables")[1].split("\n## ")[0]
    named = set(re.findall(r"^\| `([A-Z_]+)` \|", section, re.M))
    makefile = set(re.findall(r"^([A-Z_]+) *\?=", read("Makefile"), re.M))
    code = "".join(
        path.read_text(encoding="utf-8") for path in python_files("utils", "course")
    )
    assert makefile <= named
    assert {name for name in named - makefile if f'"{name}"' not in code} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_pages_name_only_targets_that_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.M))
    text = page.read_text(encoding="utf-8")
    commands = re.findall(r"(?:`|^|&& |=\S+ )make ([a-z-]+)\b", text, re.M)
    assert set(commands) <= targets
    assert commands or page.name != "README.md"


@pytest.mark.parametrize("profile", PROFILES.values(), ids=lambda p: p.name)
def test_readme_shows_the_profiles_as_they_are(profile: Any) -> None:
    row = (
        f"| `{profile.name}` | {profile.machine} | {profile.cell_seconds:,} s "
        f"| {profile.notebook_seconds:,} s |"
    )
    assert row in read("README.md")


def test_readme_names_the_lessons_that_a_large_profile_changes() -> None:
    section = read("README.md").split("## Profiles")[1].split("\n## ")[0]
    section = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", section)  # a link as its words
    larger = [path for path in select() if "gpu" in sizes(path)]
    *numbers, last = [path.name[:2] for path in larger]
    assert f"sizes of lessons {', '.join(numbers)} and {last};" in section
    assert "`cluster` takes the\nsame sizes" in section
    assert [path for path in select() if "cluster" in sizes(path)] == []
    expected = {path.stem for path in (ROOT / "expected").glob("*.toml")}
    assert "Neither profile has been recorded" in section and expected == {
        "smoke",
        "laptop",
    }


def test_readme_says_how_many_hours_the_lessons_take() -> None:
    hours = sum(about(path)["hours"] for path in select())
    assert f"take about {hours:.0f} hours of study" in read("README.md")


def about(path: Path) -> dict[str, Any]:
    """What a lesson says of itself."""
    return json.loads(path.read_text(encoding="utf-8"))["metadata"]["course"]


def test_readme_names_every_public_target_with_its_word() -> None:
    rows = re.findall(
        r"^\| `make ([a-z-]+)[^`]*` \| `course ([a-z-]+)", read("README.md"), re.M
    )
    assert len(rows) >= 8
    assert [pair for pair in rows if pair[0] != pair[1]] == []
    assert {word for _, word in rows} <= {
        *command.EARLY,
        *command.ACTIONS,
        *command.CHORES,
    }


def test_readme_names_the_pythons_that_the_set_up_takes() -> None:
    oldest = project()["project"]["requires-python"].removeprefix(">=")
    newest = ".".join(map(str, setup.NEWEST))
    assert f"You need Python {oldest} to {newest}, " in read("README.md")


@pytest.mark.release
def test_readme_says_how_long_the_first_start_took() -> None:
    facts = json.loads(bare_root.RECORD.read_text(encoding="utf-8"))
    table = bare_root.first_start(facts)
    assert bare_root.fill(read("README.md"), table) == read("README.md")
    assert all(step["ended"] in ("0", "answered") for step in facts["typed"])


def test_readme_keeps_the_table_of_where_it_is_known_to_run() -> None:
    section = read("README.md").split("## Where it is known to run")[1]
    assert re.match(
        r"\s*<!-- places:begin -->.*?<!-- places:end -->", section, re.S
    )


def test_the_bare_root_types_what_the_readme_says() -> None:
    typed = bare_root.commands(everything=False)
    assert typed[0].startswith("git clone https://") and typed[1] == "cd course"
    assert {"make lab", "python3 -m course setup", "make run ONLY=00"} <= set(typed)
    assert "make run" in bare_root.commands(everything=True)
    assert not any("#" in command or "conda" in command for command in typed)


def test_readme_says_what_the_assets_cost() -> None:
    every = assets.catalogue().values()
    fetched, kept = (
        sum(getattr(a, what) for a in every) / 1000
        for what in ("megabytes", "disk")
    )
    assert f"| at most {fetched:.1f} GB | at most {kept:.1f} GB |" in read(
        "README.md"
    )


def test_pages_name_the_torch_that_is_pinned() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    named = set(re.findall(r"torch(==[0-9.]*[0-9])", text))
    assert named == set(pins_on("linux 3.11.9")["torch"])


def test_readme_keeps_the_marks_between_which_the_table_is_written() -> None:
    marks = [
        read("README.md").count(f"<!-- lessons:{mark} -->")
        for mark in ("begin", "end")
    ]
    assert marks == [1, 1]


def test_readme_tree_names_what_is_there() -> None:
    tree = (
        read("README.md").split("## How the repository is built")[1].split("```")[1]
    )
    names = re.findall(r"^(\S+?)/? {2,}", tree, re.M)
    assert names
    assert [name for name in names if not (ROOT / name).exists()] == []


# links ------------------------------------------------------------------------------------------


def anchors(target: Path) -> set[str]:
    """The anchors that headings of a page get; of a notebook also those of its cells."""
    text = target.read_text(encoding="utf-8")
    if target.suffix == ".ipynb":
        return {f"cell-id={cell['id']}" for cell in json.loads(text)["cells"]}
    heads = re.findall(r"^#+ (.+)$", text, re.M)
    return {
        re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-")
        for head in heads
    }


def dead_links(page: Path) -> list[str]:
    """The relative links of a page that lead nowhere."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        wrong = not target.exists()
        if anchor and not wrong:
            wrong = anchor not in anchors(target)
        if wrong:
            dead.append(link)
    return dead


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    assert dead_links(page) == []


def test_a_dead_link_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One\n[a](gone.md) [b](#one) [c](#two) [d](page.md) [e](https://x.org)\n"
    )
    assert dead_links(page) == ["gone.md", "#two"]


# docs -------------------------------------------------------------------------------------------


def test_troubleshooting_quotes_our_messages_as_they_are() -> None:
    files = [
        path.read_text(encoding="utf-8")
        for path in python_files("utils", "stages", "course")
    ]
    cell = read("course/templates/bootstrap.j2")
    code = "\n".join([read("Makefile"), cell, *files])
    code = re.sub(r'"\s*\n\s*f?"', "", code)  # strings that go on in the next line
    blocks = re.findall(
        r"```console\n(.*?)```", read("docs/troubleshooting.md"), re.S
    )
    lines = [
        re.sub(r"^(Course|Runtime)Error: ", "", line)
        for block in blocks
        for line in block.splitlines()
    ]
    parts = [part.strip(" :") for line in lines for part in line.split("…")]
    assert len(lines) > 15
    assert [part for part in parts if part not in code] == []


def test_troubleshooting_gives_each_symptom_one_thing_to_do() -> None:
    page = read("docs/troubleshooting.md")
    entries = re.findall(r"^### ([^\n]+)\n(.*?)(?=^##|\Z)", page, re.M | re.S)
    assert len(entries) > 30
    assert [head for head, body in entries if body.count("**Do:**") != 1] == []


def test_glossary_is_sorted_and_has_each_word_once() -> None:
    parts = read("docs/glossary.md").split("\n## ")[1:]
    words = [re.findall(r"^- \*\*(.+?)\*\*: ", part, re.M) for part in parts]
    assert [sorted(w, key=str.lower) for w in words] == words
    every = [word for part in words for word in part]
    assert len(every) == len(set(every)) > 45


# legal ------------------------------------------------------------------------------------------


def test_licence_holds_the_full_apache_text_and_names_both() -> None:
    note, line, text = read("LICENSE").partition("-" * 80 + "\n\n")
    assert hashlib.sha256(text.encode()).hexdigest() == APACHE
    assert "https://creativecommons.org/licenses/by/4.0/legalcode" in note
    assert project()["project"]["license"] == "Apache-2.0 AND CC-BY-4.0"


def test_citation_agrees_with_the_project() -> None:
    held, facts = yaml.safe_load(read("CITATION.cff")), project()["project"]
    assert held["cff-version"] == "1.2.0"
    assert str(held["version"]) == facts["version"]
    assert held["repository-code"] == facts["urls"]["Repository"]
    assert held["license"] == facts["license"].split(" AND ")
    assert held["authors"] == [{"name": "The Transformers, End to End authors"}]
    assert f"version {facts['version']}" in read("README.md")
    # The tag of a release carries its date; a date here would be wrong until there is one.
    assert "date-released" not in held


# the commands ---------------------------------------------------------------------------------


def test_ci_runs_every_part_and_makes_each_target_that_it_names() -> None:
    script = read(".ci/run")
    parts = re.findall(r'^part "([^"]+)"', script, re.M)
    assert parts[:4] == ["ruff check", "ruff format", "mypy", "lint-imports"]
    assert {"make test", "make slow-tests", "make run", "make check"} <= set(parts)
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.M))
    assert set(re.findall(r"\bmake ([a-z-]+)", script)) <= targets


@pytest.mark.skipif(not shutil.which("make"), reason="there is no make here")
def test_every_public_target_is_listed_by_make() -> None:
    run = subprocess.run(
        ["make"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    targets = [
        "run",
        "lab",
        "test",
        "bench",
        "report",
        "check",
        "release-check",
        "faults",
        "sync",
    ]
    listed = re.findall(r"^  make (\S+)", run.stdout, re.M)
    assert set(targets) <= set(listed)
    for variable in ("PROFILE", "ONLY", "FRESH", "JOBS", "PYTHON"):
        assert f"{variable}=" in run.stdout
