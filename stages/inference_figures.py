"""What lesson 20 shows of its measurements: each with its range over the rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.ticker import LogLocator, NullLocator

from utils.show import COLOURS, show_figure, show_table

Rounds = Mapping[Any, Sequence[float]]
# A bar of a plan: its slot, the step at which it begins, and its length.
Bar = tuple[int, int, int]


def gain(found: Rounds, base: Any, way: Any) -> float:
    """How many times as fast a way is as another one: the median over the rounds.

    >>> gain({"slow": [4.0, 4.0, 9.0], "fast": [2.0, 2.0, 3.0]}, "slow", "fast")
    2.0
    """
    ratios = np.divide(found[base], found[way])
    return float(np.median(ratios))


def show_speeds(
    found: Rounds, base: Any, amount: float, unit: str = "tokens a second"
) -> None:
    """A table of speeds: medians with their range, and the gain over one way within a round."""
    rows = []
    for way, seconds in found.items():
        speeds = amount / np.array(seconds)
        row = {"way": way, unit: f"{np.median(speeds):.1f}"}
        row["range"] = f"{speeds.min():.1f} to {speeds.max():.1f}"
        row["gain"] = f"{gain(found, base, way):.2f}x"
        rows.append(row)
    show_table(rows, align="lrrr")


def draw_lengths(found: Mapping[int, Rounds]) -> None:
    """Time for one more token over the length of the text before it."""
    figure, axes = plt.subplots(figsize=(7, 2.8))
    lengths = list(found)
    for way, colour in zip(("without", "with a cache"), COLOURS):
        times = [1e3 * np.array(found[length][way]) for length in lengths]
        middle = [np.median(some) for some in times]
        low = [some.min() for some in times]
        high = [some.max() for some in times]
        axes.plot(lengths, middle, "o-", color=colour, label=way)
        axes.fill_between(lengths, low, high, color=colour, alpha=0.2)
    axes.set(xlabel="tokens before it", ylabel="ms for one token", ylim=(0, None))
    axes.legend(frameon=False)
    alt = "Time for one more token over the length before it: without a cache it "
    alt += "rises steeply, with one it stays almost level."
    show_figure(figure, alt)


def draw_roof(
    bandwidth: float,
    peak: float,
    points: Mapping[str, tuple[float, np.ndarray]],
) -> None:
    """The roofline of a machine, and measured points below it: intensity, operations a second."""
    figure, axes = plt.subplots(figsize=(7, 3.2))
    line = np.geomspace(0.2, 300, 60)
    roof = np.minimum(bandwidth * line, peak)
    axes.loglog(line, roof / 1e9, color="black")
    for (name, (intensity, speeds)), colour in zip(points.items(), COLOURS):
        ends = [speeds.min() / 1e9, speeds.max() / 1e9]
        axes.plot([intensity, intensity], ends, color=colour)
        middle = np.median(speeds) / 1e9
        axes.plot(intensity, middle, "o", color=colour, label=name)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(NullLocator())
    axes.set(xlabel="operations for each byte read")
    axes.set(ylabel="billion operations a second")
    axes.legend(frameon=False, loc="lower right")
    alt = "The roofline: a slope set by memory, then a flat roof. Decoding for one "
    alt += (
        "caller is furthest to the left, more callers follow to the right, and a "
    )
    alt += "prompt is nearest to the roof. All lie below the line."
    show_figure(figure, alt)


def draw_slots(plans: Mapping[str, Sequence[Bar]]) -> None:
    """Which request is in which slot at which step, for several ways to batch."""
    figure, panels = plt.subplots(len(plans), 1, figsize=(7, 4.4), sharex=True)
    for axes, (name, bars) in zip(panels, plans.items()):
        for number, (slot, start, length) in enumerate(bars):
            colour = COLOURS[number % 6]
            place = (slot - 0.4, 0.8)
            axes.broken_barh(
                [(start, length)], place, edgecolor="white", facecolor=colour
            )
        axes.set(yticks=[], ylabel=name)
    panels[-1].set(xlabel="steps")
    alt = (
        "Slots over time for three ways to batch. Padded batches leave gaps behind "
    )
    alt += (
        "short answers, sorted ones leave fewer, and with continuous batching the "
    )
    alt += "bars follow each other without gaps."
    show_figure(figure, alt)


def draw_trade(found: Mapping[int, Sequence[float]]) -> None:
    """Tokens a second for all callers, over the time between two tokens of one."""
    figure, axes = plt.subplots(figsize=(7, 2.8))
    for number, (callers, seconds) in enumerate(found.items()):
        wait = 1e3 * np.array(seconds)
        speed = 1e3 * callers / wait
        label = "each round" if number == 0 else None
        axes.plot(wait, speed, ".", color=COLOURS[0], alpha=0.4, label=label)
        middle = (float(np.median(wait)), float(np.median(speed)))
        label = "median, with its number of callers" if number == 0 else None
        axes.plot(*middle, "o", color=COLOURS[1], label=label)
        axes.annotate(f"  {callers}", middle, color=COLOURS[1])
    axes.set(xlabel="ms between two tokens of one caller", xlim=(0, None))
    axes.legend(loc="upper left", fontsize=8)
    axes.set(ylabel="tokens a second for all", ylim=(0, None))
    alt = (
        "Throughput over latency, each median labelled with its number of callers: "
    )
    alt += "with more callers throughput rises, and on the whole the wait of each."
    show_figure(figure, alt)
