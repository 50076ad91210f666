"""Floor 2: `Lesson`, the one object a notebook holds: profile, artifacts, figures, exercises.

Figures and verdicts are stored in the notebook's own outputs, under a media type of their own, so
that the executed notebook is the record and nothing beside it can disagree.
"""
from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from IPython.display import display

from utils import common, folders
from utils.common import CourseError
from utils.notebooks import maker_of
from utils.profiles import choose_profile

RECORD_TYPE = "application/vnd.course.record+json"
WHO = {"answer": "your answer", "solution": "the solution", "wrong answer": "a wrong answer"}
MARKS = {"pass": "✅", "fail": "❌", "not attempted": "○"}


class Lesson:
    """What a notebook holds in its hand.

    >>> lesson = Lesson("05", "smoke", 42)                      # doctest: +SKIP
    """

    def __init__(self, number: str, profile: str = "auto", seed: int = 42) -> None:
        import torch

        self.number, self.seed = number, seed
        self.profile, why = choose_profile(profile)
        self.device = common.choose_device()
        self.threads = common.choose_threads(self.profile.threads)
        torch.set_num_threads(self.threads.value)
        self.dtype = common.choose_dtype(self.device.value)
        self._inputs: dict[str, str] = {}
        self._checks: dict[str, Callable[[], None]] = {}
        common.set_seed(seed)
        facts = common.machine_facts()
        versions = [f"{name} {facts[name]}" for name in ("python", "torch", "transformers", "datasets")]
        print(f"lesson {number} | profile {self.profile.name} ({why}) | seed {seed}",
              " | ".join(versions), f"device {self.device}", f"dtype {self.dtype}",
              f"threads {self.threads}", sep="\n")

    def pick(self, **sizes: Any) -> Any:
        """The value for this profile: `lesson.pick(smoke=200, laptop=5_000)`."""
        return self.profile.pick(**sizes)

    def folder(self, name: str) -> Path:
        """Where this profile keeps an artifact."""
        return common.build_folder() / "artifacts" / self.profile.name / name

    @contextmanager
    def publish(self, name: str, **settings: Any) -> Iterator[Path]:
        """A folder to fill; when the block ends well it becomes the artifact `name`.

        >>> with lesson.publish("tokenizer", vocabulary=4096) as folder:    # doctest: +SKIP
        ...     tokenizer.save_pretrained(folder)
        """
        facts = {"name": name, "lesson": self.number, "settings": {**settings, "seed": self.seed},
                 "inputs": dict(self._inputs)}
        with folders.sealed(self.folder(name), facts) as folder:
            yield folder
        made = folders.read_manifest(self.folder(name))
        print(f"published {name}: {len(made['files'])} files, {common.format_bytes(made['bytes'])}, "
              f"hash {made['hash']}")

    def need(self, name: str, **settings: Any) -> Path:
        """The folder of an artifact, checked byte for byte, or an error that says how to make it."""
        folder, maker = self.folder(name), maker_of(name) or "NN"
        manifest = folders.read_manifest(folder)
        wrong = "is not there" if manifest is None else (
            folders.damage(folder, manifest) or self._stale(manifest, settings))
        if wrong:
            raise CourseError(f"the artifact {name!r} {wrong}", folder,
                              f"run lesson {maker}: make run ONLY={maker} PROFILE={self.profile.name}")
        self._inputs[name] = manifest["hash"]
        return folder

    def _stale(self, manifest: dict, settings: dict) -> str:
        """How an artifact's settings or inputs differ from today's, in words."""
        for key, wanted in {**settings, "seed": self.seed}.items():
            made = manifest["settings"].get(key)
            if json.loads(json.dumps(wanted)) != made:
                return f"was made with {key}={made!r}, not {wanted!r}"
        for source, made_from in manifest["inputs"].items():
            current = folders.read_manifest(self.folder(source))
            if current is None or current["hash"] != made_from:
                return f"was made from another {source!r} than today's"
        return ""

    def record(self, name: str, value: float, unit: str = "", source: float | None = None,
               source_name: str = "the classic text") -> None:
        """Show a figure and store it, to be held against `expected/` and the sources' figure."""
        shown = f"{name}: {format_figure(value)} {unit}".rstrip()
        if source is not None:
            shown += f"   ({source_name}: {format_figure(source)})"
        emit(shown, {"kind": "figure", "name": name, "value": float(value), "unit": unit,
                     "source": source, "source_name": source_name if source is not None else ""})

    def exercise(self, name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
        """Decorate the check of an exercise: it runs at once and says how the answer does.

        A check is a function of no arguments with `assert condition, "a hint"` in it. An answer
        that is still `...`, or raises `NotImplementedError`, is "not attempted".
        """
        def remember(check: Callable[[], None]) -> Callable[[], None]:
            self._checks[name] = check
            self._judge(name, "answer")
            return check
        return remember

    def solution(self, name: str, wrong: dict[str, Any] | None = None) -> None:
        """Check the solution just defined, and that each `wrong` answer in its place is refused."""
        self._judge(name, "solution")
        for answer, values in (wrong or {}).items():
            for value in values if isinstance(values, list) else [values]:
                self._judge(name, "wrong answer", {answer: value})

    def _judge(self, name: str, which: str, instead: dict[str, Any] | None = None) -> None:
        """Run a check, show the verdict, store it."""
        if name not in self._checks:
            raise CourseError(f"exercise {name!r} has no check yet", fix="run its check cell first")
        verdict, hint = run_check(self._checks[name], instead or {})
        said = {"pass": "passes", "fail": hint, "not attempted": "not attempted yet"}[verdict]
        shown = f"{MARKS[verdict]} exercise {name}, {WHO[which]}: {said}"
        if instead and verdict == "fail":
            shown = f"✓ exercise {name}, a wrong {' and '.join(instead)} is refused: {hint}"
        emit(shown, {"kind": "exercise", "name": name, "which": which, "verdict": verdict,
                     "hint": hint})


def run_check(check: Callable[[], None], instead: dict[str, Any]) -> tuple[str, str]:
    """Run a check with some names of its notebook replaced: the verdict and the hint."""
    names = check.__globals__
    kept = {name: names[name] for name in instead}
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
        names.update(kept)


def emit(text: str, record: dict[str, Any]) -> None:
    """Show one line of text, and store the record behind it in the cell's output."""
    display({"text/plain": text, RECORD_TYPE: record}, raw=True)


def format_figure(value: float) -> str:
    """Four significant digits, thousands apart.

    >>> format_figure(1529600000), format_figure(3.62104), format_figure(0.81)
    ('1,529,600,000', '3.621', '0.81')
    """
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"
