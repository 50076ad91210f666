"""A recipe is all that decides a training run; from it come model, optimizers and rates.

It is a TOML file in `launch/recipes`; `python -m stages.training` and a notebook read the same one.
It says nothing of the machine: `rows` are those of a step over all processes, however many there
are, and `micro` only how many of them one process may hold at once.
"""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from utils.errors import CourseError, build_folder

# What may change when a run goes on: it concerns the machine, the disk and the screen.
FREE = {"tokens", "tokenizer", "folder", "micro", "threads", "compile", "shard"}
FREE |= {"save_every", "keep", "log_every", "log_to", "hub", "hub_public"}
Schedule = Literal["trapezoid", "cosine", "linear", "constant"]


class Recipe(BaseModel):
    """One training run. A relative path begins at the build folder; None means "not at all".

    >>> Recipe(model={}, steps=0)
    Traceback (most recent call last):
    utils.errors.CourseError: steps is 0
      where: the recipe
      next:  input should be greater than 0
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False
    )

    # What `AutoConfig.for_model` takes: `model_type` and its sizes.
    model: dict[str, Any]
    tokens: str = "artifacts/laptop/tokens"
    tokenizer: str = "artifacts/laptop/tokenizer"
    folder: str = Field("pretraining", min_length=1)
    steps: PositiveInt = 1000
    rows: PositiveInt = 8
    micro: PositiveInt = 8
    # Muon is for the matrices of the layers, and AdamW for the rest; "adamw" is AdamW for all.
    optimizer: Literal["muon", "adamw"] = "muon"
    rate: PositiveFloat = 6e-3
    matrix_rate: PositiveFloat = 0.03
    weight_decay: NonNegativeFloat = 0.0
    clip: PositiveFloat = 1.0
    schedule: Schedule = "trapezoid"
    # Shares of the steps.
    warmup: float = Field(0.02, ge=0, le=1)
    cooldown: float = Field(0.5, ge=0, le=1)
    # "auto": what the machine that begins the run is faster with. float16 wants a GPU.
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    attention: Literal["sdpa", "eager", "flash_attention_2", "flex_attention"] = (
        "sdpa"
    )
    compile: bool = False
    # Weights, gradients and optimizer states are cut over the processes (FSDP).
    shard: bool = False
    # Of a CPU. None: measured when the run begins.
    threads: PositiveInt | None = None
    evaluate_every: PositiveInt = 100
    evaluate_rows: PositiveInt = 512
    sample_every: PositiveInt | None = None
    prompts: list[str] = Field(["def "], min_length=1)
    save_every: PositiveInt = 100
    # So many of the newest checkpoints; the best one is kept besides. None: all of them.
    keep: PositiveInt | None = 2
    log_every: PositiveInt = 1
    log_to: list[Literal["tensorboard", "trackio", "wandb"]] = []
    # A repository that checkpoints are pushed to; it is made private, unless `hub_public`.
    hub: str | None = None
    hub_public: bool = False
    seed: int = Field(42, ge=0, lt=2**32)

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise plain_error(error, type(self).model_fields) from None

    @model_validator(mode="before")
    @classmethod
    def read_none(cls, fields: Any) -> Any:
        """TOML has no null: the word "none" stands for it, also among the sizes of the model."""
        if not isinstance(fields, dict):
            return fields
        sizes = fields.get("model")
        if isinstance(sizes, dict):
            fields = {**fields, "model": _without_words(sizes)}
        return _without_words(fields)

    @classmethod
    def load(cls, path: Path | str, **changes: Any) -> Recipe:
        """The recipe of a file, with changes; the sizes of `model` are merged and not replaced."""
        if not Path(path).is_file():
            raise CourseError(
                "there is no such recipe", Path(path), "see launch/recipes"
            )
        try:
            fields = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            what = f"the recipe is not TOML: {error}"
            raise CourseError(what, Path(path), "mend that line") from error
        return cls(**_merge(fields, changes))

    def change(self, **changes: Any) -> Recipe:
        """A recipe with some fields changed; the sizes of `model` are merged.

        >>> Recipe(model={"n_layer": 2}).change(steps=5, model={"n_head": 1}).model
        {'n_layer': 2, 'n_head': 1}
        """
        return Recipe(**_merge(vars(self), changes))

    def place(self, name: str) -> Path:
        """The path of a field: as it is written, or from the build folder on.

        >>> Recipe(model={}, folder="mine").place("folder") == build_folder() / "mine"
        True
        """
        return build_folder() / getattr(self, name)

    def differences(self, other: dict[str, Any]) -> str:
        """What a run cannot change and another recipe, from JSON, has otherwise; "" for nothing."""
        mine = json.loads(json.dumps(vars(self)))
        names = [
            name
            for name in mine
            if name not in FREE and mine[name] != other.get(name)
        ]
        return ", ".join(
            f"{name} {other.get(name)!r}, not {mine[name]!r}" for name in names
        )


def _without_words(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        name: None if value == "none" else value for name, value in fields.items()
    }


def _merge(fields: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    sizes = fields.get("model")
    more = changes.get("model", {})
    if isinstance(sizes, dict) and isinstance(more, dict):
        return {**fields, **changes, "model": {**sizes, **more}}
    return {**fields, **changes}


def plain_error(error: ValidationError, known: Iterable[str]) -> CourseError:
    """The first thing that pydantic finds wrong: the field, its value, and what it should be."""
    first = error.errors()[0]
    name = str(first["loc"][0]) if first["loc"] else "it"
    if first["type"] == "extra_forbidden":
        return CourseError(
            f"a recipe has no {name!r}", "the recipe", nearest(name, known)
        )
    if first["type"] == "missing":
        return CourseError(f"{name} is missing", "the recipe", "write it down")
    message = first["msg"][0].lower() + first["msg"][1:]
    return CourseError(f"{name} is {first['input']!r}", "the recipe", message)


def nearest(word: str, known: Iterable[str]) -> str:
    """A question or a list for somebody who wrote a word that is not known.

    >>> nearest("step", ["steps", "rows"])
    "did you mean 'steps'?"
    """
    close = difflib.get_close_matches(word, known, 1)
    return (
        f"did you mean {close[0]!r}?"
        if close
        else f"one of {', '.join(sorted(known))}"
    )


# the model ------------------------------------------------------------------------------------


def make_config(recipe: Recipe, **facts: Any) -> Any:
    """The configuration of a recipe's model; a size that this kind of model has not is refused."""
    from transformers import CONFIG_MAPPING, AutoConfig

    kind = recipe.model.get("model_type", "")
    if kind not in CONFIG_MAPPING:
        hint = (
            nearest(str(kind), CONFIG_MAPPING) if kind else "say gpt2, or nanochat"
        )
        raise CourseError(
            f"there is no model of type {kind!r}", "model_type in the recipe", hint
        )
    plain = CONFIG_MAPPING[kind]()
    for name in recipe.model:
        if not hasattr(plain, name):
            hint = nearest(name, [*plain.to_dict(), *plain.attribute_map])
            raise CourseError(
                f"{kind} has no size {name!r}", "model in the recipe", hint
            )
    return AutoConfig.for_model(**{**facts, **recipe.model})


