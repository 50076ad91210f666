"""Documented functions: taken apart whole. The loop: the same losses however it is launched."""
from __future__ import annotations

import ast
import json
import os
import random
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from stages import classifier as finetuning
from utils.errors import CourseError, PACKAGE
from stages.launch import free_port, launch
from stages.classifier import decay_groups, make_loader, Plan, shared_loss, train
from stages.functions import documented_functions

LONG = "    total = 0\n    for value in values:\n        total += value\n    return total / len(values)\n"


def found(text: str) -> list:
    return list(documented_functions(text))


def test_a_method_is_dedented_and_known_for_one() -> None:
    inner = 'def mean(self, values):\n    """The mean of a list of numbers.\n\n    Longer."""\n' + LONG
    text = "class A:\n" + "".join("    " + line + "\n" for line in inner.splitlines())
    (function,) = found(text)
    assert (function.name, function.top) == ("mean", False)
    assert function.docstring == "The mean of a list of numbers."
    assert function.signature == "def mean(self, values):" and function.body.startswith("total = 0")
    ast.parse(function.code)


@pytest.mark.parametrize("text", [
    "def f(:\n",                                                        # no Python
    "def f(values):\n" + LONG,                                          # no docstring
    'def f(values):\n    """Too few words."""\n' + LONG,
    'def f(values):\n    """A docstring with quite enough words."""\n', # no body
    'def f(v): "A docstring with quite enough words."; return [x * 1 for x in v] + [0] * 40 + [1]\n',
    "x = '\0'\n",
])
def test_what_is_of_no_use_is_left_out(text: str) -> None:
    assert found(text) == []


def test_a_long_signature_and_a_decorator_are_kept_apart() -> None:
    text = ('@cache\ndef mean(\n    values: list,\n) -> float:\n'
            '    """The mean of a list of numbers."""\n' + LONG)
    (function,) = found(text)
    assert function.signature == "def mean(\n    values: list,\n) -> float:" and function.top
    ast.parse(function.code)


