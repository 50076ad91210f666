"""Floor 3: masked language modelling on lines of text: what the classic `run_mlm.py` did, today.

    torchrun --standalone --nproc_per_node 2 -m stages.mlm --train_file a.txt \\
        --validation_file b.txt --model_name_or_path IN --output_dir OUT --max_steps 100

The number of a row says which line it is and which of its tokens are hidden. So any number of
processes sees the same rows, and a run that was stopped goes on with the row it would have seen.
"""
from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import (AutoConfig, AutoTokenizer, BertForMaskedLM, HfArgumentParser,
                          PrinterCallback, Trainer, TrainingArguments)
from transformers.modeling_outputs import MaskedLMOutput
from transformers.utils import logging

from utils.errors import CourseError
from utils.artifacts import write_json

IGNORE = -100  # the label of a place that is not asked


@dataclass
class TextArguments:
    """What `run_mlm` takes besides the arguments of the Trainer."""

    train_file: str = field(metadata={"help": "UTF-8 text, a row a line"})
    validation_file: str = field(metadata={"help": "the same, of text that is not trained on"})
    model_name_or_path: str = field(metadata={"help": "a folder with a tokenizer, and weights"})
    from_scratch: bool = field(default=False, metadata={"help": "take its configuration only"})
    max_seq_length: int = 32
    mlm_probability: float = 0.15
    whole_word: bool = False


@dataclass(frozen=True)
class Masking:
    """Which tokens are asked, and what stands in their place: a mask, another token, or itself."""

    share: float = 0.15
    hide: float = 0.8
    swap: float = 0.1
    whole_words: bool = False

    def apply(self, ids: np.ndarray, words: np.ndarray, mask: int, size: int,
              noise: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and labels; `words` numbers the word of each token, -1 where nothing may be asked.

        >>> ids, words = np.array([2, 7, 8, 3]), np.array([-1, 0, 0, -1])
        >>> [a.tolist() for a in Masking(1, 1).apply(ids, words, 4, 9, np.random.default_rng(0))]
        [[2, 4, 4, 3], [-100, 7, 8, -100]]
        """
        units = words if self.whole_words else np.arange(len(ids))
        drawn, fate = noise.random((2, len(ids)))  # one draw a unit: no more than tokens
        chosen = (drawn[units] < self.share) & (words >= 0)
        fate = fate[units]
        inputs = np.where(chosen & (fate < self.hide), mask, ids)
        swapped = chosen & (fate >= self.hide) & (fate < self.hide + self.swap)
        return (np.where(swapped, noise.integers(size, size=len(ids)), inputs),
                np.where(chosen, ids, IGNORE))


class MaskedLines(Dataset):
    """Lines as masked rows. Row k is always the same row, whoever asks for it, and when."""

    def __init__(self, lines: list[str], tokenizer: Any, masking: Masking, seed: int = 0,
                 length: int = 32, rows: int = 0) -> None:
        coded = tokenizer(lines, truncation=True, max_length=length)
        self.ids = [np.array(ids) for ids in coded["input_ids"]]
        self.words = [np.array([-1 if w is None else w for w in coded.word_ids(i)])
                      for i in range(len(lines))]
        self.tokenizer, self.masking, self.seed = tokenizer, masking, seed
        self.rows = rows or len(lines)

    @functools.lru_cache(4)
    def order(self, epoch: int) -> np.ndarray:
        """The lines of an epoch, shuffled."""
        return np.random.default_rng([self.seed, epoch]).permutation(len(self.ids))

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        if not 0 <= row < self.rows:
            raise IndexError(row)
        line = self.order(row // len(self.ids))[row % len(self.ids)]
        noise = np.random.default_rng([self.seed, 1, row])
        mask, size = self.tokenizer.mask_token_id, len(self.tokenizer)
        found = self.masking.apply(self.ids[line], self.words[line], mask, size, noise)
        return dict(zip(("input_ids", "labels"), found))

    def collate(self, rows: list[dict[str, np.ndarray]]) -> dict[str, torch.Tensor]:
        """Rows padded to the longest of them."""
        ids, labels = ([torch.from_numpy(row[name]) for row in rows]
                       for name in ("input_ids", "labels"))
        pad = functools.partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
        return {"input_ids": pad(ids, padding_value=self.tokenizer.pad_token_id),
                "attention_mask": pad([torch.ones_like(row) for row in ids]),
                "labels": pad(labels, padding_value=IGNORE)}


class SparseMaskedLM(BertForMaskedLM):
    """BERT whose head works at the asked places only; a loss that adds up over processes."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None,
                labels: torch.Tensor | None = None, num_items_in_batch: Any = None,
                **given: Any) -> MaskedLMOutput:
        """Scores, a row for each asked place; without labels, those of all places."""
        if labels is None:
            return super().forward(input_ids, attention_mask=attention_mask, **given)
        states, asked = self.bert(input_ids, attention_mask=attention_mask)[0], labels != IGNORE
        scores = self.cls(states[asked])
        total = F.cross_entropy(scores, labels[asked], reduction="sum")
        count = torch.as_tensor(asked.sum() if num_items_in_batch is None else num_items_in_batch)
        return MaskedLMOutput(loss=total / count.clamp(min=1), logits=scores)


