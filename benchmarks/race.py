"""The races behind the leaderboard, and the record of a run: commands of their own.

    python -m benchmarks.race race              classic against ours, 1,080 CPU seconds each
    python -m benchmarks.race ablations         one change a row, 45 CPU seconds each
    python -m benchmarks.race record FOLDER     a run of the engine, into results/

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
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from torch import nn
from transformers import AutoTokenizer

from benchmarks.pretraining import BOARD, load
from benchmarks.timing import artifact
from course.checkout import clean_commit, commit
from stages import evaluation
from stages import tokenizer as tokenizers
from stages import tokens as token_store
from stages.corpus import read_texts
from stages.recipe import Recipe, build_model, make_optimizers, share_of_rate
from stages.tokens import Loader, open_store, split_rows
from utils import artifacts
from utils.errors import CourseError, build_folder
from utils.machine import machine_facts

WINDOWS, WARM, MEASURED = 768, 8, 20


def windows(name: str = "test", count: int = WINDOWS) -> list[str]:
    """Blocks of a split as texts, in the order of the file: those that come last in the order of training.

    Of `test`, packages that nobody trained on; of `train`, blocks that no race comes to.
    """
    tokens = artifact("tokens", "laptop")
    tokenizer = AutoTokenizer.from_pretrained(tokens.with_name("tokenizer"))
    split = open_store(tokens, tokenizer)[name]
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
        texts = list(read_texts(artifact("corpus", "laptop"), "train"))
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
        return lambda: load("modern", "laptop", **{**base, **fields})

    if kind == "race":
        return {
            "classic": lambda: load("classic", "laptop", **classic_store()),
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
            "laptop",
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
            "modern", "laptop", **{**base, **classic_store()}
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
                "command": "python -m benchmarks.race race; … ablations",
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
    try:
        # Before the work, because its record may be of a commit only.
        clean_commit()
    except CourseError as error:
        sys.exit(str(error))
    if sys.argv[1] == "record":
        print(record(Path(sys.argv[2])))
    else:
        main(sys.argv[1], *sys.argv[2:])
