"""A recipe that enters the race: a TOML file as in launch/recipes, with a table [race] if it likes.

[race]
idea = "half the width"      # its name on the board; else that of the file
base = "../modern.toml"      # another file, which this one changes
pattern = "code"             # how its tokenizer cuts text, see stages/tokenizer.py
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.recipe import Recipe
from stages.tokenizer import PATTERNS
from utils.artifacts import hash_json
from utils.errors import CourseError

# What the race decides, and what a run of the race does not do.
DECIDED = {"tokens", "tokenizer", "folder", "steps", "micro", "threads", "shard"}
DECIDED |= {"seed", "evaluate_every", "evaluate_rows", "sample_every", "prompts"}
DECIDED |= {"save_every", "save_beside", "keep", "log_every", "log_to", "hub"}
DECIDED |= {"start_from", "loss_chunk"}


@dataclass(frozen=True)
class Entrant:
    """What a file enters: a recipe, the name of its idea, and how its tokenizer cuts text."""

    idea: str
    recipe: Recipe
    pattern: str = "code"

    def facts(self) -> dict[str, Any]:
        """All of the recipe that the race does not decide."""
        fields = self.recipe.model_dump(mode="json")
        return {k: value for k, value in fields.items() if k not in DECIDED}

    @property
    def hash(self) -> str:
        """What makes it this entrant and no other."""
        return hash_recipe(self.facts(), self.pattern)


def hash_recipe(recipe: dict[str, Any], pattern: str) -> str:
    """What makes two entries the same one."""
    return hash_json([recipe, pattern])


def read_entrant(path: Path) -> Entrant:
    """The entrant of a recipe's file, which may name another as its `base` and then changes that."""
    try:
        fields = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        what = f"the recipe cannot be read: {error}"
        raise CourseError(what, path, "see launch/recipes") from error
    about = fields.pop("race", {})
    for name in about:
        if name not in ("idea", "pattern", "base"):
            what = f"the table [race] of a recipe has no {name!r}"
            raise CourseError(what, path, "it has idea, pattern and base")
    if "base" in about:
        base = read_entrant(path.parent / about["base"])
        recipe = change_recipe(base.recipe, fields)
        pattern = about.get("pattern", base.pattern)
    else:
        recipe = Recipe(**fields)
        pattern = about.get("pattern", "code")
    if pattern not in PATTERNS:
        what = f"there is no pattern {pattern!r} to cut text by"
        raise CourseError(what, path, f"one of {', '.join(PATTERNS)}")
    return Entrant(about.get("idea", path.stem), recipe, pattern)


def change_recipe(recipe: Recipe, changes: dict[str, Any]) -> Recipe:
    """A recipe with changes; a model of another type comes with all of its sizes."""
    if "model_type" in changes.get("model", {}):
        return Recipe(**{**vars(recipe), **changes})
    return recipe.change(**changes)
