"""The machine: its memory, its GPUs, its threads. A choice comes with its reason."""

from __future__ import annotations

import contextlib
import importlib.metadata as metadata
import os
import platform
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from utils.errors import Choice
from utils.show import format_bytes

# A way must be this much faster before it is worth its price.
CLEARLY_FASTER = 1.3


def set_seed(seed: int) -> None:
    """Seed Python, NumPy and torch, on the CPU and every GPU."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def fastest_of(*works: Callable[[], object], repeats: int = 5) -> list[float]:
    """Seconds of the fastest run of each, taken in turn; the first, which warms caches, not counted.

    >>> slow, quick = fastest_of(lambda: time.sleep(0.02), lambda: None)
    >>> slow > quick
    True
    """
    times: list[list[float]] = [[] for _ in works]
    for _ in range(repeats + 1):
        for work, seconds in zip(works, times):
            start = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - start)
    return [min(seconds[1:]) for seconds in times]


def private_memory_name() -> str:
    """Which number of the system's is the private memory of a process here.

    >>> private_memory_name() in ("RssAnon", "private bytes", "RSS, mapped files included")
    True
    """
    if Path("/proc/self/status").exists():
        return "RssAnon"
    return (
        "private bytes" if sys.platform == "win32" else "RSS, mapped files included"
    )


def memory_of(pid: int | None = None) -> dict[str, int]:
    """Bytes of a process (this one by default): `private`, `mapped` (files), and all: `resident`.

    Memory-mapped files are resident although the system can drop them at any time, so a corpus
    larger than the memory looks as if it were held. `private` is what the process really costs.

    >>> memory_of()["resident"] >= memory_of()["private"] > 0      # doctest: +SKIP
    True
    """
    if private_memory_name() == "RssAnon":
        text = Path(f"/proc/{pid or 'self'}/status").read_text()
        lines = re.findall(r"(VmRSS|RssAnon|RssFile|RssShmem):\s+(\d+)", text)
        if not lines:  # the process has ended and is not collected yet
            raise ProcessLookupError(pid)
        sizes = {name: int(kilobytes) * 1024 for name, kilobytes in lines}
        mapped = sizes["RssFile"] + sizes["RssShmem"]
        return {
            "private": sizes["RssAnon"],
            "mapped": mapped,
            "resident": sizes["VmRSS"],
        }
    import psutil

    info = psutil.Process(pid).memory_info()
    private = getattr(info, "private", info.rss)
    return {
        "private": private,
        "mapped": max(0, info.rss - private),
        "resident": info.rss,
    }


@contextlib.contextmanager
def nvidia_driver() -> Iterator[Any]:
    """NVIDIA's driver, the module `pynvml`, or None where there is none. Makes no CUDA context."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def gpu_memory() -> list[tuple[str, int, int]]:
    """Name, used and total bytes of every NVIDIA GPU of the machine, hidden ones too."""
    readings = []
    with nvidia_driver() as driver:
        for index in range(driver.nvmlDeviceGetCount() if driver else 0):
            card = driver.nvmlDeviceGetHandleByIndex(index)
            memory = driver.nvmlDeviceGetMemoryInfo(card)
            readings.append(
                (driver.nvmlDeviceGetName(card), memory.used, memory.total)
            )
    return readings


class Card(NamedTuple):
    """A GPU as torch will see it."""

    name: str
    total: int
    major: int


def first_gpu() -> Card:
    """The first GPU that torch may use. Where NVIDIA's driver describes it, no CUDA context is made,
    because a kernel that has one cannot be forked; of a part of a card (MIG) only torch can tell."""
    import torch

    with nvidia_driver() as driver:
        if driver is not None:
            with contextlib.suppress(driver.NVMLError, LookupError):
                return _first_visible(driver)
    known = torch.cuda.get_device_properties(0)
    return Card(known.name, known.total_memory, known.major)