@torch.no_grad()
def score(model: SparseMaskedLM, rows: MaskedLines, batch: int = 64) -> dict[str, np.ndarray]:
    """For each asked token: its label, its loss in nats, and whether the best guess is right."""
    model.eval()
    found = []
    for start in range(0, len(rows), batch):
        part = rows.collate([rows[k] for k in range(start, min(start + batch, len(rows)))])
        part = {name: values.to(model.device) for name, values in part.items()}
        scores, labels = model(**part).logits, part["labels"][part["labels"] != IGNORE]
        losses = F.cross_entropy(scores, labels, reduction="none")
        found.append((labels, losses, scores.argmax(-1) == labels))
    return {name: torch.cat(parts).cpu().numpy()
            for name, parts in zip(("label", "loss", "right"), zip(*found))}


def run(text: TextArguments, training: TrainingArguments, callbacks: Any = None) -> dict[str, Any]:
    """Train, going on from the last whole checkpoint in `output_dir`; what `metrics.json` says."""
    if training.max_steps < 1:
        raise CourseError("say --max_steps N: rows are counted here, not epochs")
    out = Path(training.output_dir)
    saved = [int(state.parent.name[11:]) for state in out.glob("checkpoint-*/trainer_state.json")]
    start = text.model_name_or_path
    tokenizer = AutoTokenizer.from_pretrained(start)
    torch.manual_seed(training.seed)  # the same first weights in every process
    model = (SparseMaskedLM(AutoConfig.from_pretrained(start)) if text.from_scratch else
             SparseMaskedLM.from_pretrained(start, dtype=torch.float32))
    masking = Masking(text.mlm_probability, whole_words=text.whole_word)
    step = training.train_batch_size * training.world_size * training.gradient_accumulation_steps
    train, held_out = (
        MaskedLines(Path(name).read_text(encoding="utf-8").splitlines(), tokenizer, masking,
                    training.seed, text.max_seq_length, rows) for name, rows in (
                        (text.train_file, step * training.max_steps), (text.validation_file, 0)))
    trainer = Trainer(model, training, train.collate, train_dataset=train, eval_dataset=held_out,
                      processing_class=tokenizer, callbacks=callbacks)
    trainer.remove_callback(PrinterCallback)  # metrics.json says it
    trainer.train(resume_from_checkpoint=str(out / f"checkpoint-{max(saved)}") if saved else None)
    trainer.save_model()  # before anything else can fail
    losses = {log["step"]: log["loss"] for log in trainer.state.log_history if "loss" in log}
    found = score(model, held_out)
    metrics = {"world": training.world_size, "rows a step": step, "losses": losses,
               "validation loss": float(found["loss"].mean()),
               "validation accuracy": float(found["right"].mean())}
    if trainer.is_world_process_zero():
        write_json(out / "metrics.json", metrics)
    return metrics


if __name__ == "__main__":
    logging.set_verbosity_error()
    run(*HfArgumentParser((TextArguments, TrainingArguments)).parse_args_into_dataclasses())
