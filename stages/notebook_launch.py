"""Where a cell of a notebook starts its processes, and by which launcher.

    launch_in_notebook(function) -> run on a GPU each, or on two CPU processes, by `accelerate`

Where accelerate's launcher would not start several processes, those of `stages.launch` are taken.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from stages.launch import count_gpus, free_port, launch, require_world, start_method
from utils.machine import why_no_cuda


class Place(NamedTuple):
    """How many processes a cell starts, on which kind of device, by which launcher, and why."""

    processes: int
    device: str
    launcher: str
    reason: str

    def __str__(self) -> str:
        devices = "a GPU each" if self.device == "cuda" else "the CPU"
        how = f"{self.processes} processes on {devices}, by {self.launcher}"
        return f"{how} ({self.reason})"

    def variables(self) -> dict[str, str]:
        """What a program's environment needs so that it computes on the same kind of device."""
        if self.device == "cuda":
            return {}
        return {
            "CUDA_VISIBLE_DEVICES": "",
            "ACCELERATE_USE_CPU": "true",
            "USE_TORCH_XLA": "false",
        }


def why_not_notebook_launcher() -> str:
    """Why accelerate's launcher would not fork this kernel; nothing where it would.

    On Colab it may call the function in the kernel, once, and whoever then compares one process with
    two compares it with itself. These are the questions that `accelerate/launchers.py` asks.
    """
    kaggle = any(name.startswith("KAGGLE") for name in os.environ)
    ipython = sys.modules.get("IPython")
    shell = str(ipython.get_ipython()) if ipython else ""
    colab = "google.colab" in shell and not kaggle
    tpu = "TPU_NAME" in os.environ or os.environ.get("PJRT_DEVICE") == "TPU"
    if tpu and (colab or kaggle):
        return "notebook_launcher would take the TPU"
    if colab and torch.cuda.device_count() < 2:
        return "on Colab, without two GPUs, notebook_launcher runs one process only"
    if "bitsandbytes" in sys.modules:
        return "notebook_launcher refuses where bitsandbytes is imported"
    if torch.version.hip or torch.xpu.is_available():
        return "on this make of GPU notebook_launcher takes no function of a cell"
    method = start_method()
    return "" if method.value == "fork" else method.reason


def where_to_launch(batch: int = 0, most: int = 0) -> Place:
    """A process for each GPU, or two on the CPU where there are not two GPUs, and why.

    `batch` rows must be shared evenly by the processes, of which there are `most` at most.
    """
    problem = why_no_cuda()
    cards = 0 if problem else count_gpus()
    counts = range(2, min(cards, most or cards) + 1)
    fitting = [count for count in counts if batch % count == 0]
    reason = problem or f"GPUs to be shared out: {cards}"
    if cards < torch.cuda.device_count() and not problem:
        reason = "a GPU here is split, and a process can use one part only"
    launcher = "notebook_launcher"
    refusal = why_not_notebook_launcher()
    if refusal:
        launcher = "launch"
        reason += f"; {refusal}"
    device = "cuda" if fitting else "cpu"
    return Place(max(fitting, default=2), device, launcher, reason)


@contextlib.contextmanager
def unchanged_kernel() -> Iterator[None]:
    """Put back the environment and the handlers of signals, of which accelerate's launcher leaves its own."""
    names = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    kinds = [getattr(signal, name) for name in names if hasattr(signal, name)]
    handlers = {kind: signal.getsignal(kind) for kind in kinds}
    environment = os.environ.copy()
    try:
        yield
    finally:
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ |= environment
        for kind, handler in handlers.items():
            signal.signal(kind, handler)


def work_in_place(place: Place, function: Callable, arguments: tuple) -> None:
    """What each process of a cell does: check that it is one of several, then run the function."""
    require_world(place.processes)
    os.environ |= place.variables()
    # A fork would wait for ever for threads that only its parent has.
    torch.set_num_threads(1)
    function(*arguments)
    require_world(place.processes)


def launch_in_notebook(
    function: Callable,
    *arguments: Any,
    place: Place | None = None,
    seconds: float = 600,
) -> Place:
    """Run a function on the processes of a `Place`, and say which; a result is left in a file.

    `notebook_launcher` starts them. Where it would not, `launch` spawns as many.
    """
    from accelerate import notebook_launcher

    place = place or where_to_launch()
    print(place)
    work = (place, function, arguments)
    with unchanged_kernel():
        os.environ["OMP_NUM_THREADS"] = "1"
        if place.launcher == "launch":
            # Fresh processes are born with the variables. A fork of this kernel sets them itself:
            # a kernel whose CUDA began while they hid the GPUs would never see one again.
            os.environ |= place.variables()
            numbers: Any = {"world": place.processes, "seconds": seconds}
            launch(work_in_place, *work, start="spawn", **numbers)
        else:
            port = str(free_port())
            notebook_launcher(work_in_place, work, place.processes, use_port=port)
    return place
