"""One run of the race, in a process of its own: `python -m benchmarks.race_train FOLDER`.

The folder holds `run.json`: recipe, seed and budget. The run trains until it and every process that
it has started have used the budget of CPU seconds, and leaves a checkpoint and `result.json`. The
learning rate follows the clock, because nobody knows beforehand how many steps the budget buys. A run
that was killed goes on from its newest checkpoint, with the CPU seconds that it had used by then.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from filelock import FileLock, Timeout
from torch import nn
from transformers import AutoTokenizer

from stages import checkpoints
from stages.recipe import Recipe, build_model, make_optimizers, share_of_rate
from stages.tokens import Loader, open_store, split_rows
from utils.artifacts import read_json, write_json
from utils.errors import CourseError, short_path

RUN, RESULT = "run.json", "result.json"
# CPU seconds between two checkpoints, and between two looks at the processes that were started.
SAVE_EVERY = 60.0
LOOK_EVERY = 2.0
# The schedule is asked for a share of the run, and a recipe knows only steps.
FINE = 1_000_000


def own_seconds() -> float:
    """CPU seconds of this process, and of those it has started and waited for."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def living_seconds() -> float:
    """CPU seconds of the processes that this one has started and that live, and of those they waited for."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        try:
            spent = process.cpu_times()
        except psutil.Error:
            # It has ended since: its time is in that of whoever waited for it.
            continue
        total += spent.user + spent.system
        total += getattr(spent, "children_user", 0.0)
        total += getattr(spent, "children_system", 0.0)
    return total


@dataclass
class Clock:
    """How much of a budget is used: `before`, in earlier turns of the run, and since."""

    budget: float
    before: float = 0.0
    # Where the schedule stood, and how much was used, when training began in this turn.
    share: float = 0.0
    used: float = 0.0
    # Of the processes that live, and when we last looked: a look takes milliseconds.
    living: float = 0.0
    looked: float = -LOOK_EVERY

    def spent(self) -> float:
        """CPU seconds of all turns, and of every process of this one."""
        own = own_seconds()
        if own - self.looked >= LOOK_EVERY:
            self.living = living_seconds()
            self.looked = own
        return self.before + own + self.living

    def mark(self) -> None:
        """From now on the schedule moves: what compiling cost is behind us."""
        self.used = self.spent()

    def progress(self, spent: float) -> float:
        """The share of the schedule that is over.

        >>> Clock(budget=100, used=20).progress(60)
        0.5
        >>> Clock(budget=100, used=60, share=0.5).progress(80)
        0.75
        """
        left = max(self.budget - self.used, 1e-9)
        part = (spent - self.used) / left
        return min(1.0, self.share + (1 - self.share) * part)


def rate_at(recipe: Recipe, progress: float) -> float:
    """The share of the full learning rate at a share of the run.

    >>> recipe = Recipe(model={}, warmup=0.1, cooldown=0.5)
    >>> [round(rate_at(recipe, part), 2) for part in (0.05, 0.3, 0.75, 1)]
    [0.5, 1.0, 0.5, 0.0]
    """
    fine = recipe.change(steps=FINE)
    step = min(round(progress * FINE), FINE - 1)
    return share_of_rate(step, fine)


class Racer:
    """Model, optimizers and rows of a run; one step after the other."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        torch.set_num_threads(1)
        self.recipe = recipe
        self.folder = folder
        self.tokenizer = AutoTokenizer.from_pretrained(recipe.tokenizer)
        place = Path(recipe.tokens)
        self.split = open_store(place, self.tokenizer)["train"]
        self.block = self.split.header["block"]
        self.model = build_model(recipe, self.tokenizer)
        self.refuse_short_models()
        self.optimizers = make_optimizers(self.model, recipe)
        self.step = 0
        self.narrow = recipe.precision == "bfloat16"
        self.run: Any = torch.compile(self.model) if recipe.compile else self.model
        self.model.train()

    def refuse_short_models(self) -> None:
        """Refuse a model that has fewer positions than a block has tokens."""
        positions = getattr(
            self.model.config, "max_position_embeddings", self.block
        )
        if positions < self.block:
            what = (
                f"blocks have {self.block} tokens, the model {positions} positions"
            )
            raise CourseError(what, "the recipe", f"set block={positions}")

    def go_to(self, step: int) -> None:
        """Let the next rows be those of this step."""
        self.step = step
        recipe = self.recipe
        start = step * recipe.rows
        self.batches = iter(Loader(self.split, recipe.rows, recipe.seed, start))

    def gradients(self) -> None:
        """Forward and backward of one step's rows."""
        # Dropout of a step is the same in every turn of a run.
        torch.manual_seed(self.recipe.seed * FINE + self.step)
        rows = split_rows(next(self.batches))
        with torch.autocast("cpu", torch.bfloat16, enabled=self.narrow):
            loss = self.run(**rows, use_cache=False).loss
        loss.backward()

    def compile(self) -> None:
        """One step whose gradients are dropped, so that whatever compiles has compiled."""
        self.gradients()
        self.model.zero_grad()

    def take(self, share: float) -> None:
        """One step at a share of the full rate."""
        self.gradients()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["full_rate"] * share
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1

    def save(self, **progress: float) -> None:
        """A checkpoint, and no other beside it."""
        known = {"step": self.step, **progress}
        parts = (self.model, self.optimizers, self.tokenizer, known)
        path = checkpoints.save_checkpoint(self.folder, *parts)
        for older in checkpoints.list_checkpoints(self.folder):
            if older != path:
                shutil.rmtree(older)

    def resume(self) -> dict[str, float]:
        """Stand where the newest checkpoint stands; its progress, or that of a beginning."""
        path = checkpoints.newest_checkpoint(self.folder)
        progress = {"step": 0, "cpu": 0.0, "share": 0.0, "turns": 0, "start": 0.0}
        if path:
            progress = checkpoints.load_checkpoint(
                path, self.model, self.optimizers
            )
        self.go_to(progress["step"])
        return progress


