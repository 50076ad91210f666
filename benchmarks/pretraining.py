"""The training step, its loop and its resume against peers; and the bars of the recorded race."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoTokenizer

from benchmarks import race_entry
from benchmarks.timing import Row, artifact, interleaved, row
from stages import checkpoints, training
from stages.recipe import Recipe, build_model, make_optimizers
from stages.tokens import Loader, open_store, split_rows
from utils.errors import ROOT

RECIPES = ROOT / "launch" / "recipes"
# What the best entry may have of the best compressor, alone and primed, and of the classic recipe.
RACE_BARS = {
    "plain": 0.70,
    "primed": 0.80,
    "classic": 0.60,
    "classic, well set": 0.85,
}
# Tokens of a row in the course's own store.
BLOCK = 256


class Plain(nn.Module):
    """A GPT as short trainers write it: fused projections, SDPA, no biases, tied head."""

    def __init__(
        self, vocabulary: int, width: int, layers: int, heads: int, block: int
    ) -> None:
        super().__init__()
        self.heads, self.table = heads, nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(block, width)
        self.layers = nn.ModuleList(
            nn.ModuleList(
                [
                    nn.LayerNorm(width, bias=False),
                    nn.Linear(width, 3 * width, bias=False),
                    nn.Linear(width, width, bias=False),
                    nn.LayerNorm(width, bias=False),
                    nn.Linear(width, 4 * width, bias=False),
                    nn.Linear(4 * width, width, bias=False),
                ]
            )
            for _ in range(layers)
        )
        self.last = nn.LayerNorm(width, bias=False)
        self.apply(
            lambda m: (
                nn.init.normal_(m.weight, std=0.02)
                if hasattr(m, "weight") and m.weight.ndim > 1
                else None
            )
        )

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean loss of the targets."""
        x = self.table(ids) + self.places.weight[: ids.shape[1]]
        for norm, project, out, second, up, down in self.layers:
            parts = project(norm(x)).chunk(3, -1)
            q, k, v = (
                p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in parts
            )
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + out(mixed.transpose(1, 2).flatten(2))
            x = x + down(F.gelu(up(second(x))))
        scores = self.last(x) @ self.table.weight.T
        return F.cross_entropy(scores.flatten(0, 1).float(), targets.flatten())


def load(name: str, profile: str = "smoke", **changes: Any) -> Recipe:
    """A recipe of the house on a profile's artifacts, on one thread."""
    made = artifact("tokens", profile).parent
    places = {part: str(made / part) for part in ("tokens", "tokenizer")}
    return Recipe.load(
        RECIPES / f"{name}.toml", **{**places, "threads": 1, **changes}
    )


