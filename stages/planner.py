"""What a training run takes, before it is paid for: memory, layout, days, energy, money.

Bytes are those of `stages.step_memory`. Three things are assumed and not computed: the share of the
peak rate that a class of code reaches (`EFFICIENCY`), the power that cooling adds (`COOLING`), and
prices. All stand here, in the open.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pydantic

from stages.machines import MACHINES, USABLE, Count, Link, Machine, Positive
from stages.step_memory import CONVENTIONS
from utils.errors import CourseError

# Machines and their links are part of a plan, and stand apart for length alone.
__all__ = ["MACHINES", "Layout", "Link", "Machine", "Plan", "Shape"]
__all__ += ["choose_layout", "communication_seconds", "device_hours", "plan"]

# Share of the peak rate that useful arithmetic reaches, by the class of a run. "tuned", "small model"
# and "library loop" are the geometric means of the published runs of their class, and judged with each
# run left out of its own mean: `stages.published_runs`. "tuned, H100" is the median of the 32 rows
# without recomputation in the H100 table of MosaicML's llm-foundry (2023), and knows no run of ours.
# "two CPU cores" is 0.09 teraflops, what our own loop reached on one thread of such a machine.
EFFICIENCY = {
    "tuned": 0.47,
    "tuned, H100": 0.40,
    "small model": 0.29,
    "library loop": 0.08,
    "two CPU cores": 0.22,
}
RECOMPUTE = 0.75  # with checkpointing three of four multiplications are useful ones
COOLING = 1.1  # watts at the meter for a watt in the machine
CONTEXT = 1e9  # bytes of a device's context and workspaces
STAGES = (1, 2, 4, 8, 16)  # of a pipeline


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


def state_bytes(shape: Shape, layout: Layout, precision: str = "bfloat16") -> float:
    """What stays of the parameters on one device while a step is computed.

    16 bytes a parameter, of weights, gradients and AdamW's averages; and where the model is whole and
    computes in bfloat16, a 16-bit copy of each.

    >>> state_bytes(Shape(1e9, 24, 2048, 2048), Layout()) / 1e9
    18.0
    >>> state_bytes(Shape(1e9, 24, 2048, 2048), Layout(data=8, shards=8)) / 1e9
    2.0
    """
    convention = CONVENTIONS[precision]
    parameters = shape.parameters / (layout.tensor * layout.pipeline)
    if layout.shards == 1:
        return convention.state_bytes(parameters)
    return convention.states * parameters / layout.shards


def transit_bytes(
    shape: Shape, layout: Layout, precision: str = "bfloat16"
) -> float:
    """What a device holds of others' shards: weights that are gathered, gradients on their way.

    The layer in use and the next one are there as copies, and the gradients of a layer twice: as they
    were computed, and in float32 to be summed. The table of tokens stays gathered for the whole pass.
    """
    if layout.shards == 1:
        return 0.0
    each = CONVENTIONS[precision].copy or 4
    layer = shape.parameters / shape.layers
    table = shape.vocabulary * shape.width
    held = 2 * each * layer + (each + 4) * layer + each * table
    return held / layout.tensor


def activation_bytes(
    shape: Shape, layout: Layout, rows: int = 1, precision: str = "bfloat16"
) -> float:
    """What `rows` rows need on one device of a pipeline's fullest stage.

    A cut layer's devices share its tokens where they do not share its width (sequence parallelism,
    Korthikanti et al., 2022), so that all activations are divided. A pipeline takes a backward pass
    as soon as it can: its first stage holds as many micro-batches as there are stages, and its last
    one holds one, with the scores over the vocabulary.
    """
    convention = CONVENTIONS[precision]
    layers = shape.layers / layout.pipeline
    a_layer = convention.layer
    working = convention.working - convention.layer
    if layout.checkpointing:
        a_layer = convention.entry
        working = convention.working
    kept = shape.width * (a_layer * layers + convention.edge)
    passing = working * shape.width
    scores = convention.scores * shape.vocabulary
    first = kept * layout.pipeline + passing
    last = kept + max(scores, passing)
    return rows * shape.context * max(first, last) / layout.tensor


def memory_per_device(
    shape: Shape, layout: Layout, rows: int = 1, precision: str = "bfloat16"
) -> float:
    """All of it: states, activations of `rows` rows, a gigabyte for the context and workspaces."""
    states = state_bytes(shape, layout, precision)
    states += transit_bytes(shape, layout, precision)
    return states + activation_bytes(shape, layout, rows, precision) + CONTEXT


def rows_that_fit(
    shape: Shape, layout: Layout, machine: Machine, batch: float
) -> list[int]:
    """Every number of rows that a pass can take: powers of two within the copy's share and memory.

    >>> rows_that_fit(Shape(124e6, 12, 768, 1024), Layout(data=8), MACHINES["T4"], 8 * 4096)
    [1, 2, 4]
    """
    share = batch / shape.context / layout.data
    room = USABLE * machine.memory
    fitting = []
    rows = 1
    while rows <= share:
        if memory_per_device(shape, layout, rows, machine.precision) > room:
            break
        fitting.append(rows)
        rows *= 2
    return fitting


def communication_seconds(
    shape: Shape, layout: Layout, machine: Machine, rows: float, passes: int = 1
) -> float:
    """Seconds of traffic of a device in a step, on the slowest link that each kind crosses.

    Sharded weights are gathered twice in each pass, forward and backward, and the gradients of the
    pass are scattered. Copies add up their gradients once a step. A layer cut over devices sums
    activations four times, six times if it is computed again, and a pipeline hands them on and
    their gradients back.
    """
    model = layout.tensor * layout.pipeline
    weights = 2 * shape.parameters / model
    near = machine.link(model * layout.shards, model)
    gather = near.seconds("all_gather", weights, layout.shards)
    scatter = near.seconds("reduce_scatter", weights, layout.shards)
    far = machine.link(layout.devices, model * layout.shards)
    replicas = layout.data // layout.shards
    copies = far.seconds("all_reduce", weights / layout.shards, replicas)
    activations = 2 * rows * shape.context * shape.width
    cut = machine.link(layout.tensor)
    within = cut.seconds("all_reduce", activations, layout.tensor)
    times = 6 if layout.checkpointing else 4
    sums = times * shape.layers / layout.pipeline * within
    handed = 0.0
    if layout.pipeline > 1:
        # A stage has one neighbour, and each of its devices a link of its own there.
        neighbour = machine.link(model, machine.node)
        handed = 2 * activations / layout.tensor / neighbour.bandwidth
    return passes * (2 * gather + scatter) + copies + sums + handed


def find_class(machine: Machine, shape: Shape, loop: bool = False) -> str:
    """The class of a run in `EFFICIENCY`: by machine, size and code, never by run."""
    if machine.name == "2 CPU cores":
        return "two CPU cores"
    if loop:
        return "library loop"
    if shape.parameters < 5e8:
        return "small model"
    return "tuned, H100" if machine.name == "H100" else "tuned"


def device_hours(
    shape: Shape,
    tokens: float,
    machine: Machine,
    checkpointing: bool = False,
    loop: bool = False,
    share: float | None = None,
) -> float:
    """Hours of one device for a run: arithmetic over the share of the peak that its class reaches."""
    if share is None:
        share = EFFICIENCY[find_class(machine, shape, loop)]
    rate = machine.flops * share
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
    """Every layout that the planner knows, from the simplest to the most divided.

    A layer is cut over a whole node or not at all. States are shared by all copies or by none;
    without other cuts also within each node.

    >>> [layout.name for layout in layouts(MACHINES["H100"], 2) if not layout.checkpointing]
    ['DDP over 2', 'FSDP over 2', 'pipeline 2', 'tensor 2']
    """
    node = min(machine.node, devices)
    found = []
    for checkpointing in (False, True):
        for tensor in sorted({1, node}):
            for stages in STAGES:
                data = devices // (tensor * stages)
                shared = {1, data}
                if tensor == stages == 1:
                    shared.add(node)
                for shards in sorted(shared):
                    found.append(
                        Layout(tensor, stages, data, shards, checkpointing)
                    )
    # Some do not use all devices, or not evenly.
    even = [one for one in found if one.devices == devices]
    return [one for one in even if one.shards and one.data % one.shards == 0]


@dataclass(frozen=True)
class Trial:
    """A layout with the rows of a pass that make it fastest."""

    layout: Layout
    rows: int  # 0 if none fit
    memory: float
    seconds: float
    verdict: str


def try_layout(
    shape: Shape, layout: Layout, machine: Machine, batch: float
) -> Trial:
    """The fastest way to run a layout, or why it cannot be run; the most rows where more are no slower."""
    best = 0
    seconds = math.inf
    for rows in rows_that_fit(shape, layout, machine, batch):
        took, _ = step_seconds(shape, layout, machine, batch, rows)
        if took <= seconds:
            best = rows
            seconds = took
    memory = memory_per_device(shape, layout, max(best, 1), machine.precision)
    verdict = f"{best} row(s) at once, {seconds:,.2f} s a step"
    if best == 0:
        verdict = "too much"
    if batch / shape.context / layout.data < 1:
        verdict = "less than one row for each copy"
    if layout.pipeline > shape.layers:
        best = 0
        seconds = math.inf
        verdict = "more stages than layers"
    return Trial(layout, best, memory, seconds, verdict)


def try_all(
    shape: Shape, machine: Machine, devices: int, batch: float
) -> list[Trial]:
    """Each layout with its activations kept or computed again, whichever is faster or alone fits."""
    better: dict[Layout, Trial] = {}
    for layout in layouts(machine, devices):
        kept = replace(layout, checkpointing=False)
        trial = try_layout(shape, layout, machine, batch)
        if kept not in better or trial.seconds < better[kept].seconds:
            better[kept] = trial
    return list(better.values())


def choose_layout(
    shape: Shape, machine: Machine, devices: int, batch: float
) -> tuple[Layout, list[str]]:
    """The fastest layout that fits, the simpler one on a tie, and what was said of each."""
    trials = try_all(shape, machine, devices, batch)
    reasons = []
    for trial in trials:
        again = ", activations recomputed" if trial.layout.checkpointing else ""
        size = trial.memory / 1e9
        reasons.append(
            f"{trial.layout.name}{again}: {size:,.1f} GB, {trial.verdict}"
        )
    fastest = min(trials, key=lambda trial: trial.seconds)
    if not fastest.rows:
        what = "\n  ".join(["no layout fits", *reasons])
        fix = "take other devices, or another batch"
        raise CourseError(what, machine.name, fix)
    return fastest.layout, reasons


def plan(
    shape: Shape, tokens: float, machine: Machine, devices: int, batch: float = 5e5
) -> Plan:
    """A whole run of `tokens` tokens, in steps of `batch` tokens, by the layout that is chosen."""
    layout, reasons = choose_layout(shape, machine, devices, batch)
    trial = try_layout(shape, layout, machine, batch)
    step, traffic = step_seconds(shape, layout, machine, batch, trial.rows)
    steps = math.ceil(tokens / batch)
    hours = step * steps / 3600 * devices
    energy = hours * machine.watts * COOLING / 1000
    costs = energy, hours * machine.hourly
    share = traffic / step
    return Plan(
        layout, trial.rows, trial.memory, step, steps, share, *costs, reasons
    )