def train(racer: Racer, budget: float) -> dict[str, Any]:
    """Train until the budget is used; what it took."""
    known = racer.resume()
    clock = Clock(budget, before=known["cpu"], share=known["share"])
    facts = {"turns": known["turns"] + 1, "start": known["start"]}
    # What is left may not pay for compiling once more.
    if budget - known["cpu"] < 2 * known["start"]:
        racer.run = racer.model
    first = racer.step
    racer.compile()
    racer.go_to(first)
    clock.mark()
    facts["start"] += clock.used - clock.before
    spent = take_steps(racer, clock, facts)
    if racer.step == first == 0:
        what = f"{budget:,.0f} CPU seconds were over before the first step"
        fix = "take a larger budget, or compile = false"
        raise CourseError(what, racer.folder, fix)
    racer.save(cpu=spent, share=1.0, **facts)
    each = (spent - clock.used) / max(1, racer.step - first)
    size = racer.recipe.rows * racer.block
    return {
        "cpu_seconds": clock.spent(),
        "carried": known["cpu"],
        "turns": facts["turns"],
        "start_seconds": facts["start"],
        "steps": racer.step,
        "tokens": racer.step * size,
        "tokens_per_second": size / each if each else 0.0,
    }


def take_steps(racer: Racer, clock: Clock, facts: dict[str, float]) -> float:
    """Steps until the budget is used, and a checkpoint now and then; the CPU seconds by then."""
    spent = saved = clock.used
    while spent < clock.budget:
        share = clock.progress(spent)
        racer.take(rate_at(racer.recipe, share))
        spent = clock.spent()
        if spent - saved >= SAVE_EVERY:
            share = clock.progress(spent)
            racer.save(cpu=spent, share=share, **facts)
            saved = spent
    return spent


def main(place: str) -> int:
    """Train in a folder; 1 and a plain message where that cannot be."""
    folder = Path(place)
    facts = read_json(folder / RUN)
    try:
        # Whoever has started this process may have been killed, and begun again.
        with FileLock(folder / ".lock", timeout=0):
            recipe = Recipe(**facts["recipe"])
            result = train(Racer(recipe, folder), facts["budget"])
            write_json(folder / RESULT, result)
    except Timeout:
        print(f"another process trains in {short_path(folder)}", file=sys.stderr)
        return 1
    except CourseError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        # Whoever has started this process was interrupted too, and says so.
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
