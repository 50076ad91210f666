"""Floor 1: the four places the course runs in. A profile changes sizes only, never the lesson.

>>> SMOKE.pick(smoke=200, laptop=2_000), LAPTOP.pick(smoke=200), GPU.pick(smoke=200, laptop=2_000)
(200, 200, 2000)
"""
from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from typing import Any

from utils.common import CourseError, gpu_memory, why_no_cuda


@dataclass(frozen=True)
class Profile:
    """A size of machine and the patience that goes with it."""

    name: str
    machine: str
    cell_seconds: int  # one cell may run this long
    notebook_seconds: int  # and one notebook this long
    threads: int | None = None  # None: measured where the lesson runs

    def pick(self, **sizes: Any) -> Any:
        """The value for this profile, or for the nearest smaller profile that has one."""
        order = list(PROFILES)
        if "smoke" not in sizes or not set(sizes) <= set(order):
            raise ValueError(f"sizes are named {', '.join(order)}, smoke always: not {sorted(sizes)}")
        smaller = order[: order.index(self.name) + 1]
        return next(sizes[name] for name in reversed(smaller) if name in sizes)


SMOKE = Profile("smoke", "2 cores, 8 GB, no network", 180, 300, threads=1)
LAPTOP = Profile("laptop", "4 to 8 cores, 16 GB", 900, 1800)
GPU = Profile("gpu", "one GPU of 16 GB or more", 3600, 7200)
CLUSTER = Profile("cluster", "many GPUs, many nodes", 86_400, 604_800)
PROFILES = {p.name: p for p in (SMOKE, LAPTOP, GPU, CLUSTER)}


def choose_profile(name: str = "auto") -> tuple[Profile, str]:
    """A profile by name, or for `auto` the one this machine can carry, and why.

    >>> choose_profile("smoke")[1]
    'asked for'
    """
    name = os.environ.get("COURSE_PROFILE", name) if name == "auto" else name
    if name == "auto":
        return measure_profile()
    if name not in PROFILES:
        close = difflib.get_close_matches(str(name), PROFILES, 1)
        hint = f"{close[0]}, perhaps; or " * bool(close)
        raise CourseError(f"unknown profile {name!r}", "PROFILE",
                          f"choose {hint}one of {', '.join(PROFILES)}, auto")
    return PROFILES[name], "asked for"


def measure_profile() -> tuple[Profile, str]:
    """The largest profile whose machine this is."""
    import psutil

    cards = [] if why_no_cuda() else [total for _, _, total in gpu_memory() if total > 15e9]
    cores, memory = os.cpu_count() or 1, psutil.virtual_memory().total
    if cards:
        many = int(os.environ.get("WORLD_SIZE", 1)) > len(cards)
        return (CLUSTER if many else GPU), f"{len(cards)} GPU of 16 GB or more"
    large = cores >= 4 and memory > 12e9
    return (LAPTOP if large else SMOKE), f"{cores} cores, {memory / 1e9:.0f} GB, no large GPU"
