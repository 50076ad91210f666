"""What a large run will take, said before it begins, and what came of it, in one report.

Hours and memory are the planner's. What no formula gives is a range, and its two ends say why.
"""

from __future__ import annotations

import bz2
import json
import lzma
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from stages.checkpoints import PROGRESS
from stages.evaluation import perplexity
from stages.planner import (
    MACHINES,
    Layout,
    Machine,
    Shape,
    device_hours,
    memory_per_device,
)
from stages.recipe import Recipe
from stages.tokenizer import byte_letters
from stages.tokens import Loader, Split, open_store
from stages.training_callbacks import sum_losses
from utils.artifacts import list_files, read_json
from utils.errors import CourseError
from utils.machine import choose_device

# Up to four passes repeated text teaches nearly as much as new text (Muennighoff et al., 2023).
MOST_EPOCHS = 4
# Bytes of Python that a token spells, at the least and at the most, from this vocabulary on. The
# packages below have 4.56 at 32,768.
BYTES_OF_TOKEN = {0: (1.7, 2.5), 8_192: (3.0, 4.0), 32_768: (4.2, 4.8)}
# The share of a corpus that is for training; the rest are validation and test.
TRAINED_ON = 0.9
# Of the texts of a source: bytes, and the least and the largest share that the filters leave.
# `packages`: of the 50 wheels of launch/packages.txt they left 144.5 MB. `codeparrot-clean`: the card
# of the raw set says 180 GB, about 70% of them duplicates; how much is under the GPL, which we drop,
# nobody has counted.
SOURCES = {
    "packages": (205e6, (0.68, 0.72)),
    "codeparrot-clean": (54e9, (0.4, 0.75)),
    "environment": (2e6, (0.5, 0.9)),
}
# Hoffmann et al. (2022), equation 10: the loss of web text, in nats a token.
IRREDUCIBLE, OF_SIZE, OF_TOKENS = 1.69, (406.4, 0.34), (410.7, 0.28)
# Python is easier to predict than web text. By how much is a guess.
EASIER = 0.4
Range = tuple[float, float]
# What, expected, came.
Rows = list[tuple[str, str, str]]


@dataclass(frozen=True)
class Forecast:
    """A run in figures, those of which nobody can be sure as a range."""

    parameters: int
    text: Range  # bytes that the filters leave
    tokens: Range  # to train on
    steps: Range
    read: Range  # tokens that the run reads
    hours: Range
    disk: Range  # bytes
    memory: float  # bytes of each device
    loss: Range  # nats a token


def count_parameters(recipe: Recipe) -> int:
    """The weights of a recipe's model, tied ones once; none of them is allocated."""
    sizes = {**recipe.model, "bos_token_id": 0, "eos_token_id": 0}
    config = AutoConfig.for_model(**sizes, vocab_size=recipe.vocabulary)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return model.num_parameters()


def shape_of(recipe: Recipe, parameters: int) -> Shape:
    """What the planner wants to know of a model."""
    sizes = AutoConfig.for_model(**recipe.model)
    return Shape(
        parameters=parameters,
        layers=sizes.num_hidden_layers,
        width=sizes.hidden_size,
        context=recipe.block or 1024,
        vocabulary=recipe.vocabulary or 32_768,
    )


