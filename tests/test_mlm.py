"""Masked lines: the same row for everybody, the right share of questions, a loss that adds up."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from small_runs import run_program
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
    BertConfig,
    BertForMaskedLM,
    HfArgumentParser,
    PreTrainedTokenizerFast,
    TrainerCallback,
    TrainingArguments,
)

from stages.mlm import (
    IGNORE,
    MaskedLines,
    Masking,
    SparseMaskedLM,
    TextArguments,
    run,
    score,
)
from utils.errors import CourseError

MASK = 4
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PIECES = [*SPECIAL, "read", "##s", "a", "file", "write", "##r", "name"]
LINES = [
    "reads a file",
    "writer reads a name",
    "a name",
    "write a file name",
    "read",
    "files reads writer",
]
# A loaded machine draws slowly; that is no fault.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    numbers = {piece: number for number, piece in enumerate(PIECES)}
    bare = Tokenizer(WordPiece(numbers, unk_token="[UNK]"))
    bare.pre_tokenizer = Whitespace()
    marks = [("[CLS]", 2), ("[SEP]", 3)]
    bare.post_processor = TemplateProcessing("[CLS] $A [SEP]", special_tokens=marks)
    names = {
        f"{name}_token": f"[{name.upper()}]"
        for name in ("pad", "unk", "cls", "sep", "mask")
    }
    return PreTrainedTokenizerFast(tokenizer_object=bare, **names)


def small_config() -> BertConfig:
    return BertConfig(
        vocab_size=len(PIECES),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    )


def mask_words(
    masking: Masking, words: np.ndarray, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ids = np.random.default_rng(9).integers(5, 1000, len(words))
    inputs, labels = masking.apply(
        ids, words, MASK, 1000, np.random.default_rng(seed)
    )
    return ids, inputs, labels


# masking ------------------------------------------------------------------------------------------


def test_shares_are_those_ordered_and_labels_are_the_truth() -> None:
    words = np.arange(20_000) - 10
    words[:10] = -1  # these may not be asked
    ids, inputs, labels = mask_words(Masking(), words)
    asked = labels != IGNORE
    assert not asked[:10].any()
    assert (labels[asked] == ids[asked]).all()
    assert (inputs[~asked] == ids[~asked]).all()
    assert asked.mean() == pytest.approx(0.15, abs=0.01)
    assert (inputs[asked] == MASK).mean() == pytest.approx(0.8, abs=0.03)
    assert (inputs[asked] == ids[asked]).mean() == pytest.approx(0.1, abs=0.03)


def test_whole_words_are_asked_as_one_and_not_more_often() -> None:
    lengths = np.arange(4_000) % 4 + 1
    words = np.repeat(np.arange(4_000), lengths)
    _, inputs, labels = mask_words(Masking(swap=0, whole_words=True), words)
    for chosen in (labels != IGNORE, inputs == MASK):
        counts = np.bincount(words[chosen], minlength=4_000)
        assert set(counts / lengths) == {0.0, 1.0}
    assert (labels != IGNORE).mean() == pytest.approx(0.15, abs=0.02)


@unhurried
@given(
    st.lists(st.integers(-1, 30), max_size=40).map(sorted),
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(0, 1),
    st.booleans(),
)
@example([-1, -1, 4, 4, 7], 1.0, 1.0, 0.0, False)
def test_any_masking_asks_only_words_and_knows_the_truth(
    words: list[int], share: float, hide: float, swap: float, whole: bool
) -> None:
    numbers = np.unique(words, return_inverse=True)[1] - (-1 in words)
    ids, inputs, labels = mask_words(Masking(share, hide, swap, whole), numbers)
    asked = labels != IGNORE
    assert (labels[asked] == ids[asked]).all()
    assert (inputs[~asked] == ids[~asked]).all()
    assert (numbers[asked] >= 0).all()
    if whole:
        assert not set(numbers[asked]) & set(numbers[~asked])
    if share == 1:
        assert (asked == (numbers >= 0)).all()
    if hide == 1:
        assert (inputs[asked] == MASK).all()


# rows ---------------------------------------------------------------------------------------------


def test_a_row_is_the_same_whoever_asks_and_another_in_the_next_epoch(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    one = MaskedLines(LINES, tokenizer, Masking(0.5), seed=3, rows=60)
    two = MaskedLines(LINES, tokenizer, Masking(0.5), seed=3, rows=60)
    backwards = {row: two[row] for row in reversed(range(60))}
    for row in range(60):
        for name in ("input_ids", "labels"):
            assert np.array_equal(one[row][name], backwards[row][name])
    orders = [tuple(one.order(epoch)) for epoch in range(10)]
    assert all(sorted(order) == list(range(6)) for order in orders)
    assert len(set(orders)) > 5
    with pytest.raises(IndexError):
        one[60]


def test_padding_is_neither_seen_nor_asked(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    rows = MaskedLines(LINES, tokenizer, Masking(1, 1, 0), seed=1)
    batch = rows.collate([rows[row] for row in range(6)])
    padding = batch["attention_mask"] == 0
    assert padding.any()
    assert (batch["labels"][padding] == IGNORE).all()
    assert (batch["input_ids"][padding] == 0).all()
    assert (batch["input_ids"][~padding] != 0).all()
    lengths = [len(rows[row]["input_ids"]) for row in range(6)]
    assert batch["attention_mask"].sum(1).tolist() == lengths


# the loss -----------------------------------------------------------------------------------------


def test_the_sparse_head_has_the_loss_and_gradients_of_the_full_one(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    torch.manual_seed(0)
    full = BertForMaskedLM(small_config())
    sparse = SparseMaskedLM(small_config())
    sparse.load_state_dict(full.state_dict())
    rows = MaskedLines(LINES, tokenizer, Masking(0.5), seed=1)
    batch = rows.collate([rows[row] for row in range(6)])
    full_loss = full(**batch).loss
    sparse_loss = sparse(**batch).loss
    full_loss.backward()
    sparse_loss.backward()
    torch.testing.assert_close(full_loss, sparse_loss)
    for one, other in zip(full.parameters(), sparse.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    logits = sparse(input_ids=batch["input_ids"]).logits
    assert logits.shape == (*batch["labels"].shape, len(PIECES))
    count = int((batch["labels"] != IGNORE).sum())
    halves = [
        {name: column[k : k + 3] for name, column in batch.items()} for k in (0, 3)
    ]
    losses = [
        sparse(**half, num_items_in_batch=count).loss.item() for half in halves
    ]
    assert sum(losses) == pytest.approx(full_loss.item(), rel=1e-5)


@pytest.mark.parametrize("count", [None, 0, torch.tensor(0)])
def test_a_batch_without_a_question_has_no_nan(
    tokenizer: PreTrainedTokenizerFast, count: Any
) -> None:
    rows = MaskedLines(LINES, tokenizer, Masking(0.0))
    loss = SparseMaskedLM(small_config())(
        **rows.collate([rows[0]]), num_items_in_batch=count
    ).loss
    loss.backward()
    assert loss == 0


GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_scores_are_those_of_the_tokens_asked(
    tokenizer: PreTrainedTokenizerFast, device: str
) -> None:
    torch.manual_seed(0)
    model = SparseMaskedLM(small_config()).to(device)
    rows = MaskedLines(LINES, tokenizer, Masking(0.7), seed=2)
    small = score(model, rows, batch=2)
    large = score(model, rows, batch=64)
    for name in small:
        assert np.allclose(small[name], large[name], atol=1e-5)
    labels = np.concatenate([rows[row]["labels"] for row in range(6)])
    assert small["label"].tolist() == labels[labels != IGNORE].tolist()
    batch = rows.collate([rows[row] for row in range(6)])
    assert small["loss"].mean() == pytest.approx(
        model.cpu()(**batch).loss.item(), rel=1e-4
    )


# the program --------------------------------------------------------------------------------------


def flags_of(
    folder: Path, tokenizer: PreTrainedTokenizerFast, **more: Any
) -> list[str]:
    """The command line of a small run, whose files are written first."""
    tokenizer.save_pretrained(folder / "start")
    small_config().save_pretrained(folder / "start")
    (folder / "lines.txt").write_text("\n".join(LINES * 4))
    options = {
        "train_file": folder / "lines.txt",
        "validation_file": folder / "lines.txt",
        "from_scratch": True,
        "model_name_or_path": folder / "start",
        "output_dir": folder / "out",
        "use_cpu": True,
        "max_steps": 6,
        "save_steps": 2,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
        "per_device_train_batch_size": 8,
        **more,
    }
    return [
        part
        for name, value in options.items()
        for part in (f"--{name}", str(value))
    ]


def arguments_of(
    folder: Path, tokenizer: PreTrainedTokenizerFast, **more: Any
) -> tuple:
    parser = HfArgumentParser((TextArguments, TrainingArguments))
    return parser.parse_args_into_dataclasses(flags_of(folder, tokenizer, **more))


@pytest.mark.parametrize(
    "flag, value",
    [
        ("mlm_probability", -0.1),
        ("mlm_probability", 1.5),
        ("mlm_probability", float("nan")),
        ("max_seq_length", 0),
        ("max_steps", 0),
        ("max_steps", -1),
    ],
)
def test_a_number_outside_its_range_is_refused_by_its_flag(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, flag: str, value: float
) -> None:
    with pytest.raises(CourseError, match=f"--{flag}"):
        run(*arguments_of(tmp_path, tokenizer, **{flag: value}))


@pytest.mark.parametrize("flag", ["train_file", "validation_file"])
@pytest.mark.parametrize("exists", [True, False])
def test_a_file_without_lines_is_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, flag: str, exists: bool
) -> None:
    path = tmp_path / "nothing.txt"
    if exists:
        path.touch()
    with pytest.raises(CourseError, match=r"nothing\.txt"):
        run(*arguments_of(tmp_path, tokenizer, **{flag: path}))


def test_a_start_that_is_not_here_is_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(CourseError, match="(?s)--model_name_or_path.*/nowhere"):
        run(*arguments_of(tmp_path, tokenizer, model_name_or_path="/nowhere"))


class Stop(TrainerCallback):
    def on_step_begin(
        self, args: Any, state: Any, control: Any, **rest: Any
    ) -> None:
        if state.global_step == 3:
            raise KeyboardInterrupt


def test_a_run_that_was_stopped_ends_as_one_that_was_not(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    uninterrupted = run(*arguments_of(tmp_path / "a", tokenizer))
    assert len(uninterrupted["losses"]) == 6
    stopped = arguments_of(tmp_path / "b", tokenizer)
    with pytest.raises(KeyboardInterrupt):
        run(*stopped, callbacks=[Stop()])
    out = tmp_path / "b" / "out"
    assert not (out / "metrics.json").exists()
    # A process killed while it saved leaves such a folder, and a reader may leave the other.
    (out / "checkpoint-4").mkdir()
    (out / "checkpoint-4" / "model.safetensors").write_bytes(b"the first bytes")
    (out / "checkpoint-copy").mkdir()
    (out / "checkpoint-copy" / "trainer_state.json").write_text("{}")
    assert run(*arguments_of(tmp_path / "b", tokenizer)) == uninterrupted


def test_a_step_in_pieces_has_the_losses_of_one_piece(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    one = run(*arguments_of(tmp_path / "a", tokenizer))
    pieces = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    four = run(*arguments_of(tmp_path / "b", tokenizer, **pieces))
    assert four["rows a step"] == one["rows a step"] == 8
    assert list(four["losses"].values()) == pytest.approx(
        list(one["losses"].values()), abs=1e-5
    )


def test_weights_are_saved_before_they_are_measured(
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*rest: Any) -> None:
        raise RuntimeError("while measuring")

    monkeypatch.setattr("stages.mlm.score", fail)
    with pytest.raises(RuntimeError, match="while measuring"):
        run(*arguments_of(tmp_path, tokenizer))
    assert (tmp_path / "out" / "model.safetensors").exists()


class Listen(TrainerCallback):
    def __init__(self) -> None:
        self.losses: dict[int, float] = {}

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Any, **rest: Any
    ) -> None:
        self.losses[state.global_step] = metrics["eval_loss"]


def test_the_flags_of_old_pages_run(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    listener = Listen()
    flags = {
        "do_train": True,
        "do_eval": True,
        "eval_strategy": "steps",
        "eval_steps": 3,
    }
    metrics = run(*arguments_of(tmp_path, tokenizer, **flags), callbacks=[listener])
    assert list(listener.losses) == [3, 6]
    # The Trainer's is a mean of batches' means.
    assert listener.losses[6] == pytest.approx(metrics["validation loss"], abs=0.3)


@pytest.mark.slow
def test_two_processes_have_the_losses_of_one(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    one = run(*arguments_of(tmp_path / "one", tokenizer))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", "2", "-m", "stages.mlm"]
    command += flags_of(tmp_path / "two", tokenizer, per_device_train_batch_size=4)
    run_program(command)
    two = json.loads((tmp_path / "two" / "out" / "metrics.json").read_text())
    assert two["world"] == 2
    losses = list(two["losses"].values())
    assert losses == pytest.approx(list(one["losses"].values()), abs=1e-4)
