"""The figures of lesson 21: where a server's knee is, and what overload does to those who wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib import pyplot as plt
from matplotlib.ticker import LogLocator

from stages.serving_load import Outcome
from utils.show import COLOURS, show_figure


def draw_knee(curve: Sequence[Mapping[str, float]]) -> None:
    """Times against the share of capacity that arrives; a row has its `share` and a summary."""
    figure, axes = plt.subplots(1, 2, figsize=(7, 2.8))
    titles = {"first": "to the first token", "gap": "between tokens"}
    shares = [row["share"] for row in curve]
    for panel, (what, title) in zip(axes, titles.items(), strict=True):
        for percent, colour, mark in zip((50, 95), COLOURS, "os", strict=False):
            values = [1e3 * row[f"{what} p{percent}"] for row in curve]
            label = f"{percent}th percentile"
            panel.semilogy(shares, values, mark + "-", color=colour, label=label)
        panel.axvline(1, color="0.6", linestyle="--", zorder=0)
        panel.set(xlabel="arrivals / capacity", ylabel=f"ms {title}")
        # Ticks at 1, 2 and 5 and not only at powers of ten, of which a panel may have none.
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_formatter("")
    lines, names = axes[0].get_legend_handles_labels()
    figure.legend(lines, names, loc="upper center", ncols=2, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.9))
    alt = "Milliseconds to the first token and between tokens, on a logarithmic scale, against "
    alt += "arrivals as a share of capacity, for the 50th and the 95th percentile; a dashed line "
    alt += "marks capacity."
    show_figure(figure, alt=alt)


def draw_overload(runs: Mapping[str, Sequence[Outcome]]) -> None:
    """How long each answered request waited, by when it was due."""
    figure, axes = plt.subplots(figsize=(7, 2.8))
    for (name, outcomes), colour, mark in zip(
        runs.items(), COLOURS, "ox", strict=False
    ):
        begin = min(one.due for one in outcomes)
        whole = [one for one in outcomes if one.whole]
        due = [one.due - begin for one in whole]
        waits = [one.first for one in whole]
        axes.plot(due, waits, mark, color=colour, markersize=4, label=name)
    axes.set(
        xlabel="second in which a request was due", ylabel="s to the first token"
    )
    axes.legend(frameon=False)
    alt = "Seconds to the first token against the second in which a request was due, a point for "
    alt += "each answered request of either server; refused requests have none."
    show_figure(figure, alt=alt)
