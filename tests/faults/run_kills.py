"""Kill training runs of every kind at random moments, and hold what goes on to what nobody killed.

    python -m tests.faults.run_kills [--minutes 20] [--seed 0] [--only NAME]

One process, two with a copy each, and two with a shard each; in float32, bfloat16 and what "auto" finds;
with dropout, accumulation and compiling. SIGKILL ends one rank, and the others at some moment in the
second behind it. The same ranks go on then, and losses, norms and weights must have the bits of a run
that nobody killed. "auto" finds another precision at each start, as it might on a busy machine: a run
must keep the one that its checkpoint names. The table is written to `results/kills.json`. Linux only.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from course.checkout import clean_commit
from tests.faults.kills import make_inputs, start
from utils import artifacts
from utils.errors import ROOT, CourseError
from utils.machine import machine_facts

RECORD = ROOT / "results" / "kills.json"
STEPS = 12
# Far more than a run takes: it only ends what hangs.
PATIENCE = 300
PRECISIONS = ("float32", "bfloat16")
NOISE = {"attention_dropout": 0.3}


@dataclass(frozen=True)
class Kind:
    """A kind of run: how many processes, and what its recipe says besides."""

    ranks: int
    shard: bool
    changes: dict[str, Any]

    @property
    def name(self) -> str:
        """What a reader calls it.

        >>> Kind(2, True, {"precision": "bfloat16", "micro": 1}).name
        'two shards, bfloat16, accumulation'
        """
        words = [{1: "one process", 2: "two processes"}[self.ranks]]
        if self.shard:
            words = ["two shards"]
        words.append(self.changes["precision"])
        if "micro" in self.changes:
            words.append("accumulation")
        if "model" in self.changes:
            words.append("dropout")
        if "compile" in self.changes:
            words.append("compiled")
        return ", ".join(words)


def make_kinds() -> list[Kind]:
    """Each number of processes in each precision, with all else that makes a resume harder."""
    hard = {"micro": 1, "model": NOISE}
    kinds = []
    for ranks, shard in ((1, False), (2, False), (2, True)):
        for precision in ("float32", "bfloat16", "auto"):
            kinds.append(Kind(ranks, shard, {"precision": precision, **hard}))
    compiled = {"precision": "bfloat16", **hard, "compile": True}
    return [*kinds, Kind(1, False, compiled), Kind(2, False, compiled)]


# one run ----------------------------------------------------------------------------------------


def train(kind: Kind, inputs: Path, folder: Path, rank: int, port: int) -> None:
    """What one rank does, in a fork of its own."""
    from stages import run as runs
    from stages.training import pretrain
    from tests.small_runs import small_recipe
    from utils.errors import Choice

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"TQDM_DISABLE": "1"}
    if kind.ranks > 1:
        ranks = str(kind.ranks)
        os.environ |= {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    import torch

    found = getattr(torch, random.Random(os.getpid()).choice(PRECISIONS))
    runs.choose_dtype = lambda device: Choice(found, "drawn")  # type: ignore
    recipe = small_recipe(inputs, folder, save_every=3, evaluate_rows=4)
    pretrain(recipe.change(**kind.changes, shard=kind.shard))


def start_ranks(kind: Kind, inputs: Path, folder: Path) -> list[int]:
    """Start the ranks of a run; their process numbers."""
    from stages.launch import free_port

    folder.mkdir(exist_ok=True)
    port = free_port()
    children = []
    for rank in range(kind.ranks):
        place = (kind, inputs, folder / "run", rank, port)
        log = folder / f"rank{rank}.log"
        children.append(start(lambda place=place: train(*place), log, "run"))
    return children


def wait(children: list[int]) -> str:
    """Wait until all have ended: nothing, or how one of them failed."""
    left = set(children)
    deadline = time.monotonic() + PATIENCE
    failure = ""
    while left and not failure:
        for child in sorted(left):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                left.remove(child)
                failure = failure or (
                    f"a rank ended with {status}" if status else ""
                )
        if time.monotonic() > deadline:
            failure = "it hung"
        time.sleep(0.01)
    kill_all(sorted(left))
    return failure


def kill_all(children: list[int]) -> None:
    """End what may still live, and collect it."""
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def last_words(folder: Path) -> str:
    """The last line of each rank."""
    words = []
    for log in sorted(folder.glob("rank*.log")):
        lines = log.read_text("utf-8", "replace").strip().splitlines()
        words.append(f"{log.stem}: {lines[-1] if lines else 'nothing'}")
    return "; ".join(words)


def result(folder: Path) -> dict[str, Any]:
    """What a run ends with: all its losses and norms, the hash of its weights, its precisions."""
    log = (folder / "run" / "log.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in log.splitlines()]
    weights = folder / "run" / f"checkpoint-{STEPS:06}" / "model.safetensors"
    figures: dict[str, Any] = {"weights": artifacts.hash_file(weights)}
    for kind, names in {"step": ("loss", "norm"), "validation": ("loss",)}.items():
        chosen = [line for line in lines if line["kind"] == kind]
        figures[kind] = [
            (line["step"], *(line[name] for name in names)) for line in chosen
        ]
    starts = [line for line in lines if line["kind"] == "start"]
    return {"figures": figures, "starts": [line["precision"] for line in starts]}


def halves(folder: Path) -> list[str]:
    """Folders that are called checkpoints and are not whole."""
    problems = []
    for path in sorted((folder / "run").glob("checkpoint-*")):
        manifest = artifacts.read_manifest(path)
        broken = "no manifest"
        if manifest:
            broken = artifacts.damage(path, manifest, full=True)
        if broken:
            problems.append(f"{path.name} is half: {broken}")
    return problems


# all of them ------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What became of the kills of a kind."""

    kills: int = 0
    # In how many of them a checkpoint was there to go on from.
    went_on: int = 0
    problems: list[str] = field(default_factory=list)


