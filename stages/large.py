"""One command for a large run: data, tokenizer, tokens, training, evaluation, report.

    python -m stages.large gpt2-110m                 # a recipe of launch/recipes
    python -m stages.large gpt2-110m --plan          # only say what it takes
    python -m stages.large gpt2-110m --rehearse      # all of it, a thousandth in size, offline
    python -m stages.large gpt2-110m --data codeparrot-clean steps=20000 micro=8
    python -m stages.large gpt2-110m tokens=$PWD/mine/tokens tokenizer=$PWD/mine/tokenizer

Each step leaves a sealed folder. What is there and whole is not made again: after a kill, a full
disk or a mended mistake the same command goes on.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from stages import large_data, large_figures
from stages.checkpoints import newest_checkpoint
from stages.large_data import Job, list_packages
from stages.recipe import Recipe, nearest
from stages.tokens import open_store
from stages.training import parse_changes
from utils.artifacts import (
    Facts,
    damage,
    read_manifest,
    sealed,
    write_json,
)
from utils.errors import ROOT, CourseError, build_folder, short_path

RECIPES = ROOT / "launch" / "recipes"
PACKAGES = ROOT / "launch" / "packages.txt"
# What a rehearsal keeps of a recipe: a thousandth of its steps, about a thousandth of its weights.
REHEARSAL: Facts = {"rows": 8, "micro": 8, "vocabulary": 512, "block": 64}
REHEARSAL |= {"precision": "float32", "compile": False, "threads": 1, "log_to": []}
REHEARSAL |= {"evaluate_rows": 32, "log_every": 1, "sample_every": None}


@dataclass(frozen=True)
class Step:
    """What is made, from which other results, with which settings, and how."""

    name: str
    needs: tuple[str, ...]
    settings: Facts
    make: Callable[[Job, Path], None]


def check_store(job: Job) -> int:
    """The steps that the tokens allow; a store of other sizes than the recipe's is refused."""
    train = open_store(job.place("tokens"))["train"]
    for name in ("vocabulary", "block"):
        wanted = getattr(job.recipe, name)
        size = train.header[name]
        if size != wanted:
            what = f"{job.name} wants a {name} of {wanted:,} tokens, here it is {size:,}"
            fix = f"make tokens of that {name}, or set {name}={size}"
            raise CourseError(what, job.place("tokens"), fix)
    return large_figures.steps_of(job.recipe, len(train) * train.header["block"])


def train(job: Job) -> None:
    """Train by `stages.training` in a process of its own, on all cards of this machine."""
    steps = check_store(job)
    folder = job.place("training")
    changes = {"steps": steps, "folder": str(folder)}
    for name in ("tokens", "tokenizer"):
        changes[name] = str(job.place(name))
    recipe = job.recipe.change(**changes)
    if steps < job.recipe.steps:
        print(
            f"  {steps:,} steps, {large_figures.MOST_EPOCHS} epochs, in place of {job.recipe.steps:,}"
        )
    path = write_recipe(recipe, job.folder / "recipe.toml")
    start = launcher(count_cards())
    start += ["-m", "stages.training", str(path)]
    wait_for(start, folder)
    newest = newest_checkpoint(folder)
    done = large_figures.step_of(newest)
    if done < steps:
        raise CourseError(
            f"the training stopped at step {done:,} of {steps:,}", folder
        )


