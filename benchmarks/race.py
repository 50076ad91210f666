"""The race that anyone can enter; docs/race.md has its rules.

python -m benchmarks race my_recipe.toml               an entry: two seeds of 1,080 CPU seconds
python -m benchmarks race my_recipe.toml --budget 60   a rehearsal, judged on validation alone
python -m benchmarks ladder --budget 300               one change a rung, from classic to ours
python -m benchmarks board ENTRY.json                  checks an entry and adds it to the board
python -m benchmarks board                             prints the board
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from benchmarks import race_corpus, race_entry, race_train
from benchmarks import race_rules as rules
from course.checkout import clean_commit, commit
from stages import checkpoints, evaluation, yardsticks
from stages.race_recipe import Entrant, read_entrant
from stages.recipe import Recipe
from utils.artifacts import read_json, write_json
from utils.errors import ROOT, CourseError, build_folder
from utils.machine import choose_dtype, machine_facts

LADDER = ROOT / "launch" / "recipes" / "race"


def bits_per_byte(
    model: Any, tokenizer: Any, pieces: list[str], recipe: Recipe
) -> float:
    """Of a model on these pieces, each by itself behind an end token."""
    total = 0.0
    model.eval()
    narrow = recipe.precision == "bfloat16"
    block = recipe.block or race_corpus.BLOCK
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=narrow):
        for piece in pieces:
            ids = [tokenizer.eos_token_id, *tokenizer(piece)["input_ids"]]
            for first in range(0, len(ids) - 1, block):
                row = torch.tensor(ids[first : first + block + 1])
                scores = model(row[None, :-1], use_cache=False).logits[0]
                loss = F.cross_entropy(scores.float(), row[1:], reduction="sum")
                total += float(loss)
    size = sum(len(piece.encode()) for piece in pieces)
    return evaluation.bits_per_byte(total, 1, size)


def judge(folder: Path, recipe: Recipe, pieces: list[str]) -> float:
    """Bits per byte of the model that a run has left."""
    path = checkpoints.newest_checkpoint(folder)
    tokenizer = AutoTokenizer.from_pretrained(path)
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return round(bits_per_byte(model, tokenizer, pieces, recipe), 4)


def waited_seconds() -> float:
    """CPU seconds of the processes that this one has started and waited for."""
    spent = os.times()
    return spent.children_user + spent.children_system


def start_child(folder: Path, env: dict[str, str]) -> int:
    """Train in a process of its own until it ends; its exit status."""
    command = [sys.executable, "-m", "benchmarks.race_train", str(folder)]
    return subprocess.run(command, cwd=ROOT, env=env).returncode


def run_seed(recipe: Recipe, folder: Path, budget: float) -> dict[str, Any]:
    """Train one seed in a process of its own, or take up what it has left; what it took."""
    result = read_json(folder / race_train.RESULT)
    if result:
        return result
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"recipe": recipe.model_dump(mode="json"), "budget": budget}
    write_json(folder / race_train.RUN, facts)
    # Compiled anew each time: what another run has left would be time that nobody counts.
    compiled = folder / "compiled"
    shutil.rmtree(compiled, ignore_errors=True)
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(compiled)}
    env |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    env |= {"TOKENIZERS_PARALLELISM": "false"}
    before = waited_seconds()
    if start_child(folder, env):
        what = f"the run of seed {recipe.seed} ended before its end"
        fix = "mend what stands above, then the same command goes on"
        raise CourseError(what, folder, fix)
    result = read_json(folder / race_train.RESULT)
    # What it has counted itself, or what the system has counted for it: the larger one.
    seen = result["carried"] + waited_seconds() - before
    result["cpu_seconds"] = max(result["cpu_seconds"], seen)
    write_json(folder / race_train.RESULT, result)
    shutil.rmtree(compiled, ignore_errors=True)
    return result


def folder_of(entrant: Entrant, budget: float) -> Path:
    """Where an entrant's runs lie."""
    plain = re.sub(r"\W+", "-", entrant.idea.lower()).strip("-")
    name = f"{plain}-{entrant.hash[:8]}-{budget:g}"
    return build_folder() / "race" / name