def _first_visible(driver: Any) -> Card:
    """The first card of `CUDA_VISIBLE_DEVICES`; a LookupError where it names a part of a card."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    count = driver.nvmlDeviceGetCount()
    cards = [driver.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    if not first.isdigit():
        cards = [
            card
            for card in cards
            if driver.nvmlDeviceGetUUID(card).startswith(first)
        ]
    card = cards[int(first) if first.isdigit() else 0]
    with contextlib.suppress(driver.NVMLError):  # a card without that mode is whole
        if driver.nvmlDeviceGetMigMode(card)[0] == driver.NVML_DEVICE_MIG_ENABLE:
            raise LookupError("the card is split")
    major, _ = driver.nvmlDeviceGetCudaComputeCapability(card)
    memory = driver.nvmlDeviceGetMemoryInfo(card)
    return Card(driver.nvmlDeviceGetName(card), memory.total, major)


def why_no_cuda() -> str:
    """Why torch cannot use a GPU, or nothing if it can; no CUDA context is made by asking."""
    import torch

    built = torch.version.cuda
    if not torch.cuda.device_count():
        return "torch sees no GPU"
    with nvidia_driver() as driver:
        if (
            driver is None or not built
        ):  # another make: torch has counted what it can use
            return ""
        newest = driver.nvmlSystemGetCudaDriverVersion() // 1000
    return (
        f"the driver is too old for CUDA {built}"
        if newest < int(built.split(".")[0])
        else ""
    )


def print_gpu_utilization() -> None:
    """One line a GPU: memory used by everybody on it. Without one, this process's own memory."""
    cards = gpu_memory()
    for index, (name, used, total) in enumerate(cards):
        print(
            f"GPU {index} ({name}): {format_bytes(used)} of {format_bytes(total)} used"
        )
    if not cards:
        memory = {kind: format_bytes(count) for kind, count in memory_of().items()}
        print(
            f"no NVIDIA GPU; this process holds {memory['resident']}, {memory['private']} its own"
        )


def choose_device() -> Choice:
    """The accelerator if torch can use one, else the CPU."""
    import torch

    reason = why_no_cuda()
    if not reason:
        card = first_gpu()
        return Choice("cuda", f"{card.name}, {format_bytes(card.total)}")
    if torch.mps.is_available():
        return Choice("mps", "Apple GPU")
    return Choice("cpu", reason)


def prepare(device: Choice, threads: Choice, seed: int) -> None:
    """Take what was chosen: threads, seed, and no GPU that torch counts and cannot use."""
    import torch

    if device.value != "cuda" and torch.cuda.device_count():
        os.environ["CUDA_VISIBLE_DEVICES"] = (
            ""  # or Accelerate and the Trainer would take it
        )
    torch.set_num_threads(threads.value)
    set_seed(seed)


def choose_dtype(device: str) -> Choice:
    """bfloat16 where the machine gains by it: asked of a GPU, measured on a CPU."""
    import torch

    if device == "cuda" and first_gpu().major >= 8:
        return Choice(torch.bfloat16, "the GPU computes it natively")
    if device != "cpu":
        return Choice(torch.float32, "this GPU has no bfloat16 of its own")
    wide = torch.ones(384, 384)
    narrow = wide.to(torch.bfloat16)
    full, half = fastest_of(
        lambda: wide @ wide, lambda: narrow @ narrow, repeats=20
    )
    if full / half > CLEARLY_FASTER:
        return Choice(
            torch.bfloat16,
            f"a matrix product is {full / half:.2g}x as fast as in float32",
        )
    return Choice(
        torch.float32, f"bfloat16 runs at {full / half:.2g}x its speed on this CPU"
    )


def choose_threads(fixed: int | None = None) -> Choice:
    """All threads only for a clear gain: on shared cores, waiting for each other costs more."""
    import torch

    if fixed:
        return Choice(fixed, "fixed by the profile, so that figures repeat")
    many = torch.get_num_threads()
    if os.environ.get("OMP_NUM_THREADS"):
        return Choice(many, "OMP_NUM_THREADS")
    layer = torch.nn.Linear(256, 256)
    batch = torch.ones(256, 256)

    def work(threads: int) -> None:
        torch.set_num_threads(threads)
        for _ in range(40):
            layer(batch)

    one, every = fastest_of(lambda: work(1), lambda: work(many))
    reason = f"{many} run small layers {one / every:.2g}x as fast as one"
    return Choice(many if one / every > CLEARLY_FASTER else 1, reason)


def machine_facts() -> dict[str, str]:
    """What a reader of a figure must know: processor, memory, GPU, system and versions."""
    import psutil

    named = None
    cpuinfo = Path(
        "/proc/cpuinfo"
    )  # `platform` does not know the processor's name on Linux
    if cpuinfo.exists():
        named = re.search(r"model name\s*: (.+)", cpuinfo.read_text())
    facts = {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": named[1] if named else platform.processor(),
        "cores": str(os.cpu_count()),
        "memory": format_bytes(psutil.virtual_memory().total),
        "gpu": ", ".join(name for name, _, _ in gpu_memory()) or "none",
        "python": platform.python_version(),
    }
    for library in (
        "torch",
        "transformers",
        "datasets",
        "tokenizers",
        "accelerate",
    ):
        facts[library] = metadata.version(library)
    return facts