def test_every_function_of_the_standard_library_that_is_found_parses() -> None:
    import argparse
    import statistics
    import inspect

    functions = [f for module in (argparse, statistics) for f in found(inspect.getsource(module))]
    assert len(functions) > 10
    for function in functions:
        ast.parse(function.code)
        assert function.docstring.split()[0] not in function.body.splitlines()[0]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """A tiny classifier, its tokenizer, and 157 rows: twenty batches of eight, the last of five."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("plan")
    words = ["[PAD]", "[UNK]", *(f"w{i}" for i in range(60))]
    bare = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    bare.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=bare, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    torch.manual_seed(0)
    BertForSequenceClassification(BertConfig(
        vocab_size=len(words), hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=40, pad_token_id=0)).save_pretrained(folder)
    draw = random.Random(0)
    texts = [" ".join(draw.choices(words[2:], k=draw.randint(3, 30))) for _ in range(157)]
    labels = [int("w1" in text.split()) for text in texts]
    pq.write_table(pa.table({"text": texts, "label": labels}), folder / "rows.parquet")
    return Plan(str(folder), str(folder / "rows.parquet"), rate=5e-3)


def alone(plan: Plan, **changes: Any) -> list[float]:
    """The losses of one process, in a process of its own: this one must stay free to fork."""
    return launch(train, replace(plan, **changes), world=1)[0]


@pytest.fixture(scope="module")
def reference(plan: Plan) -> list[float]:
    return plain_loop(plan)


def plain_loop(plan: Plan) -> list[float]:
    """The same training with nothing but PyTorch, as the lesson writes it."""
    import torch
    from transformers import AutoModelForSequenceClassification, get_linear_schedule_with_warmup

    torch.manual_seed(plan.seed)
    model = AutoModelForSequenceClassification.from_pretrained(
        plan.weights, hidden_dropout_prob=plan.dropout, attention_probs_dropout_prob=plan.dropout).train()
    model.base_model.embeddings.requires_grad_(False)
    loader, losses = make_loader(plan, plan.batch), []
    optimizer = torch.optim.AdamW(decay_groups(model, plan.decay), lr=plan.rate)
    schedule = get_linear_schedule_with_warmup(optimizer, plan.warmup, len(loader))
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def gap(ours: list[float], theirs: list[float]) -> float:
    assert len(ours) == len(theirs) == 20
    return max(abs(a - b) for a, b in zip(ours, theirs))


def test_one_process_is_the_plain_loop_with_dropout_too(plan: Plan, reference: list[float]) -> None:
    assert gap(alone(plan), reference) < 1e-5
    noisy = replace(plan, dropout=0.1)
    assert gap(alone(noisy), plain_loop(noisy)) < 1e-5 < gap(plain_loop(noisy), reference)


def test_two_processes_are_the_plain_loop_in_every_step(plan: Plan, reference: list[float]) -> None:
    both = launch(train, replace(plan, processes=2), world=2)
    assert both[0] == both[1]
    assert gap(both[0], reference) < 1e-4
    assert reference[0] - min(reference) > 0.05  # and it learned: equal losses are not equal constants


def test_the_agreement_breaks_where_the_loop_is_broken(plan: Plan, reference: list[float],
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    two = replace(plan, processes=2)
    assert gap(alone(plan, seed=1, dropout=0.1), reference) > 1e-3
    assert gap(alone(plan, decay=30.0), reference) > 1e-3
    monkeypatch.setattr(finetuning, "shared_loss", lambda losses, first, rows, world: losses.mean())
    careless = launch(train, two, world=2)[0]  # forks: they have the patched function
    assert gap(careless[:19] + reference[19:], reference) < 1e-4 < abs(careless[19] - reference[19])
    monkeypatch.setattr(finetuning, "decay_groups", lambda model, decay: [
        {"params": [p], "weight_decay": 0.0, "lr": 1e-4} for p in model.parameters()])
    assert gap(launch(train, two, world=2)[0], reference) > 1e-3


def test_parts_of_a_ragged_batch_average_to_its_mean() -> None:
    import torch

    losses = torch.rand(12, generator=torch.Generator().manual_seed(0))
    for rows in range(1, 13):
        parts = [shared_loss(losses[first:first + 4], first, rows, 3) for first in (0, 4, 8)]
        assert torch.stack(parts).mean().item() == pytest.approx(losses[:rows].mean().item())


def test_a_run_with_fewer_processes_than_planned_stops(plan: Plan) -> None:
    with pytest.raises(CourseError, match="1 process"):
        train(replace(plan, processes=2))


def test_a_batch_that_the_processes_cannot_share_is_refused(plan: Plan) -> None:
    with pytest.raises(CourseError, match="9 rows"):
        launch(train, replace(plan, batch=9, processes=2), world=2)


def test_main_takes_a_plan_and_leaves_losses_and_a_model(plan: Plan, reference: list[float],
                                                         tmp_path: Path) -> None:
    given, told = tmp_path / "plan.json", tmp_path / "losses.json"
    given.write_text(json.dumps(asdict(replace(plan, processes=2, save=str(tmp_path / "model")))))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port",
               str(free_port()), "-m", "stages.classifier", str(given), str(told)]
    done = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True, timeout=240,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    assert gap(json.loads(told.read_text()), reference) < 1e-4
    for name in ("model.safetensors", "tokenizer.json"):
        assert (tmp_path / "model" / name).exists()


def test_biases_and_norms_do_not_decay() -> None:
    import torch

    model = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
    model[1].weight.requires_grad = False
    pulled, free = decay_groups(model, 0.1)
    assert [p.shape for p in pulled["params"]] == [(5, 4)] and pulled["weight_decay"] == 0.1
    assert len(free["params"]) == 3 and free["weight_decay"] == 0.0