def begin(folder: Path, entrant: Entrant, name: str) -> str:
    """Write down what is begun; refuse to go on with a run of another commit."""
    facts = {"recipe": entrant.hash, "corpus": rules.CORPUS, "rules": rules.VERSION}
    facts |= {"commit": name}
    known = read_json(folder / "begun.json")
    if known and known != facts:
        changed = next(key for key in facts if known.get(key) != facts[key])
        what = f"this run began with another {changed}: {known.get(changed)}"
        fix = "delete the folder to begin anew, or go back to that"
        raise CourseError(what, folder, fix)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "begun.json", facts)
    return name


def race(path: Path, budget: float | None = None) -> Path:
    """Run an entrant with every seed and judge it; the path of its entry, or of its rehearsal."""
    entrant = read_entrant(path)
    rehearsal = budget is not None
    if budget is not None and not 0 < budget < math.inf:
        what = f"a budget of {budget} CPU seconds is none"
        raise CourseError(what, "--budget", "a number above zero")
    name = commit() if rehearsal else clean_commit()
    budget = budget or rules.BUDGET
    recipe = decide_precision(entrant.recipe)
    entrant = Entrant(entrant.idea, recipe, entrant.pattern)
    folder = folder_of(entrant, budget)
    if rehearsal:
        folder = folder.with_name(f"rehearsal-{folder.name}")
    corpus = race_corpus.open_corpus()
    recipe = race_corpus.make_store(corpus, recipe, entrant.pattern)
    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    try:
        with lock.acquire(timeout=0):
            begin(folder, entrant, name)
            runs = run_seeds(recipe, folder, budget)
            judged = judge_runs(runs, folder, recipe, corpus, rehearsal)
            facts = describe(entrant, name, budget, rehearsal, judged)
            facts |= measure_compressors(recipe, corpus, runs[0], rehearsal)
    except Timeout as error:
        what = "another process runs this race in this folder"
        raise CourseError(what, folder, "wait for it") from error
    place = folder / "entry.json"
    write_json(place, race_entry.seal_entry(facts))
    return place


def decide_precision(recipe: Recipe) -> Recipe:
    """The recipe with what "auto" means here, which the entry then says."""
    formats: tuple[str, ...] = ("float32", "bfloat16")
    if recipe.precision in formats:
        return recipe
    if recipe.precision != "auto":
        what = f"a processor does not train in {recipe.precision}"
        raise CourseError(
            what, "precision of the recipe", "one of float32, bfloat16"
        )
    dtype = str(choose_dtype("cpu").value)
    return recipe.change(precision=dtype.removeprefix("torch."))


def run_seeds(recipe: Recipe, folder: Path, budget: float) -> list[dict[str, Any]]:
    """The runs of all seeds, one after the other."""
    runs = []
    for seed in rules.SEEDS:
        place = folder / f"seed-{seed}"
        own = recipe.change(seed=seed)
        print(f"seed {seed}: {budget:g} CPU seconds", flush=True)
        runs.append({"seed": seed, **run_seed(own, place, budget)})
    return runs


def judge_runs(
    runs: list[dict[str, Any]],
    folder: Path,
    recipe: Recipe,
    corpus: race_corpus.Corpus,
    rehearsal: bool,
) -> list[dict[str, Any]]:
    """The runs with bits per byte: on validation, and on test only at the end of a real race."""
    torch.set_num_threads(1)
    splits = ["validation"] if rehearsal else ["validation", "test"]
    judged = [{**run, "test": None} for run in runs]
    for split in splits:
        pieces = race_corpus.pieces_of(corpus, split)
        for run in judged:
            place = folder / f"seed-{run['seed']}"
            run[split] = judge(place, recipe, pieces)
            print(f"seed {run['seed']}: {run[split]} on {split}", flush=True)
    return judged


