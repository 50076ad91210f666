"""The drawings of the lesson on instruction tuning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib import pyplot as plt

from utils.show import COLOURS, show_figure


def draw_course(
    losses: Sequence[float], points: Sequence[tuple[int, float]]
) -> None:
    """The loss of each step, and the share of right answers at some of them."""
    figure, axes = plt.subplots(figsize=(7, 2.6))
    steps, shares = zip(*points)
    axes.plot(losses, color=COLOURS[5], label="loss of a step, nats a token")
    label = "right answers, rehearsal"
    axes.plot(steps, shares, "o-", color=COLOURS[0], label=label)
    axes.set(xlabel="step", ylim=(0, 2))
    axes.legend()
    show_figure(
        figure,
        alt="The loss of each step, and at five points from step 0 on the "
        "share of right answers; the text below reads both curves",
    )


def draw_rates(found: Mapping[str, Mapping[float, float]]) -> None:
    """The share of right answers by the learning rate, a line for each way of training."""
    figure, axes = plt.subplots(figsize=(7, 2.6))
    for (kind, shares), colour in zip(found.items(), COLOURS):
        rates = list(shares)
        axes.plot(rates, list(shares.values()), "o-", color=colour, label=kind)
    axes.set(xscale="log", xlabel="learning rate", ylabel="right, rehearsal")
    axes.legend()
    show_figure(
        figure,
        alt="Right answers over the learning rate: a line for full "
        "training and one for LoRA",
    )
