"""A tokenizer, a token store and runs of twelve steps, for the tests of pretraining."""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from stages import tokenizer as tokenizers
from stages import tokens
from stages.launch import free_port
from stages.recipe import Recipe
from stages.training import Step, pretrain
from utils.artifacts import sealed
from utils.errors import ROOT, CourseError

torch.set_num_threads(1)
BLOCK = 32
NANO = {
    "model_type": "nanochat",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": BLOCK,
    "tie_word_embeddings": True,
    "final_logit_softcapping": "none",
}
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": BLOCK,
}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
PLAN = {"steps": 12, "rows": 4, "micro": 4, "precision": "float32", "threads": 1}
PLAN |= {"evaluate_every": 4, "evaluate_rows": 21, "save_every": 4}


class Killed(BaseException):
    """What no handler of the engine may swallow."""


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer and a token store of this package's own source."""
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def write_inputs(root: Path) -> Path:
    """Write a tokenizer, and a token store of the text it has learned."""
    paths = sorted((ROOT / "utils").glob("*.py"))
    texts = [path.read_text(encoding="utf-8") for path in paths]
    tokenizer = tokenizers.train_bpe(texts, 500)
    tokenizer.save_pretrained(root / "tokenizer")
    splits = {"train": texts[4:], "validation": texts[:4]}
    with sealed(root / "tokens", {}) as folder:
        tokens.write_store(folder, splits, tokenizer, BLOCK)
    return root


def small_recipe(inputs: Path, folder: Path, **changes: Any) -> Recipe:
    """Twelve steps that save every fourth."""
    places = {name: str(inputs / name) for name in ("tokens", "tokenizer")}
    return Recipe(model=NANO, folder=str(folder), **places, **PLAN).change(
        **changes
    )


@pytest.fixture
def recipe(inputs: Path, tmp_path: Path) -> Recipe:
    """A run of its own."""
    return small_recipe(inputs, tmp_path / "run")


@pytest.fixture(scope="session")
def calm(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """The run that nothing ever disturbed: what every other is held to."""
    calm = small_recipe(inputs, tmp_path_factory.mktemp("calm") / "run")
    pretrain(calm)
    return calm


def log_lines(recipe: Recipe, kind: str = "step") -> list[dict[str, Any]]:
    text = (recipe.place("folder") / "log.jsonl").read_text(encoding="utf-8")
    return [
        line for line in map(json.loads, text.splitlines()) if line["kind"] == kind
    ]


def losses(recipe: Recipe, kind: str = "step") -> dict[int, float]:
    return {line["step"]: line["loss"] for line in log_lines(recipe, kind)}


def weights(recipe: Recipe, step: int = 12) -> dict[str, torch.Tensor]:
    return load_file(
        recipe.place("folder") / f"checkpoint-{step:06}" / "model.safetensors"
    )


def check_same_bits(one: Recipe, two: Recipe) -> None:
    """Two runs had the same losses in every step, and left the same weights."""
    assert losses(one) == losses(two)
    mine, theirs = weights(one), weights(two)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def checkpoint_names(recipe: Recipe) -> list[str]:
    return sorted(path.name for path in recipe.place("folder").glob("checkpoint-*"))


def at_step(
    monkeypatch: pytest.MonkeyPatch,
    step: int,
    action: Any,
    name: str = "forward_backward",
) -> None:
    """Call `action` on the step object before a method of its runs for the step of this number."""
    real = getattr(Step, name)

    def acting(self: Step, number: int, *rest: Any) -> Any:
        if number == step:
            action(self)
        return real(self, number, *rest)

    monkeypatch.setattr(Step, name, acting)


def lose_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the fifth step on, one gradient is not a number."""
    real = Step.forward_backward

    def poisoned(self: Step, number: int) -> torch.Tensor:
        loss = real(self, number)
        if number >= 4:
            next(self.model.parameters()).grad.fill_(math.nan)
        return loss

    monkeypatch.setattr(Step, "forward_backward", poisoned)


def die(*_: Any) -> None:
    raise Killed


def reset_accelerate() -> None:
    """Forget what accelerate has found out of this process and its environment."""
    AcceleratorState._reset_state(reset_partial_state=True)


def train_on(
    ranks: int, recipe: Recipe, train: Callable[[Recipe], object] = pretrain
) -> list[str]:
    """Train on ranks like torchrun's that need not import anything; what each of them said at last.

    They are forks of this process, where a system has good ones. `train` says what is changed.
    """
    kind = "fork" if sys.platform == "linux" else "spawn"
    context: Any = multiprocessing.get_context(kind)
    port = free_port()
    children = []
    for rank in range(ranks):
        place = (recipe, train, rank, ranks, port)
        child = context.Process(target=train_as_rank, args=place)
        child.start()
        children.append(child)
    for child in children:
        child.join()
        if child.exitcode:
            # The first rank has told what is wrong: nobody need wait for one that hangs.
            for other in children:
                other.kill()
    return [path.read_text() for path in list_words(recipe, ranks)]


def list_words(recipe: Recipe, ranks: int) -> list[Path]:
    """Where each rank writes what it says."""
    return [Path(f"{recipe.folder}.rank{rank}") for rank in range(ranks)]


def train_as_rank(
    recipe: Recipe, train: Any, rank: int, ranks: int, port: int
) -> None:
    """What one rank does; its words end with the way it ended."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    words = list_words(recipe, ranks)[rank]
    with words.open("w", buffering=1) as file:
        with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            reset_accelerate()
            torch.set_num_threads(1)
            try:
                train(recipe)
                print("ended well")
            except CourseError as error:
                print(error)
                os._exit(1)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
    # A fork must not run its parent's clean-up.
    os._exit(0)


def check_ended(words: list[str]) -> None:
    """All ranks ended well; else the words of those that did not."""
    wrong = [text[-2000:] for text in words if not text.endswith("ended well\n")]
    assert not wrong, "\n".join(wrong)


def launch(
    recipe: Recipe, *more: str, start: tuple[str, ...] = (), **env: str
) -> str:
    """Train in processes of their own, from a file; returns what they said."""
    path = write_recipe(recipe)
    command = [sys.executable, *start, "-m", "stages.training", str(path), *more]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=env
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout + done.stderr


def write_recipe(recipe: Recipe) -> Path:
    """The file of a recipe, beside its folder."""
    path = Path(recipe.folder + ".toml")
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = {
        name: value for name, value in vars(recipe).items() if name != "model"
    }
    lines = [
        f"{name} = {json.dumps('none' if v is None else v)}"
        for name, v in fields.items()
    ]
    sizes = [
        f"{name} = {json.dumps('none' if v is None else v)}"
        for name, v in recipe.model.items()
    ]
    path.write_text("\n".join([*lines, "[model]", *sizes]))
    return path


def run_program(command: list[str]) -> None:
    """Run a program on one thread from the checkout; its last words if it fails."""
    child = subprocess.run(
        command,
        check=False,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert child.returncode == 0, child.stderr[-2000:]
