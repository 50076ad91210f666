"""Hostile programs by name and class, and what may come of each; see prelude.py for their words."""

from __future__ import annotations

import platform
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
FILES = ["resources", "processes", "files", "writing", "kernel", "forged", "values"]
# No program can know it; the programs that look for it put the words together themselves.
TESTS = 'assert solve(3) == "4711 and the hidden answer"\n'
NO_ANSWER = "\ndef solve(x): return 0\n"


@dataclass(frozen=True)
class Hostile:
    """One program: what it does, how it may end, and what its output must say."""

    name: str
    kind: str
    code: str
    outcome: list[str]
    tests: str = TESTS
    stopped: str = ""
    processes: int = 0
    seconds: float = 0.0

    @property
    def patience(self) -> float:
        """Seconds: few where it would never end, else more than a busy machine needs."""
        return self.seconds or (1.0 if "timeout" in self.outcome else 60.0)

    def program(self, places: dict[str, str]) -> str:
        """Its text, with the places of this machine in it."""
        code = self.code
        for mark, place in places.items():
            code = code.replace(f"@{mark}@", place)
        answer = "" if "def solve" in code else NO_ANSWER
        # An error of a text must be the text's own.
        prelude = PRELUDE if "attack" in code or "call(" in code else ""
        return prelude + code + answer


PRELUDE = (FOLDER / "prelude.py").read_text(encoding="utf-8")


def refused_call(attack: str, **entry: Any) -> dict[str, Any]:
    """An entry of one call that the kernel must refuse."""
    code = f"@attack\ndef _(): {attack}\n"
    return {
        **entry,
        "code": code,
        "outcome": ["failed"],
        "stopped": "PermissionError",
    }


def read_programs() -> list[Hostile]:
    """All that this machine's processor can run."""
    programs = []
    for name in FILES:
        text = (FOLDER / f"{name}.toml").read_text(encoding="utf-8")
        for entry in tomllib.loads(text)["program"]:
            machine = entry.pop("machine", platform.machine())
            word, times = entry.pop("repeat", ("", 0))
            if "attack" in entry:
                entry = refused_call(**entry)
            entry["code"] = word * times + entry["code"]
            entry["kind"] = entry.pop("class")
            if machine == platform.machine():
                programs.append(Hostile(**entry))
    return programs
