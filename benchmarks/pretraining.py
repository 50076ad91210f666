"""The training step and its loop against peers; and, as commands, the races behind the leaderboard.

    python -m benchmarks pretraining                   step, loop and resume, two minutes
    python -m benchmarks.pretraining race              classic against ours, 1,080 CPU seconds each
    python -m benchmarks.pretraining ablations         one change a row, 45 CPU seconds each
    python -m benchmarks.pretraining record FOLDER     a run of the engine, into results/

A run has one thread and a budget of CPU seconds, so that other work on the machine hardly matters:
1,080 of them are ten minutes of two cores. The result is bits per byte on held-out packages, the
same bytes for all whatever their tokenizers, in `results/leaderboard.json`.
"""

from __future__ import annotations

import gzip
import itertools
import json
import lzma
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from torch import nn
from torch.nn import functional as F
from transformers import AutoTokenizer

from stages import checkpoints, training
from stages import tokenizer as tokenizers
from stages import tokens as token_store
from stages.recipe import Recipe, build_model, make_optimizers, share_of_rate
from stages.tokens import Loader, open_store, split_rows
from utils import artifacts, evaluation
from utils.errors import ROOT, build_folder
from utils.machine import machine_facts

ARTIFACTS = build_folder() / "artifacts" / "laptop"
RECIPES = ROOT / "launch" / "recipes"
BOARD = ROOT / "results" / "leaderboard.json"
WINDOWS, WARM, MEASURED = 768, 8, 20
BARS = {
    "step": 2.0,
    "plain": 0.95,
    "loop": 0.03,
    "resume": 2.0,
    "classic": 0.65,
    "xz": 0.72,
}


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


def load(name: str, **changes: Any) -> Recipe:
    """A recipe of the house on the laptop's artifacts, on one thread."""
    places = {part: str(ARTIFACTS / part) for part in ("tokens", "tokenizer")}
    return Recipe.load(
        RECIPES / f"{name}.toml", **{**places, "threads": 1, **changes}
    )


def bare_step(recipe: Recipe, plain: bool = False) -> Callable[[], None]:
    """The step without a loop around it: the recipe's model, or the plain one of its size."""
    tokenizer = AutoTokenizer.from_pretrained(recipe.tokenizer)
    split = open_store(Path(recipe.tokens), tokenizer)["train"]
    block, sizes = split.header["block"], recipe.model
    if plain:
        model = Plain(
            len(tokenizer),
            sizes["hidden_size"],
            sizes["num_hidden_layers"],
            sizes["num_attention_heads"],
            block,
        )
        optimizers: list = [
            torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        ]
    else:
        model = build_model(recipe, tokenizer)
        optimizers = make_optimizers(model, recipe)
    run = torch.compile(model) if recipe.compile else model
    rows, low = iter(Loader(split, recipe.rows, 42)), recipe.precision != "float32"

    def step() -> None:
        batch = next(rows)
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            parts = split_rows(batch)
            loss = (
                run(parts["input_ids"], parts["labels"])
                if plain
                else run(**parts, use_cache=False).loss
            )
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


def whole_loop(recipe: Recipe) -> Callable[[], None]:
    """One turn of the engine's loop: the step, the checks, the log line, the progress bar."""
    run, step = start_run(recipe)
    return lambda: training.advance(run, step)