class Calm:
    """Runs that nobody kills, each made when it is first asked for: how long they live, and their end."""

    def __init__(self, inputs: Path, scratch: Path) -> None:
        self.inputs = inputs
        self.scratch = scratch
        self.known: dict[str, tuple[float, Any]] = {}

    def of(self, kind: Kind, precision: str) -> tuple[float, Any]:
        """Seconds and figures of a run of this kind in a precision."""
        fixed = Kind(
            kind.ranks, kind.shard, kind.changes | {"precision": precision}
        )
        if fixed.name not in self.known:
            # Compiled code is found on the disk from the second run on, as after a kill.
            for turn in range(2 if "compile" in kind.changes else 1):
                found = self.run(fixed, self.scratch / f"calm {fixed.name} {turn}")
            self.known[fixed.name] = found
        return self.known[fixed.name]

    def run(self, kind: Kind, folder: Path) -> tuple[float, Any]:
        """One run from its beginning to its end."""
        began = time.monotonic()
        failure = wait(start_ranks(kind, self.inputs, folder))
        life = time.monotonic() - began
        if failure:
            words = f"{kind.name} fails undisturbed: {failure}"
            raise SystemExit(f"{words}: {last_words(folder)}")
        print(f"{life:6.1f} s undisturbed  {kind.name}", flush=True)
        return life, result(folder)["figures"]


def attempt(
    kind: Kind, tally: Tally, calm: Calm, folder: Path, noise: random.Random
) -> None:
    """Kill one run at a moment of its life, let it go on, and look."""
    precision = kind.changes["precision"]
    life, _ = calm.of(kind, "float32" if precision == "auto" else precision)
    moment = noise.random() * life
    gap = noise.random() * noise.choice((0, 1))
    while True:
        children = start_ranks(kind, calm.inputs, folder)
        noise.shuffle(children)
        time.sleep(moment)
        if os.waitpid(children[0], os.WNOHANG) == (0, 0):
            break
        # It had ended before: not a kill. Again, and earlier.
        wait(children[1:])
        folder = folder.with_name(folder.name + "+")
        moment *= 0.9
    kill_all(children[:1])
    if children[1:]:
        time.sleep(gap)
    kill_all(children[1:])
    tally.kills += 1
    problems = halves(folder)
    tally.went_on += any((folder / "run").glob("checkpoint-*"))
    failure = wait(start_ranks(kind, calm.inputs, folder))
    if failure:
        problems.append(f"it did not go on: {failure}: {last_words(folder)}")
    else:
        problems += compare(kind, calm, result(folder))
    where = f"at {moment / life:.3f} of its life"
    tally.problems += [f"{where}: {problem}" for problem in problems]