def build_model(recipe: Recipe, tokenizer: Any, seed: int | None = None) -> Any:
    """The model of a recipe with fresh weights, the same ones for the same seed."""
    from transformers import AutoModelForCausalLM

    end = tokenizer.eos_token_id
    pad = end if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    ids = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": pad}
    config = make_config(recipe, vocab_size=len(tokenizer), **ids)
    torch.manual_seed(recipe.seed if seed is None else seed)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=recipe.attention
    )
    # GPT-2's class name says nothing of its loss, see lesson 09.
    model.loss_type = "ForCausalLM"
    return model


def flops_per_token(model: Any, block: int) -> int:
    """Multiplications and additions to train on one token: 6 a weight, and the attention's.

    A weight counts where it multiplies: a tied embedding as the head, a lookup not at all.
    """
    from transformers.pytorch_utils import Conv1D

    multiplying = [
        m for m in model.modules() if isinstance(m, (torch.nn.Linear, Conv1D))
    ]
    weights = sum(module.weight.numel() for module in multiplying)
    sizes = model.config
    return 6 * weights + 12 * sizes.num_hidden_layers * sizes.hidden_size * block


# optimizers and their rates -------------------------------------------------------------------


def sort_parameters(model: Any) -> dict[str, list[torch.nn.Parameter]]:
    """Matrices of the layers, embeddings (with the head), and vectors: biases and norms."""
    head = model.get_output_embeddings()
    tables = [
        m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)
    ]
    looked_up = {id(weight) for weight in tables}
    if head is not None:
        looked_up.add(id(head.weight))
    kinds: dict[str, list[torch.nn.Parameter]] = {
        "matrices": [],
        "embeddings": [],
        "vectors": [],
    }
    for parameter in model.parameters():
        if parameter.ndim <= 1:
            kinds["vectors"].append(parameter)
        elif id(parameter) in looked_up:
            kinds["embeddings"].append(parameter)
        else:
            kinds["matrices"].append(parameter)
    return kinds


