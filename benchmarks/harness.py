"""EleutherAI's lm-evaluation-harness on our items, from local files: `python -m benchmarks.harness`.

It writes what the harness found, item for item, to results/18_harness.json, and lesson 18 holds its
own figures to it. Three of the harness's requirements are built by scripts at their installation,
which the course does not ask of a reader, so the harness has an environment of its own:

    pip install lm_eval==0.4.13
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from stages.benchmarks import sample_rows
from utils.assets import asset
from utils.errors import ROOT

TASKS = {
    "lambada": "lambada_openai",
    "hellaswag": "hellaswag",
    "piqa": "piqa",
}
PACKAGES = ("lm_eval", "torch", "transformers", "tokenizers", "datasets")
# How many items, with how many layers: lesson 18 takes all of them, and two at `smoke`.
MANY = {2: 16, 30: 200}


def local_task(name: str, many: int, folder: Path) -> str:
    """The harness's own task with its own wording, but with our rows in place of the hub's."""
    from lm_eval.tasks import TaskManager

    rows = sample_rows(asset("benchmarks"), name, many)
    if name == "lambada":
        texts = [f"{row['query']} {row['answers_text'][0]}" for row in rows]
        rows = [{"text": text} for text in texts]
    path = folder / f"{name}.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    split = "test" if name == "lambada" else "validation"
    entry = TaskManager().task_index[TASKS[name]]
    task = {
        "include": str(entry.yaml_path),
        "task": f"{name}_here",
        "dataset_path": "json",
        "dataset_name": None,
        "training_split": None,
        "dataset_kwargs": {"data_files": {split: str(path)}},
    }
    # JSON is YAML as well.
    place = folder / f"{name}.yaml"
    place.write_text(json.dumps(task), encoding="utf-8")
    return str(place)


def item_of(sample: dict[str, Any]) -> dict[str, Any]:
    """The log-likelihoods of one item's endings, and what the harness counted as right."""
    scores = [response[0][0] for response in sample["resps"]]
    kept = {"log_likelihoods": [round(float(score), 5) for score in scores]}
    for metric in ("acc", "acc_norm"):
        if metric in sample:
            kept[metric] = int(sample[metric])
    return kept


def run(layers: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The three tasks with so many layers of SmolLM2: the items, and the harness's scores."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = asset("smollm2")
    weights = AutoModelForCausalLM.from_pretrained(
        place, dtype=torch.float32, num_hidden_layers=layers
    )
    tokenizer = AutoTokenizer.from_pretrained(place)
    model = HFLM(weights, tokenizer=tokenizer, device="cpu", batch_size=1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        tasks = [local_task(name, MANY[layers], folder) for name in TASKS]
        found = simple_evaluate(model, tasks=tasks, bootstrap_iters=0)
    items, scores = {}, {}
    for name in TASKS:
        samples = found["samples"][f"{name}_here"]
        samples.sort(key=lambda one: one["doc_id"])
        items[name] = [item_of(sample) for sample in samples]
        figures = found["results"][f"{name}_here"].items()
        scores[name] = {k: v for k, v in figures if isinstance(v, float)}
    return items, scores


def main() -> None:
    """Run the harness and keep what was found."""
    torch.set_num_threads(1)
    begun = time.perf_counter()
    found = {str(layers): run(layers) for layers in MANY}
    commit = ["git", "rev-parse", "HEAD"]
    record = {
        "how": "each task's own wording and scoring, on our sample as local files",
        "command": "python -m benchmarks.harness",
        "commit": subprocess.check_output(
            commit, cwd=ROOT, encoding="utf-8"
        ).strip(),
        "versions": {name: version(name) for name in PACKAGES},
        "machine": f"{platform.system()} {platform.machine()}, no GPU, one thread",
        "python": platform.python_version(),
        "seconds": round(time.perf_counter() - begun),
        "scores": {layers: scores for layers, (_, scores) in found.items()},
        "layers": {layers: items for layers, (items, _) in found.items()},
    }
    path = ROOT / "results" / "18_harness.json"
    path.write_text(json.dumps(record) + "\n", encoding="utf-8")
    print(f"wrote {path.name}: {record['scores']}", file=sys.stderr)


if __name__ == "__main__":
    main()
