"""Devices that a training run can be planned for, and the links between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import pydantic
from pydantic import Field

USABLE = 0.9  # how much of a device's memory a plan may fill

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


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
    flops: Positive  # a second at best, dense, in the precision below
    memory: Positive
    watts: Positive
    hourly: Annotated[float, Field(ge=0)]  # an assumption: ask for today's price
    inside: Positive = 1e9  # bytes a second of each device, within a node
    outside: Positive = 1e9  # and to other nodes
    node: Count = 8
    # What the training loop computes in on such a device: `utils.machine.choose_dtype`.
    precision: Literal["float32", "bfloat16"] = "bfloat16"

    def link(self, devices: int, stride: int = 1) -> Link:
        """What a ring has that takes every `stride`-th of `devices` neighbours; bandwidth alone is counted.

        All its members in a node carry its bytes out together, as NCCL lets them with a ring for each.

        >>> h100 = MACHINES["H100"]
        >>> [h100.link(*group).bandwidth / 1e9 for group in ((8,), (16,), (16, 8))]
        [450.0, 400.0, 50.0]
        """
        if devices <= self.node:
            return Link(0.0, self.inside)
        carriers = max(1, self.node // stride)
        return Link(0.0, min(self.inside, carriers * self.outside))


MACHINES = {
    "2 CPU cores": Machine("2 CPU cores", 0.4e12, 8e9, 30, 0.10, node=1),
    # It has no bfloat16, and its 65 teraflops are those of float16.
    "T4": Machine("T4", 8.1e12, 16e9, 100, 0.35, node=1, precision="float32"),
    "A100": Machine("A100", 312e12, 80e9, 500, 1.80, 300e9, 25e9),
    "A100-40": Machine("A100-40", 312e12, 40e9, 500, 1.30, 300e9, 25e9),
    "H100": Machine("H100", 989e12, 80e9, 1000, 2.80, 450e9, 50e9),
}