def cpu_seconds(
    works: dict[str, Callable[[], None]], repeats: int = 12
) -> dict[str, float]:
    """The least CPU time of one turn of each, taken in turn."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats + 3):
        for name, work in works.items():
            start = time.process_time()
            work()
            times[name].append(time.process_time() - start)
    return {name: min(kept[3:]) for name, kept in times.items()}


def step_rows() -> list[dict[str, Any]]:
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
        works = {
            "the loop": whole_loop(ours),
            "our step": bare_step(ours),
            "our step, AdamW": bare_step(simple),
            "plain GPT, AdamW": bare_step(simple, plain=True),
            "classic": bare_step(load("classic")),
        }
        seconds = cpu_seconds(works)
    tokens = ours.rows * 256
    speed = {name: round(tokens / value) for name, value in seconds.items()}
    ratio = seconds["classic"] / seconds["our step"]
    plain = seconds["plain GPT, AdamW"] / seconds["our step, AdamW"]
    over = seconds["the loop"] / seconds["our step"] - 1
    same = seconds["classic"] / seconds["our step, AdamW"]
    return [
        {
            "id": "step-classic",
            "what": "training step, 4 layers of 256, Muon, one thread",
            "unit": "tokens/s",
            "ours": speed["our step"],
            "peers": {"classic": speed["classic"]},
            "ratio": round(ratio, 2),
            "bar": BARS["step"],
            "holds": ratio >= BARS["step"],
        },
        {
            "id": "step-classic-adamw",
            "what": "the same, both with AdamW",
            "unit": "tokens/s",
            "ours": speed["our step, AdamW"],
            "peers": {"classic": speed["classic"]},
            "ratio": round(same, 2),
            "bar": BARS["step"],
            "holds": same >= BARS["step"],
        },
        {
            "id": "step-plain",
            "what": "the same, both with AdamW",
            "unit": "tokens/s",
            "ours": speed["our step, AdamW"],
            "peers": {"plain GPT": speed["plain GPT, AdamW"]},
            "ratio": round(plain, 2),
            "bar": BARS["plain"],
            "holds": plain >= BARS["plain"],
        },
        {
            "id": "loop-overhead",
            "what": "what the loop adds to the step",
            "unit": "of the step",
            "ours": round(over, 4),
            "peers": {},
            "ratio": None,
            "bar": f"<= {BARS['loop']}",
            "holds": over <= BARS["loop"],
        },
    ]


def resume_row() -> dict[str, Any]:
    """Seconds from the loaded model to the next row, after a few steps and after very many."""
    seconds = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, number in {"early": 10, "late": 1_000_000}.items():
            fields = {
                "compile": False,
                "steps": number + 10,
                "folder": f"{scratch}/{name}",
            }
            recipe = load("modern", **fields)
            run, step = start_run(recipe)
            step.take(0, 1.0)
            run.progress.update(step=number, validation_loss=1.0)
            run.save(step)
            start = time.perf_counter()
            path = checkpoints.newest_checkpoint(run.folder)
            checkpoints.load_checkpoint(path, step.model, step.optimizers)
            step.go_to(number)
            next(step.batches)
            seconds[name] = time.perf_counter() - start
    return {
        "id": "resume",
        "what": "from a built model to the next row of a resumed run",
        "unit": "s",
        "ours": round(seconds["late"], 3),
        "peers": {"after 10 steps": round(seconds["early"], 3)},
        "ratio": None,
        "bar": f"<= {BARS['resume']} s",
        "holds": max(seconds.values()) <= BARS["resume"],
    }


def board_rows() -> list[dict[str, Any]]:
    """The bars of the recorded race; it takes an hour and is a command of its own."""
    board = artifacts.read_json(BOARD)
    bits = {row["idea"]: row["bits_per_byte"] for row in board["race"]}
    best, found = min(bits.values()), []
    for name, peer in {
        "classic": bits["classic"],
        "xz": board["yardsticks"]["xz -9e"],
    }.items():
        found.append(
            {
                "id": f"race-{name}",
                "what": "held-out packages, the recorded race",
                "unit": "bits per byte",
                "ours": best,
                "peers": {name: peer},
                "ratio": round(best / peer, 3),
                "bar": f"<= {BARS[name]}",
                "holds": best / peer <= BARS[name],
                "measured": "recorded",
            }
        )
    return found


def rows() -> list[dict[str, Any]]:
    """The bars, measured now or read from the board."""
    now = [{**row, "measured": "now"} for row in (*step_rows(), resume_row())]
    return [*now, *board_rows()]


def windows(name: str = "test", count: int = WINDOWS) -> list[str]:
    """Blocks of a split as texts, in the order of the file: those that come last in the order of training.

    Of `test`, packages that nobody trained on; of `train`, blocks that no race comes to.
    """
    tokenizer = AutoTokenizer.from_pretrained(ARTIFACTS / "tokenizer")
    split = open_store(ARTIFACTS / "tokens", tokenizer)[name]
    rows = np.sort(Loader(split, 1, 42).rows_at(len(split) - 1 - np.arange(count)))
    said = (tokenizer.decode(row[1:]) for row in split.gather(rows))
    return [
        text.replace("\ufffd", "?").replace(tokenizer.eos_token, "\n")
        for text in said
    ]


def yardsticks(texts: list[str]) -> dict[str, float]:
    """Bits per byte of general compressors, all the texts as one stream."""
    import zstandard

    data = "".join(texts).encode()
    sizes = {
        "gzip -9": gzip.compress(data, 9),
        "zstd -19": zstandard.compress(data, 19),
        "xz -9e": lzma.compress(data, preset=9 | lzma.PRESET_EXTREME),
    }
    return {
        name: round(len(packed) * 8 / len(data), 4)
        for name, packed in sizes.items()
    }


def bits_per_byte(
    model: Any, tokenizer: Any, texts: list[str], block: int, low: bool
) -> float:
    """Of a model and its own tokenizer on these texts, each by itself behind an end token."""
    end, total = tokenizer.eos_token_id, 0.0
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=low):
        for text in texts:
            ids = [end, *tokenizer(text)["input_ids"]]
            for first in range(0, len(ids) - 1, block):
                row = torch.tensor([ids[first : first + block + 1]])
                total += float(model(**split_rows(row), use_cache=False).loss) * (
                    row.shape[1] - 1
                )
    size = sum(len(text.encode()) for text in texts)
    return evaluation.bits_per_byte(total, 1, size)


def cpu_time() -> float:
    """CPU seconds of this process and of those it has waited for: compilers count too."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def train_for(recipe: Recipe, budget: float) -> dict[str, Any]:
    """Train for so many CPU seconds; the number of steps comes from the speed of the first ones."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(recipe.tokenizer)
    split = open_store(Path(recipe.tokens), tokenizer)["train"]
    block, low = split.header["block"], recipe.precision != "float32"
    model = build_model(recipe, tokenizer)
    optimizers, run = (
        make_optimizers(model, recipe),
        torch.compile(model) if recipe.compile else model,
    )
    known: Recipe | None = None
    loader, steps, begun = (
        iter(Loader(split, recipe.rows, recipe.seed)),
        10**9,
        cpu_time(),
    )
    for step in itertools.count():
        if step == WARM:
            marked = cpu_time()
        if step == WARM + MEASURED:
            each = (cpu_time() - marked) / MEASURED
            steps = step + max(1, round((budget - (cpu_time() - begun)) / each))
            known = recipe.change(steps=steps)
        if step >= steps:
            break
        share = (
            min(1, (step + 1) / 40) if known is None else share_of_rate(step, known)
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            loss = run(**split_rows(next(loader)), use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["full_rate"] * share
            optimizer.step()
            optimizer.zero_grad()
    spent = cpu_time() - begun
    bits = {
        name: round(bits_per_byte(model, tokenizer, windows(name), block, low), 4)
        for name in ("test", "train")
    }
    return {
        "bits_per_byte": bits["test"],
        "bits_per_byte_same_packages": bits["train"],
        "cpu_seconds": round(spent),
        "steps": steps,
        "tokens": steps * recipe.rows * block,
        "tokens_per_second": round(recipe.rows * block / each),
    }


def classic_store() -> dict[str, str]:
    """The store of the classic recipe: 32,768 tokens under GPT-2's rule, made once."""
    folder = build_folder() / "scratch" / "classic"
    if not (folder / "tokens").exists():
        texts = list(tokenizers.read_texts(ARTIFACTS / "corpus", "train"))
        tokenizer = tokenizers.train_bpe(
            texts[::4], 32_768, tokenizers.PATTERNS["gpt2"]
        )
        tokenizer.save_pretrained(folder / "tokenizer")
        with artifacts.sealed(folder / "tokens", {}) as place:
            token_store.write_store(place, {"train": texts}, tokenizer, 256)
    return {
        "tokens": str(folder / "tokens"),
        "tokenizer": str(folder / "tokenizer"),
    }