def describe(
    entrant: Entrant,
    name: str,
    budget: float,
    rehearsal: bool,
    runs: list[dict[str, Any]],
) -> dict[str, Any]:
    """What an entry says besides the compressors."""
    fields = race_entry.RunFacts.model_fields
    kept = []
    for run in runs:
        values = {field: run[field] for field in fields}
        for field in ("cpu_seconds", "start_seconds", "tokens_per_second"):
            values[field] = round(run[field], 1)
        kept.append(values)
    test = None
    if not rehearsal:
        test = round(statistics.mean(run["test"] for run in runs), 4)
    return {
        "rules": rules.VERSION,
        "idea": entrant.idea,
        "rehearsal": rehearsal,
        "budget": budget,
        "corpus": rules.CORPUS,
        "recipe": entrant.facts(),
        "pattern": entrant.pattern,
        "recipe_hash": entrant.hash,
        "machine": machine_facts(),
        "commit": name,
        "runs": kept,
        "validation": round(statistics.mean(run["validation"] for run in runs), 4),
        "test": test,
    }


def measure_compressors(
    recipe: Recipe, corpus: race_corpus.Corpus, run: dict[str, Any], rehearsal: bool
) -> dict[str, Any]:
    """The compressors on the bytes that were judged, primed with what a run of that seed has read."""
    split = "validation" if rehearsal else "test"
    judged = "".join(race_corpus.pieces_of(corpus, split)).encode()
    tokenizer = AutoTokenizer.from_pretrained(recipe.tokenizer)
    read = race_corpus.text_read(recipe, tokenizer, run["seed"], run["steps"])
    bits = yardsticks.measure(judged, read)
    return {"judged_on": split, "bytes": len(judged), "compressors": bits}


def climb(budget: float) -> None:
    """Every rung of the ladder on validation, and the ladder on the board."""
    name = clean_commit()
    rows = []
    for path in sorted(LADDER.glob("[0-9]*.toml")):
        entry = read_json(race(path, budget))
        keys = ("idea", "validation", "runs", "recipe", "pattern")
        rows.append({key: entry[key] for key in keys})
        print(f"{entry['validation']:.4f}  {entry['idea']}", flush=True)
    ladder = {"budget": budget, "commit": name, "machine": machine_facts()}
    board = race_entry.read_board()
    board["ladder"] = {**ladder, "corpus": rules.CORPUS, "rungs": rows}
    write_json(race_entry.BOARD, board)


def show_entry(path: Path) -> None:
    """What came of a race, in lines of text."""
    entry = read_json(path)
    split = entry["judged_on"]
    kind = "a rehearsal" if entry["rehearsal"] else "an entry"
    print(f"{entry['idea']}: {entry[split]:.4f} bits per byte on {split}, {kind}")
    for way, bits in entry["compressors"].items():
        best = min(bits, key=bits.__getitem__)
        ratio = entry[split] / bits[best]
        print(
            f"  {ratio:.3f} of the best {way} compressor, {best} {bits[best]:.4f}"
        )
    print(path)


def command(arguments: list[str]) -> int:
    """`race`, `ladder` or `board`; 1 and a plain message where something is refused."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    actions = parser.add_subparsers(dest="action", required=True)
    action = actions.add_parser("race")
    action.add_argument("recipe", type=Path)
    action.add_argument("--budget", type=float)
    action = actions.add_parser("ladder")
    action.add_argument("--budget", type=float, default=300.0)
    action = actions.add_parser("board")
    action.add_argument("entries", type=Path, nargs="*")
    options = parser.parse_args(arguments)
    try:
        if options.action == "race":
            show_entry(race(options.recipe, options.budget))
        elif options.action == "ladder":
            climb(options.budget)
        else:
            for path in options.entries:
                race_entry.admit(path)
            print(race_entry.format_board(race_entry.read_board()))
    except CourseError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        return 130
    return 0
