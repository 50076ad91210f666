"""Floor 3: what a training run takes, before it is paid for: memory, layout, days, energy, money.

    Shape, tokens, Machine -> plan() -> Plan, with its reasons

Three things are assumed and not computed: the share of the peak rate that a class of code reaches
(`EFFICIENCY`), the power that cooling adds (`OVERHEAD`), and prices. All stand here, in the open.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, field

# Share of the peak rate that useful arithmetic reaches, by the class of a run. The first two follow
# reports on speed: Megatron-LM (2021, Table 1: 44 to 52% on A100), PaLM (2022: 46%), Llama 3 (2024,
# Table 4: 38 to 43% on H100). "library loop" was set from the two CodeParrot runs of lesson 12, so
# those do not test it. The others are rules of thumb.
EFFICIENCY = {"tuned": 0.45, "tuned, H100": 0.40, "small model": 0.30, "library loop": 0.10,
              "two CPU cores": 0.60}
RECOMPUTE = 0.75  # with activation checkpointing, three of four multiplications are useful ones
OVERHEAD = 1.1  # watts at the meter for a watt in the machine


@dataclass(frozen=True)
class Shape:
    """What the arithmetic of a decoder depends on."""

    parameters: float
    layers: int
    width: int
    context: int
    vocabulary: int = 50_000

    def flops_per_token(self) -> float:
        """Multiplications and additions of a training step for one token: 6 N + 12 L d T.

        >>> round(Shape(124e6, 12, 768, 1024).flops_per_token() / 1e9, 2)
        0.86
        """
        return 6 * self.parameters + 12 * self.layers * self.width * self.context


@dataclass(frozen=True)
class Machine:
    """One device, and its links to its neighbours and to the other nodes, in SI units."""

    name: str
    flops: float  # peak, bfloat16, dense
    memory: float
    watts: float  # at full load, with its share of the node
    hourly: float  # US dollars an hour; an assumption, ask for today's
    inside: float = 0.0  # bytes a second between devices of a node
    outside: float = 0.0  # and to other nodes
    node: int = 8


MACHINES = {m.name: m for m in (
    Machine("2 CPU cores", 0.4e12, 8e9, 30, 0.10, node=1),
    Machine("T4", 65e12, 16e9, 100, 0.35, node=1),
    Machine("RTX 4090", 165e12, 24e9, 500, 0.40, 25e9, 3e9),
    Machine("A100", 312e12, 80e9, 500, 1.80, 300e9, 25e9),
    Machine("A100-40", 312e12, 40e9, 500, 1.30, 300e9, 25e9),
    Machine("H100", 989e12, 80e9, 1000, 2.80, 450e9, 50e9))}


@dataclass(frozen=True)
class Layout:
    """How a model lies on devices: tensor x pipeline x data parallel, states sharded or not."""

    tensor: int
    pipeline: int
    data: int
    sharded: bool
    checkpointing: bool
    devices = property(lambda self: self.tensor * self.pipeline * self.data)


@dataclass(frozen=True)
class Plan:
    """What a run takes. Times in seconds, memory in bytes, energy in kWh, money in dollars."""

    layout: Layout
    rows_at_once: int  # rows of one pass on each copy; a step has as many passes as its rows need
    memory: float
    step: float
    steps: float
    communication: float  # seconds of traffic over seconds of a step; at 1, traffic rules
    energy: float
    money: float
    reasons: list[str] = field(default_factory=list)

    @property
    def days(self) -> float:
        """From the first step to the last, with no accident."""
        return self.step * self.steps / 86_400


def state_bytes(shape: Shape, layout: Layout) -> float:
    """Weights in bf16, gradients in fp32, AdamW's three copies in fp32, on one device.

    >>> state_bytes(Shape(1e9, 24, 2048, 2048), Layout(1, 1, 1, False, False)) / 1e9
    18.0
    """
    own = shape.parameters / (layout.tensor * layout.pipeline)
    return own * 18 / (layout.data if layout.sharded else 1)


def activation_bytes(shape: Shape, layout: Layout, rows: int = 1) -> float:
    """What a forward pass keeps on one device: 34 bytes a token and unit of width in each layer.

    That count is of Korthikanti et al. (2022), for bf16 and an attention that keeps no scores. With
    checkpointing a layer keeps its input, 2 bytes, and one layer at a time is whole. The scores
    over the vocabulary are kept in fp32, with their gradient.
    """
    tokens, layers = rows * shape.context, shape.layers / layout.pipeline
    unit = tokens * shape.width
    kept = unit * (2 * layers + 34 / layout.tensor) if layout.checkpointing else (
        34 * unit * layers / layout.tensor)
    in_flight = min(layout.pipeline, 4)  # micro-batches on the first stage of a pipeline
    return kept * in_flight + 8 * tokens * shape.vocabulary / layout.tensor


def memory_per_device(shape: Shape, layout: Layout, rows: int = 1) -> float:
    """States, activations of `rows` rows, and a gigabyte for the context and the workspaces."""
    layer = 4 * shape.parameters / shape.layers * layout.sharded  # gathered, the next one too
    return state_bytes(shape, layout) + layer + activation_bytes(shape, layout, rows) + 1e9


def layouts(machine: Machine, devices: int) -> list[tuple[Layout, str]]:
    """Layouts from the simplest to the most divided, each with the reason to need it."""
    found = []
    for checkpointing, kept in ((False, "activations kept"), (True, "activations recomputed")):
        for sharded in (False, True)[: min(devices, 2)]:
            said = "states sharded over all" if sharded else "a whole copy on each device"
            found.append((Layout(1, 1, devices, sharded, checkpointing), f"{said}, {kept}"))
    inside = min(machine.node, devices)
    for stages in (1, 2, 4, 8, 16):
        if inside > 1 and devices % (inside * stages) == 0:
            said = f"each layer over the {inside} devices of a node, {stages} pipeline stage(s)"
            found.append((Layout(inside, stages, devices // (inside * stages), True, True), said))
    return found


def rows_that_fit(shape: Shape, layout: Layout, machine: Machine, batch: float) -> int:
    """Rows of one pass: the largest power of two that fits in 90% of the memory; 0 if none does.

    A pipeline takes one row in a pass, since it needs many passes to fill.
    """
    most = 1 if layout.pipeline > 1 else batch / shape.context / layout.data
    rows = 2 ** int(math.log2(max(most, 1)))
    while rows and memory_per_device(shape, layout, rows) > 0.9 * machine.memory:
        rows //= 2
    return rows


def communication_seconds(shape: Shape, layout: Layout, machine: Machine, rows: float,
                          passes: int = 1) -> float:
    """Seconds of traffic in a step, bf16, on the slowest link that each kind of traffic crosses.

    Whole copies add up their gradients once a step. Sharded weights are gathered twice in each
    pass, forward and backward, and the gradients of the pass are scattered.
    """
    if layout.devices == 1:
        return 0.0
    own = shape.parameters / (layout.tensor * layout.pipeline)
    link = machine.inside if layout.devices <= machine.node else machine.outside
    trips = 3 * passes if layout.sharded else 2
    across = 2 * own * trips * (layout.data - 1) / layout.data / link
    sums = 8 * shape.layers / layout.pipeline * (layout.tensor - 1) / layout.tensor
    within = sums * 2 * rows * shape.context * shape.width / machine.inside
    return across + within


def efficiency(machine: Machine, shape: Shape, library_loop: bool = False) -> float:
    """The assumed share of the peak: by machine, size and code, never by run."""
    if machine.name == "2 CPU cores":
        return EFFICIENCY["two CPU cores"]
    if library_loop:
        return EFFICIENCY["library loop"]
    if shape.parameters < 5e8:
        return EFFICIENCY["small model"]
    return EFFICIENCY["tuned, H100" if machine.name == "H100" else "tuned"]


def device_hours(shape: Shape, tokens: float, machine: Machine, checkpointing: bool = False,
                 library_loop: bool = False) -> float:
    """Hours of one device for a run: arithmetic over the rate that its class reaches."""
    share = efficiency(machine, shape, library_loop) * (RECOMPUTE if checkpointing else 1)
    return shape.flops_per_token() * tokens / (machine.flops * share) / 3600


def step_seconds(shape: Shape, layout: Layout, machine: Machine, batch: float,
                 rows_at_once: int = 1) -> tuple[float, float]:
    """Seconds of a step of `batch` tokens, and of its traffic; at best arithmetic hides that."""
    hours = device_hours(shape, batch, machine, layout.checkpointing)
    rows = batch / shape.context / layout.data
    passes = max(1, math.ceil(rows / rows_at_once))
    bubble = 1 + (layout.pipeline - 1) / passes  # a pipeline fills and drains in each step
    traffic = communication_seconds(shape, layout, machine, rows, passes)
    return max(hours * 3600 / layout.devices * bubble, traffic), traffic


def choose_layout(shape: Shape, machine: Machine, devices: int, batch: float,
                  ) -> tuple[Layout, list[str]]:
    """The fastest layout that fits in 90% of the memory, the simpler one on a tie, and why."""
    reasons, best, least = [], None, math.inf
    for layout, said in layouts(machine, devices):
        at_once = rows_that_fit(shape, layout, machine, batch)
        need = memory_per_device(shape, layout, max(at_once, 1)) / 1e9
        seconds, _ = step_seconds(shape, layout, machine, batch, max(at_once, 1))
        why = f"{at_once} row(s) at once, {seconds:,.2f} s a step" if at_once else "too much"
        if batch / shape.context / layout.data < 1:
            at_once, why = 0, "less than one row for each copy"
        reasons.append(f"{said}: {need:,.1f} GB, {why}")
        if at_once and seconds < 0.98 * least:
            best, least = layout, seconds
    if best is None:
        raise ValueError("; ".join([*reasons, "take other devices, or another batch"]))
    return best, reasons


def plan(shape: Shape, tokens: float, machine: Machine, devices: int, batch: float = 5e5) -> Plan:
    """All of it, for a batch of so many tokens a step."""
    layout, reasons = choose_layout(shape, machine, devices, batch)
    at_once = rows_that_fit(shape, layout, machine, batch)
    steps = math.ceil(tokens / batch)
    step, traffic = step_seconds(shape, layout, machine, batch, at_once)
    spent = step * steps / 3600 * devices
    return Plan(layout, at_once, memory_per_device(shape, layout, at_once), step, steps,
                traffic / step, spent * machine.watts * OVERHEAD / 1000, spent * machine.hourly,
                reasons)


def optimal_sizes(flops: float) -> tuple[float, float]:
    """Parameters and tokens of the lowest loss for a budget of 6 N D operations.

    The loss is E + A / N^a + B / D^b (Hoffmann et al. 2022); the constants A, B, a, b are those of
    the correction by Besiroglu et al. (2024).
    """
    a_size, b_size, a, b = 482, 2085, 0.348, 0.366
    ratio = (a * a_size / (b * b_size)) ** (1 / (a + b))
    parameters = ratio * (flops / 6) ** (b / (a + b))
    return parameters, flops / 6 / parameters
