"""Which precision the pretraining loop computes in, whatever its launcher asked for.

accelerate launch --config_file FILE … -m tests.cluster.precision RECIPE.toml OUT.json
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import torch

from stages import training
from stages.recipe import Recipe

FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sharded": {"shard": True},
    "compiled": {"compile": True},
}


def watch(forms: dict[str, Any]) -> dict[str, list[str]]:
    """Train by each recipe: for training and for evaluation, what its last linear layer gave out."""
    make = training.make_model
    seen: set[str] = set()

    @torch.compiler.disable
    def note(layer: Any, inputs: Any, output: torch.Tensor) -> None:
        what = "train" if layer.training else "evaluate"
        seen.add(f"{what} {output.dtype}")

    def watched(*arguments: Any) -> Any:
        model = make(*arguments)
        model.get_output_embeddings().register_forward_hook(note)
        return model

    training.make_model = watched
    # Kernels need not be made to see their types: that takes minutes.
    torch.compile = functools.partial(torch.compile, backend="eager")
    found = {}
    for name, recipe in forms.items():
        seen.clear()
        training.pretrain(recipe)
        found[name] = sorted(seen)
    return found


if __name__ == "__main__":
    recipe = Recipe.load(sys.argv[1], steps=1, evaluate_every=1)
    forms = {}
    for precision in ("float32", "bfloat16"):
        for form, changes in FORMS.items():
            name = f"{form} {precision}"
            folder = f"{recipe.folder}-{name}"
            forms[name] = recipe.change(
                precision=precision, folder=folder, **changes
            )
    # One launcher's processes see the same; the first of them tells.
    result = watch(forms)
    if torch.distributed.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(result))
