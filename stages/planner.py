"""What a training run takes, before it is paid for: memory, layout, days, energy, money.

Three things are assumed and not computed: the share of the peak rate that a class of code reaches
(`EFFICIENCY`), the power that cooling adds (`COOLING`), and prices. All stand here, in the open.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import pydantic
from pydantic import Field

from utils.errors import CourseError

# Share of the peak rate that useful arithmetic reaches, by the class of a run. The first two follow
# reports on speed: Megatron-LM (2021, Table 1: 44 to 52% on A100), PaLM (2022: 46%), Llama 3 (2024,
# Table 4: 38 to 43% on H100). "library loop" was set from the two CodeParrot runs of lesson 12, so
# those do not test it. The others are rules of thumb.
EFFICIENCY = {
    "tuned": 0.45,
    "tuned, H100": 0.40,
    "small model": 0.30,
    "library loop": 0.10,
    "two CPU cores": 0.60,
}
RECOMPUTE = 0.75  # with checkpointing three of four multiplications are useful ones
COOLING = 1.1  # watts at the meter for a watt in the machine
USABLE = 0.9  # how much of a device's memory a plan may fill

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


@pydantic.dataclasses.dataclass(frozen=True)
class Shape:
    """What the arithmetic of a decoder depends on."""

    parameters: Positive
    layers: Count
    width: Count
    context: Count
    vocabulary: Count = 50_000

    def estimated_flops_per_token(self) -> float:
        """Multiplications and additions of a training step for one token: 6 N + 12 L d T.

        Every parameter counts; `stages.recipe.flops_per_token` leaves out a model's lookups.

        >>> round(Shape(124e6, 12, 768, 1024).estimated_flops_per_token() / 1e9, 2)
        0.86
        """
        attention = 12 * self.layers * self.width * self.context
        return 6 * self.parameters + attention


@dataclass(frozen=True)
class Link:
    """What a message costs: a start, and the time of its bytes, one way."""

    latency: float
    bandwidth: float

    def seconds(self, kind: str, size: float, world: int) -> float:
        """The time of a collective over a ring.

        >>> round(Link(0.001, 1e9).seconds("all_reduce", 4e9, 4), 3)
        6.006
        """
        rounds = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}[kind]
        return rounds * (world - 1) * (self.latency + size / world / self.bandwidth)


@pydantic.dataclasses.dataclass(frozen=True)
class Machine:
    """One device with its share of the node, and its links to neighbours and to other nodes."""

    name: str
    flops: Positive  # a second at best, in bfloat16, dense
    memory: Positive
    watts: Positive
    hourly: Annotated[float, Field(ge=0)]  # an assumption: ask for today's price
    inside: Positive = 1e9  # bytes a second, within a node
    outside: Positive = 1e9  # and to other nodes
    node: Count = 8

    def link(self, devices: int) -> Link:
        """The slowest link among neighbouring devices; its bandwidth alone is counted."""
        return Link(0.0, self.inside if devices <= self.node else self.outside)


MACHINES = {
    "2 CPU cores": Machine("2 CPU cores", 0.4e12, 8e9, 30, 0.10, node=1),
    "T4": Machine("T4", 65e12, 16e9, 100, 0.35, node=1),
    "A100": Machine("A100", 312e12, 80e9, 500, 1.80, 300e9, 25e9),
    "A100-40": Machine("A100-40", 312e12, 40e9, 500, 1.30, 300e9, 25e9),
    "H100": Machine("H100", 989e12, 80e9, 1000, 2.80, 450e9, 50e9),
}


@dataclass(frozen=True)
class Layout:
    """How a model lies on devices; `shards` of the data parallel ones share a copy of the states."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    shards: int = 1
    checkpointing: bool = False

    @property
    def devices(self) -> int:
        """All devices of the run."""
        return self.tensor * self.pipeline * self.data

    @property
    def name(self) -> str:
        """What this layout is called.

        >>> Layout(data=16, shards=8).name, Layout(tensor=8, pipeline=2, data=4, shards=4).name
        ('FSDP over 8, DDP over 2', 'tensor 8, pipeline 2, FSDP over 4')
        """
        sizes = {"tensor": self.tensor, "pipeline": self.pipeline}
        sizes["FSDP over"] = self.shards
        sizes["DDP over"] = self.data // self.shards
        parts = [f"{kind} {size}" for kind, size in sizes.items() if size > 1]
        return ", ".join(parts) or "one process"


