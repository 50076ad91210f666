"""Masked language modelling on lines of text: what the classic `run_mlm.py` did, today.

    torchrun --standalone --nproc_per_node 2 -m stages.mlm --train_file a.txt \\
        --validation_file b.txt --model_name_or_path IN --output_dir OUT --max_steps 100

The number of a row says which line it is and which of its tokens are hidden. So any number of
processes sees the same rows, and a run that was stopped goes on with the row it would have seen.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, BertForMaskedLM, Trainer, TrainingArguments
from transformers.modeling_outputs import MaskedLMOutput

from utils.artifacts import write_json
from utils.errors import CourseError

IGNORE = -100  # the label of a place that is not asked


@dataclass
class TextArguments:
    """What `run_mlm` takes besides the arguments of the Trainer."""

    train_file: str  # UTF-8 text, a row a line
    validation_file: str  # the same, of text that is not trained on
    model_name_or_path: str  # a folder with a tokenizer, and weights
    from_scratch: bool = False  # take its configuration only
    max_seq_length: int = 32
    mlm_probability: float = 0.15
    whole_word: bool = False

    def __post_init__(self) -> None:
        place = f"--mlm_probability {self.mlm_probability}"
        place += f" --max_seq_length {self.max_seq_length}"
        if not 0 <= self.mlm_probability <= 1 or self.max_seq_length < 1:
            fix = "write a share from 0 to 1, and a length of at least 1"
            raise CourseError("a number is outside its range", place, fix)


@dataclass(frozen=True)
class Masking:
    """Which tokens are asked, and what stands in their place: a mask, another token, or itself."""

    share: float = 0.15
    hide: float = 0.8
    swap: float = 0.1
    whole_words: bool = False

    def apply(
        self, ids: np.ndarray, words: np.ndarray, mask: int, size: int, noise: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and labels; `words` numbers the word of each token, -1 where nothing may be asked.

        >>> ids, words = np.array([2, 7, 8, 3]), np.array([-1, 0, 0, -1])
        >>> [a.tolist() for a in Masking(1, 1, 0).apply(ids, words, 4, 9, np.random.default_rng(0))]
        [[2, 4, 4, 3], [-100, 7, 8, -100]]
        """
        drawn, fate = noise.random((2, len(ids)))
        if self.whole_words:
            # The tokens of a word share the draw of that word's number.
            drawn, fate = drawn[words], fate[words]
        asked = (drawn < self.share) & (words >= 0)
        hidden = asked & (fate < self.hide)
        swapped = asked & ~hidden & (fate < self.hide + self.swap)
        inputs = np.where(hidden, mask, ids)
        inputs = np.where(swapped, noise.integers(size, size=len(ids)), inputs)
        return inputs, np.where(asked, ids, IGNORE)


@dataclass(eq=False)
class MaskedLines(torch.utils.data.Dataset):
    """Lines as masked rows. Row k is always the same row, whoever asks for it, and when."""

    lines: list[str]
    tokenizer: Any
    masking: Masking
    seed: int = 0
    length: int = 32  # tokens of a line; the rest is cut
    rows: int = 0  # 0: one for each line

    def __post_init__(self) -> None:
        cut = {"truncation": True, "max_length": self.length}
        encoded = self.tokenizer(self.lines, **cut)
        self.ids = [np.array(ids) for ids in encoded["input_ids"]]
        # The number of each token's word; -1 for special tokens, whose word is None.
        words = [encoded.word_ids(line) for line in range(len(self.lines))]
        self.words = [
            np.array([-1 if n is None else n for n in line]) for line in words
        ]
        self.rows = self.rows or len(self.lines)

    def order(self, epoch: int) -> np.ndarray:
        """The lines of an epoch, shuffled."""
        return shuffle(len(self.ids), self.seed, epoch)

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        if not 0 <= row < self.rows:
            raise IndexError(row)
        epoch, place = divmod(row, len(self.ids))
        line = self.order(epoch)[place]
        noise = np.random.default_rng([self.seed, 1, row])
        vocabulary = self.tokenizer.mask_token_id, len(self.tokenizer)
        inputs, labels = self.masking.apply(
            self.ids[line], self.words[line], *vocabulary, noise
        )
        return {"input_ids": inputs, "labels": labels}

    def collate(self, rows: list[dict[str, np.ndarray]]) -> dict[str, torch.Tensor]:
        """Rows padded to the longest of them."""
        pad = transformers.DataCollatorForTokenClassification(self.tokenizer)
        return pad(rows)


@functools.lru_cache(8)
def shuffle(count: int, seed: int, epoch: int) -> np.ndarray:
    """The numbers below `count` in the order of an epoch."""
    noise = np.random.default_rng([seed, epoch])
    return noise.permutation(count)


