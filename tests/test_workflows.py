"""CI, dev container and editor: least rights, pinned actions, every system and Python."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import browser as browsers
import pytest
import yaml

from course import chores, generate, notebooks
from course.notebooks import select
from utils.errors import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
# GitHub's own action for pages cannot do without these two.
PUBLISHING = {"pages", "id-token"}
# A word of these from an event may be anybody's: a title, a branch's name, a message.
STRANGERS = r"\$\{\{[^}]*(github\.event|github\.head_ref|github\.ref_name|inputs\.)"


def read(path: Path | str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def jobs_of(path: Path) -> dict[str, Any]:
    return yaml.safe_load(read(path))["jobs"]


def jobs_named(name: str) -> dict[str, Any]:
    return jobs_of(ROOT / f".github/workflows/{name}.yml")


def script_of(job: dict[str, Any]) -> str:
    return "\n".join(step.get("run", "") for step in job["steps"])


def writes(job: dict[str, Any]) -> bool:
    return "write" in job.get("permissions", {}).values()


def problems_of(text: str) -> list[str]:
    """What is wrong with the rights of a workflow."""
    problems = []
    workflow = yaml.safe_load(text)
    # YAML 1.1 reads `on:` as true; GitHub does not.
    if "pull_request_target" in str(workflow[True]):
        problems.append("a stranger's change runs with our rights")
    if workflow["permissions"] != {"contents": "read"}:
        problems.append("the workflow may do more than read")
    if not workflow["concurrency"]:
        problems.append("two runs may meet")
    for used in re.findall(r"uses: (.*)", text):
        if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}  # v[\d.]+", used):
            problems.append(f"not pinned: {used}")
    for name, job in workflow["jobs"].items():
        problems += problems_of_job(name, job)
    return problems


def problems_of_job(name: str, job: dict[str, Any]) -> list[str]:
    """What is wrong with a job of a workflow."""
    problems = []
    script = script_of(job)
    if not job.get("timeout-minutes"):
        problems.append(f"{name} may hang")
    if re.search(STRANGERS, script):
        problems.append(f"{name} gives a stranger's words to a shell")
    ours = re.sub(r"#.*", "", script)
    if writes(job) and re.search(r"\b(pip|python|npm|make \w+)\b", ours):
        problems.append(f"{name} runs packages where it may write")
    used = [
        step["uses"].partition("@")[0] for step in job["steps"] if "uses" in step
    ]
    rights = {
        right for right, may in job.get("permissions", {}).items() if may == "write"
    }
    publishes = rights == PUBLISHING and used == ["actions/deploy-pages"]
    if writes(job) and used and not publishes:
        problems.append(f"{name} runs an action where it may write")
    for step in job["steps"]:
        keeps = step.get("with", {}).get("persist-credentials", True)
        if step.get("uses", "").startswith("actions/checkout@") and keeps:
            problems.append(f"{name} leaves its token in the checkout")
    return problems


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_has_no_more_rights_than_it_needs(path: Path) -> None:
    assert problems_of(read(path)) == []


def test_pinned_actions_are_renewed_and_pinned_packages_are_not() -> None:
    facts = yaml.safe_load(read(".github/dependabot.yml"))
    assert facts["version"] == 2
    (update,) = facts["updates"]
    assert update["package-ecosystem"] == "github-actions"
    assert (update["directory"], update["schedule"]) == (
        "/",
        {"interval": "monthly"},
    )
    assert update["groups"]["actions"]["patterns"] == ["*"]


GOOD = """on: [push]
permissions:
  contents: read
concurrency:
  group: a
jobs:
  one:
    timeout-minutes: 5
    runs-on: ubuntu-latest
    steps:
      - run: echo
