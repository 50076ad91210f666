"""What a reader is shown: numbers, tables, figures, and the source of a function."""

from __future__ import annotations

import base64
import html
import inspect
import io
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar

from utils.errors import short_path

# Okabe and Ito's palette: told apart by readers with any kind of colour vision.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7"]
COLOURS += ["#E69F00", "#56B4E9", "#000000"]
Item = TypeVar("Item")
ALIGN = {"l": "left", "r": "right", "c": "center"}


def format_bytes(count: float) -> str:
    """Bytes in the unit a person would use.

    >>> format_bytes(538_000_000), format_bytes(812)
    ('538 MB', '812 B')
    """
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            digits = ".3g" if count < 999 * size else ".0f"
            return f"{count / size:{digits}} {unit}"
    return f"{count:.0f} B"


def format_memory(count: int | None) -> str:
    """The memory that something took; not every system tells it.

    >>> format_memory(2_000_000), format_memory(None)
    ('2 MB', 'not measured')
    """
    return format_bytes(count) if count else "not measured"


def format_figure(value: float) -> str:
    """Four significant digits, thousands apart.

    >>> format_figure(1529600000), format_figure(3.62104), format_figure(0.81)
    ('1,529,600,000', '3.621', '0.81')
    """
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"


def count_parameters(model: Any, trainable: bool = False) -> int:
    """The number of parameters of a model; tied ones, which torch lists once, count once.

    >>> import torch
    >>> count_parameters(torch.nn.Linear(3, 2))
    8
    """
    wanted = (p for p in model.parameters() if p.requires_grad or not trainable)
    return sum(parameter.numel() for parameter in wanted)


def format_cell(value: Any) -> str:
    """A value as a table shows it: 1,234,567 and 0.3, and a dash for None."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, Real):
        return str(value)
    if isinstance(value, Integral):
        return f"{int(value):,}"
    return f"{float(value):.10g}"


def cell_html(value: Any) -> str:
    """A value as HTML in which nothing of it can become markup; only `code` keeps its look.

    >>> cell_html("<s> and `</s>`")
    '&lt;s&gt; and <code>&lt;/s&gt;</code>'
    """
    text = html.escape(format_cell(value))
    text = text.replace("\n", "⏎")
    text = text.replace("$", "<span>$</span>")
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", text)


def tolerate_narrow_consoles() -> None:
    """Where a console or pipe lacks a character, as on Windows, print ? and go on."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def progress(items: Iterable[Item], what: str = "") -> Iterator[Item]:
    """The items one by one, and meanwhile one line that moves, which is gone at the end.

    It shows from the second second on, and never where `TQDM_DISABLE` is set, as in a run of the course.

    >>> sum(progress([1, 2, 3]))
    6
    """
    from tqdm.auto import tqdm

    hidden = "TQDM_DISABLE" in os.environ
    yield from tqdm(items, what or None, leave=False, delay=1, disable=hidden)


def show_table(rows: Iterable[dict[str, Any]], align: str = "") -> None:
    """Show a table from a list of rows, numbers to the right, unless `align` says l, r or c for each.

    show_table([{"model": "gpt2", "parameters": 124_439_808}])
    """
    from IPython.display import display

    rows = list(rows)
    if not rows:
        print("(a table without rows)")
        return
    heads = list(rows[0])
    marks = ["r" if isinstance(rows[0][head], Real) else "l" for head in heads]
    lines = [heads]
    lines += [[row.get(head, "") for head in heads] for row in rows]
    table = plain = ""
    for line in lines:
        tag = "th" if line is heads else "td"
        for value, mark in zip(line, align or marks, strict=True):
            table += f'<{tag} style="text-align:{ALIGN[mark]}">{cell_html(value)}</{tag}>'
        table = f"{table}</tr>\n<tr>"
        plain += " | ".join(map(format_cell, line)) + "\n"
    table = f"<table><tr>{table.removesuffix('<tr>')}</table>"
    display({"text/html": table, "text/plain": plain.rstrip()}, raw=True)


def show_figure(figure: Any, alt: str) -> None:
    """Show a matplotlib figure with a text for those who cannot see it, then close it.

    The picture is shown as HTML, because a picture by itself loses its text in JupyterLab, in Colab
    and in pages made by nbconvert.
    """
    from IPython.display import display
    from matplotlib import pyplot as plt

    image = io.BytesIO()
    # Half the bytes of a PNG, every pixel as it was drawn.
    look = {"dpi": 110, "bbox_inches": "tight", "facecolor": "white"}
    figure.savefig(image, format="webp", pil_kwargs={"lossless": True}, **look)
    plt.close(figure)
    content = base64.b64encode(image.getvalue()).decode("ascii")
    picture = (
        f'<img alt="{html.escape(alt)}" src="data:image/webp;base64,{content}">'
    )
    data = {"text/html": picture, "text/plain": f"[figure: {alt}]"}
    display(data, raw=True)


def show_source(thing: Callable) -> None:
    """Show the code of a function with its place, where a lesson speaks of it."""
    from IPython.display import Markdown, display

    thing = inspect.unwrap(thing)
    source = inspect.getsource(thing)
    place = short_path(Path(inspect.getsourcefile(thing) or ""))
    line = inspect.getsourcelines(thing)[1]
    display(Markdown(f"`{place}`, line {line}\n```python\n{source}```"))
