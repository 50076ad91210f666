"""A run in a process of its own: started from its command line and followed, or forked to be killed."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers.utils.logging import disable_progress_bar

from stages.launch import count_gpus
from stages.recipe import Recipe
from utils.errors import ROOT, CourseError

# What a run in a process of its own says, in its folder.
WORDS = "words.txt"


def command_of(recipe: Recipe, file: Path, world: int = 1) -> list[str]:
    """What follows `python` to train by a recipe: a file, and what the recipe has otherwise."""
    plain = Recipe.load(file)
    changes = {}
    for name, value in vars(recipe).items():
        if name != "model" and value != getattr(plain, name):
            changes[name] = value
    lacking = plain.model.keys() - recipe.model.keys()
    if lacking:
        raise CourseError(
            f"the model lacks {', '.join(sorted(lacking))}, which the recipe's file sets",
            file,
            "begin with Recipe.load of this file and change that",
        )
    for name, value in recipe.model.items():
        if plain.model.get(name) != value:
            changes[f"model.{name}"] = value
    words = [f"{name}={value}" for name, value in changes.items()]
    ranks = ["-m", "torch.distributed.run", "--standalone"]
    ranks.append(f"--nproc_per_node={world}")
    launcher = ranks if world > 1 else []
    return [*launcher, "-m", "stages.training", str(file), *words]


def read_log(recipe: Recipe, kind: str = "step") -> list[dict[str, Any]]:
    """The lines of one kind in a run's log, as far as it is written."""
    path = recipe.place("folder") / "log.jsonl"
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    whole, _, _ = text.rpartition("\n")
    lines = [json.loads(line) for line in whole.splitlines()]
    return [line for line in lines if line["kind"] == kind]


def train_apart(recipe: Recipe, file: Path, threads: int = 1) -> None:
    """Train in a process of its own, or in one for each GPU, with the progress on one line."""
    folder = recipe.place("folder")
    folder.mkdir(parents=True, exist_ok=True)
    cards = max(1, count_gpus())
    world = max(n for n in range(1, cards + 1) if recipe.rows % n == 0)
    command = [sys.executable, *command_of(recipe, file, world)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    place = folder / WORDS
    with place.open("w", encoding="utf-8") as words:
        run = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=words,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    follow(run, recipe)
    if run.returncode:
        last = place.read_text(encoding="utf-8").strip()[-600:]
        what = f"the run ended with status {run.returncode}: {last}"
        raise CourseError(what, place, "mend what it says, then run the cell again")


def follow(run: subprocess.Popen, recipe: Recipe) -> None:
    """Wait for a run, and move a bar with its log."""
    with tqdm(total=recipe.steps, disable="TQDM_DISABLE" in os.environ) as bar:
        while run.poll() is None:
            time.sleep(0.5)
            for line in read_log(recipe)[-1:]:
                bar.n = line["step"]
                bar.set_postfix_str(f"loss {line['loss']:.2f}")


def fork(work: Callable, recipe: Recipe) -> Any:
    """Start work(recipe) in a copy of this process, on its processor; what it says goes to a file."""
    folder = recipe.place("folder")
    folder.mkdir(parents=True, exist_ok=True)
    context: Any = get_context("fork")  # which no type of Windows knows
    child = context.Process(target=speak_aside, args=(work, recipe))
    child.start()
    return child


def speak_aside(work: Callable, recipe: Recipe) -> None:
    """What such a copy does."""
    # A GPU that this process has used does not survive a fork.
    os.environ["ACCELERATE_USE_CPU"] = "true"
    words = (recipe.place("folder") / WORDS).open("a", encoding="utf-8")
    sys.stdout = sys.stderr = words
    # It has none of our threads, and would wait for them.
    torch.set_num_threads(1)
    # Handlers still hold the kernel's streams.
    logging.disable()
    disable_progress_bar()
    try:
        work(recipe)
    finally:
        words.flush()
