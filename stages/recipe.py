"""A recipe is all that decides a training run; from it come model, optimizers and rates.

It is a TOML file in `launch/recipes` and says nothing of the machine: `rows` are those of a step over all
processes, however many there are, and `micro` only how many of them one process may hold at once.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from stages.muon import Muon
from utils.errors import CourseError, build_folder

# What may change when a run goes on: it concerns the machine, the disk and the screen.
FREE = {"tokens", "tokenizer", "folder", "micro", "threads", "compile", "shard"}
FREE |= {"save_every", "keep", "log_every", "log_to", "hub", "vocabulary", "block"}
FREE |= {"evaluate_every", "evaluate_rows", "sample_every", "prompts", "start_from"}
FREE |= {"recompute", "loss_chunk", "save_beside"}
# What may change until the rate begins to fall.
LATE = {"steps", "cooldown"}
Schedule = Literal["trapezoid", "cosine", "linear", "constant"]


class Plan(BaseModel):
    """Named fields, checked when they are written down and fixed from then on."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False
    )

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**read_none(fields))
        except ValidationError as error:
            raise plain_error(error, type(self).model_fields) from None

    def change(self, **changes: Any) -> Self:
        """The same with other values in some fields."""
        fields = {**vars(self), **changes}
        return type(self)(**fields)


def read_none(value: Any) -> Any:
    """TOML has no null: the word "none" stands for it, also among the sizes of a model."""
    if isinstance(value, dict):
        return {name: read_none(part) for name, part in value.items()}
    if value == "none":
        return None
    return value


def plain_error(error: ValidationError, known: Iterable[str]) -> CourseError:
    """The first thing that pydantic finds wrong: the field, its value, and what it should be."""
    first = error.errors()[0]
    name = str(first["loc"][0])
    what = f"{name} is {first['input']!r}"
    fix = first["msg"][0].lower() + first["msg"][1:]
    if first["type"] == "extra_forbidden":
        what = f"a recipe has no {name!r}"
        fix = nearest(name, known)
    if first["type"] == "missing":
        what = f"{name} is missing"
    return CourseError(what, "the recipe", fix)


def nearest(word: str, known: Iterable[str]) -> str:
    """A question or a list for somebody who wrote a word that is not known."""
    close = difflib.get_close_matches(word, known, 1)
    if close:
        return f"did you mean {close[0]!r}?"
    names = ", ".join(sorted(known))
    return f"one of {names}"


