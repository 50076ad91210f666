"""How many requests a second a card will carry, before it is rented: the roofline of serving.

Reading a prompt is bound by arithmetic, writing an answer by the bytes that every step fetches: all
weights once for the whole batch, and the cache of every answer in it. The two constants come from what
the makers of a server report for one card (`FITTED`), and `judge` says how far the plan is from what
they report for the release after it (`UNSEEN`).
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import pydantic

from stages.machines import MACHINES, USABLE, Count, Machine, Positive
from utils.errors import CourseError

# Bytes a second that a card can fetch from its own memory, by its data sheet.
BANDWIDTH = {
    "2 CPU cores": 20e9,
    "T4": 320e9,
    "A100": 2039e9,
    "A100-40": 1555e9,
    "H100": 3350e9,
}
# In serving a T4 may compute in float16, whatever training does.
FLOPS = {"T4": 65e12}


@pydantic.dataclasses.dataclass(frozen=True)
class Served:
    """What the cost of serving a decoder depends on."""

    name: str
    parameters: Positive
    layers: Count
    width: Count  # of all heads
    kept: Positive = 1.0  # heads of keys and values, as a share of all heads
    bytes: Positive = 2.0  # of a weight, and of a number in the cache

    @property
    def weights(self) -> float:
        """Bytes of the weights."""
        return self.parameters * self.bytes

    @property
    def cache(self) -> float:
        """Bytes that one token leaves in the cache: a key and a value in each layer.

        >>> LLAMA_7B.cache / 1024
        512.0
        """
        heads = self.width * self.kept
        numbers = 2 * self.layers * heads
        return numbers * self.bytes


@pydantic.dataclasses.dataclass(frozen=True)
class Traffic:
    """What a request brings and wants, in tokens."""

    prompt: Count
    answer: Count


@dataclass(frozen=True)
class Efficiency:
    """Shares of the peak that a good server reaches: of the arithmetic, and of the bandwidth."""

    arithmetic: float
    bandwidth: float


@dataclass(frozen=True)
class Load:
    """What a card carries."""

    batch: int  # answers at once
    requests: float  # a second
    tokens: float  # written a second
    step: float  # seconds to write one token of every answer, if nobody reads
    gap: float  # seconds from one token of an answer to the next, with the others' prompts in between
    first: float  # seconds until a prompt alone is read
    dollars: float  # for a million tokens written, their prompts included

    @property
    def reading(self) -> float:
        """The share of the time in which prompts are read."""
        return 1 - self.step / self.gap


def largest_batch(
    model: Served, traffic: Traffic, machine: Machine, devices: int = 1
) -> int:
    """How many answers fit into memory at once, each at its full length.

    >>> largest_batch(LLAMA_7B, Traffic(128, 128), MACHINES["A100"])
    436
    """
    memory = USABLE * machine.memory * devices
    length = traffic.prompt + traffic.answer
    each = model.cache * length
    fitting = (memory - model.weights) / each
    return max(0, int(fitting))


def carry(
    model: Served,
    traffic: Traffic,
    machine: Machine,
    share: Efficiency,
    batch: int | None = None,
    devices: int = 1,
) -> Load:
    """What a card, or several that cut each layer between them, carries at most.

    `batch` answers are written together; every one costs its prompt once. What devices say to each
    other is not counted.
    """
    most = largest_batch(model, traffic, machine, devices)
    batch = batch or most
    if not batch:
        fix = "take more memory, more cards, or fewer bits"
        raise CourseError(
            "not even one answer fits", f"{model.name} on {machine.name}", fix
        )
    rate = FLOPS.get(machine.name, machine.flops) * devices * share.arithmetic
    fetch = BANDWIDTH[machine.name] * devices * share.bandwidth
    prompt = reading_flops(model, traffic.prompt) / rate
    # On average an answer is half written.
    length = traffic.prompt + traffic.answer / 2
    fetched = (model.weights + batch * length * model.cache) / fetch
    computed = 2 * model.parameters * batch / rate
    step = max(fetched, computed)
    seconds = batch * prompt + traffic.answer * step
    requests = batch / seconds
    tokens = requests * traffic.answer
    dollars = machine.hourly * devices / 3600 / tokens * 1e6
    # So often a row gets its next token, on average: `answer` times while the whole batch turns over.
    gap = seconds / traffic.answer
    return Load(batch, requests, tokens, step, gap, prompt, dollars)


def reading_flops(model: Served, length: int) -> float:
    """Multiplications and additions to read a prompt: 2 N a token, and attention to all before it.

    >>> round(reading_flops(LLAMA_7B, 2048) / 1e12, 1)
    28.7
    """
    pairs = length**2
    attention = 2 * model.layers * model.width * pairs
    products = 2 * model.parameters * length
    return products + attention


LLAMA_7B = Served("LLaMA 7B", 6.74e9, 32, 4096)
GPT_J = Served("GPT-J 6B", 6.05e9, 28, 4096)
LLAMA_70B = Served("LLaMA 70B", 69e9, 80, 8192, kept=8 / 64)
FALCON = Served("Falcon 180B", 179.5e9, 80, 14_848, kept=8 / 232)


@dataclass(frozen=True)
class Report:
    """A published run on A100s with 16 bits: so many answers at once, and what came out."""

    model: Served
    batch: int
    devices: int
    traffic: Traffic
    tokens: float  # written a second, by each card

    @property
    def name(self) -> str:
        """What tells it from the others."""
        sizes = f"{self.traffic.prompt} + {self.traffic.answer}"
        cards = "1 card" if self.devices == 1 else f"{self.devices} cards"
        return f"{self.model.name}, {cards}, {sizes}"

    def plan(self, share: Efficiency) -> float:
        """What the plan says instead."""
        a100 = MACHINES["A100"]
        load = carry(
            self.model, self.traffic, a100, share, self.batch, self.devices
        )
        return load.tokens / self.devices


SHORT = Traffic(128, 128)
TELLS = Traffic(128, 2048)
READS = Traffic(2048, 128)
LONG = Traffic(2048, 2048)
# TensorRT-LLM 0.5.0, docs/source/performance.md, "A100 GPUs (FP16)" of "Peak Throughput", its rows on one
# card: both models with each traffic. On several cards one would have to know what the number is of, and
# the plan leaves out what cards say to each other, so that no constant comes from such a run.
FITTED = [
    Report(GPT_J, 64, 1, SHORT, 3679),
    Report(GPT_J, 32, 1, TELLS, 1558),
    Report(GPT_J, 32, 1, READS, 526),
    Report(GPT_J, 16, 1, LONG, 650),
    Report(LLAMA_7B, 64, 1, SHORT, 3486),
    Report(LLAMA_7B, 32, 1, TELLS, 1459),
    Report(LLAMA_7B, 32, 1, READS, 529),
    Report(LLAMA_7B, 16, 1, LONG, 592),
]
# TensorRT-LLM 0.6.1, the same table a release later, all rows; no constant knows them. An earlier edition
# of that page says "out tok/s" over these numbers, a later one "out tok/s/GPU".
UNSEEN = [
    Report(GPT_J, 512, 1, SHORT, 6374),
    Report(GPT_J, 120, 2, TELLS, 2192),
    Report(GPT_J, 60, 1, READS, 670),
    Report(GPT_J, 64, 2, LONG, 903),
    Report(LLAMA_7B, 384, 1, SHORT, 5586),
    Report(LLAMA_7B, 60, 1, TELLS, 1928),
    Report(LLAMA_7B, 52, 1, READS, 591),
    Report(LLAMA_7B, 64, 2, LONG, 782),
    Report(LLAMA_70B, 1280, 4, SHORT, 670),
    Report(LLAMA_70B, 240, 4, TELLS, 525),
    Report(LLAMA_70B, 120, 4, READS, 79),
    Report(FALCON, 1024, 8, SHORT, 232),
    Report(FALCON, 128, 8, TELLS, 180),
]
# What `fit` makes of `FITTED`; a test holds it to that.
GOOD_SERVER = Efficiency(0.66, 0.72)
STEPS = [share / 100 for share in range(40, 101, 2)]


def fit(reports: list[Report]) -> Efficiency:
    """The two shares that explain published runs best: the least sum of errors, as ratios."""

    def misses(share: Efficiency) -> float:
        total = 0.0
        for one in reports:
            ratio = one.plan(share) / one.tokens
            total += abs(math.log(ratio))
        return total

    shares = [Efficiency(one, other) for one in STEPS for other in STEPS]
    return min(shares, key=misses)


def judge(report: Report, share: Efficiency) -> float:
    """Tokens planned over tokens published, less one."""
    return report.plan(share) / report.tokens - 1


def median_error(reports: list[Report], share: Efficiency) -> float:
    """Half of the runs are planned better than this."""
    errors = []
    for one in reports:
        error = judge(one, share)
        errors.append(abs(error))
    return statistics.median(errors)
