"""Kill what writes, at random moments, and look at what is left.

    python -m tests.faults.kills [--count 200] [--seed 0]

Each undertaking replaces an old version of something by a new one. It is killed (SIGKILL) at a random
moment of its life. Then nothing may be half, the old version or the new one must be there, no process
may be left, and a repeated run must end with what an undisturbed one ends with. The table that is
printed is written to `results/kills.json`. Linux and macOS only: a prepared parent is forked.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from course.checkout import clean_commit
from utils import artifacts
from utils.errors import ROOT, CourseError
from utils.machine import machine_facts

AT_ONCE = 2
# Seconds that processes may outlive the one that started them; far more than they need.
PATIENCE = 60
NUMBER = "COURSE_KILL"


class Undertaking:
    """Something that writes; a subclass says what, and what must be there afterwards."""

    name = ""
    # Its share of all kills.
    weight = 1.0
    # Sealed folders below the place of an attempt, each with an old version.
    sealed: tuple[str, ...] = ()

    def prepare(self, place: Path) -> None:
        """Write what all attempts begin with: the old version."""
        self.write(place, old=True)

    def write(self, place: Path, old: bool = False) -> None:
        """Write the version; this is what is killed."""
        raise NotImplementedError

    def result(self, place: Path) -> Any:
        """What a run ends with: figures and hashes that do not depend on the clock."""
        return {
            name: (artifacts.read_manifest(place / name) or {})["hash"]
            for name in self.sealed
        }

    def problems(self, place: Path) -> list[str]:
        """What is half, or lost."""
        problems = []
        for name in self.sealed:
            manifest = artifacts.read_manifest(place / name)
            if manifest is None:
                problems.append(f"{name} is lost")
            elif artifacts.damage(place / name, manifest, full=True):
                broken = artifacts.damage(place / name, manifest, full=True)
                problems.append(f"{name} is half: {broken}")
        return problems

    def litter(self, place: Path) -> list[str]:
        """What is left over when a repeated run has ended."""
        names = [path.name for path in place.rglob(".*") if ".new-" in path.name]
        return [f"{name} was left behind" for name in names]


class Publish(Undertaking):
    """A lesson that publishes an artifact of some megabytes."""

    name = "lesson.publish"
    weight = 2.0
    sealed = ("artifacts/smoke/thing",)

    def write(self, place: Path, old: bool = False) -> None:
        from utils.lesson import Lesson
        from utils.profiles import PROFILES

        os.environ["COURSE_BUILD"] = str(place)
        lesson = Lesson.__new__(Lesson)
        lesson.number = "03"
        lesson.seed = 42
        lesson.profile = PROFILES["smoke"]
        lesson._inputs = {}
        noise = random.Random(int(old))
        with lesson.publish("thing", version=int(old)) as folder:
            for number in range(8):
                (folder / f"{number}.bin").write_bytes(noise.randbytes(500_000))


class Corpus(Undertaking):
    """A corpus of the course's own files."""

    name = "corpus"
    sealed = ("corpus",)

    def write(self, place: Path, old: bool = False) -> None:
        from stages import corpus, sources

        packages = ["utils"] if old else ["utils", "stages", "course", "tests"]
        trees = [sources.folder_tree(ROOT / name, name, "MIT") for name in packages]
        with artifacts.sealed(place / "corpus", {}) as folder:
            corpus.build(trees, folder)


class Packing(Undertaking):
    """A token store of the course's own files."""

    name = "packing"
    sealed = ("tokens",)

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def write(self, place: Path, old: bool = False) -> None:
        from stages import tokens

        paths = sorted((ROOT / "stages").glob("*.py"))[: 2 if old else None]
        texts = [path.read_text(encoding="utf-8") for path in paths]
        splits = {"train": texts * (1 if old else 4), "validation": texts[:2]}
        with artifacts.sealed(place / "tokens", {}) as folder:
            tokens.write_store(folder, splits, self.tokenizer, 64, shard=10_000)


