"""Every row of docs/trainer.md does what the page says, with the libraries that are installed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)

PAGE = (Path(__file__).parent.parent / "docs/trainer.md").read_text(
    encoding="utf-8"
)
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.splitlines()
    if re.match(r"\| [`aer]", line) and not re.match(r"\| arguments", line)
]
OLD = [row for row in ROWS if len(row) == 3]
PAIRS = [row for row in ROWS if len(row) == 2 and "_strategy=" in row[0]]
LATE = {
    row[0]: row[1] for row in ROWS if len(row) == 2 and "_strategy=" not in row[0]
}
STEPS = {"eval_strategy": "steps", "eval_steps": 1}


def toy() -> BertForSequenceClassification:
    set_seed(1)
    shape = {"vocab_size": 100, "hidden_size": 16, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 2, "intermediate_size": 16, "num_labels": 2}
    return BertForSequenceClassification(BertConfig(**shape))


def rows(labels: bool = True) -> Dataset:
    columns = {"input_ids": [[1, 2, 3, 4], [5, 6, 7, 8]] * 8}
    if labels:
        columns["label"] = [0, 1] * 8
    return Dataset.from_dict(columns)


def trainer(place: Path, data: Dataset | None = None, **options: Any) -> Trainer:
    callbacks = options.pop("callbacks", None)
    quiet = {
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "max_steps": 2,
    }
    args = TrainingArguments(str(place), **{**quiet, **options})
    data = data or rows()
    return Trainer(
        toy(), args, train_dataset=data, eval_dataset=rows(), callbacks=callbacks
    )


def kind(error: str) -> type[Exception]:
    """The class that a cell names first."""
    return getattr(__import__("builtins"), error.split(":")[0].split()[0])


def run(code: str, place: Path) -> None:
    """Do what a cell of the page shows."""
    names: dict[str, Any] = {
        "place": str(place),
        "model": toy(),
        "Trainer": Trainer,
    }
    names |= {"TrainingArguments": TrainingArguments, "tokenizer": AutoTokenizer}
    exec(code, names)


def test_the_page_has_all_its_rows() -> None:
    assert (len(OLD), len(PAIRS), len(LATE)) == (15, 7, 7)


@pytest.mark.parametrize("then, error, now", OLD, ids=[row[0] for row in OLD])
def test_an_old_call_fails_and_its_heir_works(then, error, now, tmp_path) -> None:
    with pytest.raises(kind(error)):
        run(then.strip("`"), tmp_path)
    code = re.match(r"`([^`]+)`", now)
    if code and "sklearn" not in now:
        run(code[1], tmp_path)


@pytest.mark.parametrize("given, result", PAIRS, ids=[row[0] for row in PAIRS])
def test_a_pair_is_taken_or_refused(given, result, tmp_path) -> None:
    code = (
        f"TrainingArguments(place, load_best_model_at_end=True, {given.strip('`')})"
    )
    if result == "works":
        run(code, tmp_path)
    else:
        with pytest.raises(kind(result)):
            run(code, tmp_path)


def test_the_name_of_the_metric_says_which_way_is_better(tmp_path) -> None:
    ways = {}
    for name in ("accuracy", "error", "rating_loss"):
        made = TrainingArguments(
            str(tmp_path), metric_for_best_model=name, load_best_model_at_end=True,
            eval_strategy="steps", eval_steps=2, save_steps=2,
        )  # fmt: skip
        ways[name] = made.greater_is_better
    assert ways == {"accuracy": True, "error": True, "rating_loss": False}


def late(start: str) -> str:
    """What the page says about the mistake that begins so."""
    return next(text for name, text in LATE.items() if name.startswith(start))


def test_evaluation_without_data(tmp_path) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, eval_strategy="epoch")
    with pytest.raises(kind(late("evaluation without"))):
        Trainer(toy(), args, train_dataset=rows())


def test_early_stopping_without_a_metric(tmp_path) -> None:
    made = trainer(tmp_path, callbacks=[EarlyStoppingCallback(2)])
    with pytest.raises(kind(late("early stopping"))):
        made.train()


def test_resuming_from_nothing(tmp_path) -> None:
    made = trainer(tmp_path)
    with pytest.raises(kind(late("`resume_from"))):
        made.train(resume_from_checkpoint=True)


def test_rows_without_labels(tmp_path) -> None:
    made = trainer(tmp_path, rows(labels=False))
    with pytest.raises(kind(late("rows without"))):
        made.train()


def test_a_metric_that_is_not_computed(tmp_path) -> None:
    options: dict[str, Any] = {
        **STEPS,
        "save_steps": 1,
        "metric_for_best_model": "f1",
    }
    made = trainer(tmp_path, load_best_model_at_end=True, **options)
    with pytest.raises(kind(late("a `metric_for"))):
        made.train()
    assert made.state.global_step == 1


def losses(made: Trainer) -> list[float]:
    made.train()
    return [log["loss"] for log in made.state.log_history if "loss" in log]


def test_fp16_on_a_cpu_changes_nothing_and_bf16_does(tmp_path) -> None:
    plain = losses(trainer(tmp_path, logging_steps=1))
    assert losses(trainer(tmp_path, logging_steps=1, fp16=True)) == plain
    assert losses(trainer(tmp_path, logging_steps=1, bf16=True)) != plain


def test_a_short_run_logs_no_loss(tmp_path) -> None:
    assert losses(trainer(tmp_path)) == []
    assert trainer(tmp_path).args.logging_steps == 500


def test_two_cards_in_one_process_double_the_batch(tmp_path) -> None:
    arguments = TrainingArguments(
        tmp_path, per_device_train_batch_size=8, use_cpu=True
    )
    assert arguments.train_batch_size == 8
    arguments._n_gpu = 2  # as a process sees a machine with two cards
    assert arguments.train_batch_size == 16


def test_the_trainer_drafts_a_card_of_the_model(tmp_path) -> None:
    made = trainer(tmp_path, eval_strategy="steps", eval_steps=1)
    made.train()
    made.create_model_card(
        model_name="my-model", language="en", license="apache-2.0"
    )
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "license: apache-2.0" in card and "# my-model" in card
    assert "learning_rate" in card and "Validation Loss" in card
