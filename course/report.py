"""What a run leaves: the report's pages, and on request the record of its costs and outputs."""

from __future__ import annotations

import datetime
import functools
import os
from functools import partial
from pathlib import Path
from typing import Any

import nh3

from course import verdicts
from course.checkout import clean_commit, commit
from course.fetch import taken_by
from course.generate import TEMPLATES, title_of
from course.notebooks import calls, cells, read, write
from course.results import (
    Result,
    fingerprint,
    page_of,
    recorded,
    results_of,
    run_folder,
)
from utils import artifacts
from utils.errors import ROOT, CourseError, build_folder
from utils.machine import machine_facts
from utils.profiles import Profile
from utils.show import format_figure, format_memory

Output = dict[str, Any]
# Nothing is fetched and nothing runs in a page: a formula stays as it was written.
PAGE = """{% extends "lab/index.html.j2" %}
{% block html_head_js %}{% endblock %}
{% block html_head_js_mathjax %}{% endblock %}
{% block html_head_js_mermaidjs %}{% endblock %}"""
# A cleaner's own rules, and what tables and pictures of ours take beside them.
STYLED = {"class", "id", "title", "style"}
CLEAN: dict[str, Any] = {
    "attributes": {**nh3.ALLOWED_ATTRIBUTES, "*": STYLED},
    "filter_style_properties": {"text-align", "opacity"},
    "url_schemes": {"http", "https", "mailto", "data"},
    "link_rel": None,
}


def keep_address(tag: str, attribute: str, value: str) -> str | None:
    """A picture may hold its own bytes; a link that did could be a page, with a program in it."""
    inside = value.strip().lower().startswith("data:")
    return None if inside and tag != "img" else value


def export(executed: Path, page: Path) -> None:
    """Write an executed notebook as a page in which no text of a corpus can become a program."""
    from nbconvert import HTMLExporter

    exporter = HTMLExporter(
        raw_template=PAGE, sanitize_html=True, embed_images=True
    )
    clean = partial(nh3.clean, attribute_filter=keep_address, **CLEAN)
    exporter.register_filter("clean_html", clean)
    # Pictures are looked for beside the lesson, not beside its copy.
    place = {"path": str(ROOT / "notebooks"), "name": executed.stem}
    with executed.open(encoding="utf-8") as file:
        body, _ = exporter.from_file(file, {"metadata": place})
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(body, encoding="utf-8")


def section(result: Result, profile: Profile) -> dict[str, Any]:
    """What the first page says of one lesson."""
    source = ROOT / "notebooks" / f"{result.name}.ipynb"
    page = page_of(result.name, profile)
    facts: dict[str, Any] = {**vars(result), "title": result.name}
    facts["memory"] = format_memory(result.peak_bytes)
    facts |= {"figures": [], "exercises": [], "problems": []}
    facts["page"] = f"{profile.name}/{page.name}" if page.exists() else ""
    try:
        facts["title"] = title_of(source)
        if result.status == "passed":
            path = run_folder(profile) / source.name
            notebook, number = read(path), result.name[:2]
            figures = verdicts.judge_figures(notebook, profile.name, number)
            facts["figures"] = figures
            facts["exercises"] = verdicts.records(notebook, "exercise")
            facts["problems"] = verdicts.problems_of(path, profile.name, source)
    except (CourseError, OSError) as error:
        facts["problems"] = [str(error)]
    return facts


@functools.cache
def setting() -> dict[str, Any]:
    """Where and from what a run was made."""
    return {"facts": machine_facts(), "commit": commit()}


def write_index(profile: Profile) -> Path:
    """Write the first page of the report of the last run at a profile; its path."""
    folder = build_folder() / "report"
    results = results_of(profile)
    peaks = [0]
    for result in results:
        peaks.append(result.peak_bytes or 0)
    page = TEMPLATES.get_template("report.j2").render(
        sections=[section(result, profile) for result in results],
        profile=profile,
        peak=format_memory(max(peaks)),
        parameters=results[0].parameters if results else {},
        figure=lambda value: "–" if value is None else format_figure(value),
        **setting(),
    )
    with artifacts.plain_disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        aside = folder / f".index.{os.getpid()}.part"
        aside.write_text(page, encoding="utf-8")
        artifacts.move(aside, folder / "index.html")
    return folder / "index.html"


