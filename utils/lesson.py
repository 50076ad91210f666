"""`Lesson`, the one object a notebook holds: profile, artifacts, figures, exercises.

Figures and verdicts are stored in the notebook's own outputs, under a media type of their own, so
that the executed notebook is the record and nothing beside it can disagree.
"""

from __future__ import annotations

import html
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from IPython.display import display

from utils import artifacts, machine
from utils.artifacts import Facts
from utils.errors import ROOT, Choice, CourseError, build_folder
from utils.profiles import choose_profile, tight_memory
from utils.show import format_bytes, format_figure

Check = Callable[[], None]
RECORD_TYPE = "application/vnd.course.record+json"
# Which lesson publishes which artifact; a test holds this to the notebooks themselves.
PUBLISHED_BY = {
    "corpus": "03",
    "tokenizer": "07",
    "tokens": "08",
    "pretrained": "09",
    "sentiment": "13",
    "sentiment-model": "13",
    "instruct-adapter": "17",
    "exported": "20",
}
# Lessons that start processes, which share the GPUs out among them; a test holds this to the notebooks.
STARTS_PROCESSES = {"09", "10", "11", "14"}
MARKS = {"pass": "✅", "fail": "❌", "not attempted": "○"}


class Lesson:
    """What a notebook holds in its hand: `lesson = Lesson("07", PROFILE, SEED)`."""

    def __init__(self, number: str, profile: str = "auto", seed: int = 42) -> None:
        self.number = number
        self.seed = seed
        self.profile, reason = choose_profile(profile)
        self.device = machine.choose_device()
        self.threads = machine.choose_threads(self.profile.threads)
        self.dtype = machine.choose_dtype(self.device.value)
        self._inputs: dict[str, str] = {}
        self._checks: dict[str, Check] = {}
        machine.prepare(self.device, self.threads, seed)
        self._take_one_gpu()
        profile = f"profile {self.profile.name} ({reason})"
        facts = machine.machine_facts()
        libraries = ("python", "torch", "transformers", "datasets")
        lines = [f"lesson {number} | {profile} | seed {seed}"]
        lines.append(" | ".join(f"{name} {facts[name]}" for name in libraries))
        warning = tight_memory(number, self.profile)
        if warning:
            lines.append(f"memory {warning}")
        # That a card lies idle, and what to type, is said before all else.
        idle = facts["gpu"] != "none" and self.device.value != "cuda"
        place = 0 if idle and not machine.asked_device() else len(lines)
        lines.insert(place, f"device {self.device}")
        lines += [f"dtype {self.dtype}", f"threads {self.threads}"]
        print("\n".join(lines))

    def _take_one_gpu(self) -> None:
        """Leave the other GPUs alone, unless this is a lesson whose processes share them out."""
        if self.device.value != "cuda" or self.number in STARTS_PROCESSES:
            return
        others = machine.hide_other_gpus()
        if others:
            reason = f"{self.device.reason}; GPUs left alone here: {others}"
            self.device = Choice("cuda", reason)

    def pick(self, **sizes: Any) -> Any:
        """The value for this profile: `lesson.pick(smoke=200, laptop=5_000)`."""
        return self.profile.pick(**sizes)

    def folder(self, name: str) -> Path:
        """Where this profile keeps an artifact."""
        return build_folder() / "artifacts" / self.profile.name / name

    @contextmanager
    def publish(self, name: str, **settings: Any) -> Iterator[Path]:
        """A folder to fill; when the block ends well it becomes the artifact `name`.

        with lesson.publish("tokenizer", vocabulary=4096) as folder:
            tokenizer.save_pretrained(folder)
        """
        settings["seed"] = self.seed
        facts = {"name": name, "lesson": self.number, "settings": settings}
        facts["inputs"] = self._inputs
        with artifacts.sealed(self.folder(name), facts) as folder:
            yield folder
        made = artifacts.read_manifest(self.folder(name)) or artifacts.BROKEN
        size = f"{len(made['files'])} files, {format_bytes(made['bytes'])}"
        print(f"published {name}: {size}, hash {made['hash']}")

    def need(self, name: str, make: bool = True) -> Path:
        """The folder of an artifact; one that is missing is made first, by running its lesson.

        What is damaged, or made with another seed or from other inputs than today's, is an error
        that names the command: it is never replaced in silence.
        """
        folder = self.folder(name)
        missing = artifacts.read_manifest(folder) is None and name in PUBLISHED_BY
        if missing and make and "COURSE_RUN" not in os.environ:
            self._make(name)
        problem = self._problem(name)
        if problem:
            maker = PUBLISHED_BY.get(name, "NN")
            way = f"run lesson {maker}: make run ONLY={maker} PROFILE={self.profile.name}"
            raise CourseError(f"the artifact {name!r} {problem}", folder, way)
        manifest = artifacts.read_manifest(folder) or artifacts.BROKEN
        self._inputs[name] = manifest["hash"]
        return folder

    def _problem(self, name: str) -> str:
        """What is wrong with an artifact, in words; nothing if it can be used."""
        manifest = artifacts.read_manifest(self.folder(name))
        if manifest is None:
            return "is not there"
        broken = artifacts.damage(self.folder(name), manifest)
        if broken:
            return f"is damaged: {broken}"
        seed = manifest["settings"].get("seed")
        if seed != self.seed:
            return f"was made with seed={seed!r}, not {self.seed!r}"
        return artifacts.staleness(manifest, self.folder)

    def _make(self, name: str) -> None:
        """Run the lesson that publishes an artifact, in this interpreter and at this profile."""
        maker = PUBLISHED_BY[name]
        profile = self.profile.name
        print(f"{name!r} is not there: running lesson {maker} at profile {profile}")
        held = artifacts.read_json(ROOT / "results" / f"{profile}.json") or {}
        cost = held.get("notebooks", {}).get(maker)
        if cost:
            print(f"(recorded on {cost['machine']}: {cost['seconds']} s)")
        command = [sys.executable, "-m", "course", "run", "--only", maker]
        command += ["--profile", profile, "--seed", str(self.seed)]
        pipes: Facts = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        pipes |= {"encoding": "utf-8", "errors": "replace"}
        pipes["env"] = machine.environment_with_all_gpus()
        pipes["env"]["PYTHONIOENCODING"] = "utf-8"
        checkout = Path(__file__).parent.parent
        with subprocess.Popen(command, cwd=checkout, **pipes) as child:
            try:
                for line in child.stdout or ():
                    print(line, end="", flush=True)
            finally:
                child.terminate()

    def record(
        self,
        name: str,
        value: float,
        unit: str = "",
        source: float | None = None,
        source_name: str = "the classic text",
    ) -> None:
        """Note a figure, to be held against `expected/`, beside the figure of a source if there is one."""
        text = f"{name}: {format_figure(value)} {unit}".rstrip()
        record: Facts = {"kind": "figure", "name": name, "value": float(value)}
        record |= {"unit": unit, "source": source, "source_name": ""}
        if source is not None:
            record["source_name"] = source_name
            text += f"   ({source_name}: {format_figure(source)})"
        emit(text, record, quiet=True)

    def exercise(self, name: str) -> Callable[[Check], Check]:
        """Decorate the check of an exercise: it runs at once and says how the answer does.

        A check is a function of no arguments with `assert condition, "a hint"` in it. An answer
        that is still `...`, or raises `NotImplementedError`, is "not attempted".
        """

        def remember(check: Check) -> Check:
            self._checks[name] = check
            self._judge(name, "answer", {})
            return check

        return remember

    def solution(self, name: str) -> None:
        """Hold the solution just defined to the check of its exercise."""
        self._judge(name, "solution", {})

    def refuse(self, name: str, **wrong: Any) -> None:
        """Put wrong answers in the place of an answer, one at a time: the check must refuse each."""
        for answer, values in wrong.items():
            for value in values if isinstance(values, list) else [values]:
                self._judge(name, "wrong answer", {answer: value})

    def _judge(self, name: str, which: str, instead: Facts) -> None:
        """Run a check, show the verdict, store it."""
        if name not in self._checks:
            what = f"exercise {name!r} has no check yet"
            raise CourseError(what, fix="run its check cell first")
        verdict, hint = run_check(self._checks[name], instead)
        words = hint or {"pass": "passes"}.get(verdict, "not attempted yet")
        who = {"answer": "your answer", "solution": "the solution"}.get(which)
        text = (
            f"{MARKS[verdict]} exercise {name}, {who or 'a wrong answer'}: {words}"
        )
        if which == "wrong answer" and verdict == "fail":
            wrong = " and ".join(instead)
            text = f"✓ exercise {name}, a wrong {wrong} is refused: {hint}"
        record = {"kind": "exercise", "name": name, "which": which}
        emit(text, {**record, "verdict": verdict, "hint": hint})


def run_check(check: Check, instead: Facts) -> tuple[str, str]:
    """Run a check with some names of its notebook replaced: the verdict and the hint."""
    names = check.__globals__
    for name in instead:
        if name not in names:
            what = f"the notebook has no {name!r} to replace"
            raise CourseError(what, check.__name__, "mend the name")
    originals = {name: names[name] for name in instead}
    names.update(instead)
    try:
        if any(names.get(name) is ... for name in check.__code__.co_names):
            return "not attempted", ""
        check()
        return "pass", ""
    except NotImplementedError:
        return "not attempted", ""
    except AssertionError as error:
        return "fail", str(error) or "the check does not hold"
    except Exception as error:  # an answer may do anything: tell the reader, go on
        return "fail", f"{type(error).__name__}: {error}"
    finally:
        names.update(originals)


def emit(text: str, record: Facts, quiet: bool = False) -> None:
    """Show one line of text, small if it is quiet, and store the record behind it in the cell's output."""
    data: Facts = {"text/plain": text, RECORD_TYPE: record}
    if quiet:
        small = f'<small style="opacity:0.6">{html.escape(text)}</small>'
        data["text/html"] = small
    display(data, raw=True)
