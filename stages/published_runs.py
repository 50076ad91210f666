"""Training runs whose cost was published, and how well the planner would have said it beforehand.

A constant is never judged on the run that it was fitted to: `judge` leaves each run out of its class's
mean. A class with one run alone takes its share from elsewhere, see `stages.planner.EFFICIENCY`.

How classes are averaged matters where they are small: with geometric means, which are those of
ratios, half of the runs are within 8%; with arithmetic means or medians within 14 to 16%.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace

from stages.planner import EFFICIENCY, MACHINES, Shape, device_hours, find_class

SMALL = Shape(124e6, 12, 768, 1024)
XL = Shape(1.5e9, 48, 1600, 1024)
LLAMA_7B = Shape(6.7e9, 32, 4096, 2048)
LLAMA_65B = Shape(65.2e9, 80, 8192, 2048)


@dataclass(frozen=True)
class Run:
    """A run, and the hours of one device that its makers report."""

    name: str
    shape: Shape
    tokens: float
    machine: str
    hours: float
    source: str
    # Activations were computed again, as its configuration says.
    checkpointing: bool = False
    # The plain loop of a library, nothing tuned.
    loop: bool = False

    @property
    def kind(self) -> str:
        """Its class in the planner."""
        return find_class(MACHINES[self.machine], self.shape, self.loop)

    def plan_hours(self, share: float) -> float:
        """What the planner says if the class reaches this share of the peak."""
        machine = MACHINES[self.machine]
        return device_hours(
            self.shape, self.tokens, machine, self.checkpointing, share=share
        )

    @property
    def share(self) -> float:
        """The share of the peak that the reported hours mean."""
        return self.plan_hours(1.0) / self.hours


RUNS = [
    Run("CodeParrot 110M", SMALL, 29.5e9, "A100-40", 384,
        "its README: 16 GPUs for a day", loop=True),
    # Its tokens: 50,000 steps of 2 rows, 16 times accumulated, on each of 16 GPUs.
    Run("CodeParrot 1.5B", XL, 26.2e9, "A100-40", 2688,
        "its README: 16 GPUs for a week", checkpointing=True, loop=True),
    Run("nanoGPT 124M", SMALL, 295e9, "A100-40", 768,
        "its README: 8 GPUs for four days"),
    Run("llm.c 124M", SMALL, 10e9, "A100", 12,
        "its discussion 481: 8 GPUs for 90 minutes"),
    Run("SmolLM 135M", Shape(135e6, 30, 576, 2048), 600e9, "H100", 1536,
        "the model's discussion: 64 GPUs for about a day"),
    Run("TinyLlama 1.1B", Shape(1.1e9, 22, 2048, 2048), 300e9, "A100-40", 3456,
        "its README"),
    Run("Pythia 1.4B", Shape(1.41e9, 24, 2048, 2048), 3e11, "A100-40", 7120,
        "Biderman et al. 2023", checkpointing=True),
    Run("Pythia 12B", Shape(11.8e9, 36, 5120, 2048), 3e11, "A100-40", 72_300,
        "Biderman et al. 2023", checkpointing=True),
    Run("LLaMA 7B", LLAMA_7B, 1e12, "A100", 82_432, "Touvron et al. 2023a, Table 15"),
    Run("LLaMA 65B", LLAMA_65B, 1.4e12, "A100", 1_022_362,
        "Touvron et al. 2023a, Table 15"),
    Run("Llama 2 7B", replace(LLAMA_7B, context=4096), 2e12, "A100", 184_320,
        "Touvron et al. 2023b, Table 2"),
    Run("Llama 2 70B", Shape(69e9, 80, 8192, 4096), 2e12, "A100", 1_720_320,
        "Touvron et al. 2023b, Table 2"),
    Run("BLOOM 176B", Shape(176e9, 70, 14_336, 2048), 366e9, "A100", 1.08299e6,
        "Luccioni et al. 2022", checkpointing=True),
    Run("Llama 3.1 405B", Shape(405e9, 126, 16_384, 8192), 15.6e12, "H100", 3.084e7,
        "its model card"),
]  # fmt: skip


def share_of_class(kind: str, without: Run | None = None) -> float:
    """The geometric mean of the shares that the runs of a class reached, one run left out.

    >>> round(share_of_class("small model"), 2)
    0.29
    """
    shares = [run.share for run in RUNS if run.kind == kind and run != without]
    if not shares:
        return EFFICIENCY[kind]
    return statistics.geometric_mean(shares)


def judge(run: Run) -> float:
    """Hours planned over hours reported, less one, by a planner that does not know this run."""
    share = share_of_class(run.kind, without=run)
    return run.plan_hours(share) / run.hours - 1


def median_error() -> float:
    """Half of the published runs are planned better than this, each without knowing it."""
    return statistics.median(abs(judge(run)) for run in RUNS)