def keep(profile: Profile, paths: list[Path]) -> list[str]:
    """Make passed lessons the record: costs into `results/`, at laptop outputs into notebooks."""
    made_from = clean_commit()
    results = {result.name: result for result in results_of(profile)}
    record = recorded(profile.name)
    facts = machine_facts()
    machine = facts["gpu"]
    if machine == "none":
        machine = f"{facts['cores']} cores, {facts['memory']}"
    kept = []
    for path in paths:
        result, number = results.get(path.stem), path.name[:2]
        if result is None or result.status != "passed":
            continue
        refuse_to_keep(path, result)
        kept.append(path.name)
        record[number] = {
            "seconds": result.seconds,
            "peak_bytes": result.peak_bytes,
            "disk_bytes": disk_of(path, profile),
            "machine": machine,
            "commit": made_from,
            "date": f"{datetime.date.today()}",
            "command": f"make run PROFILE={profile.name} ONLY={number}",
            "facts": facts,
        }
        if profile.name == "laptop":
            keep_outputs(run_folder(profile) / path.name, path)
    if not kept:
        what = f"no finished run at profile {profile.name}"
        raise CourseError(what, run_folder(profile), "run it first")
    target = ROOT / "results" / f"{profile.name}.json"
    target.parent.mkdir(exist_ok=True)
    artifacts.write_json(target, {"notebooks": dict(sorted(record.items()))})
    return kept


def refuse_to_keep(path: Path, result: Result) -> None:
    """An error where a run says nothing of this commit, or of what the lesson costs."""
    mark = fingerprint(path, result.parameters)
    if not result.peak_bytes:
        what = "the memory of this lesson could not be measured"
        way = "record it on a machine that tells, as Linux does"
        raise CourseError(what, path, way)
    if result.fingerprint != mark:
        what = "this lesson, or what it uses, has changed since it ran"
        way = "run it again, then keep it"
        raise CourseError(what, path, way)


def disk_of(path: Path, profile: Profile) -> int:
    """Bytes of the assets that a lesson takes and of the artifacts that it makes."""
    size = sum(asset.disk * 10**6 for asset in taken_by(path))
    for name in calls(path, "publish"):
        folder = build_folder() / "artifacts" / profile.name / name
        manifest = artifacts.read_manifest(folder) or artifacts.BROKEN
        if manifest == artifacts.BROKEN:
            way = f"run lesson {path.stem[:2]} again, and keep it then"
            raise CourseError(
                f"what the run made is not whole here: {name}", folder, way
            )
        size += manifest["bytes"]
    return size


def keep_outputs(executed: Path, target: Path) -> None:
    """Put the outputs of a run into the notebook they came from; nothing else of the run."""
    notebook = read(target)
    run = {cell["id"]: cell["outputs"] for cell in cells(read(executed), "code")}
    for count, cell in enumerate(cells(notebook, "code"), 1):
        cell["outputs"] = join_streams(run[cell["id"]])
        cell["execution_count"] = count
        for output in cell["outputs"]:
            if "execution_count" in output:
                output["execution_count"] = count
    write(target, notebook)


def join_streams(outputs: list[Output]) -> list[Output]:
    """Outputs in which a stream that the clock has cut in pieces is one again."""
    joined: list[Output] = []
    for output in outputs:
        last = joined[-1] if joined else {}
        if output.get("name") and output.get("name") == last.get("name"):
            text = "".join(last["text"]) + "".join(output["text"])
            last["text"] = text.splitlines(keepends=True)
        else:
            joined.append(output)
    return joined