def steps_of(recipe: Recipe, tokens: float) -> int:
    """The recipe's steps, or those of four epochs where there is less text.

    >>> steps_of(Recipe(model={}, steps=50_000, rows=192, block=1024), tokens=49e6)
    996
    """
    rows = tokens // (recipe.block or 1024)
    most = int(MOST_EPOCHS * rows // recipe.rows)
    return max(1, min(recipe.steps, most))


def expect_loss(parameters: float, tokens: float) -> float:
    """The loss that Hoffmann et al. expect of web text.

    >>> round(expect_loss(70e9, 1.4e12), 2)
    1.94
    """
    size, power = OF_SIZE
    of_size = size / parameters**power
    size, power = OF_TOKENS
    return IRREDUCIBLE + of_size + size / tokens**power


def disk_of(recipe: Recipe, parameters: int, text: float, tokens: float) -> float:
    """Bytes: text thrice while it is cleaned, the store, and the checkpoints there are at once.

    A checkpoint has 12 bytes a weight. Besides those that are kept there are the best one and one
    that is being written.
    """
    checkpoints = 2 + (recipe.keep or 2)
    states = 12 * parameters
    wide = (recipe.vocabulary or 0) > 2**16
    of_token = 4 if wide else 2
    store = of_token * tokens
    return 3 * text + store + checkpoints * states


def bytes_of_token(vocabulary: int) -> Range:
    """How many bytes a token of so large a vocabulary spells.

    >>> bytes_of_token(32_768)
    (4.2, 4.8)
    """
    below = [size for size in BYTES_OF_TOKEN if size <= vocabulary]
    return BYTES_OF_TOKEN[max(below)]


def text_of(source: str, vocabulary: int) -> tuple[Range, Range]:
    """Bytes of text that the filters leave of a source, and tokens of it that are for training."""
    raw, shares = SOURCES[source]
    text = (raw * shares[0], raw * shares[1])
    short, long = bytes_of_token(vocabulary)
    fewest = TRAINED_ON * text[0] / long
    most = TRAINED_ON * text[1] / short
    return text, (fewest, most)


def forecast(
    recipe: Recipe, text: Range, tokens: Range, machine: Machine, devices: int
) -> Forecast:
    """All of it, for so much text, so many tokens to train on, and so many devices of a kind."""
    parameters = count_parameters(recipe)
    shape = shape_of(recipe, parameters)
    steps = (steps_of(recipe, tokens[0]), steps_of(recipe, tokens[1]))
    of_step = recipe.rows * shape.context
    read = (steps[0] * of_step, steps[1] * of_step)
    short = device_hours(shape, read[0], machine) / devices
    long = device_hours(shape, read[1], machine, loop=True) / devices
    layout = Layout(data=devices, shards=devices if recipe.shard else 1)
    least = disk_of(recipe, parameters, text[0], tokens[0] / TRAINED_ON)
    most = disk_of(recipe, parameters, text[1], tokens[1] / TRAINED_ON)
    # No model is worse than one that guesses.
    guessing = math.log(shape.vocabulary)
    return Forecast(
        parameters=parameters,
        text=text,
        tokens=tokens,
        steps=steps,
        read=read,
        hours=(short, long),
        disk=(least, most),
        memory=memory_per_device(shape, layout, recipe.micro),
        loss=(
            min(guessing, EASIER * expect_loss(parameters, read[1])),
            min(guessing, expect_loss(parameters, read[0])),
        ),
    )


def find_machine(name: str) -> Machine:
    """What the planner knows by the name that a driver gives to a card.

    >>> find_machine("NVIDIA A100-SXM4-80GB").name
    'A100'
    """
    for known, machine in MACHINES.items():
        if known in name:
            return machine
    what = f"the planner does not know {name}"
    fix = "take the hours of another card: --card H100"
    raise CourseError(what, "stages/planner.py", fix)


def spread(values: Range, unit: float = 1, digits: int = 0) -> str:
    """A range for a reader; one figure where both ends are the same.

    >>> spread((2e9, 3.5e9), 1e9, 1), spread((5, 5))
    ('2.0 to 3.5', '5')
    """
    low, high = (value / unit for value in values)
    first = f"{low:,.{digits}f}"
    last = f"{high:,.{digits}f}"
    if first == last:
        return first
    return f"{first} to {last}"


def explain(recipe: Recipe, known: Forecast, machine: Machine, devices: int) -> str:
    """A forecast as text, each line with the arithmetic behind it."""
    block = recipe.block or 1024
    ends = dict.fromkeys(short_number(tokens) for tokens in known.read)
    read = " to ".join(ends)
    checkpoints = (recipe.keep or 2) + 2
    short, long = bytes_of_token(recipe.vocabulary or 0)
    lines = [
        f"model   {known.parameters / 1e6:,.2f} M weights; vocabulary {recipe.vocabulary:,}, block {block:,}",
        f"text    {spread(known.text, 1e6, 1)} MB that the filters leave",
        f"tokens  {spread(known.tokens, 1e6, 1)} M to train on: {short} to"
        f" {long} bytes each, {TRAINED_ON:.0%} of the text",
        f"steps   {spread(known.steps)} of the recipe's {recipe.steps:,}; {recipe.rows} x {block:,} tokens"
        f" each, {MOST_EPOCHS} epochs at most",
        f"hours   {spread(known.hours, digits=3)} on {devices} x {machine.name}: (6 x weights + 12 x"
        f" layers x width x block) x {read} tokens, at the planner's rate of good code and of a"
        " library's loop",
        f"disk    {spread(known.disk, 1e9, 2)} GB: 3 x text, the tokens, {checkpoints} checkpoints of 12"
        " bytes a weight",
        f"memory  {known.memory / 1e9:,.1f} GB on each device, {recipe.micro} rows at once",
        f"loss    {spread(known.loss, digits=2)} nats a token: the law of web text, 1.69 + 406.4 /"
        f" weights^0.34 + 410.7 / tokens^0.28, and {EASIER} of it, which is a guess for Python",
    ]
    return "\n".join(lines)


def short_number(value: float) -> str:
    """A large number in thousands, millions or billions.

    >>> short_number(9.83e9), short_number(25_600)
    ('9.83 G', '25.6 k')
    """
    for unit, sign in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:.3g} {sign}"
    return f"{value:.3g}"


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in a folder."""
    return AutoTokenizer.from_pretrained(folder)


def step_of(checkpoint: Path | None) -> int:
    """The steps that a checkpoint has behind it; none without one."""
    if checkpoint is None:
        return 0
    return read_json(checkpoint / PROGRESS)["step"]


def toml_value(value: Any) -> str:
    """A value of a recipe in TOML, which has no null.

    >>> toml_value(None), toml_value(["a"]), toml_value(True), toml_value(5e-4)
    ('"none"', '["a"]', 'true', '0.0005')
    """
    if value is None:
        value = "none"
    return json.dumps(value)


def judge(checkpoint: Path | None, tokens: Path, most: int) -> dict[str, Any]:
    """Loss and bits per byte of a checkpoint on rows of the test split, and of compressors on their text."""
    if checkpoint is None:
        what = "there is no checkpoint to judge"
        raise CourseError(what, tokens, "run the same command again")
    tokenizer = load_tokenizer(checkpoint)
    split = open_store(tokens, tokenizer)["test"]
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    model.loss_type = "ForCausalLM"
    model.to(choose_device().value)
    rows = min(most, len(split))
    total, count = sum_losses(model, Loader(split, 4, 0, stop=rows)).tolist()
    text = text_of_rows(split, tokenizer, rows)
    loss = total / count
    return {
        "rows": rows,
        "loss": loss,
        "perplexity": perplexity(loss),
        "bits per byte": total / math.log(2) / len(text),
        "bz2": 8 * len(bz2.compress(text)) / len(text),
        "xz -9e": 8
        * len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))
        / len(text),
    }


def text_of_rows(split: Split, tokenizer: Any, rows: int) -> bytes:
    """The bytes of the tokens that these rows predict; an end of a document is none."""
    numbers = np.sort(Loader(split, 1, 0).rows_at(np.arange(rows)))
    parts = []
    for row in split.gather(numbers):
        ids = [int(one) for one in row[1:] if one != tokenizer.eos_token_id]
        pieces = tokenizer.convert_ids_to_tokens(ids)
        parts.append(bytes_of_pieces(pieces))
    return b"".join(parts)


def bytes_of_pieces(pieces: list[str]) -> bytes:
    """The bytes behind byte-level pieces, also where a row cuts a character in two."""
    numbers = {letter: byte for byte, letter in byte_letters().items()}
    letters = "".join(pieces)
    known = [numbers[letter] for letter in letters]
    return bytes(known)


def log_lines(folder: Path, kind: str) -> Iterator[dict[str, Any]]:
    """The lines of one kind in the log of a training."""
    with (folder / "log.jsonl").open(encoding="utf-8") as file:
        for line in file:
            entry = json.loads(line)
            known = entry["kind"]
            if known == kind:
                yield entry


def report_rows(folder: Path, tokens: Path, expected: Forecast) -> Rows:
    """Of each figure what was expected and what came."""
    training = folder / "training"
    judged = read_json(folder / "evaluation" / "evaluation.json")
    train = open_store(tokens)["train"]
    *_, last = log_lines(training, "validation")
    steps = list(log_lines(training, "step"))
    every = last["step"] / len(steps)
    hours = every * sum(line["seconds"] for line in steps) / 3600
    disk = sum(path.stat().st_size for path in list_files(folder).values())
    rows = [
        (
            "text to train on, MB",
            spread(expected.text, 1e6, 1),
            f"{train.bytes / 1e6:,.1f}",
        ),
        (
            "tokens, M",
            spread(expected.tokens, 1e6, 2),
            f"{train.tokens / 1e6:,.2f}",
        ),
        ("bytes a token", "", f"{train.bytes / train.tokens:.2f}"),
        ("steps", spread(expected.steps), f"{last['step']:,}"),
        ("hours of training", spread(expected.hours, digits=3), f"{hours:,.3f}"),
        ("disk, GB", spread(expected.disk, 1e9, 3), f"{disk / 1e9:,.3f}"),
        (
            "memory at the peak, GB",
            f"{expected.memory / 1e9:,.2f}",
            f"{last['memory'] / 1e9:,.2f}",
        ),
        (
            "validation loss, nats a token",
            spread(expected.loss, digits=2),
            f"{last['loss']:.3f}",
        ),
        ("test loss, nats a token", "", f"{judged['loss']:.3f}"),
    ]
    for name in ("bits per byte", "bz2", "xz -9e"):
        what = (
            name
            if name == "bits per byte"
            else f"{name} on the same text, bits per byte"
        )
        rows.append((what, "", f"{judged[name]:.3f}"))
    return rows


def write_report(folder: Path, name: str, source: str, rows: Rows) -> Path:
    """The report as a page of Markdown."""
    lines = [
        f"# {name}, from {source}",
        "",
        "| what | expected | came |",
        "|:--|--:|--:|",
    ]
    lines += [f"| {what} | {before} | {after} |" for what, before, after in rows]
    samples = list(log_lines(folder / "training", "sample"))
    for sample in samples[-1]["samples"] if samples else []:
        lines += ["", "```python", sample.replace("```", "'''"), "```"]
    path = folder / "report.md"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