class Training(Undertaking):
    """A run of twelve steps that saves every other one and keeps two; it goes on from an old run."""

    name = "training"
    weight = 1.5

    def __init__(self, inputs: Path) -> None:
        self.inputs = inputs

    def write(self, place: Path, old: bool = False) -> None:
        from stages.training import pretrain
        from tests.small_runs import small_recipe

        os.environ["TQDM_DISABLE"] = "1"
        recipe = small_recipe(
            self.inputs, place / "run", save_every=2, evaluate_rows=4
        )
        if old:
            self.leave_after_first_save()
        pretrain(recipe)

    def leave_after_first_save(self) -> None:
        """The old version is a run that somebody stopped behind its first checkpoint."""
        from stages import training

        save = training.Run.save

        def save_and_stop(run: Any, *arguments: Any) -> None:
            save(run, *arguments)
            run.stopping = True

        training.Run.save = save_and_stop  # type: ignore[method-assign]

    def result(self, place: Path) -> Any:
        lines = (
            (place / "run" / "log.jsonl").read_text(encoding="utf-8").splitlines()
        )
        steps = [line for line in map(json.loads, lines) if line["kind"] == "step"]
        weights = place / "run" / "checkpoint-000012" / "model.safetensors"
        losses = {line["step"]: line["loss"] for line in steps}
        return {"losses": losses, "weights": artifacts.hash_file(weights)}

    def problems(self, place: Path) -> list[str]:
        """Every folder that is called a checkpoint is whole, and there is at least one."""
        problems = []
        whole = 0
        for path in (place / "run").glob("checkpoint-*"):
            manifest = artifacts.read_manifest(path)
            broken = (
                artifacts.damage(path, manifest, full=True)
                if manifest
                else "no manifest"
            )
            whole += not broken
            if broken:
                problems.append(f"{path.name} is half: {broken}")
        return problems if whole else [*problems, "every checkpoint is lost"]


class Course(Undertaking):
    """The runner on a course of two lessons, the second of which takes what the first makes."""

    name = "runner"
    weight = 0.6
    sealed = ("build/artifacts/smoke/one", "build/artifacts/smoke/two")

    def write(self, place: Path, old: bool = False) -> None:
        from tests import conftest

        if not (place / "notebooks").exists():
            course = conftest.Course(place)
            self.add_lessons(course, conftest)
        course = conftest.Course.__new__(conftest.Course)
        environment = {
            **os.environ,
            "COURSE_ROOT": str(place),
            "COURSE_BUILD": str(place / "build"),
        }
        environment |= {"PYTHONPATH": str(ROOT), "JOBS": "2"}
        for name in ("COURSE_RUN", "COURSE_PROFILE"):
            environment.pop(name, None)
        command = [sys.executable, "-m", "course", "run", "--profile", "smoke"]
        command += ["--seed", str(42 - old)]
        os.execve(sys.executable, command, environment)

    def add_lessons(self, course: Any, conftest: Any) -> None:
        parameters = conftest.PARAMETERS
        wait = "import time\ntime.sleep(0.3)"
        first = conftest.publish_cell("one").replace(
            '"a")', '"a" * 100 + str(SEED))'
        )
        second = conftest.publish_cell("two").replace('"a")', "str(SEED))")
        need = 'lesson.need("one")'
        course.add(
            "00_a.ipynb", parameters, conftest.lesson_cell("00"), wait, first
        )
        course.add(
            "03_b.ipynb", parameters, conftest.lesson_cell("03"), need, wait, second
        )

    def result(self, place: Path) -> Any:
        results = {}
        for path in sorted((place / "build" / "run" / "smoke").glob("*.json")):
            facts = artifacts.read_json(path) or {}
            if "status" in facts:
                results[path.stem] = (facts["status"], facts["artifacts"])
        return [super().result(place), results]


# one attempt --------------------------------------------------------------------------------------