class SparseMaskedLM(BertForMaskedLM):
    """BERT whose head works at the asked places only; a loss that adds up over processes."""

    def forward(
        self,
        input_ids: Any,
        labels: Any = None,
        num_items_in_batch: Any = None,
        **rest: Any,
    ) -> MaskedLMOutput:
        """Logits, a row for each asked place; without labels, those of all places."""
        if labels is None:
            return super().forward(input_ids, **rest)
        states = self.bert(input_ids, **rest)[0]
        asked = labels != IGNORE
        logits = self.cls(states[asked])
        total = F.cross_entropy(logits, labels[asked], reduction="sum")
        count = asked.sum() if num_items_in_batch is None else num_items_in_batch
        return MaskedLMOutput(loss=total / max(count, 1), logits=logits)


@torch.no_grad()
def score(
    model: SparseMaskedLM, rows: MaskedLines, batch: int = 64
) -> dict[str, np.ndarray]:
    """For each asked token: its label, its loss in nats, and whether the best guess is right."""
    model.eval()
    parts = []
    # A generator of its own: scoring must not move the noise of a training.
    own = torch.Generator()
    for columns in DataLoader(rows, batch, collate_fn=rows.collate, generator=own):
        columns = {
            name: column.to(model.device) for name, column in columns.items()
        }
        logits = model(**columns).logits
        label = columns["labels"][columns["labels"] != IGNORE]
        loss = F.cross_entropy(logits, label, reduction="none")
        right = logits.argmax(-1) == label
        parts.append((label.cpu(), loss.cpu(), right.cpu()))
    joined = [torch.cat(tensors).numpy() for tensors in zip(*parts)]
    return dict(zip(("label", "loss", "right"), joined))


def run(
    text: TextArguments, training: TrainingArguments, callbacks: Any = None
) -> dict[str, Any]:
    """Train, going on from the last whole checkpoint in `output_dir`; what `metrics.json` says."""
    if training.max_steps < 1:
        what = "rows are counted here, not epochs"
        raise CourseError(what, "--max_steps", "say --max_steps N")
    model = make_model(text, training.seed)
    pieces = training.world_size * training.gradient_accumulation_steps
    step = training.train_batch_size * pieces
    tokenizer = AutoTokenizer.from_pretrained(text.model_name_or_path)
    masking = Masking(text.mlm_probability, whole_words=text.whole_word)
    how = tokenizer, masking, training.seed, text.max_seq_length
    train = MaskedLines(
        read_lines(text.train_file), *how, step * training.max_steps
    )
    held_out = MaskedLines(read_lines(text.validation_file), *how)
    trainer = Trainer(
        model,
        training,
        train.collate,
        train,
        held_out,
        tokenizer,
        callbacks=callbacks,
    )
    trainer.remove_callback(transformers.PrinterCallback)  # metrics.json says it
    folder = Path(str(training.output_dir))
    trainer.train(resume_from_checkpoint=last_checkpoint(folder))
    trainer.save_model()  # before anything else can fail
    scores = score(model, held_out)
    logs = [log for log in trainer.state.log_history if "loss" in log]
    metrics = {
        "world": training.world_size,
        "rows a step": step,
        "losses": {log["step"]: log["loss"] for log in logs},
        "validation loss": float(scores["loss"].mean()),
        "validation accuracy": float(scores["right"].mean()),
    }
    if trainer.is_world_process_zero():
        write_json(folder / "metrics.json", metrics)
    return metrics


def make_model(text: TextArguments, seed: int) -> SparseMaskedLM:
    """The model that a run begins with, the same one in every process."""
    folder = text.model_name_or_path
    if not Path(folder).is_dir():
        place = f"--model_name_or_path {folder}"
        raise CourseError("there is no such folder", place, "write that of a model")
    torch.manual_seed(seed)
    if text.from_scratch:
        return SparseMaskedLM(transformers.AutoConfig.from_pretrained(folder))
    return SparseMaskedLM.from_pretrained(folder, dtype=torch.float32)


def read_lines(file: str) -> list[str]:
    """The lines of a file, which has some."""
    path = Path(file)
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    if not lines:
        what = "this file has no lines, or is not there"
        raise CourseError(what, path, "write a row a line")
    return lines


def last_checkpoint(folder: Path) -> str | None:
    """The newest checkpoint whose `trainer_state.json` is there, what the first process writes last.

    Other processes may still be writing their random state then.
    """
    saved = {}
    for state in folder.glob("checkpoint-[0-9]*/trainer_state.json"):
        path = state.parent
        number = path.name.split("-")[1]
        saved[int(number)] = str(path)
    if not saved:
        return None
    return saved[max(saved)]


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    kinds: Any = (TextArguments, TrainingArguments)
    run(*transformers.HfArgumentParser(kinds).parse_args_into_dataclasses())
