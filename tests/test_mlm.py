"""Masked lines: the same row for everybody, the right share of questions, a loss that adds up."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (BertConfig, BertForMaskedLM, HfArgumentParser, PreTrainedTokenizerFast, TrainerCallback,
                          TrainingArguments)

from utils.errors import CourseError
from stages.mlm import (IGNORE, MaskedLines, Masking, run, score, SparseMaskedLM,
                        TextArguments)

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "read", "##s", "a", "file", "write", "##r", "name"]
LINES = ["reads a file", "writer reads a name", "a name", "write a file name", "read", "files reads writer"]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    bare = Tokenizer(WordPiece({piece: i for i, piece in enumerate(PIECES)}, unk_token="[UNK]"))
    bare.pre_tokenizer = Whitespace()
    bare.post_processor = TemplateProcessing("[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    return PreTrainedTokenizerFast(tokenizer_object=bare, **names)


def config() -> BertConfig:
    return BertConfig(vocab_size=len(PIECES), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                      intermediate_size=32, max_position_embeddings=16, hidden_dropout_prob=0,
                      attention_probs_dropout_prob=0)


def masked(masking: Masking, words: np.ndarray, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ids = np.random.default_rng(9).integers(5, 1000, len(words))
    return ids, *masking.apply(ids, words, 4, 1000, np.random.default_rng(seed))


def test_shares_are_those_ordered_and_labels_are_the_truth() -> None:
    words = np.arange(20_000) - 10  # the first ten may not be asked
    words[:10] = -1
    ids, inputs, labels = masked(Masking(), words)
    asked = labels != IGNORE
    assert not asked[:10].any() and (labels[asked] == ids[asked]).all()
    assert (inputs[~asked] == ids[~asked]).all()
    assert asked.mean() == pytest.approx(0.15, abs=0.01)
    assert (inputs[asked] == 4).mean() == pytest.approx(0.8, abs=0.03)
    assert (inputs[asked] == ids[asked]).mean() == pytest.approx(0.1, abs=0.03)


def test_whole_words_are_asked_as_one_and_not_more_often() -> None:
    words = np.repeat(np.arange(4_000), np.arange(4_000) % 4 + 1)
    _, inputs, labels = masked(Masking(swap=0, whole_words=True), words)
    for seen in (labels != IGNORE, inputs == 4):
        counts = np.bincount(words[seen], minlength=4_000)
        assert set(counts / np.bincount(words)) == {0.0, 1.0}
    assert (labels != IGNORE).mean() == pytest.approx(0.15, abs=0.02)


@pytest.mark.parametrize("masking, share", [(Masking(1, 1, 0), 1), (Masking(1, 0, 0), 0), (Masking(0), 0)])
def test_the_extremes_leave_nothing_to_chance(masking: Masking, share: float) -> None:
    _, inputs, labels = masked(masking, np.arange(50))
    assert (inputs == 4).mean() == share
    assert (labels != IGNORE).all() == (masking.share == 1)


def test_a_row_is_the_same_whoever_asks_and_another_in_the_next_epoch(tokenizer) -> None:
    one, two = (MaskedLines(LINES, tokenizer, Masking(0.5), seed=3, rows=60) for _ in range(2))
    backwards = {k: two[k] for k in reversed(range(60))}
    for k in range(60):
        assert all(np.array_equal(one[k][name], backwards[k][name]) for name in ("input_ids", "labels"))
    lines = [one.order(epoch).tolist() for epoch in range(10)]
    assert all(sorted(line) == list(range(6)) for line in lines) and len(set(map(tuple, lines))) > 5
    with pytest.raises(IndexError):
        one[60]


def test_padding_is_neither_seen_nor_asked(tokenizer) -> None:
    rows = MaskedLines(LINES, tokenizer, Masking(1, 1, 0), seed=1)
    batch = rows.collate([rows[k] for k in range(6)])
    padding = batch["attention_mask"] == 0
    assert padding.any() and (batch["labels"][padding] == IGNORE).all()
    assert (batch["input_ids"][padding] == 0).all() and (batch["input_ids"][~padding] != 0).all()


def test_the_sparse_head_has_the_loss_and_gradients_of_the_full_one(tokenizer) -> None:
    torch.manual_seed(0)
    full, sparse = BertForMaskedLM(config()), SparseMaskedLM(config())
    sparse.load_state_dict(full.state_dict())
    rows = MaskedLines(LINES, tokenizer, Masking(0.5), seed=1)
    batch = rows.collate([rows[k] for k in range(6)])
    for model in (full, sparse):
        model.loss = model(**batch).loss
        model.loss.backward()
    torch.testing.assert_close(full.loss, sparse.loss)
    for one, other in zip(full.parameters(), sparse.parameters()):
        torch.testing.assert_close(one.grad, other.grad)
    assert sparse(input_ids=batch["input_ids"]).logits.shape == (*batch["labels"].shape, len(PIECES))
    count = int((batch["labels"] != IGNORE).sum())
    halves = [{name: part[k:k + 3] for name, part in batch.items()} for k in (0, 3)]
    assert sum(sparse(**half, num_items_in_batch=count).loss.item() for half in halves) == pytest.approx(
        full.loss.item(), rel=1e-5)


@pytest.mark.parametrize("count", [None, 0, torch.tensor(0)])
def test_a_batch_without_a_question_has_no_nan(tokenizer, count) -> None:
    rows = MaskedLines(LINES, tokenizer, Masking(0.0))
    loss = SparseMaskedLM(config())(**rows.collate([rows[0]]), num_items_in_batch=count).loss
    loss.backward()
    assert loss == 0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU"))])
def test_scores_are_those_of_the_tokens_asked(tokenizer, device: str) -> None:
    torch.manual_seed(0)
    model = SparseMaskedLM(config()).to(device)
    rows = MaskedLines(LINES, tokenizer, Masking(0.7), seed=2)
    small, large = (score(model, rows, batch) for batch in (2, 64))
    assert all(np.allclose(small[name], large[name], atol=1e-5) for name in small)
    labels = np.concatenate([rows[k]["labels"] for k in range(6)])
    assert small["label"].tolist() == labels[labels != IGNORE].tolist()
    batch = rows.collate([rows[k] for k in range(6)])
    assert small["loss"].mean() == pytest.approx(model.cpu()(**batch).loss.item(), rel=1e-4)


def settings(folder: Path, tokenizer, **more) -> tuple:
    tokenizer.save_pretrained(folder / "start")
    config().save_pretrained(folder / "start")
    (folder / "lines.txt").write_text("\n".join(LINES * 4))
    given = {"train_file": folder / "lines.txt", "validation_file": folder / "lines.txt", "from_scratch": True,
             "model_name_or_path": folder / "start", "output_dir": folder / "out", "use_cpu": True,
             "max_steps": 6, "save_steps": 2, "logging_steps": 1, "report_to": "none", "disable_tqdm": True,
             "train_sampling_strategy": "sequential", "per_device_train_batch_size": 8, **more}
    flags = [part for name, value in given.items() for part in (f"--{name}", str(value))]
    return HfArgumentParser((TextArguments, TrainingArguments)).parse_args_into_dataclasses(flags)


class Stop(TrainerCallback):
    def on_step_begin(self, args, state, control, **rest) -> None:
        if state.global_step == 3:
            raise KeyboardInterrupt


def test_a_run_that_was_stopped_ends_as_one_that_was_not(tmp_path: Path, tokenizer) -> None:
    whole = run(*settings(tmp_path / "a", tokenizer))
    with pytest.raises(KeyboardInterrupt):
        run(*settings(tmp_path / "b", tokenizer), callbacks=[Stop()])
    assert not (tmp_path / "b" / "out" / "metrics.json").exists()
    half = tmp_path / "b" / "out" / "checkpoint-4"  # killed while it was saved
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"the first bytes")
    assert run(*settings(tmp_path / "b", tokenizer)) == whole and len(whole["losses"]) == 6
    pieces = run(*settings(tmp_path / "c", tokenizer, per_device_train_batch_size=2, gradient_accumulation_steps=4))
    assert list(pieces["losses"].values()) == pytest.approx(list(whole["losses"].values()), abs=1e-5)


def test_weights_are_saved_before_they_are_measured(tmp_path: Path, tokenizer, monkeypatch) -> None:
    def broken(*given) -> None:
        raise RuntimeError("while measuring")

    monkeypatch.setattr("stages.mlm.score", broken)
    with pytest.raises(RuntimeError, match="while measuring"):
        run(*settings(tmp_path, tokenizer))
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_the_flags_of_old_pages_run(tmp_path: Path, tokenizer) -> None:
    said = []

    class Listen(TrainerCallback):
        def on_evaluate(self, args, state, control, metrics, **rest) -> None:
            said.append((state.global_step, metrics["eval_loss"]))

    given = settings(tmp_path, tokenizer, do_train=True, do_eval=True, eval_strategy="steps", eval_steps=3)
    metrics = run(*given, callbacks=[Listen()])
    assert [step for step, _ in said] == [3, 6]
    assert said[-1][1] == pytest.approx(metrics["validation loss"], abs=0.3)  # a mean of batches' means
    with pytest.raises(CourseError, match="--max_steps"):
        run(*settings(tmp_path, tokenizer, max_steps=-1))