def start(task: Callable[[], object], log: Path, mark: str) -> int:
    """Run a task in a fork of this process, in a session of its own; returns the fork's number."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.setsid()
        os.environ[NUMBER] = mark
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        task()
        status = 0
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        # A fork must not run its parent's clean-up.
        os._exit(status)


def finish(task: Callable[[], object], log: Path, mark: str) -> str:
    """Run a task to its end; its last words where it failed."""
    _, status = os.waitpid(start(task, log, mark), 0)
    words = log.read_text("utf-8", "replace").strip().splitlines()
    return f"{words[-1] if words else 'failed in silence'}" if status else ""


def family(process: psutil.Process, mark: str) -> list[psutil.Process]:
    """Processes that one has started: its descendants, and who has its mark in the environment."""
    members = []
    with contextlib.suppress(psutil.Error):
        members = process.children(recursive=True)
    for other in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if other != process and other.environ().get(NUMBER) == mark:
                members.append(other)
    return list(dict.fromkeys(members))


def kill(child: int, delay: float, mark: str) -> tuple[bool, list[psutil.Process]]:
    """Kill a child after a while: whether it still lived, and which processes it had."""
    process = psutil.Process(child)
    deadline = time.monotonic() + delay
    while time.monotonic() < deadline:
        finished, _ = os.waitpid(child, os.WNOHANG)
        if finished:
            return False, family(process, mark)
        time.sleep(min(0.002, max(0.0, deadline - time.monotonic())))
    # Held for the moment in which its family is counted.
    os.kill(child, signal.SIGSTOP)
    members = family(process, mark)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True, members


def is_alive(process: psutil.Process) -> bool:
    """Whether a process still runs; one that nobody has collected does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def survivors(members: list[psutil.Process]) -> list[str]:
    """Processes that are still there when patience has ended."""
    deadline = time.monotonic() + PATIENCE
    while any(map(is_alive, members)) and time.monotonic() < deadline:
        time.sleep(0.05)
    names = [
        f"process {process.pid} outlived it"
        for process in members
        if is_alive(process)
    ]
    for process in filter(is_alive, members):
        process.kill()
    return names


@dataclass
class Attempt:
    """One kill: of what, when, and what was wrong afterwards."""

    name: str
    number: int
    share: float
    problems: list[str] = field(default_factory=list)


class Bench:
    """Undertakings with their beginnings, lives and ends, measured once without a kill."""

    def __init__(self, scratch: Path, undertakings: list[Undertaking]) -> None:
        self.scratch = scratch
        self.undertakings = {
            undertaking.name: undertaking for undertaking in undertakings
        }
        self.lives: dict[str, float] = {}
        self.ends: dict[str, Any] = {}
        for undertaking in undertakings:
            self.measure(undertaking)

    def measure(self, undertaking: Undertaking) -> None:
        """The old version, the life of a process that writes the new one, and what that ends with."""
        before = self.scratch / undertaking.name / "before"
        before.mkdir(parents=True)
        log = before.with_suffix(".log")
        failure = finish(lambda: undertaking.prepare(before), log, "before")
        calm = before.with_name("calm")
        shutil.copytree(before, calm, symlinks=True)
        began = time.monotonic()
        failure = failure or finish(lambda: undertaking.write(calm), log, "calm")
        self.lives[undertaking.name] = time.monotonic() - began
        if failure:
            raise SystemExit(
                f"{undertaking.name} fails undisturbed: {failure}\n{log.read_text()}"
            )
        self.ends[undertaking.name] = undertaking.result(calm)

    def attempt(self, attempt: Attempt) -> Attempt:
        """Kill once, look, repeat, look again."""
        undertaking = self.undertakings[attempt.name]
        before = self.scratch / attempt.name / "before"
        place = before.with_name(f"{attempt.number:04}")
        log = place.with_suffix(".log")
        mark = f"{os.getpid()}-{attempt.name}-{attempt.number}"
        delay = attempt.share * self.lives[attempt.name]
        hit = False
        while not hit:
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(before, place, symlinks=True)
            child = start(lambda: undertaking.write(place), log, mark)
            hit, members = kill(child, delay, mark)
            # One that has ended before was not killed: again, and earlier.
            delay *= 0.9
        problems = survivors(members)
        problems += undertaking.problems(place)
        failure = finish(lambda: undertaking.write(place), log, mark)
        if failure:
            problems.append(f"the repeated run failed: {failure}")
        elif undertaking.result(place) != self.ends[attempt.name]:
            problems.append("the repeated run ended with something else")
        problems += undertaking.problems(place)
        problems += undertaking.litter(place)
        attempt.problems = list(dict.fromkeys(problems))
        if not problems:
            shutil.rmtree(place)
        return attempt