def compare(kind: Kind, calm: Calm, found: dict[str, Any]) -> list[str]:
    """What differs between a run that was killed and one that was not."""
    precision = found["starts"][-1]
    if len(set(found["starts"])) > 1:
        return [f"it changed its precision: {found['starts']}"]
    _, figures = calm.of(kind, precision)
    return [] if found["figures"] == figures else ["it went on to other bits"]


def work(kinds: list[Kind], calm: Calm, end: float, seed: int) -> dict[str, Tally]:
    """Kill runs of all kinds in turn until the time is over."""
    noise = random.Random(seed)
    tallies = {kind.name: Tally() for kind in kinds}
    number = 0
    while time.monotonic() < end:
        kind = kinds[number % len(kinds)]
        tally = tallies[kind.name]
        before = len(tally.problems)
        attempt(kind, tally, calm, calm.scratch / f"{number:04}", noise)
        for problem in tally.problems[before:]:
            print(f"✘ {kind.name}: {problem}", flush=True)
        number += 1
    return tallies


def table(tallies: dict[str, Tally]) -> list[dict[str, Any]]:
    """A row for each kind of run."""
    rows = []
    for name, tally in tallies.items():
        row: dict[str, Any] = {"what": name, "kills": tally.kills}
        row["with a checkpoint"] = tally.went_on
        rows.append({**row, "problems": tally.problems})
    return rows


def main(arguments: list[str]) -> int:
    """Kill for so many minutes, print and write the table; 1 if one run went on to other bits."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.run_kills")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", help="kinds by a part of their name; nothing is written"
    )
    options = parser.parse_args(arguments)
    try:
        made_from = "" if options.only else clean_commit()
    except CourseError as error:
        print(error, file=sys.stderr)
        return 2
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    os.environ |= {"HF_HUB_OFFLINE": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    began = time.monotonic()
    end = began + 60 * options.minutes
    kinds = [kind for kind in make_kinds() if (options.only or "") in kind.name]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        scratch = Path(place)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(scratch / "compiled")
        inputs = import_all(scratch)
        tallies = work(kinds, Calm(inputs, scratch), end, options.seed)
    rows = table(tallies)
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    wrong = sum(len(tally.problems) for tally in tallies.values())
    count = sum(tally.kills for tally in tallies.values())
    seconds = round(time.monotonic() - began)
    print(f"{count} kills, {wrong} problems, {seconds} s")
    if not options.only:
        words = f"--minutes {options.minutes:g} --seed {options.seed}"
        record = artifacts.read_json(RECORD) or {}
        record["runs"] = {
            "commit": made_from,
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "command": f"python -m tests.faults.run_kills {words}",
            "machine": machine_facts(),
            "seconds": seconds,
            "kinds": rows,
        }
        artifacts.write_json(RECORD, record)
    return 1 if wrong else 0


def import_all(scratch: Path) -> Path:
    """Import what the forks need, of which nothing is run here, and make their inputs."""
    import torch
    import torch._inductor.compile_fx  # noqa: F401
    from transformers import AutoTokenizer, NanoChatForCausalLM  # noqa: F401

    sys.path.insert(0, str(ROOT / "tests"))
    torch.set_num_threads(1)
    from stages import training  # noqa: F401
    from tests import small_runs  # noqa: F401

    inputs = scratch / "inputs"
    inputs.mkdir()
    # A process of its own: what a parent has computed with threads, its forks cannot.
    maker = multiprocessing.get_context("fork").Process(
        target=make_inputs, args=(inputs,)
    )
    maker.start()
    maker.join()
    if maker.exitcode:
        raise SystemExit("the inputs could not be made")
    return inputs


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
