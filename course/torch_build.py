"""Which build of PyTorch a machine can use, asked of NVIDIA's driver before anything is installed.

The wheel on PyPI is made for CUDA 13 on Linux and for the CPU on Windows; PyTorch's own index has the
other builds. A driver of the generation of CUDA 12 runs what is built for CUDA 12.6, and so does a card
older than Turing, whose code the builds for CUDA 13 no longer hold.
"""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

INDEX = "https://download.pytorch.org/whl"
ASKED = ("auto", "cpu", "cuda")
# The oldest compute capability in the builds for CUDA 13, and the oldest CUDA that still has a build.
TURING = 7.5
OLDEST_CUDA = 12.0
NEWEST_CUDA = 13.0


class Driver(NamedTuple):
    """NVIDIA's driver: the newest CUDA that it runs, 0 where it does not say, and its cards."""

    cuda: float
    cards: list[str]
    # The lowest compute capability among the cards.
    capability: float = 0.0


class Build(NamedTuple):
    """A build of PyTorch, `cpu` or `cuda`: the place that has it, empty for pip's own, and why."""

    kind: str
    place: str
    reason: str


def newest_cuda() -> float:
    """The newest CUDA that the driver runs, such as 12.4; 0 without a driver. Makes no CUDA context."""
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    version = ctypes.c_int(0)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(name).cuDriverGetVersion(ctypes.byref(version))
    thousands, rest = divmod(version.value, 1000)
    return thousands + rest / 100


def ask_nvidia_smi() -> list[list[str]]:
    """Name and compute capability of each card, as the driver's own program tells them."""
    query = "--query-gpu=name,compute_cap"
    command = ["nvidia-smi", query, "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        options: dict[str, Any] = {"capture_output": True, "timeout": 20}
        answer = subprocess.run(command, encoding="utf-8", **options)
        lines = answer.stdout.splitlines()
        if not answer.returncode:
            return [line.rsplit(", ", 1) for line in lines if ", " in line]
    return []


def find_driver() -> Driver | None:
    """NVIDIA's driver, or None where there is no sign of one."""
    cuda = newest_cuda()
    signs = [cuda, shutil.which("nvidia-smi"), Path("/proc/driver/nvidia").exists()]
    if not any(signs):
        return None
    cards = ask_nvidia_smi()
    names = [name for name, _ in cards]
    capabilities = [0.0]
    with contextlib.suppress(ValueError):  # "[N/A]"
        capabilities = [float(capability) for _, capability in cards]
    return Driver(cuda, names, min(capabilities, default=0.0))


def choose_build(asked: str, driver: Driver | None) -> Build:
    """The build that fits a machine, or the one that is asked for."""
    if sys.platform == "darwin":
        return Build("cpu", "", "there is one build for a Mac")
    if asked == "cpu":
        return cpu_build("asked for")
    if driver is None:
        if asked == "cuda":
            return cuda_build(Driver(0, []), "asked for")
        return cpu_build("there is no NVIDIA driver here")
    name = ", ".join(driver.cards) or "an NVIDIA driver"
    if 0 < driver.cuda < OLDEST_CUDA and asked == "auto":
        old = f"{name} is here, but its driver ends at CUDA {driver.cuda:.1f}"
        return cpu_build(f"{old}: install a newer driver from nvidia.com")
    return cuda_build(driver, f"{name} is here")


def cpu_build(reason: str) -> Build:
    """The build without CUDA; on Windows it is the usual one."""
    windows = sys.platform == "win32"
    return Build("cpu", "" if windows else f"{INDEX}/cpu", reason)


def cuda_build(driver: Driver, reason: str) -> Build:
    """The newest build for CUDA that a driver and its cards run; on Linux that may be the usual one."""
    old_driver = 0 < driver.cuda < NEWEST_CUDA
    old_card = 0 < driver.capability < TURING
    if old_driver or old_card:
        return Build("cuda", f"{INDEX}/cu126", reason)
    windows = sys.platform == "win32"
    return Build("cuda", f"{INDEX}/cu130" if windows else "", reason)
