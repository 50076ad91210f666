"""What a program may use, and the verdict on it.

The kernel counts for each process and each user, and no control group is made: what a cage can take
is bounded without one (processes times memory, and the scratch folder, as no other memory that
outlives a process can be had), and a group would be left over where the judge itself is killed.
"""

from __future__ import annotations

from dataclasses import dataclass

from utils.errors import CourseError

RANGES = {
    "seconds": (0.05, 3600),
    "memory_mb": (16, 1 << 20),
    "output_bytes": (0, 1 << 30),
    "processes": (0, 1000),
    "files_mb": (1, 1 << 20),
}


@dataclass(frozen=True)
class Limits:
    """What a program may use. Memory is counted beyond what a bare interpreter has, for each process.

    >>> Limits(seconds=1.5).processes
    0
    """

    seconds: float = 3.0
    memory_mb: int = 256
    output_bytes: int = 64_000
    # Beside its own; with none a program can start no thread either.
    processes: int = 0
    files_mb: int = 16

    def __post_init__(self) -> None:
        for name, (least, most) in RANGES.items():
            value = getattr(self, name)
            if not least <= value <= most:
                what = (
                    f"a limit of {name}={value} is not between {least} and {most}"
                )
                raise CourseError(what, "Limits", "choose another")


@dataclass(frozen=True)
class Verdict:
    """How a program did: "passed", "failed", "error", "timeout", "memory", "output", "refused", "crashed"."""

    passed: bool
    outcome: str
    message: str
    seconds: float
    output: str
    results: tuple[str, ...] = ()
