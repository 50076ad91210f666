"""The four places the course runs in. A profile changes sizes only, never the lesson.

>>> SMOKE.pick(smoke=200, laptop=2_000), LAPTOP.pick(smoke=200), GPU.pick(smoke=200, laptop=2_000)
(200, 200, 2000)
"""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from typing import Any

from utils.errors import CourseError
from utils.machine import first_gpu, why_no_cuda


@dataclass(frozen=True)
class Profile:
    """A size of machine and the patience that goes with it."""

    name: str
    machine: str
    # A cell or a notebook that runs longer hangs. The limits are far above what a busy machine
    # needs, because a slow machine is not a wrong course.
    cell_seconds: int
    notebook_seconds: int
    # None: measured where the lesson runs.
    threads: int | None = None

    def pick(self, **sizes: Any) -> Any:
        """The value for this profile, or for the nearest smaller profile that has one."""
        order = list(PROFILES)
        if "smoke" not in sizes or not set(sizes) <= set(order):
            names = f"{', '.join(order)}, smoke always"
            raise ValueError(f"sizes are named {names}: not {sorted(sizes)}")
        chosen = None
        last = order.index(self.name)
        for name in order[: last + 1]:
            chosen = sizes.get(name, chosen)
        return chosen


SMOKE = Profile("smoke", "2 cores, 8 GB, no network", 900, 1_800, threads=1)
LAPTOP = Profile("laptop", "4 to 8 cores, 16 GB", 3_600, 7_200)
GPU = Profile("gpu", "one GPU of 15 GB or more", 14_400, 28_800)
CLUSTER = Profile("cluster", "many GPUs, many nodes", 86_400, 604_800)
PROFILES = {profile.name: profile for profile in (SMOKE, LAPTOP, GPU, CLUSTER)}


def choose_profile(name: str = "auto") -> tuple[Profile, str]:
    """A profile by name, or for `auto` the one this machine can carry, and why."""
    if name == "auto":
        name = os.environ.get("COURSE_PROFILE", name)
        if name == "auto":
            return measure_profile()
    if name not in PROFILES:
        close = difflib.get_close_matches(str(name), PROFILES, 1)
        hint = f"{close[0]}, perhaps; or " if close else ""
        names = ", ".join(PROFILES)
        fix = f"choose {hint}one of {names}, auto"
        raise CourseError(f"unknown profile {name!r}", "PROFILE", fix)
    return PROFILES[name], "asked for"


def measure_profile() -> tuple[Profile, str]:
    """The largest profile whose machine this is; only cards that torch may use count."""
    import psutil
    import torch

    cards = 0 if why_no_cuda() else torch.cuda.device_count()
    if cards and first_gpu().total > 14.5e9:
        many = int(os.environ.get("WORLD_SIZE", 1)) > cards
        return (CLUSTER if many else GPU), f"{cards} GPU of 15 GB or more"
    cores = os.cpu_count() or 1
    memory = psutil.virtual_memory().total
    profile = LAPTOP if cores >= 4 and memory > 12e9 else SMOKE
    return profile, f"{cores} cores, {memory / 1e9:.0f} GB, no large GPU"
