"""What a run leaves behind: the report's pages, and on request the record of its costs and outputs."""
from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import nbformat
from nbconvert import HTMLExporter

from course.fetch import taken_by
from utils import artifacts
from utils.errors import build_folder, CourseError, ROOT
from utils.machine import machine_facts
from course import verdicts
from course.generate import TEMPLATES, title_of
from course.runner import results_of, run_folder
from course.notebooks import calls
from utils.profiles import Profile


def commit() -> str:
    """The commit of the checkout, with a mark if it was changed since."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip() or "unknown"


def export(notebook: Path, page: Path) -> None:
    """An executed notebook as a page; not done again when the page is newer."""
    if page.exists() and page.stat().st_mtime > notebook.stat().st_mtime:
        return
    exporter = HTMLExporter(embed_images=True, mathjax_url="", require_js_url="", jquery_url="")
    resources = {"metadata": {"path": str(ROOT / "notebooks"), "name": notebook.stem}}
    page.write_text(exporter.from_notebook_node(nbformat.read(notebook, 4), resources)[0], "utf-8")


def section(result: dict[str, Any], profile: Profile, folder: Path) -> dict[str, Any]:
    """What the page says of one notebook."""
    executed = run_folder(profile) / f"{result['name']}.ipynb"
    page = f"{profile.name}/{executed.stem}.html"
    held = {"title": title_of(ROOT / "notebooks" / executed.name), "page": "", "figures": [],
            "exercises": [], "problems": []}
    if result["status"] != "blocked" and executed.exists():
        export(executed, folder / page)
        held.update(page=page, figures=verdicts.judge_figures(executed, profile.name),
                    exercises=verdicts.records(executed, "exercise"))
    if result["status"] == "passed":
        held["problems"] = verdicts.problems_of(executed, profile.name)
    return {**result, **held}


def report(profile: Profile) -> Path:
    """Write the report of the last run at a profile; the path of its first page."""
    folder, ran = build_folder() / "report", results_of(profile)
    with artifacts.plain_disk_errors(folder):
        (folder / profile.name).mkdir(parents=True, exist_ok=True)
        page = TEMPLATES.get_template("report.j2").render(
            sections=[section(result, profile, folder) for result in ran.values()],
            profile=profile, facts=machine_facts(), commit=commit(),
            parameters=next(iter(ran.values()), {}).get("parameters", {}),
            figure=lambda value: "–" if value is None else verdicts.format_figure(value))
        (folder / "index.html").write_text(page, encoding="utf-8")
    return folder / "index.html"


def keep(profile: Profile, paths: list[Path]) -> list[str]:
    """Make passed notebooks the record: costs into `results/`, at laptop outputs into the notebooks."""
    passed = {n: r for n, r in results_of(profile).items() if r["status"] == "passed"}
    chosen = [p for p in paths if p.stem in passed]
    if not chosen:
        raise CourseError(f"no finished run at profile {profile.name}", run_folder(profile), "run it first")
    target, facts = ROOT / "results" / f"{profile.name}.json", machine_facts()
    held = artifacts.read_json(target) or {"notebooks": {}}
    machine = f"{facts['cores']} cores, {facts['memory']}" if facts["gpu"] == "none" else facts["gpu"]
    for path in chosen:
        result, number = passed[path.stem], path.name[:2]
        held["notebooks"][number] = {
            "seconds": result["seconds"], "peak_bytes": result["peak_bytes"],
            "disk_bytes": disk_of(path, profile), "machine": machine, "commit": commit(),
            "command": f"make run PROFILE={profile.name} ONLY={number}", "facts": facts}
        if profile.name == "laptop":
            keep_outputs(run_folder(profile) / path.name, path)
    artifacts.write_json(target, {"notebooks": dict(sorted(held["notebooks"].items()))})
    return [p.name for p in chosen]


def disk_of(path: Path, profile: Profile) -> int:
    """Bytes of the assets that a lesson takes and of the artifacts that it makes."""
    artifacts = build_folder() / "artifacts" / profile.name
    made = [artifacts.read_manifest(artifacts / name) or {} for name in calls(path, "publish")]
    taken = [asset.disk * 10**6 for asset in taken_by(path)]
    return sum(taken) + sum(manifest.get("bytes", 0) for manifest in made)


def keep_outputs(executed: Path, target: Path) -> None:
    """Put the outputs of a run into the notebook they came from; nothing else of the run."""
    source, ran = nbformat.read(target, 4), nbformat.read(executed, 4)
    outputs = {c.id: c.outputs for c in ran.cells if c.cell_type == "code"}
    for count, cell in enumerate((c for c in source.cells if c.cell_type == "code"), 1):
        cell.outputs, cell.execution_count = [], count
        for output in outputs[cell.id]:
            last = cell.outputs[-1] if cell.outputs else {}
            if output.get("name") and output.get("name") == last.get("name"):
                last["text"] += output["text"]  # one stream, cut in pieces by the clock
                continue
            cell.outputs.append(output)
            if "execution_count" in output:
                output["execution_count"] = count
    target.write_text(nbformat.writes(source) + "\n", encoding="utf-8")
