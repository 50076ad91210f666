"""A recipe is a valid one or a plain error; models, optimizers and rates are what it says."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import BLOCK, GPT2, NANO, inputs, recipe  # noqa: F401
from transformers import AutoTokenizer

from stages.recipe import (
    Recipe,
    build_model,
    decay_groups,
    flops_per_token,
    make_optimizers,
    share_of_rate,
    sort_parameters,
)
from stages.tokens import Loader, open_store, split_rows
from stages.training import parse_changes
from utils.errors import ROOT, CourseError, build_folder

RECIPES = sorted((ROOT / "launch" / "recipes").glob("*.toml"))


@pytest.fixture
def tokenizer(inputs: Path) -> Any:
    return AutoTokenizer.from_pretrained(inputs / "tokenizer")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"step": 3}, "no 'step'.*\n.*\n.*did you mean 'steps'"),
        ({"rate": "fast"}, "rate is 'fast'"),
        ({"steps": 2.5}, "steps is 2.5"),
        ({"schedule": "spiral"}, "'spiral'(.|\n)*trapezoid"),
        ({"optimizer": "sgd"}, "'muon' or 'adamw'"),
        ({"precision": "fp16"}, "bfloat16"),
        ({"model": 3}, "model is 3"),
        ({"rate": math.inf}, "rate is inf"),
        ({"log_to": ["paper"]}, "tensorboard"),
        ({"compile": 1}, "compile is 1"),
        ({"folder": ""}, "folder is ''"),
    ],
)
def test_a_wrong_field_is_named_with_its_value(
    wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(CourseError, match=message):
        Recipe(**{"model": NANO, **wrong})


COUNTS = [
    "steps",
    "rows",
    "micro",
    "threads",
    "evaluate_every",
    "evaluate_rows",
    "sample_every",
]
COUNTS += ["save_every", "keep", "log_every", "clip", "rate", "matrix_rate"]


@pytest.mark.parametrize("field", COUNTS)
@pytest.mark.parametrize("value", [0, -1])
def test_no_zero_means_never_or_all_or_a_crash(field: str, value: int) -> None:
    with pytest.raises(CourseError, match=f"{field} is {value}"):
        Recipe(model=NANO, **{field: value})


def test_never_and_all_are_said_in_words(tmp_path: Path) -> None:
    (tmp_path / "all.toml").write_text(
        'keep = "none"\n[model]\nfinal_logit_softcapping = "none"'
    )
    recipe = Recipe.load(
        tmp_path / "all.toml", **parse_changes(["sample_every=none", "hub=none"])
    )
    assert recipe.keep is None
    assert recipe.sample_every is None
    assert recipe.hub is None
    assert recipe.model == {"final_logit_softcapping": None}


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 2**40),
    st.floats(),
    st.sampled_from(["muon", "cosine", "bfloat16", "none", "eager", "", "x"]),
    st.lists(st.sampled_from(["def ", "tensorboard", 3]), max_size=2),
    st.dictionaries(
        st.sampled_from(["n_layer", "model_type"]), st.integers(), max_size=2
    ),
)
NAMES = st.sampled_from([*Recipe.model_fields, "step", "Rows", ""])


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(NAMES, VALUES, max_size=6), st.integers(0, 2**40))
def test_any_fields_are_a_usable_recipe_or_a_plain_error(
    fields: dict[str, Any], step: int
) -> None:
    try:
        recipe = Recipe(**{"model": NANO, **fields})
    except CourseError as error:
        assert any(name in str(error) for name in [*fields, "it"])
        assert str(error).count("\n") >= 2
        return
    share = share_of_rate(step % recipe.steps, recipe)
    assert 0 < share <= 1
    assert 1 % recipe.save_every >= 0
    assert recipe.place("folder") != build_folder()
    again = Recipe(**json.loads(json.dumps(vars(recipe))))
    assert again == recipe


@given(st.text(max_size=30), st.text(max_size=10))
def test_any_command_line_is_read(name: str, value: str) -> None:
    changes = parse_changes([f"{name}={value}"])
    try:
        Recipe(**{"model": NANO, **changes})
    except CourseError as error:
        assert "next:" in str(error)


def test_a_recipe_cannot_be_changed_behind_its_back() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Recipe(model=NANO).steps = 3


def test_relative_paths_begin_at_the_build_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COURSE_BUILD", str(tmp_path / "elsewhere"))
    monkeypatch.chdir(tmp_path)
    recipe = Recipe.load(ROOT / "launch" / "recipes" / "modern.toml")
    assert (
        recipe.place("tokens")
        == tmp_path / "elsewhere" / "artifacts" / "laptop" / "tokens"
    )
    assert recipe.change(folder="/abs").place("folder") == Path("/abs")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_of_the_house_builds_a_model(
    path: Path, tokenizer: Any
) -> None:
    recipe = Recipe.load(path)
    with torch.device("meta"):
        model = build_model(recipe, tokenizer)
    owned = []
    for optimizer in make_optimizers(model, recipe):
        for group in optimizer.param_groups:
            owned += [id(parameter) for parameter in group["params"]]
    assert sorted(owned) == sorted(map(id, model.parameters())), (
        "each has one optimizer"
    )


def test_a_missing_and_a_broken_recipe_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CourseError, match="cannot be read: .*No such file"):
        Recipe.load(tmp_path / "no.toml")
    (tmp_path / "bad.toml").write_bytes(b"steps = = 3")
    with pytest.raises(CourseError, match="cannot be read"):
        Recipe.load(tmp_path / "bad.toml")
    (tmp_path / "bad.toml").write_bytes(b"\xff")
    with pytest.raises(CourseError, match="cannot be read"):
        Recipe.load(tmp_path / "bad.toml")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"n_layers": 3}, "no size 'n_layers'(.|\n)*did you mean 'n_layer'"),
        ({"model_type": "gpt22"}, "did you mean 'gpt2'"),
        ({"model_type": "none"}, "no model of type None"),
    ],
)
def test_a_misspelt_size_is_not_ignored(
    sizes: dict[str, Any], message: str, tokenizer: Any
) -> None:
    with pytest.raises(CourseError, match=message):
        build_model(Recipe(model={**GPT2, **sizes}), tokenizer)


@pytest.mark.parametrize("schedule", ["trapezoid", "cosine", "linear", "constant"])
def test_a_schedule_rises_stays_inside_and_never_rises_again(schedule: str) -> None:
    recipe = Recipe(model={}, steps=200, warmup=0.1, schedule=schedule)
    shares = [share_of_rate(step, recipe) for step in range(200)]
    assert min(shares) > 0
    assert max(shares) == 1
    assert shares[:20] == sorted(shares[:20])
    assert shares[20:] == sorted(shares[20:], reverse=True)


@pytest.mark.parametrize("sizes", [NANO, GPT2], ids=["nanochat", "gpt2"])
def test_a_fresh_model_knows_nothing(
    sizes: dict[str, Any], inputs: Path, tokenizer: Any
) -> None:
    model = build_model(Recipe(model=sizes), tokenizer)
    rows = next(iter(Loader(open_store(inputs / "tokens")["train"], 64, 1)))
    with torch.no_grad():
        loss = float(model(**split_rows(rows)).loss)
    assert abs(loss / math.log(len(tokenizer)) - 1) < 0.02


@pytest.mark.parametrize("pad", [None, "<|endoftext|>"])
def test_a_tokenizer_without_padding_costs_the_end_token_nothing(
    tokenizer: Any, pad: str | None
) -> None:
    """As GPT-2's, or one that pads with its end token: that token is looked up and learned as others."""
    tokenizer.pad_token = pad
    model = build_model(Recipe(model=NANO), tokenizer)
    end = tokenizer.eos_token_id
    table = model.get_input_embeddings()
    assert table.weight[end].norm() > 0.5 * table.weight.norm(dim=1).mean()
    table(torch.tensor([end])).sum().backward()
    assert table.weight.grad[end].abs().sum() > 0