"""


@pytest.mark.parametrize(
    "find, put, problem",
    [
        ("[push]", "[pull_request_target]", "a stranger's change"),
        ("contents: read", "contents: write", "more than read"),
        ("timeout-minutes: 5", "name: x", "may hang"),
        ("run: echo", "run: echo ${{ github.event.issue.title }}", "to a shell"),
        ("run: echo", "run: echo ${{ github.head_ref }}", "to a shell"),
        ("run: echo", "uses: actions/cache@v4", "not pinned"),
        ("run: echo", f"uses: actions/checkout@{'a' * 40}  # v6", "its token"),
        (
            "    steps:\n      - run: echo",
            "    permissions: {issues: write}\n    steps:\n      - run: pip install x",
            "runs packages",
        ),
        (
            "    steps:\n      - run: echo",
            "    permissions: {pages: write, id-token: write}\n"
            f"    steps:\n      - uses: actions/cache@{'a' * 40}  # v4",
            "runs an action",
        ),
        (
            "    steps:\n      - run: echo",
            "    permissions: {contents: write, pages: write, id-token: write}\n"
            f"    steps:\n      - uses: actions/deploy-pages@{'a' * 40}  # v5",
            "runs an action",
        ),
    ],
)
def test_a_bad_workflow_is_refused(find: str, put: str, problem: str) -> None:
    assert problems_of(GOOD) == []
    assert problem in " ".join(problems_of(GOOD.replace(find, put)))


def test_every_python_and_every_system_is_covered() -> None:
    jobs = jobs_named("ci")
    whole = jobs["course"]["strategy"]["matrix"]["python"]
    units = jobs["units"]["strategy"]["matrix"]["include"]
    assert whole == ["3.11", "3.14"]
    between = {row["python"] for row in units if row["os"] == "ubuntu-latest"}
    assert between == {"3.12", "3.13"}
    systems = {row["os"].partition("-")[0] for row in units}
    assert systems == {"ubuntu", "macos", "windows"}


def test_other_systems_run_what_a_reader_types() -> None:
    job = jobs_named("ci")["units"]
    script = script_of(job)
    assert "python -m course setup --tests" in script
    assert "-m pytest tests" in script and "not slow and not release" in script
    lessons = re.search(r"course run --profile smoke --only (\S+)", script)
    first = [path.name[:2] for path in select() if path.name < "03"]
    assert lessons and lessons[1].split(",") == first
    # PowerShell on Windows, as a reader has it.
    assert "shell" not in job.get("defaults", {})
    assert not any("shell" in step for step in job["steps"])


def test_every_week_the_course_runs_in_other_environments() -> None:
    job = jobs_named("elsewhere")["place"]
    places = {row["place"] for row in job["strategy"]["matrix"]["include"]}
    assert places == {"oldest", "newest", "colab"}
    assert 'course elsewhere "$PLACE"' in script_of(job)


def test_every_week_the_readme_is_typed_where_there_is_nothing_else() -> None:
    script = script_of(jobs_named("elsewhere")["bare_root"])
    # Both commands, with lesson 00 only; a record would need a clean commit of ours.
    assert script.endswith("sudo .venv/bin/python -m tests.bare_root --try")
    assert "debootstrap" in script


def test_canary_runs_unknown_code_where_nothing_may_be_written() -> None:
    jobs = jobs_named("canary")
    newest, issue = jobs["newest"], jobs["issue"]
    script = script_of(newest)
    assert "permissions" not in newest and "secrets" not in str(newest)
    assert "-c constraints" not in script and ".venv" not in script
    assert "pytest" in script and "course run --profile smoke" in script
    assert issue["permissions"] == {"actions": "read", "issues": "write"}
    assert (issue["needs"], issue["if"]) == ("newest", "failure()")
    assert "gh issue create" in script_of(issue)
    # What its sed does to the ranges.
    requirements = read("requirements.txt") + read("requirements-test.txt")
    loosened = re.sub(r",<[0-9.]+", "", requirements)
    # Else the canary would still be held.
    assert "<" not in re.sub(r"#.*", "", loosened)


def command_of(hook: dict[str, Any]) -> tuple[str, ...]:
    """The program of a hook with its arguments; `.` stands for the files that it is handed."""
    words = hook["entry"].removeprefix(".venv/bin/").removeprefix("python -m ")
    command = words.removesuffix(" --force-exclude").split()
    files = [] if hook.get("pass_filenames") is False else ["."]
    return (*command, *files)


def test_a_commit_is_looked_at_by_the_linters_of_ci() -> None:
    lines = re.findall(r'^part "[^"]+" \$bin/(.+)$', read(".ci/run"), re.M)
    in_ci = {tuple(line.split()) for line in lines}
    hooks = yaml.safe_load(read(".pre-commit-config.yaml"))["repos"][0]["hooks"]
    before_a_commit = {command_of(hook) for hook in hooks}
    by_make = {tuple(command) for command in chores.COMMANDS["style"]}
    # The same programs on the same files.
    assert before_a_commit == in_ci == by_make
    (spelling,) = [command for command in in_ci if command[0] == "codespell"]
    assert all((ROOT / name).exists() for name in spelling[1:])


def test_no_lesson_has_a_slip_of_the_pen(tmp_path: Path) -> None:
    for path in select():
        cells = notebooks.read(path)["cells"]
        written = "\n".join(notebooks.source(cell) for cell in cells)
        (tmp_path / f"{path.stem}.md").write_text(written, encoding="utf-8")
    command = [sys.executable, "-m", "codespell_lib", str(tmp_path)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.stdout == ""
    (tmp_path / "slip.md").write_text("A lenght is one number.\n")
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "lenght ==> length" in found.stdout


# From the sources of the pages to what is published of them.
SITE_STEPS = [
    ".venv/bin/python -m course site",
    ".venv/bin/python -m pytest -rs -n auto -m release tests/test_site_browser.py",
    "actions/upload-pages-artifact",
    "actions/upload-artifact",
]
ON_MAIN = "${{ github.event_name == 'push' }}"
SWITCHED_ON = "${{ needs.ask.outputs.source == 'workflow' }}"
# Whoever mends pages that fail a test wants to see them.
ANYHOW = "${{ !cancelled() }}"
# What lets a step or a job fail or be left out without a word.
FORGIVING = {"if", "continue-on-error"}


def problems_of_site(text: str) -> list[str]:
    """What is wrong with the way of the pages to those who read them."""
    problems = []
    jobs = yaml.safe_load(text)["jobs"]
    build, ask, publish = jobs["build"], jobs["ask"], jobs["publish"]
    steps = build["steps"]
    done = [step.get("run") or step["uses"].partition("@")[0] for step in steps]
    if done[-4:] != SITE_STEPS:
        problems.append("not built, tried and kept")
    if steps[-1].pop("if", "") != ANYHOW:
        problems.append("pages that fail a test are lost")
    if any(part.keys() & FORGIVING for part in [build, *steps]):
        problems.append("a step may be left out")
    if steps[-3].get("env") != {"COURSE_NEEDS_BROWSER": "1"}:
        problems.append("a test without a browser is skipped")
    kept = [step.get("with", {}).get("path") for step in steps[-2:]]
    if kept != ["build/site"] * 2:
        problems.append("other files are kept")
    if publish["needs"] != ["build", "ask"]:
        problems.append("published untried")
    if ask.get("if") != ON_MAIN or publish.get("if") != SWITCHED_ON:
        problems.append("published unasked")
    if "actions/deploy-pages@" not in publish["steps"][-1].get("uses", ""):
        problems.append("not published")
    if [name for name, job in jobs.items() if writes(job)] != ["publish"]:
        problems.append("another job may publish")
    return problems


@pytest.mark.parametrize(
    "find, put, problem",
    [
        ("-m course site", "-m course fetch", "not built"),
        ("tests/test_site_browser.py", "tests/test_site.py", "not built"),
        ("test_site_browser.py", "test_site_browser.py || true", "not built"),
        ("actions/upload-artifact", "actions/checkout", "not built"),
        ("actions/upload-pages-artifact", "actions/checkout", "not built"),
        ("      - name: Build", "      - if: false", "left out"),
        ('BROWSER: "1"', 'BROWSER: "0"', "is skipped"),
        ("path: build/site", "path: build", "other files"),
        ("!cancelled()", "success()", "lost"),
        ("needs: [build, ask]", "needs: [ask]", "untried"),
        ("source == 'workflow'", "source != ''", "unasked"),
        ("if: ${{ github.event_name == 'push' }}", "if: true", "unasked"),
        ("actions/deploy-pages", "actions/checkout", "not published"),
        (
            "timeout-minutes: 60",
            "permissions: {contents: write}",
            "another job",
        ),
    ],
)
def test_pages_are_built_tried_kept_and_published_only_when_asked(
    find: str, put: str, problem: str
) -> None:
    text = read(".github/workflows/site.yml")
    assert problems_of_site(text) == []
    assert find in text
    assert problem in " ".join(problems_of_site(text.replace(find, put)))


@pytest.mark.parametrize(
    "answer, status, source",
    [
        ("workflow", 0, "source=workflow\n"),
        ("legacy", 0, "source=\n"),
        ('{"message": "Not Found", "status": "404"}', 1, "source=\n"),
        ('{"message": "Bad credentials", "status": "401"}', 1, None),
    ],
)
def test_pages_are_published_where_their_source_is_the_workflow(
    tmp_path: Path, answer: str, status: int, source: str | None
) -> None:
    bash = shutil.which("bash")
    if not bash or sys.platform == "win32":
        pytest.skip("GitHub runs this step in a shell of Linux")
    (tmp_path / "answer.json").write_text(answer + "\n")
    github = tmp_path / "gh"
    github.write_text(f"#!/bin/sh\ncat answer.json\nexit {status}\n")
    github.chmod(0o755)
    given = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    given |= {"GITHUB_OUTPUT": "output", "GH_REPO": "kim/course"}
    script = script_of(jobs_named("site")["ask"])
    ended = subprocess.run([bash, "-e", "-c", script], cwd=tmp_path, env=given)
    assert (ended.returncode == 0) == (source is not None)
    if source is not None:
        assert (tmp_path / "output").read_text() == source


def test_a_missing_browser_fails_a_test_only_where_one_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("COURSE_NEEDS_BROWSER", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no browser"):
        browsers.go_without("no browser")
    monkeypatch.setenv("COURSE_NEEDS_BROWSER", "1")
    with pytest.raises(pytest.fail.Exception, match="no browser"):
        browsers.go_without("no browser")


def test_the_dev_container_sets_itself_up_with_the_first_lesson() -> None:
    facts = json.loads(read(".devcontainer/devcontainer.json"))
    python = re.search(r":(3\.\d+)$", facts["image"])
    assert python and python[1] in ("3.11", "3.12", "3.13", "3.14")
    commands = facts["postCreateCommand"].split(" && ")
    assert commands[0] == "python3 -m course setup"
    assert commands[1].endswith("course fetch --for 00")
    # What a free codespace has, and what `smoke` is made for.
    assert facts["hostRequirements"] == {
        "cpus": 2,
        "memory": "8gb",
        "storage": "32gb",
    }
    assert facts["containerEnv"]["COURSE_PROFILE"] == "smoke"
    for name in facts["customizations"]["codespaces"]["openFiles"]:
        assert (ROOT / name).is_file()


def test_editors_take_the_environment_and_the_same_extensions() -> None:
    settings = json.loads(read(".vscode/settings.json"))
    asked = json.loads(read(".vscode/extensions.json"))["recommendations"]
    container = json.loads(read(".devcontainer/devcontainer.json"))
    editor = container["customizations"]["vscode"]
    assert ".venv" in settings["python.defaultInterpreterPath"]
    assert ".venv" in editor["settings"]["python.defaultInterpreterPath"]
    assert settings["python.testing.pytestEnabled"] is True
    assert settings["[python]"]["editor.defaultFormatter"] in asked
    assert editor["extensions"] == asked


def test_the_address_in_every_place_is_that_of_pyproject() -> None:
    assert generate.change_address(write_it=False) == []


def test_a_badge_shows_a_workflow_that_is_there_at_the_one_address():
    from course.publish import project

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    actions = project()["repository"] + "/actions/workflows/"
    badges = re.findall(r"\[!\[[^\]]+\]\((\S+)/badge\.svg\)\]\((\S+)\)", readme)
    assert len(badges) >= 5
    for shown, linked in badges:
        assert shown == linked and linked.startswith(actions)
        assert (ROOT / ".github" / "workflows" / linked.rsplit("/")[-1]).is_file()
