"""Floor 3: a recipe is all that decides a training run; from it come model, optimizers and rates.

A recipe is a TOML file in `launch/recipes`; `python -m stages.training` and a notebook read the
same one. It says nothing of the machine: `rows` is the number of rows of a step over all processes,
however many there are, and `micro` only how many of them one process may hold at once.
"""
from __future__ import annotations

import dataclasses
import difflib
import json
import math
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from utils.errors import CourseError

FREE = {"micro", "threads", "folder", "compile", "shard", "save_every", "keep", "log_every", "log_to", "hub"}
CHOICES = {"schedule": ("trapezoid", "cosine", "linear", "constant"), "optimizer": ("muon", "adamw"),
           "precision": ("auto", "float32", "bfloat16", "float16")}


@dataclass(frozen=True)
class Recipe:
    """One training run. What is in `FREE` may change when a run goes on, the rest may not."""

    model: dict[str, Any]  # what `AutoConfig.for_model` takes: `model_type` and its sizes
    tokens: str = "build/artifacts/laptop/tokens"
    tokenizer: str = "build/artifacts/laptop/tokenizer"
    folder: str = "build/pretraining"
    steps: int = 1000
    rows: int = 8
    micro: int = 8
    optimizer: str = "muon"  # for the matrices, AdamW for the rest; or "adamw" for all
    rate: float = 6e-3
    matrix_rate: float = 0.03
    weight_decay: float = 0.0
    clip: float = 1.0
    schedule: str = "trapezoid"
    warmup: float = 0.02  # share of the steps
    cooldown: float = 0.5
    precision: str = "auto"  # or float32, bfloat16; float16 on a GPU
    attention: str = "sdpa"
    compile: bool = False
    shard: bool = False  # weights and optimizers spread over the processes (FSDP)
    threads: int = 0  # of a CPU; 0: measured when the run begins
    evaluate_every: int = 100
    evaluate_rows: int = 512
    sample_every: int = 0  # 0: never
    prompts: list[str] = field(default_factory=lambda: ["def "])
    save_every: int = 100
    keep: int = 2  # newest checkpoints; the best is kept besides
    log_every: int = 1
    log_to: list[str] = field(default_factory=list)  # tensorboard, trackio, wandb
    hub: str = ""  # a repository that each checkpoint is pushed to
    seed: int = 42

    @classmethod
    def load(cls, path: Path | str, **changes: Any) -> Recipe:
        """The recipe of a file, with changes; `model` is merged and not replaced."""
        if not Path(path).is_file():
            raise CourseError("there is no such recipe", Path(path), "see launch/recipes")
        try:
            said = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except tomllib.TOMLDecodeError as error:
            raise CourseError(f"the recipe is not TOML: {error}", Path(path), "mend that line") from error
        model = {**said.pop("model", {}), **changes.pop("model", {})}
        return cls.make(model=model, **{**said, **changes})

    @classmethod
    def make(cls, **said: Any) -> Recipe:
        """A recipe from its fields, each looked at."""
        known = {f.name: f for f in dataclasses.fields(cls)}
        for name, value in said.items():
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                raise CourseError(f"a recipe has no {name!r}", "the recipe",
                                  f"did you mean {close[0]!r}?" if close else f"one of {sorted(known)}")
            wanted = known[name].type.split("[")[0]
            fits = type(value).__name__ == wanted or (wanted == "float" and type(value) is int)
            if not fits:
                raise CourseError(f"{name} is {value!r}, which is no {wanted}", "the recipe",
                                  f"write a {wanted}")
        recipe = cls(**said)
        for name, values in CHOICES.items():
            if getattr(recipe, name) not in values:
                raise CourseError(f"{name} is {getattr(recipe, name)!r}", "the recipe",
                                  f"choose one of {', '.join(values)}")
        return recipe

    def change(self, **changes: Any) -> Recipe:
        """The same recipe but for some fields; `model` is merged.

        >>> Recipe({"n_layer": 2}).change(steps=5, model={"n_head": 1}).model
        {'n_layer': 2, 'n_head': 1}
        """
        model = {**self.model, **changes.pop("model", {})}
        return self.make(**{**vars(self), **changes, "model": model})

    def same_run(self, other: dict[str, Any]) -> str:
        """What differs from a recipe read from JSON that a run cannot change; "" if nothing."""
        mine = json.loads(json.dumps(vars(self)))
        differ = [k for k in mine if k not in FREE and mine[k] != other.get(k)]
        return ", ".join(f"{k} {other.get(k)!r}, not {mine[k]!r}" for k in differ)