@dataclass(frozen=True)
class Plan:
    """What a run takes. A step makes as many passes of `rows_at_once` as its rows need."""

    layout: Layout
    rows_at_once: int
    memory: float  # bytes on each device
    step: float  # seconds
    steps: int
    communication: float  # traffic as a share of a step; at 1 it rules
    energy: float  # kWh
    money: float  # US dollars
    reasons: list[str]

    @property
    def days(self) -> float:
        """From the first step to the last, with no accident."""
        seconds = self.step * self.steps
        return seconds / 86_400


def state_bytes(shape: Shape, layout: Layout) -> float:
    """Weights (2 bytes), gradients (4) and AdamW's three copies (12) on one device.

    >>> state_bytes(Shape(1e9, 24, 2048, 2048), Layout()) / 1e9
    18.0
    """
    devices = layout.tensor * layout.pipeline * layout.shards
    return 18 * shape.parameters / devices


def activation_bytes(shape: Shape, layout: Layout, rows: int = 1) -> float:
    """What a forward pass keeps on one device: 34 bytes a token and unit of width in each layer.

    That count is of Korthikanti et al. (2022), for bf16 and an attention that keeps no scores. With
    checkpointing a layer keeps its input, 2 bytes, and one layer at a time is whole. The scores
    over the vocabulary are kept in fp32, with their gradient.
    """
    tokens = rows * shape.context
    layers = shape.layers / layout.pipeline
    layer = 34 * tokens * shape.width / layout.tensor
    kept = layer * layers
    if layout.checkpointing:
        kept = layer + 2 * layers * tokens * shape.width
    # The first stage of a pipeline starts this many micro-batches before one comes back.
    in_flight = min(layout.pipeline, 4)
    return kept * in_flight + 8 * tokens * shape.vocabulary / layout.tensor


def memory_per_device(shape: Shape, layout: Layout, rows: int = 1) -> float:
    """States, activations of `rows` rows, and a gigabyte for the context and the workspaces."""
    states = state_bytes(shape, layout)
    if layout.shards > 1:
        # Of sharded weights the layer in use and the next one are gathered, 2 bytes each.
        states += 4 * shape.parameters / shape.layers / layout.tensor
    return states + activation_bytes(shape, layout, rows) + 1e9


def rows_that_fit(
    shape: Shape, layout: Layout, machine: Machine, batch: float
) -> int:
    """Rows of one pass: the largest power of two that fits, 0 if none does; 1 in a pipeline."""
    share = batch / shape.context / layout.data
    rows = 1
    while layout.pipeline == 1 and 2 * rows <= share:
        rows *= 2
    while rows and memory_per_device(shape, layout, rows) > USABLE * machine.memory:
        rows //= 2
    return rows


def communication_seconds(
    shape: Shape, layout: Layout, machine: Machine, rows: float, passes: int = 1
) -> float:
    """Seconds of traffic of a device in a step, on the slowest link that each kind crosses.

    Sharded weights are gathered twice in each pass, forward and backward, and the gradients of the
    pass are scattered. Copies add up their gradients once a step. A layer cut over devices sums
    activations four times, and a pipeline hands them on and their gradients back.
    """
    model = layout.tensor * layout.pipeline
    weights = 2 * shape.parameters / model
    near = machine.link(model * layout.shards)
    gather = near.seconds("all_gather", weights, layout.shards)
    scatter = near.seconds("reduce_scatter", weights, layout.shards)
    far = machine.link(layout.devices)
    replicas = layout.data // layout.shards
    copies = far.seconds("all_reduce", weights / layout.shards, replicas)
    activations = 2 * rows * shape.context * shape.width
    cut = machine.link(layout.tensor)
    within = cut.seconds("all_reduce", activations, layout.tensor)
    sums = 4 * shape.layers / layout.pipeline * within
    handed = 0.0
    if layout.pipeline > 1:
        handed = 2 * activations / machine.link(model).bandwidth
    return passes * (2 * gather + scatter) + copies + sums + handed


