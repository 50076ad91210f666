"""The four places the course runs in. A profile changes sizes only, never the lesson.

>>> SMOKE.pick(smoke=200, laptop=2_000), LAPTOP.pick(smoke=200), GPU.pick(smoke=200, laptop=2_000)
(200, 200, 2000)
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
from dataclasses import dataclass
from typing import Any

from utils.errors import ROOT, CourseError
from utils.machine import choose_device, count_cores, first_gpu, total_memory

# What `laptop` asks of a machine; an 8 GB laptop has a little less than 8 GB to share.
LAPTOP_CORES = 4
LAPTOP_MEMORY = 7.5e9
# How much of the memory a lesson can have beside the system, a browser and JupyterLab.
FREE_SHARE = 0.75


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
LAPTOP = Profile("laptop", "4 to 8 cores, 8 GB", 3_600, 7_200)
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


def fits_laptop(memory: int | None) -> bool:
    """Whether a machine with that memory carries `laptop`: nearly all lessons peak below 5 GB there."""
    return count_cores() >= LAPTOP_CORES and (memory or 0) >= LAPTOP_MEMORY


def measure_profile() -> tuple[Profile, str]:
    """The largest profile whose machine this is; only cards that torch may use count."""
    import torch

    cards = 0
    if choose_device().value == "cuda":
        cards = torch.cuda.device_count()
    if cards and first_gpu().total > 14.5e9:
        many = int(os.environ.get("WORLD_SIZE", 1)) > cards
        return (CLUSTER if many else GPU), f"{cards} GPU of 15 GB or more"
    memory = total_memory()
    profile = LAPTOP if fits_laptop(memory) else SMOKE
    size = f"{memory / 1e9:.0f} GB" if memory else "memory that cannot be read"
    return profile, f"{count_cores()} cores, {size}, no large GPU"


def tight_memory(number: str, profile: Profile) -> str:
    """A warning where a lesson, when it was recorded, took more memory than is likely to be free here."""
    peak = 0
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        text = (ROOT / "results" / f"{profile.name}.json").read_text("utf-8")
        peak = json.loads(text)["notebooks"][number]["peak_bytes"]
    memory = total_memory()
    if memory is None or peak < FREE_SHARE * memory:
        return ""
    sizes = f"it took {peak / 1e9:.1f} GB of memory when it was recorded"
    way = "close other programs, or take profile smoke"
    return f"({sizes}, and this machine has {memory / 1e9:.1f} GB: {way})"