class Recipe(Plan):
    """One training run. A relative path begins at the build folder; None means "not at all"."""

    # What `AutoConfig.for_model` takes: `model_type` and its sizes.
    model: dict[str, Any]
    tokens: str = "artifacts/laptop/tokens"
    tokenizer: str = "artifacts/laptop/tokenizer"
    folder: str = Field("pretraining", min_length=1)
    # A checkpoint of another run, with which an empty folder begins: a second cooldown, for instance.
    start_from: str | None = None
    # What the tokens must be like, in tokens. None: as they are.
    vocabulary: PositiveInt | None = None
    block: PositiveInt | None = None
    steps: PositiveInt = 1000
    rows: PositiveInt = 8
    micro: PositiveInt = 8
    # Muon is for the matrices of the layers, and AdamW for the rest; "adamw" is AdamW for all.
    optimizer: Literal["muon", "adamw"] = "muon"
    rate: float = Field(6e-3, gt=0)
    matrix_rate: float = Field(0.03, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    clip: float = Field(1.0, gt=0)
    schedule: Schedule = "trapezoid"
    # Shares of the steps.
    warmup: float = Field(0.02, ge=0, le=1)
    cooldown: float = Field(0.5, ge=0, le=1)
    # "auto": what the machine that begins the run is faster with. With float32 NVIDIA cards since
    # Ampere still round the factors of matrix products to ten bits (TF32).
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    compile: bool = False
    # Activations of a layer are computed again in the backward pass, and not kept until then.
    recompute: bool = False
    # So many tokens have logits at a time. None: all of them have.
    loss_chunk: PositiveInt | None = None
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
    # Checkpoints are copied to main memory, and written while the training goes on.
    save_beside: bool = False
    log_every: PositiveInt = 1
    log_to: list[Literal["tensorboard", "trackio", "wandb"]] = []
    # A private repository that checkpoints are pushed to.
    hub: str | None = None
    seed: int = Field(42, ge=0, lt=2**32)

    @classmethod
    def load(cls, path: Path | str, **changes: Any) -> Recipe:
        """The recipe of a file, with changes."""
        place = Path(path)
        try:
            text = place.read_text(encoding="utf-8")
            fields = tomllib.loads(text)
        except (OSError, ValueError) as error:
            what = f"the recipe cannot be read: {error}"
            raise CourseError(what, place, "see launch/recipes") from error
        return cls(**fields).change(**changes)

    def change(self, **changes: Any) -> Self:
        """A recipe with some fields changed; the sizes of `model` are merged.

        >>> Recipe(model={"n_layer": 2}).change(steps=5, model={"n_head": 1}).model
        {'n_layer': 2, 'n_head': 1}
        """
        sizes = changes.get("model")
        if isinstance(sizes, dict):
            changes["model"] = {**self.model, **sizes}
        return super().change(**changes)

    def place(self, name: str) -> Path:
        """The path of a field: as it is written, or from the build folder on."""
        written: str = getattr(self, name)
        return build_folder() / written


def build_model(recipe: Recipe, tokenizer: Any) -> Any:
    """The model of a recipe with fresh weights; a size that this kind of model has not is refused."""
    sizes = recipe.model
    kind = sizes.get("model_type", "")
    if kind not in CONFIG_MAPPING:
        what = f"there is no model of type {kind!r}"
        hint = nearest(str(kind or "gpt2"), CONFIG_MAPPING)
        raise CourseError(what, "model_type in the recipe", hint)
    plain = CONFIG_MAPPING[kind]()
    for name in sizes:
        if not hasattr(plain, name):
            what = f"{kind} has no size {name!r}"
            names = [*plain.to_dict(), *plain.attribute_map]
            hint = nearest(name, names)
            raise CourseError(what, "model in the recipe", hint)
    end = tokenizer.eos_token_id
    pad = tokenizer.pad_token_id
    if pad == end:
        # What pads is looked up as zeros and never learned; an end token opens every document.
        pad = None
    facts = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": pad}
    facts["vocab_size"] = len(tokenizer)
    facts |= sizes
    config = AutoConfig.for_model(**facts)
    torch.manual_seed(recipe.seed)
    kind = recipe.attention
    model = AutoModelForCausalLM.from_config(config, attn_implementation=kind)
    # GPT-2's class name says nothing of its loss: see docs/troubleshooting.md.
    model.loss_type = "ForCausalLM"
    if recipe.recompute:
        model.activation_checkpointing_enable({"use_reentrant": False})
    return model


def flops_per_token(model: Any, block: int) -> int:
    """Multiplications and additions to train on one token: 6 a weight, and the attention's.

    A weight counts where it multiplies: a tied embedding as the head, a lookup not at all.
    """
    weights = 0
    for part in model.modules():
        if isinstance(part, (torch.nn.Linear, Conv1D)):
            weights += part.weight.numel()
    sizes = model.config
    wide = sizes.hidden_size
    deep = sizes.num_hidden_layers
    attention = 12 * deep * wide * block
    return 6 * weights + attention


def sort_parameters(model: Any) -> dict[str, list[torch.nn.Parameter]]:
    """Matrices of the layers, embeddings (with the head), and vectors: biases and norms."""
    head = model.get_output_embeddings()
    looked_up = {id(head.weight)}
    for part in model.modules():
        if isinstance(part, torch.nn.Embedding):
            weight = part.weight
            looked_up.add(id(weight))
    kinds: dict[str, list] = {"matrices": [], "embeddings": [], "vectors": []}
    for parameter in model.parameters():
        kind = "matrices"
        if parameter.ndim <= 1:
            kind = "vectors"
        elif id(parameter) in looked_up:
            kind = "embeddings"
        kinds[kind].append(parameter)
    return kinds


def decay_groups(model: torch.nn.Module, decay: float) -> list[dict[str, Any]]:
    """Groups for an optimizer: weight decay for matrices and embeddings, none for biases and norms.

    >>> groups = decay_groups(torch.nn.Linear(3, 2), decay=0.1)
    >>> [(group["weight_decay"], len(group["params"])) for group in groups]
    [(0.1, 1), (0.0, 1)]
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    wide = [p for p in trained if p.ndim > 1]
    vectors = [p for p in trained if p.ndim <= 1]
    return [
        {"params": wide, "weight_decay": decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


def make_optimizers(model: Any, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for the matrices and AdamW for the rest."""
    decay = recipe.weight_decay
    muon = recipe.optimizer == "muon"
    matrices = sort_parameters(model)["matrices"] if muon else []
    of_muon = {id(matrix) for matrix in matrices}
    groups = decay_groups(model, decay)
    for group in groups:
        group["params"] = [p for p in group["params"] if id(p) not in of_muon]
    adamw = torch.optim.AdamW(groups, lr=recipe.rate, betas=(0.9, 0.95), fused=True)
    optimizers: list[torch.optim.Optimizer] = [adamw]
    if muon:
        rate = recipe.matrix_rate
        optimizers.append(Muon(matrices, lr=rate, weight_decay=decay))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["full_rate"] = group["lr"]
    return optimizers


def find_difference(old: Recipe, new: Recipe, step: int) -> str:
    """What a run that has taken so many steps may not change, as text; nothing if it can go on.

    How long it is may be decided late: before the rate begins to fall, and not once it falls.
    """
    at_top = (
        step == 0 or share_of_rate(step - 1, old) == share_of_rate(step, new) == 1
    )
    free = FREE | LATE if at_top else FREE
    for name in type(new).model_fields:
        theirs, ours = getattr(old, name), getattr(new, name)
        if name not in free and theirs != ours:
            return f"{name} {theirs!r}, not {ours!r}"
    return ""


def share_of_rate(step: int, recipe: Recipe) -> float:
    """What share of its full rate an optimizer has at a step, counted from 0.

    >>> recipe = Recipe(model={}, steps=100, warmup=0.1, cooldown=0.5)
    >>> [round(share_of_rate(step, recipe), 2) for step in (0, 9, 50, 75, 99)]
    [0.1, 1.0, 1.0, 0.5, 0.02]
    """
    warm = max(1, round(recipe.warmup * recipe.steps))
    if step < warm:
        return (step + 1) / warm
    steps = recipe.steps
    if recipe.schedule == "trapezoid":
        return min(1.0, (steps - step) / max(1, recipe.cooldown * steps))
    # 1 after warming up, 0 at the end.
    left = (steps - step) / max(1, steps - warm)
    if recipe.schedule == "cosine":
        return 0.1 + 0.9 * (1 - math.cos(math.pi * left)) / 2
    return left if recipe.schedule == "linear" else 1.0
