"""The drawings of the lesson on translation."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib import pyplot as plt

from utils.show import COLOURS, show_figure


def draw_exams(exams: list[tuple[float, ...]]) -> None:
    """Right letters and right dates by step; a row is the step and three shares."""
    figure, axes = plt.subplots(figsize=(7, 2.6))
    columns = list(zip(*exams))
    steps = columns[0]
    lines = columns[1:]
    names = [
        "letters, with the teacher",
        "letters, alone",
        "whole dates, alone",
    ]
    for line, name, colour in zip(lines, names, COLOURS):
        axes.plot(steps, line, color=colour, marker="o", ms=3, label=name)
    axes.set(xlabel="step", ylabel="right")
    axes.legend(frameon=False, fontsize=8)
    show_figure(
        figure,
        alt="Three curves by step: letters right with the teacher, letters right alone, "
        "whole dates right",
    )


def draw_shares(shares: np.ndarray, written: str, source: str) -> None:
    """Where the decoder looked: a row for each letter written."""
    figure, axes = plt.subplots(figsize=(7, 3))
    axes.imshow(shares, cmap="Blues", aspect="auto", vmin=0)
    spaced = source.replace(" ", "·")
    across = list(spaced)
    down = list(written)
    axes.set_xticks(range(len(across)), across)
    axes.set_yticks(range(len(down)), down)
    axes.set(xlabel="is read", ylabel="is written")
    alt = (
        "Rows are the letters written, columns the letters read; dark fields show "
    )
    show_figure(figure, alt=alt + "where the decoder looked")


def draw_costs(
    curves: dict[str, list[tuple[float, float]]], levels: dict[str, float]
) -> None:
    """Score by CPU-seconds of training, with the rivals that need none as lines."""
    figure, axes = plt.subplots(figsize=(7, 3))
    for (name, points), colour in zip(curves.items(), COLOURS):
        axes.plot(*zip(*points), color=colour, marker="o", label=name)
    for (name, level), colour in zip(levels.items(), COLOURS[2:]):
        axes.axhline(level, color=colour, ls="--", label=name)
    axes.set(xlabel="CPU-seconds of training", ylabel="validation chrF")
    axes.legend(frameon=False, fontsize=8)
    alt = "chrF of both translators by CPU-seconds of training, with the copy and the "
    show_figure(figure, alt=alt + "dictionary as dashed lines")


def draw_widths(found: dict[float, dict[int, dict[str, Any]]]) -> None:
    """Change of chrF and length by beams, with intervals; a line for each length penalty."""
    figure, panels = plt.subplots(1, 2, figsize=(7, 2.8))
    for axes, part in zip(
        panels, ("chrF over greedy", "length over the reference")
    ):
        for place, (penalty, rows) in enumerate(found.items()):
            middle, low, high = np.array([row[part] for row in rows.values()]).T
            aside = 1.06**place  # so that no bar hides another
            beams = aside * np.array(list(rows))
            axes.errorbar(
                beams,
                middle,
                [middle - low, high - middle],
                color=COLOURS[place],
                marker="o",
                capsize=3,
                label=f"length penalty {penalty}",
            )
        axes.set_xscale("log", base=2)
        axes.set(xlabel="beams", ylabel=part)
    panels[0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    alt = "Against the number of beams: the change of chrF and the length of the "
    show_figure(figure, alt=alt + "translations, with intervals")