# all of them --------------------------------------------------------------------------------------


def make_inputs(folder: Path) -> None:
    """A tokenizer and a token store for the training."""
    from stages import tokenizer as tokenizers
    from stages import tokens
    from tests.small_runs import BLOCK

    paths = sorted((ROOT / "utils").glob("*.py"))
    texts = [path.read_text(encoding="utf-8") for path in paths]
    tokenizer = tokenizers.train_bpe(texts, 500)
    tokenizer.save_pretrained(folder / "tokenizer")
    with artifacts.sealed(folder / "tokens", {}) as store:
        tokens.write_store(
            store, {"train": texts[4:], "validation": texts[:4]}, tokenizer, BLOCK
        )


def make_undertakings(scratch: Path) -> list[Undertaking]:
    """All undertakings. What they import is imported here, and nothing of it is run: forks are made."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

    from stages import corpus, sources, tokens, training  # noqa: F401

    sys.path.insert(0, str(ROOT / "tests"))
    torch.set_num_threads(1)
    inputs = scratch / "inputs"
    inputs.mkdir()
    failure = finish(lambda: make_inputs(inputs), scratch / "inputs.log", "inputs")
    if failure:
        raise SystemExit(failure)
    tokenizer = AutoTokenizer.from_pretrained(inputs / "tokenizer")
    return [Publish(), Corpus(), Packing(tokenizer), Training(inputs), Course()]


def draw(undertakings: list[Undertaking], count: int, seed: int) -> list[Attempt]:
    """Which undertaking is killed when, the same for the same seed."""
    noise = random.Random(seed)
    total = sum(undertaking.weight for undertaking in undertakings)
    attempts = []
    for undertaking in undertakings:
        share = round(count * undertaking.weight / total)
        for _ in range(share):
            attempts.append(
                Attempt(undertaking.name, len(attempts), noise.random())
            )
    noise.shuffle(attempts)
    return attempts


def table(attempts: list[Attempt], lives: dict[str, float]) -> list[dict[str, Any]]:
    """A row for each undertaking."""
    rows = []
    for name, life in lives.items():
        own = [attempt for attempt in attempts if attempt.name == name]
        rows.append(
            {
                "what": name,
                "seconds undisturbed": round(life, 2),
                "kills": len(own),
                "with a problem": sum(bool(attempt.problems) for attempt in own),
            }
        )
    return rows


def main(arguments: list[str]) -> int:
    """Kill so many times, print and write the table; 1 if something was half, lost or left."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.kills")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", help="one undertaking, by name; nothing is written down"
    )
    options = parser.parse_args(arguments)
    made_from = ""
    if not options.only:
        try:
            made_from = clean_commit()
        except CourseError as error:
            print(error, file=sys.stderr)
            return 2
    os.environ |= {
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    began = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        undertakings = make_undertakings(Path(folder))
        if options.only:
            undertakings = [u for u in undertakings if u.name == options.only]
        bench = Bench(Path(folder), undertakings)
        attempts = draw(undertakings, options.count, options.seed)
        with multiprocessing.get_context("fork").Pool(AT_ONCE) as pool:
            attempts = pool.map(bench.attempt, attempts, chunksize=1)
    rows = table(attempts, bench.lives)
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    problems = [
        {
            "what": attempt.name,
            "at": round(attempt.share, 4),
            "problems": attempt.problems,
        }
        for attempt in attempts
        if attempt.problems
    ]
    seconds = round(time.monotonic() - began)
    print(f"{len(attempts)} kills, {len(problems)} problems, {seconds} s")
    for problem in problems:
        print(
            f"✘ {problem['what']} at {problem['at']}: {problem['problems']}",
            file=sys.stderr,
        )
    if not options.only:
        record = {
            "commit": made_from,
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "command": f"python -m tests.faults.kills --count {options.count} --seed {options.seed}",
            "machine": machine_facts(),
            "seconds": seconds,
            "undertakings": rows,
            "problems": problems,
        }
        artifacts.write_json(ROOT / "results" / "kills.json", record)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