def decay_groups(model: torch.nn.Module, decay: float) -> list[dict[str, Any]]:
    """Groups for an optimizer: weight decay for matrices and embeddings, none for biases and norms.

    >>> groups = decay_groups(torch.nn.Linear(3, 2), decay=0.1)
    >>> [(group["weight_decay"], len(group["params"])) for group in groups]
    [(0.1, 1), (0.0, 1)]
    """
    trained = [
        parameter for parameter in model.parameters() if parameter.requires_grad
    ]
    wide = [parameter for parameter in trained if parameter.ndim > 1]
    vectors = [parameter for parameter in trained if parameter.ndim <= 1]
    return [
        {"params": wide, "weight_decay": decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


def make_optimizers(
    model: torch.nn.Module, recipe: Recipe
) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for the matrices and AdamW for the rest."""
    matrices = (
        sort_parameters(model)["matrices"] if recipe.optimizer == "muon" else []
    )
    of_muon = {id(matrix) for matrix in matrices}
    groups = decay_groups(model, recipe.weight_decay)
    for group in groups:
        group["params"] = [p for p in group["params"] if id(p) not in of_muon]
    groups = [group for group in groups if group["params"]]
    adamw = torch.optim.AdamW(groups, lr=recipe.rate, betas=(0.9, 0.95), fused=True)
    optimizers: list[torch.optim.Optimizer] = [adamw]
    if matrices:
        decay = recipe.weight_decay
        optimizers.append(
            torch.optim.Muon(matrices, lr=recipe.matrix_rate, weight_decay=decay)
        )
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["full_rate"] = group["lr"]
    return optimizers


def share_of_rate(step: int, recipe: Recipe) -> float:
    """What share of its full rate an optimizer has at a step, counted from 0.

    >>> recipe = Recipe(model={}, steps=100, warmup=0.1, cooldown=0.5)
    >>> [round(share_of_rate(step, recipe), 2) for step in (0, 9, 50, 75, 99)]
    [0.1, 1.0, 1.0, 0.5, 0.02]
    """
    warm = max(1, round(recipe.warmup * recipe.steps))
    if step < warm:
        return (step + 1) / warm
    # 1 after warming up, 0 at the end.
    left = (recipe.steps - step) / max(1, recipe.steps - warm)
    if recipe.schedule == "trapezoid":
        return min(
            1.0, (recipe.steps - step) / max(1, recipe.cooldown * recipe.steps)
        )
    if recipe.schedule == "cosine":
        return 0.1 + 0.9 * (1 - math.cos(math.pi * left)) / 2
    return left if recipe.schedule == "linear" else 1.0
