"""The memory convention: counted again on small models, and held against what a real step takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stages.chunked_loss import chunk_loss
from stages.memory import fake_tensors, measure_peak
from stages.planner import CONTEXT, Layout, Shape, memory_per_device
from stages.recipe import Recipe, build_model, make_optimizers
from stages.step_memory import (
    CONVENTIONS,
    Words,
    add_gradients,
    count_step,
    update,
)
from utils.errors import ROOT

SIZES = {"n_embd": 128, "n_layer": 4, "n_head": 2, "n_positions": 128}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
FUSED = {"model_type": "gpt2", "activation_function": "gelu_pytorch_tanh"}
MODEL = {**FUSED, **NO_DROPOUT, **SIZES}
PLAIN = {"optimizer": "adamw", "precision": "float32", "rows": 4, "micro": 4}


def small(**changes: Any) -> Recipe:
    """A small GPT-2 in float32 with AdamW, with changes."""
    return Recipe(model=MODEL, **PLAIN).change(**changes)


# the numbers, counted again -----------------------------------------------------------------------


def pass_bytes(recipe: Recipe, words: int, again: bool = False) -> tuple[int, int]:
    """Parameters, and what forward and backward add to gradients that are there already."""
    with fake_tensors() as live:
        model = build_model(recipe, Words(words)).train()
        if again:
            model.activation_checkpointing_enable()
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight)
        before = live.peak = live.now
        block = recipe.model["n_positions"]
        for rows in (torch.zeros(recipe.micro, block + 1, dtype=torch.long),):
            add_gradients(model, recipe, rows)
        count = sum(weight.numel() for weight in model.parameters())
        return count, live.peak - before


def slope(
    precision: str, words: int, again: bool, **sizes: tuple[int, int]
) -> float:
    """What one more row adds for each token; of a pair of sizes, the difference."""
    ((name, ends),) = sizes.items()
    found = []
    for size in ends:
        row = []
        for micro in (4, 8):
            recipe = small(precision=precision, micro=micro, rows=micro)
            recipe = recipe.change(model={name: size})
            row.append(pass_bytes(recipe, words, again)[1])
        found.append((row[1] - row[0]) / (4 * SIZES["n_positions"]))
    return (found[1] - found[0]) / (ends[1] - ends[0])


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_layer_keeps_what_the_convention_says(precision):
    counted = slope(precision, 8192, False, n_layer=(2, 4)) / SIZES["n_embd"]
    assert counted == pytest.approx(CONVENTIONS[precision].layer, rel=0.01)
    again = slope(precision, 8192, True, n_layer=(2, 4)) / SIZES["n_embd"]
    assert again == pytest.approx(CONVENTIONS[precision].entry, rel=0.01)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_scores_take_what_the_convention_says(precision):
    rows = []
    for words in (8192, 16_384):
        ends = []
        for micro in (4, 8):
            recipe = small(precision=precision, micro=micro, rows=micro)
            ends.append(pass_bytes(recipe, words)[1])
        rows.append((ends[1] - ends[0]) / (4 * SIZES["n_positions"]))
    counted = (rows[1] - rows[0]) / 8192
    assert counted == pytest.approx(CONVENTIONS[precision].scores, rel=0.01)


def test_states_are_those_of_adamw():
    with fake_tensors() as live:
        model = build_model(small(), Words(512))
        optimizers = make_optimizers(model, small())
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight)
        for optimizer in optimizers:
            optimizer.step()
        count = sum(weight.numel() for weight in model.parameters())
        held = live.now
    assert held / count == pytest.approx(CONVENTIONS["float32"].states, rel=0.01)


# the counter against real steps -------------------------------------------------------------------

RUNGS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"precision": "bfloat16"},
    "accumulation": {"micro": 1},
    "accumulation in bfloat16": {"micro": 1, "precision": "bfloat16"},
    "Muon": {"optimizer": "muon", "precision": "bfloat16"},
    "eager attention": {"attention": "eager"},
    "GELU in pieces": {"model": {"activation_function": "gelu_new"}},
    "wide": {"model": {"n_embd": 256}, "micro": 1},
    "chunked loss": {"loss_chunk": 64},
    "chunked loss in bfloat16": {"loss_chunk": 64, "precision": "bfloat16"},
    "activations again": {"recompute": True},
}
WORDS = 2048
BLOCK = 128


def real_steps(recipe: Recipe) -> None:
    """Two steps, with contents."""
    model = build_model(recipe, Words(WORDS)).train()
    if recipe.loss_chunk:
        chunk_loss(model, recipe.loss_chunk)
    optimizers = make_optimizers(model, recipe)
    for _ in range(2):
        for rows in torch.zeros(recipe.rows, BLOCK + 1, dtype=torch.long).split(
            recipe.micro
        ):
            add_gradients(model, recipe, rows)
        update(optimizers)


@pytest.mark.parametrize("rung", RUNGS)
def test_the_counter_is_within_five_percent_of_what_was_measured(rung):
    recipe = small(**RUNGS[rung])
    counted = count_step(recipe, WORDS, BLOCK).peak
    assert counted == pytest.approx(
        measure_peak(lambda: real_steps(recipe)), rel=0.05
    )


@pytest.mark.parametrize(
    "rung", ["accumulation", "accumulation in bfloat16", "wide"]
)
def test_the_planner_is_within_five_percent_of_what_was_measured(rung):
    recipe = small(**RUNGS[rung])
    parameters = count_step(recipe, WORDS, BLOCK).parameters
    sizes = recipe.model
    shape = Shape(parameters, sizes["n_layer"], sizes["n_embd"], BLOCK, WORDS)
    planned = memory_per_device(shape, Layout(), recipe.micro, recipe.precision)
    measured = measure_peak(lambda: real_steps(recipe))
    assert planned - CONTEXT == pytest.approx(measured, rel=0.05)


def test_the_counter_sees_the_gradients_of_earlier_pieces():
    alone = count_step(small(rows=1, micro=1), WORDS, BLOCK)
    second = count_step(small(rows=4, micro=1), WORDS, BLOCK)
    more = second.peak - alone.peak
    # Of four bytes a parameter, less what the optimizer's peak hides of them.
    assert 3 * alone.parameters < more <= 4 * alone.parameters


def test_no_mask_of_all_pairs_is_counted():
    long = small(model={"n_positions": 1024}, micro=1, rows=1)
    counted = count_step(long, WORDS, 1024).row
    kept = 1024 * 128 * (64 * 4 + 8) + 12 * 1024 * WORDS
    # A mask would be 1,024 x 1,024 numbers in each layer: 17 MB on top of 60.
    assert counted == pytest.approx(kept, rel=0.02)


# the large recipes --------------------------------------------------------------------------------


def per_row(name: str, micro: int = 1, chunk: Any = None, **model: Any) -> float:
    """Megabytes that a row of a large recipe adds."""
    recipe = Recipe.load(ROOT / "launch/recipes" / name)
    recipe = recipe.change(model=model, micro=micro, loss_chunk=chunk)
    return count_step(recipe, 32_768, 1024).row / 1e6


@pytest.mark.slow
def test_a_row_of_the_110_million_recipe():
    assert per_row(
        "gpt2-110m.toml", activation_function="gelu_new"
    ) == pytest.approx(974.4, rel=0.001)
    assert per_row(
        "gpt2-110m.toml", activation_function="gelu_pytorch_tanh"
    ) == pytest.approx(747.9, rel=0.001)


@pytest.mark.slow
def test_a_row_of_the_billion_recipe():
    assert per_row(
        "gpt2-1.5b.toml", activation_function="gelu_new"
    ) == pytest.approx(5136.8, rel=0.001)
    assert per_row(
        "gpt2-1.5b.toml", activation_function="gelu_pytorch_tanh"
    ) == pytest.approx(3249.4, rel=0.001)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "megabytes"), [("gpt2-110m.toml", 346.8), ("gpt2-1.5b.toml", 2850.0)]
)
def test_the_chunked_loss_lowers_a_row(name: str, megabytes: float) -> None:
    """With more rows at once than a chunk holds, as on a card: what is left are layers."""
    assert per_row(name, micro=8, chunk=4096) == pytest.approx(megabytes, rel=0.001)
