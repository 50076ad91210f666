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
LIBRARIES = ("torch", "transformers", "datasets", "tokenizers", "accelerate")


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
    """Which number of the system's is the private memory of a process here."""
    if Path("/proc/self/status").exists():
        return "RssAnon"
    windows = sys.platform == "win32"
    return "private bytes" if windows else "RSS, mapped files included"


def memory_of(pid: int | None = None) -> dict[str, int]:
    """Bytes of a process (this one by default): `private`, `mapped` (files), and all: `resident`.

    Memory-mapped files are resident although the system can drop them at any time, so a corpus
    larger than the memory looks as if it were held. `private` is what the process really costs.
    """
    import psutil

    memory = psutil.Process(pid).memory_info()
    if not memory.rss:  # the process has ended and is not collected yet
        raise psutil.NoSuchProcess(pid or os.getpid())
    resident = memory.rss
    files = getattr(memory, "shared", 0)
    private = getattr(memory, "private", resident - files)
    mapped = max(0, resident - private)
    return {"private": private, "mapped": mapped, "resident": resident}


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


class Card(NamedTuple):
    """A GPU: memory in bytes, its generation, and whether it is split into parts (MIG)."""

    name: str
    used: int
    total: int
    major: int
    uuid: str = ""
    split: bool = False


def list_gpus() -> list[Card]:
    """Every NVIDIA GPU of the machine, hidden ones too."""
    cards = []
    with nvidia_driver() as driver:
        for index in range(driver.nvmlDeviceGetCount() if driver else 0):
            card = driver.nvmlDeviceGetHandleByIndex(index)
            memory = driver.nvmlDeviceGetMemoryInfo(card)
            major, _ = driver.nvmlDeviceGetCudaComputeCapability(card)
            split = False
            with contextlib.suppress(driver.NVMLError):  # a card without that mode
                split = bool(driver.nvmlDeviceGetMigMode(card)[0])
            name, uuid = (
                driver.nvmlDeviceGetName(card),
                driver.nvmlDeviceGetUUID(card),
            )
            sizes = (memory.used, memory.total)
            cards.append(Card(name, *sizes, major, uuid, split))
    return cards


def first_gpu() -> Card:
    """The first GPU that torch may use. Where NVIDIA's driver describes it, no CUDA context is made,
    because a kernel that has one cannot be forked; of a part of a card only torch can tell."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    first = visible.split(",")[0].strip()
    for index, card in enumerate(list_gpus()):
        chosen = first == str(index)
        chosen = chosen or card.uuid.startswith(first)
        if chosen and not card.split:
            return card
    known = torch.cuda.get_device_properties(0)
    return Card(known.name, 0, known.total_memory, known.major)


def why_no_cuda() -> str:
    """Why torch cannot use a GPU, or nothing if it can; no CUDA context is made by asking."""
    import torch

    built = torch.version.cuda
    if not torch.cuda.device_count():
        return "torch sees no GPU"
    with nvidia_driver() as driver:
        # A card of another make: torch has counted what it can use.
        if driver is None or not built:
            return ""
        newest = driver.nvmlSystemGetCudaDriverVersion() // 1000
    too_old = newest < int(built.split(".")[0])
    return f"the driver is too old for CUDA {built}" if too_old else ""


def print_gpu_utilization() -> None:
    """One line a GPU: memory used by everybody on it. Without one, this process's own memory."""
    cards = list_gpus()
    for index, card in enumerate(cards):
        share = f"{format_bytes(card.used)} of {format_bytes(card.total)}"
        print(f"GPU {index} ({card.name}): {share} used")
    if not cards:
        memory = {kind: format_bytes(count) for kind, count in memory_of().items()}
        sizes = f"{memory['resident']}, {memory['private']} its own"
        print(f"no NVIDIA GPU; this process holds {sizes}")


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
        # Or Accelerate and the Trainer would take it.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
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

    def in_full() -> None:
        wide @ wide

    def in_half() -> None:
        narrow @ narrow

    full, half = fastest_of(in_full, in_half, repeats=20)
    gain = f"{full / half:.2g}x"
    if full / half > CLEARLY_FASTER:
        reason = f"a matrix product is {gain} as fast as in float32"
        return Choice(torch.bfloat16, reason)
    return Choice(torch.float32, f"bfloat16 runs at {gain} its speed on this CPU")


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

    # On Linux `platform` does not know the processor's name.
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    named = re.search(r"model name\s*: (.+)", text)
    facts = {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": named[1] if named else platform.processor(),
        "cores": str(os.cpu_count()),
        "memory": format_bytes(psutil.virtual_memory().total),
        "gpu": ", ".join(card.name for card in list_gpus()) or "none",
        "python": platform.python_version(),
    }
    for library in LIBRARIES:
        facts[library] = metadata.version(library)
    return facts
