"""Floor 0: errors, the seed, the machine, and small readings. A choice comes with its reason."""
from __future__ import annotations

import importlib.metadata as metadata
import inspect
import io
import os
import platform
import random
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent
ROOT = Path(os.environ.get("COURSE_ROOT") or PACKAGE.parent).resolve()  # notebooks, expected, results
# Okabe and Ito's palette: told apart by readers with any kind of colour vision.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]


class CourseError(Exception):
    """What was wrong, where, and the one thing to do next.

    >>> print(CourseError("the corpus is missing", "build/corpus", "run notebook 02"))
    the corpus is missing
      where: build/corpus
      next:  run notebook 02
    """

    def __init__(self, what: str, where: object = "", fix: str = "") -> None:
        where = short_path(where) if isinstance(where, Path) else where
        lines = [what] + [f"  where: {where}"] * bool(where) + [f"  next:  {fix}"] * bool(fix)
        super().__init__("\n".join(lines))

    def _render_traceback_(self) -> list[str]:
        """IPython asks for this: a reader sees the message, not forty lines of our insides."""
        return [f"{type(self).__name__}: {self}"]


@dataclass(frozen=True)
class Choice:
    """A value and why it was chosen.

    >>> str(Choice("cpu", "no accelerator found"))
    'cpu (no accelerator found)'
    """

    value: Any
    reason: str

    def __str__(self) -> str:
        return f"{self.value} ({self.reason})".replace("torch.", "")


def short_path(path: Path) -> str:
    """A path as a reader would write it: from the checkout, or from home."""
    for base, mark in ((ROOT, ""), (Path.home(), "~/")):
        if path.is_relative_to(base):
            return mark + path.relative_to(base).as_posix()
    return str(path)


def build_folder() -> Path:
    """Where runs, artifacts and reports go: `COURSE_BUILD`, else `build/` in the checkout."""
    return Path(os.environ.get("COURSE_BUILD") or ROOT / "build").resolve()


def set_seed(seed: int) -> None:
    """Seed Python, NumPy and torch, on the CPU and every GPU."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def fastest_of(*works: Callable[[], object], repeats: int = 5) -> list[float]:
    """Seconds of the fastest run of each, taken in turn; the first, which warms caches, not counted."""
    times: list[list[float]] = [[] for _ in works]
    for _ in range(repeats + 1):
        for work, kept in zip(works, times):
            start = time.perf_counter()
            work()
            kept.append(time.perf_counter() - start)
    return [min(kept[1:]) for kept in times]


def first_gpu() -> tuple[str, int, int]:
    """Name, bytes and major compute capability of torch's first GPU.

    Where NVIDIA's driver answers no CUDA context is made: a kernel that has one cannot be forked.
    """
    import pynvml
    import torch

    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    try:
        pynvml.nvmlInit()
        cards = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        card = cards[int(first)] if first.isdigit() else next(
            c for c in cards if pynvml.nvmlDeviceGetUUID(c).startswith(first))
        if is_split(card):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        major, _ = pynvml.nvmlDeviceGetCudaComputeCapability(card)
        facts = pynvml.nvmlDeviceGetName(card), pynvml.nvmlDeviceGetMemoryInfo(card).total, major
        pynvml.nvmlShutdown()
        return facts
    except (pynvml.NVMLError, IndexError, StopIteration):  # another make, or a part of a card
        known = torch.cuda.get_device_properties(0)
        return known.name, known.total_memory, known.major


def is_split(card: Any) -> bool:
    """Whether a card is in MIG mode: torch has a part of it, and the driver names the whole."""
    import pynvml

    try:
        return pynvml.nvmlDeviceGetMigMode(card)[0] == pynvml.NVML_DEVICE_MIG_ENABLE
    except pynvml.NVMLError:  # a card without that mode
        return False


def why_no_cuda() -> str:
    """Why torch cannot use a GPU, or nothing if it can; no CUDA context is made by asking."""
    import pynvml
    import torch

    built = torch.version.cuda
    if not torch.cuda.device_count():
        return "torch sees no GPU"
    try:
        pynvml.nvmlInit()
        newest = pynvml.nvmlSystemGetCudaDriverVersion() // 1000
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:  # another make: torch has counted what it can use
        return ""
    old = built and newest < int(built.split(".")[0])
    return f"the driver is too old for CUDA {built}" if old else ""


def choose_device() -> Choice:
    """The accelerator if torch can use one, else the CPU, for every library in this process."""
    import torch

    if not (why := why_no_cuda()):
        name, memory, _ = first_gpu()
        return Choice("cuda", f"{name}, {format_bytes(memory)}")
    if torch.cuda.device_count():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # or Accelerate and Trainer would take it
    return Choice("mps", "Apple GPU") if torch.mps.is_available() else Choice("cpu", why)


def choose_dtype(device: str) -> Choice:
    """bfloat16 where the machine gains by it: asked of a GPU, measured on a CPU."""
    import torch

    if device == "cuda" and first_gpu()[2] >= 8:
        return Choice(torch.bfloat16, "the GPU computes it natively")
    if device != "cpu":
        return Choice(torch.float32, "this GPU has no bfloat16 of its own")
    wide, narrow = (torch.ones(384, 384, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    full, half = fastest_of(lambda: wide @ wide, lambda: narrow @ narrow, repeats=20)
    if full / half > 1.3:
        return Choice(torch.bfloat16, f"a matrix product is {full / half:.2g}x as fast as in float32")
    return Choice(torch.float32, f"bfloat16 runs at {full / half:.2g}x its speed on this CPU")


def choose_threads(fixed: int | None = None) -> Choice:
    """All threads only for a clear gain: on shared cores, waiting for each other costs more."""
    import torch

    if fixed:
        return Choice(fixed, "fixed by the profile, so that figures repeat")
    if os.environ.get("OMP_NUM_THREADS"):
        return Choice(torch.get_num_threads(), "OMP_NUM_THREADS")
    layer, batch, many = torch.nn.Linear(256, 256), torch.ones(256, 256), torch.get_num_threads()

    def work(threads: int) -> None:
        torch.set_num_threads(threads)
        for _ in range(40):
            layer(batch)

    one, all_ = fastest_of(lambda: work(1), lambda: work(many))
    said = f"{many} run small layers {one / all_:.2g}x as fast as one"
    return Choice(many if one / all_ > 1.25 else 1, said)


def format_bytes(count: float) -> str:
    """Bytes in the unit a person would use.

    >>> format_bytes(538_000_000), format_bytes(812)
    ('538 MB', '812 B')
    """
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 999 * size else f"{count / size:.0f} {unit}"
    return f"{count:.0f} B"


def count_parameters(model: Any, trainable: bool = False) -> int:
    """Parameters of a model; tied ones, which torch lists once, count once."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad or not trainable)