def commit() -> str:
    """The commit of this checkout, with a mark if it has changes."""
    git = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(
        git, cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()


def without_places(recipe: dict[str, Any]) -> dict[str, Any]:
    """A recipe without the folders of one machine."""
    return {
        k: v
        for k, v in recipe.items()
        if k not in ("tokens", "tokenizer", "folder")
    }


def entry(name: str, recipe: Recipe, budget: float) -> dict[str, Any]:
    """A row of the board."""
    row = {
        "idea": name,
        "recipe": without_places(vars(recipe)),
        **train_for(recipe, budget),
        "commit": commit(),
    }
    print(json.dumps(row), flush=True)
    return row


def ideas(kind: str) -> dict[str, Callable[[], Recipe]]:
    """The recipes of a race: name to recipe, made when its turn comes."""
    base: dict[str, Any] = {"precision": "bfloat16"}

    def change(**fields: Any) -> Callable[[], Recipe]:
        return lambda: load("modern", **{**base, **fields})

    if kind == "race":
        return {
            "classic": lambda: load("classic", **classic_store()),
            "modern": change(),
            "modern, width 160, longer cooldown": change(
                cooldown=0.65,
                model={
                    "hidden_size": 160,
                    "intermediate_size": 640,
                    "num_attention_heads": 2,
                },
            ),
            "modern, width 160, cooldown 0.85": change(
                cooldown=0.85,
                model={
                    "hidden_size": 160,
                    "intermediate_size": 640,
                    "num_attention_heads": 2,
                },
            ),
        }
    gpt2 = {
        "model_type": "gpt2",
        "n_embd": 192,
        "n_layer": 4,
        "n_head": 3,
        "n_positions": 256,
    }
    return {
        "modern, as it is": change(),
        "eager attention": change(attention="eager"),
        "dropout 0.1 in attention": change(model={"attention_dropout": 0.1}),
        "float32": change(precision="float32"),
        "not compiled": change(compile=False),
        "GPT-2's architecture": lambda: load(
            "classic",
            **base,
            compile=True,
            optimizer="muon",
            attention="sdpa",
            rate=6e-3,
            schedule="trapezoid",
            weight_decay=0.0,
            rows=8,
            model=gpt2,
        ),
        "AdamW for all": change(optimizer="adamw", rate=3e-3),
        "cosine": change(schedule="cosine"),
        "constant rate": change(schedule="constant"),
        "vocabulary of 32,768": lambda: load(
            "modern", **{**base, **classic_store()}
        ),
        "4 rows a step": change(rows=4, micro=4),
        "16 rows a step": change(rows=16, micro=16),
        "width 128": change(
            model={
                "hidden_size": 128,
                "intermediate_size": 512,
                "num_attention_heads": 2,
            }
        ),
        "width 256": change(
            model={
                "hidden_size": 256,
                "intermediate_size": 1024,
                "num_attention_heads": 4,
            }
        ),
    }


def main(kind: str, *names: str, seconds: float | None = None) -> None:
    """Run a race, or some rows of it, and put them on the board, best first."""
    budget = seconds or {"race": 1080.0, "ablations": 45.0}[kind]
    chosen = {
        name: make
        for name, make in ideas(kind).items()
        if not names or name in names
    }
    found = [entry(name, make(), budget) for name, make in chosen.items()]
    with FileLock(
        build_folder() / "leaderboard.lock"
    ):  # several races may run at once
        board = artifacts.read_json(BOARD) or {}
        texts, near = windows("test"), windows("train")
        old = [row for row in board.get(kind, []) if row["idea"] not in chosen]
        board.update(
            {
                "what": "bits per byte on blocks of held-out packages, one thread, equal CPU seconds",
                "command": "python -m benchmarks.pretraining race; … ablations",
                "machine": machine_facts(),
                "yardsticks": yardsticks(texts),
                "yardsticks_same_packages": yardsticks(near),
                "bytes": sum(len(text.encode()) for text in texts),
                kind: sorted([*old, *found], key=lambda row: row["bits_per_byte"]),
            }
        )
        artifacts.write_json(BOARD, board)


def record(folder: Path, results: Path = BOARD.parent) -> Path:
    """Keep what a run of the engine logged: its recipe, curve, speed, memory and samples."""
    lines = [
        json.loads(line)
        for line in (folder / "log.jsonl").read_text("utf-8").splitlines()
    ]
    kinds = {
        kind: [
            {k: v for k, v in line.items() if k != "kind"}
            for line in lines
            if line["kind"] == kind
        ]
        for kind in ("step", "validation", "sample")
    }
    thin = max(1, len(kinds["step"]) // 500)
    speeds = sorted(line["tokens_per_second"] for line in kinds["step"])
    used = sorted(line["utilization"] for line in kinds["step"])
    path = results / f"pretraining-{folder.name}.json"
    begun = artifacts.read_json(folder / "recipe.json")
    begun["recipe"] = without_places(begun["recipe"])
    artifacts.write_json(
        path,
        {
            "command": f"python -m stages.training RECIPE folder={folder.name}",
            "machine": machine_facts(),
            "commit": commit(),
            **begun,
            "tokens_per_second": speeds[len(speeds) // 2],
            "utilization": used[len(used) // 2],
            "memory": max(
                (line["memory"] for line in kinds["validation"]), default=None
            ),
            "steps": kinds["step"][::thin],
            "validation": kinds["validation"],
            "samples": kinds["sample"],
        },
    )
    return path


if __name__ == "__main__":
    os.environ.update(OMP_NUM_THREADS="1", TORCHINDUCTOR_COMPILE_THREADS="1")
    if sys.argv[1] == "record":
        print(record(Path(sys.argv[2])))
    else:
        main(sys.argv[1], *sys.argv[2:])