def efficiency(machine: Machine, shape: Shape, loop: bool = False) -> float:
    """The assumed share of the peak: by machine, size and code, never by run."""
    if machine.name == "2 CPU cores":
        return EFFICIENCY["two CPU cores"]
    if loop:
        return EFFICIENCY["library loop"]
    if shape.parameters < 5e8:
        return EFFICIENCY["small model"]
    return EFFICIENCY["tuned, H100" if machine.name == "H100" else "tuned"]


def device_hours(
    shape: Shape,
    tokens: float,
    machine: Machine,
    checkpointing: bool = False,
    loop: bool = False,
) -> float:
    """Hours of one device for a run: arithmetic over the rate that its class reaches."""
    rate = machine.flops * efficiency(machine, shape, loop)
    if checkpointing:
        rate *= RECOMPUTE
    return shape.estimated_flops_per_token() * tokens / rate / 3600


def step_seconds(
    shape: Shape, layout: Layout, machine: Machine, batch: float, at_once: int = 1
) -> tuple[float, float]:
    """Seconds of a step of `batch` tokens, and of its traffic; at best arithmetic hides that."""
    rows = batch / shape.context / layout.data
    passes = max(1, math.ceil(rows / at_once))
    traffic = communication_seconds(shape, layout, machine, rows, passes)
    hours = device_hours(shape, batch, machine, layout.checkpointing)
    # A pipeline fills and drains in each step.
    bubble = 1 + (layout.pipeline - 1) / passes
    return max(hours / layout.devices * 3600 * bubble, traffic), traffic


def layouts(machine: Machine, devices: int) -> list[Layout]:
    """Layouts from the simplest to the most divided."""
    found = []
    node = min(machine.node, devices)
    for checkpointing in (False, True):
        for shards in sorted({1, node, devices}):
            found.append(Layout(1, 1, devices, shards, checkpointing))
    for tensor in sorted({1, node}):
        for stages in (1, 2, 4, 8, 16):
            data = devices // (tensor * stages)
            shards = data if tensor > 1 else 1
            found.append(Layout(tensor, stages, data, shards, True))
    # Some do not use all devices, or not evenly; and one stands there twice.
    even = [one for one in found if one.devices == devices]
    even = [one for one in even if one.data % one.shards == 0]
    return list(dict.fromkeys(even))


def choose_layout(
    shape: Shape, machine: Machine, devices: int, batch: float
) -> tuple[Layout, list[str]]:
    """The fastest layout that fits, the simpler one on a tie, and what was said of each."""
    reasons = ["no layout fits"]
    best = None
    fastest = math.inf
    for layout in layouts(machine, devices):
        rows = rows_that_fit(shape, layout, machine, batch)
        memory = memory_per_device(shape, layout, max(rows, 1)) / 1e9
        seconds, _ = step_seconds(shape, layout, machine, batch, max(rows, 1))
        if batch / shape.context / layout.data < 1:
            verdict = "less than one row for each copy"
        elif rows == 0:
            verdict = "too much"
        else:
            verdict = f"{rows} row(s) at once, {seconds:,.2f} s a step"
            if seconds < 0.98 * fastest:
                best = layout
                fastest = seconds
        recomputed = ", activations recomputed" if layout.checkpointing else ""
        reasons.append(f"{layout.name}{recomputed}: {memory:,.1f} GB, {verdict}")
    if best is None:
        fix = "take other devices, or another batch"
        raise CourseError("\n  ".join(reasons), machine.name, fix)
    return best, reasons[1:]


def plan(
    shape: Shape, tokens: float, machine: Machine, devices: int, batch: float = 5e5
) -> Plan:
    """A whole run of `tokens` tokens, in steps of `batch` tokens, by the layout that is chosen."""
    layout, reasons = choose_layout(shape, machine, devices, batch)
    rows = rows_that_fit(shape, layout, machine, batch)
    step, traffic = step_seconds(shape, layout, machine, batch, rows)
    steps = math.ceil(tokens / batch)
    hours = step * steps / 3600 * devices
    memory = memory_per_device(shape, layout, rows)
    energy = hours * machine.watts * COOLING / 1000
    costs = energy, hours * machine.hourly
    return Plan(layout, rows, memory, step, steps, traffic / step, *costs, reasons)