def process_memory() -> dict[str, int]:
    """Bytes of memory of this process: all of it (`rss`) and, on Linux, what is its own (`private`).

    Memory-mapped files count in `rss` although the system can drop them at any time.
    """
    import psutil

    memory, status = {"rss": psutil.Process().memory_info().rss}, Path("/proc/self/status")
    if status.exists():
        memory["private"] = int(re.search(r"RssAnon:\s+(\d+)", status.read_text())[1]) * 1024
    return memory


def gpu_memory() -> list[tuple[str, int, int]]:
    """Name, used and total bytes of each NVIDIA GPU, as the driver counts them; [] without one."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    cards = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    readings = [(pynvml.nvmlDeviceGetName(c), pynvml.nvmlDeviceGetMemoryInfo(c)) for c in cards]
    pynvml.nvmlShutdown()
    return [(name, memory.used, memory.total) for name, memory in readings]


def print_gpu_utilization() -> None:
    """One line a GPU: memory used by everybody on it. Without one, this process's own memory."""
    cards = gpu_memory()
    for index, (name, used, total) in enumerate(cards):
        print(f"GPU {index} ({name}): {format_bytes(used)} of {format_bytes(total)} used")
    if not cards:
        parts = [f"{format_bytes(count)} {kind}" for kind, count in process_memory().items()]
        print(f"no NVIDIA GPU; this process holds {', '.join(parts)}")


def machine_facts() -> dict[str, str]:
    """What a reader of a figure must know: processor, memory, GPU, system and versions."""
    import psutil

    cpuinfo = Path("/proc/cpuinfo")  # `platform` does not know the processor's name on Linux
    named = re.search(r"model name\s*: (.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    libraries = ("torch", "transformers", "datasets", "tokenizers", "accelerate")
    return {"system": f"{platform.system()} {platform.machine()}",
            "processor": named[1] if named else platform.processor(),
            "cores": str(os.cpu_count()), "memory": format_bytes(psutil.virtual_memory().total),
            "gpu": ", ".join(name for name, _, _ in gpu_memory()) or "none",
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in libraries}}


def show_source(thing: Callable) -> None:
    """Show the code of a function of `utils`, with its place, where a lesson speaks of it."""
    from IPython.display import Markdown, display

    place = short_path(Path(inspect.getsourcefile(thing)))
    line = inspect.getsourcelines(thing)[1]
    display(Markdown(f"`{place}`, line {line}\n```python\n{inspect.getsource(thing)}```"))


def show_table(rows: Iterable[dict[str, Any]], align: str = "") -> None:
    """A table from a list of rows; numbers to the right, unless `align` says l, r or c for each.

    >>> show_table([{"model": "gpt2", "parameters": 124_439_808}])      # doctest: +SKIP
    """
    from IPython.display import Markdown, display

    rows = list(rows)
    heads = list(rows[0])
    kinds = align or "".join("r" if isinstance(rows[0][h], (int, float)) else "l" for h in heads)
    marks = {"l": ":--", "r": "--:", "c": ":-:"}
    cells = [[f"{r[h]:,}" if isinstance(r[h], int) else str(r[h]) for h in heads] for r in rows]
    lines = [heads, [marks[k] for k in kinds], *[[c.replace("|", "\\|") for c in r] for r in cells]]
    display(Markdown("\n".join("| " + " | ".join(line) + " |" for line in lines)))


def show_figure(figure: Any, alt: str) -> None:
    """Show a matplotlib figure with a text for those who cannot see it, then close it."""
    from IPython.display import display
    from matplotlib import pyplot as plt

    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=110, bbox_inches="tight", facecolor="white")
    plt.close(figure)
    data = {"image/png": image.getvalue(), "text/plain": f"[figure: {alt}]"}
    display(data, raw=True, metadata={"image/png": {"alt": alt}})