def bare_step(recipe: Recipe, plain: bool = False) -> Callable[[], None]:
    """The step without a loop around it: the recipe's model, or the plain one of its size."""
    tokenizer = AutoTokenizer.from_pretrained(recipe.tokenizer)
    split = open_store(Path(recipe.tokens), tokenizer)["train"]
    sizes = recipe.model
    if plain:
        wide, deep = sizes["hidden_size"], sizes["num_hidden_layers"]
        model: Any = Plain(
            len(tokenizer), wide, deep, sizes["num_attention_heads"], BLOCK
        )
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        optimizers: list[Any] = [adamw]
    else:
        model = build_model(recipe, tokenizer)
        optimizers = make_optimizers(model, recipe)
    trained: Any = torch.compile(model) if recipe.compile else model
    batches = iter(Loader(split, recipe.rows, 42))
    narrow = recipe.precision != "float32"

    def step() -> None:
        parts = split_rows(next(batches))
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            if plain:
                loss = trained(parts["input_ids"], parts["labels"])
            else:
                loss = trained(**parts, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step


def start_run(recipe: Recipe) -> tuple[training.Run, training.Step]:
    """A run of the engine that has begun, and its step."""
    tokenizer = AutoTokenizer.from_pretrained(recipe.tokenizer)
    run = training.Run(recipe, training.make_accelerator(recipe), tokenizer)
    run.folder.mkdir(parents=True, exist_ok=True)
    return run, training.begin(run)


def step_rows() -> Iterator[Row]:
    """Tokens a CPU second of the step, at one size of model, and what the loop adds."""
    torch.set_num_threads(1)
    size = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4}
    with tempfile.TemporaryDirectory() as scratch:
        ours = load(
            "modern", precision="bfloat16", model=size, folder=f"{scratch}/run"
        )
        simple = ours.change(
            optimizer="adamw", rate=1e-3, folder=f"{scratch}/adamw"
        )
        run, step = start_run(ours)
        works = {
            "loop": lambda: training.advance(run, step),
            "ours": bare_step(ours),
            "ours, AdamW": bare_step(simple),
            "plain, AdamW": bare_step(simple, plain=True),
            "classic": bare_step(load("classic")),
        }
        # Processor time, and the least of it: other work on the machine hardly moves it.
        clock: Any = {"clock": time.process_time, "summary": min}
        taken = interleaved(*works.values(), repeats=12, warm_up=3, **clock)
    seconds = dict(zip(works, taken))
    speed = {name: ours.rows * BLOCK / value for name, value in seconds.items()}
    what = "training step, 4 layers of 256, one thread"
    classic = {"classic": speed["classic"]}
    yield row(
        "step-classic", f"{what}, Muon", "tokens/s", speed["ours"], classic, 2.2
    )
    plain = {"plain GPT": speed["plain, AdamW"]}
    for id, peers, bar in (
        ("step-classic-adamw", classic, 2.0),
        ("step-plain", plain, 0.95),
    ):
        fast = speed["ours, AdamW"]
        yield row(id, f"{what}, both with AdamW", "tokens/s", fast, peers, bar)
    over = seconds["loop"] / seconds["ours"] - 1
    what = "what the loop adds to the step"
    yield row(
        "loop-overhead", what, "of it", over, {}, 0.03, higher_is_better=False
    )


def seconds_to_resume(recipe: Recipe, number: int) -> float:
    """Seconds from a built model to the next row of a run that has taken so many steps."""
    run, step = start_run(recipe)
    step.take(0, 1.0)
    run.progress.update(step=number, validation_loss=1.0)
    run.save(step)
    start = time.perf_counter()
    path = checkpoints.newest_checkpoint(run.folder)
    checkpoints.load_checkpoint(path, step.model, step.optimizers)
    step.go_to(number)
    next(step.batches)
    return time.perf_counter() - start


def resume_row() -> Iterator[Row]:
    """A resume takes no longer after very many steps than after a few."""
    seconds = []
    with tempfile.TemporaryDirectory() as scratch:
        for number in (10, 1_000_000):
            fields = {"steps": number + 10, "folder": f"{scratch}/{number}"}
            recipe = load("modern", compile=False, **fields)
            seconds.append(seconds_to_resume(recipe, number))
    what = "from a built model to the next row of a resumed run"
    peers = {"after 10 steps": seconds[0]}
    rule: Any = {"higher_is_better": False, "bar_on": "ours"}
    yield row("resume", what, "s", seconds[1], peers, 2.0, **rule)


def board_rows() -> Iterator[Row]:
    """The bars of the recorded race; it takes hours and is a command of its own."""
    entries = race_entry.read_board()["entries"]
    if not entries:
        return
    bits = {entry["idea"]: entry["test"] for entry in entries}
    best = entries[0]
    peers: dict[str, dict[str, float]] = {}
    for way, measured in best["compressors"].items():
        name = min(measured, key=measured.__getitem__)
        peers[way] = {name: measured[name]}
    for idea in ("classic", "classic, well set"):
        if idea in bits:
            peers[idea] = {idea: bits[idea]}
    for way, peer in peers.items():
        figures = (best["test"], peer, RACE_BARS[way])
        id = f"race-{way.replace(', ', '-').replace(' ', '-')}"
        what = f"held-out packages, the recorded race, {way}"
        yield row(id, what, "bits per byte", *figures, False, "recorded")


PARTS = (step_rows, resume_row, board_rows)
