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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from utils.errors import Choice, CourseError, short_path
from utils.show import format_bytes

# A way must be this much faster before it is worth its price.
CLEARLY_FASTER = 1.3
# What COURSE_DEVICE may ask for.
DEVICES = ("cpu", "cuda", "mps")
# The oldest generation of CUDA for which PyTorch still has a build.
OLDEST_CUDA = 12
# What hides GPUs from CUDA, and how it stood before this module hid some.
VISIBLE = "CUDA_VISIBLE_DEVICES"
BEFORE: dict[str, str | None] = {}
# Other programs do not count in it. On Windows it moves in steps of 16 ms, which is too coarse.
CPU_CLOCK = time.perf_counter if sys.platform == "win32" else time.process_time
LIBRARIES = ("torch", "transformers", "datasets", "tokenizers", "accelerate")


def set_seed(seed: int) -> None:
    """Seed Python, NumPy and torch, on the CPU and every GPU."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def in_turn(
    ways: Mapping[Any, Callable[[], object]],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Any, list[float]]:
    """Seconds of each way in each round; the ways take turns, and one round before warms caches.

    What else slows the machine hits all of them alike, so compare within a round.
    `CPU_CLOCK` counts this process alone, with all of its threads.

    >>> sorted(in_turn({"one": lambda: 1, "two": lambda: 2}, 3))
    ['one', 'two']
    """
    found: dict[Any, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, work in ways.items():
            start = clock()
            work()
            found[name].append(clock() - start)
    return {name: seconds[1:] for name, seconds in found.items()}


def fastest_of(
    *works: Callable[[], object],
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Seconds of the fastest run of each, taken in turn; the first, which warms caches, not counted.

    >>> slow, quick = fastest_of(lambda: time.sleep(0.02), lambda: None)
    >>> slow > quick
    True
    """
    found = in_turn(dict(enumerate(works)), repeats, clock)
    return [min(seconds) for seconds in found.values()]


def count_cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def total_memory() -> int | None:
    """Bytes of memory that processes here share; None where nobody says."""
    with contextlib.suppress(Exception):  # as many kinds as there are systems
        import psutil

        return limit_of_container(psutil.virtual_memory().total)
    if sys.platform != "win32":
        with contextlib.suppress(AttributeError, OSError, ValueError):
            pages = os.sysconf("SC_PHYS_PAGES")
            return limit_of_container(pages * os.sysconf("SC_PAGE_SIZE"))
    return None


def limit_of_container(memory: int) -> int:
    """The memory of the machine, or the smaller part of it that a container gets."""
    limit = Path("/sys/fs/cgroup/memory.max")
    with contextlib.suppress(OSError, ValueError):  # "max": there is no limit
        return min(memory, int(limit.read_text("utf-8")))
    return memory


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
    """Why torch cannot use a GPU, and what to do about it, or nothing if it can.

    No CUDA context is made by asking.
    """
    import torch

    built = torch.version.cuda
    with nvidia_driver() as driver:
        newest = driver.nvmlSystemGetCudaDriverVersion() if driver else 0
    # Without a driver of NVIDIA's it is a card of another make: torch has counted what it can use.
    if newest and built and newest // 1000 < int(built.split(".")[0]):
        way = "install a newer driver from nvidia.com"
        if newest // 1000 >= OLDEST_CUDA:
            way += f", or type {torch_command()}"
        return f"the driver is too old for CUDA {built}: {way}"
    if torch.cuda.device_count():
        return ""
    return why_no_gpu_is_seen(built)


def why_no_gpu_is_seen(built: str | None) -> str:
    """Why torch counts no GPU; `built` is the CUDA that it was built for."""
    names = [card.name for card in list_gpus()]
    if not names:
        return "torch sees no GPU"
    here = f"{names[0]} is here, but"
    if not built:
        return f"{here} this PyTorch has no CUDA: type {torch_command()}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return f"{here} CUDA_VISIBLE_DEVICES={visible} hides it"
    return f"{here} PyTorch for CUDA {built} does not see it: restart the machine"


def torch_command() -> str:
    """What installs the build of PyTorch that this machine's card can use."""
    python = short_path(Path(sys.executable))
    return f"`{python} -m course setup --torch cuda`"


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
    """What COURSE_DEVICE asks for; else the NVIDIA or AMD GPU if torch can use one; else the CPU.

    Apple's GPU is taken only when it is asked for, because its figures are not those of a CPU.
    """
    import torch

    asked = asked_device()
    if asked == "cpu":
        return Choice("cpu", "COURSE_DEVICE asks for it")
    apple = torch.mps.is_available()
    if asked == "mps":
        if not apple:
            refuse_device(asked, "torch sees no Apple GPU here")
        return Choice("mps", "Apple GPU, COURSE_DEVICE asks for it")
    problem = why_no_cuda()
    if not problem:
        card = first_gpu()
        return Choice("cuda", f"{card.name}, {format_bytes(card.total)}")
    if asked:
        refuse_device(asked, problem)
    if apple:
        problem = "an Apple GPU is here; COURSE_DEVICE=mps uses it"
    return Choice("cpu", problem)


def asked_device() -> str:
    """What COURSE_DEVICE asks for, or nothing; a word that is no device is an error."""
    asked = os.environ.get("COURSE_DEVICE", "")
    if asked and asked not in DEVICES:
        fix = f"choose one of {', '.join(DEVICES)}, or unset it"
        raise CourseError(f"unknown device {asked!r}", "COURSE_DEVICE", fix)
    return asked


def refuse_device(asked: str, problem: str) -> None:
    """Say that what COURSE_DEVICE asks for cannot be had."""
    what = f"COURSE_DEVICE={asked} cannot be had: {problem}"
    raise CourseError(what, "COURSE_DEVICE", "do that, or unset it")


def prepare(device: Choice, threads: Choice, seed: int) -> None:
    """Take what was chosen: threads, seed, and no GPU that torch counts and this lesson does not use."""
    import torch

    # Or Accelerate and the Trainer would take it.
    if device.value != "cuda" and torch.cuda.device_count():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if device.value == "cpu" and torch.mps.is_available():
        os.environ["ACCELERATE_USE_CPU"] = "true"
    torch.set_num_threads(threads.value)
    set_seed(seed)


def hide_other_gpus() -> int:
    """Let this process see its first GPU alone; how many others that hides.

    The Trainer takes every GPU that a kernel sees (`DataParallel`), a batch for each, so that a lesson
    would train with another batch size than it says.
    """
    import torch

    others = torch.cuda.device_count() - 1
    if others < 1:
        return 0
    BEFORE[VISIBLE] = os.environ.get(VISIBLE)
    seen = BEFORE[VISIBLE] or "0"
    os.environ[VISIBLE] = seen.split(",")[0].strip()
    return others


def environment_with_all_gpus() -> dict[str, str]:
    """The environment for another lesson, which chooses anew among all GPUs."""
    environment = dict(os.environ)
    if VISIBLE in BEFORE:
        environment.pop(VISIBLE, None)
        before = BEFORE[VISIBLE]
        if before is not None:
            environment[VISIBLE] = before
    return environment


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
    # On Linux `platform` does not know the processor's name.
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    named = re.search(r"model name\s*: (.+)", text)
    memory = total_memory()
    facts = {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": named[1] if named else platform.processor(),
        "cores": str(os.cpu_count()),
        "memory": format_bytes(memory) if memory else "unknown",
        "gpu": ", ".join(card.name for card in list_gpus()) or "none",
        "python": platform.python_version(),
    }
    for library in LIBRARIES:
        facts[library] = metadata.version(library)
    return facts