def write_recipe(recipe: Recipe, path: Path) -> Path:
    """The recipe as a TOML file: tables of TOML hold what JSON spells, except nothing."""
    lines = []
    tables = recipe.model_dump(mode="json")
    sizes = tables.pop("model")
    for table, head in ((tables, ""), (sizes, "\n[model]\n")):
        lines.append(head)
        for name, value in table.items():
            lines.append(f"{name} = {large_figures.toml_value(value)}\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines), encoding="utf-8")
    return path


def count_cards() -> int:
    """The GPUs that this process may use."""
    import torch

    return torch.cuda.device_count()


def launcher(cards: int) -> list[str]:
    """What starts a module on so many cards."""
    if cards < 2:
        return [sys.executable]
    config = ROOT / "launch" / "ddp.yaml"
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", str(config)]
    command += ["--num_processes", str(cards)]
    return command


def wait_for(command: list[str], folder: Path) -> None:
    """Run a program to its end; Ctrl-C reaches it too, and we wait until it has saved."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    with subprocess.Popen(command, cwd=ROOT, env=environment) as child:
        while child.poll() is None:
            try:
                child.wait()
            except KeyboardInterrupt:
                print("  waiting for the training to save", flush=True)
    if child.returncode:
        what = f"the training ended with status {child.returncode}; its message stands above"
        raise CourseError(what, folder)


def data_steps(job: Job) -> list[Step]:
    """The steps before the training; none for somebody who brings tokens."""
    if job.own:
        return []
    sizes = {"vocabulary": job.recipe.vocabulary}
    steps = [
        Step("tokenizer", ("corpus",), sizes, large_data.make_tokenizer),
        Step(
            "tokens",
            ("corpus", "tokenizer"),
            {"block": job.recipe.block},
            large_data.make_tokens,
        ),
    ]
    fetches = []
    if job.source == "packages":
        for package in job.packages:
            fetch = partial(large_data.fetch_source, package)
            place = large_data.place_of(package)
            fetches.append(Step(place, (), {"package": package}, fetch))
    needs = tuple(fetch.name for fetch in fetches)
    source = {"source": job.source}
    return [*fetches, Step("corpus", needs, source, large_data.make_corpus), *steps]


def take(job: Job, step: Step) -> None:
    """Make what a step makes, if it is not there; refuse what is there and something else."""
    target = job.place(step.name)
    inputs = {}
    for name in step.needs:
        source = job.place(name)
        known = read_manifest(source) or {}
        inputs[name] = known.get("hash")
    facts = {"settings": step.settings, "inputs": inputs}
    manifest = read_manifest(target)
    if manifest is None:
        print(f"{step.name}: making it", flush=True)
        with sealed(target, facts) as aside:
            step.make(job, aside)
        return
    problem = damage(target, manifest)
    for kind, wanted in facts.items():
        for name, value in wanted.items():
            known = manifest[kind].get(name)
            if not problem and known != value:
                problem = f"it was made with {name} {known!r}, not {value!r}"
    if problem:
        fix = "delete this folder, and the same command makes it again"
        raise CourseError(f"{step.name} cannot be used: {problem}", target, fix)
    print(f"{step.name}: there and whole")


def run(job: Job, known: large_figures.Forecast) -> Path:
    """All steps, each unless it is done; returns the report."""
    if job.own:
        check_store(job)
    for step in data_steps(job):
        take(job, step)
    print("training:", flush=True)
    train(job)
    checkpoint = newest_checkpoint(job.place("training"))
    settings = {"step": large_figures.step_of(checkpoint)}
    take(job, Step("evaluation", ("tokens",), settings, evaluate))
    rates = large_figures.report_rows(job.folder, job.place("tokens"), known)
    return large_figures.write_report(job.folder, job.name, job.source, rates)


def evaluate(job: Job, folder: Path) -> None:
    """Judge the last checkpoint on held-out packages, beside compressors on the same rows."""
    rows = min(job.recipe.evaluate_rows, 2048)
    figures = large_figures.judge(
        newest_checkpoint(job.place("training")), job.place("tokens"), rows
    )
    write_json(folder / "evaluation.json", figures)


def rehearsed(recipe: Recipe) -> Recipe:
    """A thousandth of a GPT-2 recipe: of its steps, and by fewer and thinner layers of its weights."""
    sizes = recipe.model
    if sizes.get("model_type") != "gpt2":
        what = f"only a GPT-2 can be rehearsed, not {sizes.get('model_type')!r}"
        raise CourseError(what, "the recipe", "take gpt2-110m or gpt2-1.5b")
    block = REHEARSAL["block"]
    model = {"n_head": 2, "n_positions": block}
    model["n_layer"] = max(2, sizes["n_layer"] // 6)
    model["n_embd"] = max(32, sizes["n_embd"] // 12 // 32 * 32)
    steps = max(4, recipe.steps // 1000)
    often = {"evaluate_every": steps // 2, "save_every": steps // 4}
    return recipe.change(**REHEARSAL, model=model, steps=steps, **often)


def load_recipe(name: str, rehearse: bool, changes: Facts) -> Recipe:
    """A recipe of `launch/recipes` by its name, if it says what its tokens must be like."""
    known = [path.stem for path in sorted(RECIPES.glob("*.toml"))]
    if name not in known:
        what = f"there is no recipe {name!r}"
        raise CourseError(what, RECIPES, nearest(name, known))
    recipe = Recipe.load(RECIPES / f"{name}.toml")
    if recipe.vocabulary is None or recipe.block is None:
        what = f"{name} names no vocabulary and no block: it is no large run"
        raise CourseError(what, RECIPES, "take gpt2-110m or gpt2-1.5b")
    if rehearse:
        recipe = rehearsed(recipe)
    return recipe.change(**changes)


def make_job(options: Any, command: str) -> Job:
    """The run that a command line asks for."""
    changes = parse_changes(options.changes)
    own = "tokens" in changes
    if own and "tokenizer" not in changes:
        what = "tokens come with the tokenizer that made them"
        raise CourseError(what, "the command", "give tokenizer=FOLDER too")
    recipe = load_recipe(options.recipe, options.rehearse, changes)
    source = "own tokens" if own else options.data
    folder = build_folder() / "large" / options.recipe
    if options.rehearse:
        source = source if own else "environment"
        folder = folder.with_name(f"{folder.name}-rehearsal")
    folder = Path(options.folder).resolve() if options.folder else folder
    packages = list_packages(Path(options.packages))
    return Job(options.recipe, recipe, source, packages, folder, command)


def say_plan(job: Job, card: str, devices: int) -> large_figures.Forecast:
    """Print what the run will take."""
    machine = large_figures.find_machine(card)
    if job.own:
        split = open_store(job.place("tokens"))["train"]
        text = (float(split.bytes), float(split.bytes))
        tokens = (float(split.tokens), float(split.tokens))
    else:
        vocabulary = job.recipe.vocabulary or 0
        text, tokens = large_figures.text_of(job.source, vocabulary)
    known = large_figures.forecast(job.recipe, text, tokens, machine, devices)
    print(f"{job.name}, from {job.source}, in {short_path(job.folder)}")
    print(large_figures.explain(job.recipe, known, machine, devices))
    return known


def check_disk(job: Job, known: large_figures.Forecast) -> None:
    """Refuse a disk that cannot hold the run."""
    base = next(path for path in (job.folder, *job.folder.parents) if path.exists())
    free = shutil.disk_usage(base).free
    used = sum(
        file.stat().st_size for file in job.folder.rglob("*") if file.is_file()
    )
    if free + used < known.disk[0]:
        what = f"{free / 1e9:,.1f} GB are free, {known.disk[0] / 1e9:,.1f} GB at least are needed"
        raise CourseError(
            what, base, "free some space, or give folder on another disk: --folder"
        )


def parse_options(arguments: list[str]) -> Any:
    """The command line; what is no option changes the recipe."""
    parser = argparse.ArgumentParser("python -m stages.large")
    parser.add_argument("recipe", help="gpt2-110m or gpt2-1.5b")
    parser.add_argument("changes", nargs="*", help="name=value of the recipe")
    parser.add_argument(
        "--plan", action="store_true", help="only say what it takes"
    )
    parser.add_argument(
        "--rehearse", action="store_true", help="a thousandth of it"
    )
    parser.add_argument(
        "--data", choices=["packages", "codeparrot-clean"], default="packages"
    )
    parser.add_argument("--packages", default=str(PACKAGES), help="a file of names")
    parser.add_argument("--folder", help="where all of it goes")
    parser.add_argument("--card", help="T4, A100 or H100: whose hours to plan")
    return parser.parse_intermixed_args(arguments)


def choose_card(options: Any) -> tuple[str, int]:
    """The card whose hours are planned, and how many; without one only a rehearsal goes on."""
    cards = count_cards()
    if options.rehearse and not cards:
        return options.card or "2 CPU cores", 1
    if cards:
        import torch

        return options.card or torch.cuda.get_device_name(0), cards
    if not options.plan:
        what = "there is no GPU here, and on a CPU such a run takes years"
        raise CourseError(
            what, "this machine", "try --rehearse, or --plan --card H100"
        )
    return options.card or "H100", 1


def main(arguments: list[str]) -> int:
    """Say what the run takes, and do it; a step that fails says how to go on."""
    options = parse_options(arguments)
    command = " ".join(["python -m stages.large", *arguments])
    try:
        job = make_job(options, command)
        known = say_plan(job, *choose_card(options))
        if options.plan:
            return 0
        check_disk(job, known)
    except CourseError as error:
        print(error, file=sys.stderr)
        return 1
    try:
        print(f"the report: {short_path(run(job, known))}")
    except BaseException as error:
        if isinstance(error, CourseError):
            print(error, file=sys.stderr)
        print(f"what is done is kept; this goes on: {command}", file=sys.stderr)
        if isinstance(error, CourseError):
            return 1
        raise
    return 0


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main(sys.argv[1:]))