def build_model(recipe: Recipe, tokenizer: Any, seed: int | None = None) -> Any:
    """The model of a recipe with fresh weights, the same ones for the same seed."""
    from transformers import AutoConfig, AutoModelForCausalLM

    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    ids = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end if pad is None else pad}
    said = {name: None if value == "none" else value for name, value in recipe.model.items()}
    config = AutoConfig.for_model(said.pop("model_type"), vocab_size=len(tokenizer), **ids, **said)
    torch.manual_seed(recipe.seed if seed is None else seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=recipe.attention)
    model.loss_type = "ForCausalLM"  # GPT-2's class name says no loss, see lesson 09
    return model


def flops_per_token(model: torch.nn.Module, block: int) -> int:
    """Multiplications and additions to train on one token: 6 a weight, and the attention's.

    A weight counts where it multiplies: a tied embedding as the head, a lookup not at all.
    """
    from transformers.pytorch_utils import Conv1D

    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, (torch.nn.Linear, Conv1D)))
    sizes = model.config
    return 6 * weights + 12 * sizes.num_hidden_layers * sizes.hidden_size * block


def sort_parameters(model: torch.nn.Module) -> dict[str, list[torch.nn.Parameter]]:
    """Matrices of the layers, embeddings (with the head), and vectors: biases and norms.

    Muon is for the first; weight decay for the first two.
    """
    head = model.get_output_embeddings()
    looked_up = [m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    tables = {id(weight) for weight in [*looked_up, *([head.weight] if head else [])]}
    kinds: dict[str, list[torch.nn.Parameter]] = {"matrices": [], "embeddings": [], "vectors": []}
    for parameter in model.parameters():
        kind = "embeddings" if id(parameter) in tables else "matrices"
        kinds[kind if parameter.ndim > 1 else "vectors"].append(parameter)
    return kinds


def decay_groups(model: torch.nn.Module, decay: float) -> list[dict[str, Any]]:
    """Groups for an optimizer: weight decay for matrices and embeddings, none for biases and norms.

    >>> groups = decay_groups(torch.nn.Linear(3, 2), decay=0.1)
    >>> [(group["weight_decay"], len(group["params"])) for group in groups]
    [(0.1, 1), (0.0, 1)]
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    wide = [parameter for parameter in trained if parameter.ndim > 1]
    vectors = [parameter for parameter in trained if parameter.ndim <= 1]
    return [{"params": wide, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]


def make_optimizers(model: torch.nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for the matrices and AdamW for the rest."""
    kinds, decay = sort_parameters(model), recipe.weight_decay
    muon = recipe.optimizer == "muon"
    decayed = kinds["embeddings"] + ([] if muon else kinds["matrices"])
    groups = [{"params": decayed, "weight_decay": decay},
              {"params": kinds["vectors"], "weight_decay": 0.0}]
    found: list[torch.optim.Optimizer] = [torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=recipe.rate, betas=(0.9, 0.95), fused=True)]
    if muon:
        found.append(torch.optim.Muon(kinds["matrices"], lr=recipe.matrix_rate, weight_decay=decay))
    for optimizer in found:
        for group in optimizer.param_groups:
            group["full_rate"] = group["lr"]
    return found


def share_of_rate(step: int, recipe: Recipe) -> float:
    """What share of its full rate an optimizer has at a step, counted from 0.

    >>> recipe = Recipe({}, steps=100, warmup=0.1, cooldown=0.5)
    >>> [round(share_of_rate(step, recipe), 2) for step in (0, 9, 50, 75, 99)]
    [0.1, 1.0, 1.0, 0.5, 0.02]
    """
    warm = max(1, round(recipe.warmup * recipe.steps))
    if step < warm:
        return (step + 1) / warm
    left = (recipe.steps - step) / max(1, recipe.steps - warm)  # 1 after warming up, 0 at the end
    if recipe.schedule == "trapezoid":
        return min(1.0, (recipe.steps - step) / max(1, recipe.cooldown * recipe.steps))
    if recipe.schedule == "cosine":
        return 0.1 + 0.9 * (1 - math.cos(math.pi * left)) / 2
    return left if recipe.schedule == "linear" else 1.0