def test_weights_come_from_the_seed(tokenizer: Any) -> None:
    recipe = Recipe(model=NANO)
    one, same, other = (
        build_model(recipe.change(seed=seed), tokenizer) for seed in (1, 1, 2)
    )
    pairs = zip(one.parameters(), same.parameters())
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
    assert not torch.equal(next(one.parameters()), next(other.parameters()))


def test_vectors_do_not_decay_and_embeddings_are_no_matrices(
    tokenizer: Any,
) -> None:
    recipe = Recipe(model=GPT2, weight_decay=0.1, optimizer="muon")
    model = build_model(recipe, tokenizer)
    kinds = sort_parameters(model)
    assert all(vector.ndim == 1 for vector in kinds["vectors"])
    assert len(kinds["vectors"]) == 2 * 8 + 2
    tables = {id(model.transformer.wte.weight), id(model.transformer.wpe.weight)}
    assert {id(table) for table in kinds["embeddings"]} == tables
    undecayed = []
    for optimizer in make_optimizers(model, recipe):
        for group in optimizer.param_groups:
            assert group["weight_decay"] in (0, 0.1)
            undecayed += group["params"] if group["weight_decay"] == 0 else []
    assert {id(p) for p in undecayed} == {id(vector) for vector in kinds["vectors"]}


def test_a_frozen_table_is_in_no_group() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(5, 2), torch.nn.Linear(2, 3))
    model[0].requires_grad_(False)
    groups = decay_groups(model, 0.1)
    sizes = [[tuple(p.shape) for p in group["params"]] for group in groups]
    assert sizes == [[(3, 2)], [(3,)]]


def test_operations_count_a_tied_head_once_and_a_lookup_never(
    tokenizer: Any,
) -> None:
    model = build_model(Recipe(model=GPT2), tokenizer)
    layers = 2 * 12 * 32 * 32
    head = 32 * len(tokenizer)
    assert (
        flops_per_token(model, BLOCK) == 6 * (layers + head) + 12 * 2 * 32 * BLOCK
    )
