"""Masked language modelling on lines of text: what the classic `run_mlm.py` did, today.

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
import transformers
from transformers import (
    AutoConfig,
    AutoTokenizer,
    BertForMaskedLM,
    Trainer,
    TrainingArguments,
)
from transformers.modeling_outputs import MaskedLMOutput

from utils.artifacts import write_json
from utils.errors import CourseError

IGNORE = -100  # the label of a place that is not asked


@dataclass
class TextArguments:
    """What `run_mlm` takes besides the arguments of the Trainer."""

    train_file: str = field(metadata={"help": "UTF-8 text, a row a line"})
    validation_file: str = field(
        metadata={"help": "the same, of text that is not trained on"}
    )
    model_name_or_path: str = field(
        metadata={"help": "a folder with a tokenizer, and weights"}
    )
    from_scratch: bool = field(
        default=False, metadata={"help": "take its configuration only"}
    )
    max_seq_length: int = 32
    mlm_probability: float = 0.15
    whole_word: bool = False

    def __post_init__(self) -> None:
        require("--mlm_probability", self.mlm_probability, 0, 1)
        require("--max_seq_length", self.max_seq_length, 1)


def require(
    name: str, value: float, least: float, most: float = float("inf")
) -> None:
    """Refuse a number outside its range."""
    if not least <= value <= most:
        raise CourseError(
            f"{name} is {value}", fix=f"write a number from {least} to {most}"
        )


@dataclass(frozen=True)
class Masking:
    """Which tokens are asked, and what stands in their place: a mask, another token, or itself."""

    share: float = 0.15
    hide: float = 0.8
    swap: float = 0.1
    whole_words: bool = False

    def apply(
        self,
        ids: np.ndarray,
        words: np.ndarray,
        mask: int,
        size: int,
        noise: np.random.Generator,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and labels; `words` numbers the word of each token, -1 where nothing may be asked.

        >>> ids, words = np.array([2, 7, 8, 3]), np.array([-1, 0, 0, -1])
        >>> [a.tolist() for a in Masking(1, 1, 0).apply(ids, words, 4, 9, np.random.default_rng(0))]
        [[2, 4, 4, 3], [-100, 7, 8, -100]]
        """
        drawn, fate = noise.random((2, len(ids)))
        if self.whole_words:
            # The tokens of a word share the draw of that word's number.
            drawn = drawn[words]
            fate = fate[words]
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
        encoded = self.tokenizer(
            self.lines, truncation=True, max_length=self.length
        )
        self.ids = [np.array(ids) for ids in encoded["input_ids"]]
        self.words = [
            number_words(encoded.word_ids(line)) for line in range(len(self.lines))
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
        mask = self.tokenizer.mask_token_id
        size = len(self.tokenizer)
        inputs, labels = self.masking.apply(
            self.ids[line], self.words[line], mask, size, noise
        )
        return {"input_ids": inputs, "labels": labels}

    def collate(self, rows: list[dict[str, np.ndarray]]) -> dict[str, torch.Tensor]:
        """Rows padded to the longest of them."""
        return transformers.DataCollatorForTokenClassification(self.tokenizer)(rows)


@functools.lru_cache(8)
def shuffle(count: int, seed: int, epoch: int) -> np.ndarray:
    """The numbers below `count` in the order of an epoch."""
    return np.random.default_rng([seed, epoch]).permutation(count)


def number_words(words: list[int | None]) -> np.ndarray:
    """The number of each token's word; -1 for special tokens."""
    return np.array([-1 if word is None else word for word in words])


class SparseMaskedLM(BertForMaskedLM):
    """BERT whose head works at the asked places only; a loss that adds up over processes."""

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: Any = None,
        **options: Any,
    ) -> MaskedLMOutput:
        """Logits, a row for each asked place; without labels, those of all places."""
        if labels is None:
            return super().forward(
                input_ids, attention_mask=attention_mask, **options
            )
        states = self.bert(input_ids, attention_mask=attention_mask, **options)[0]
        asked = labels != IGNORE
        logits = self.cls(states[asked])
        total = F.cross_entropy(logits, labels[asked], reduction="sum")
        count = (
            asked.sum()
            if num_items_in_batch is None
            else torch.as_tensor(num_items_in_batch)
        )
        return MaskedLMOutput(loss=total / count.clamp(min=1), logits=logits)


@torch.no_grad()
def score(
    model: SparseMaskedLM, rows: MaskedLines, batch: int = 64
) -> dict[str, np.ndarray]:
    """For each asked token: its label, its loss in nats, and whether the best guess is right."""
    model.eval()
    parts: dict[str, list[torch.Tensor]] = {"label": [], "loss": [], "right": []}
    for start in range(0, len(rows), batch):
        numbers = range(start, min(start + batch, len(rows)))
        columns = rows.collate([rows[number] for number in numbers])
        columns = {
            name: column.to(model.device) for name, column in columns.items()
        }
        logits = model(**columns).logits
        labels = columns["labels"]
        labels = labels[labels != IGNORE]
        parts["label"].append(labels)
        parts["loss"].append(F.cross_entropy(logits, labels, reduction="none"))
        parts["right"].append(logits.argmax(-1) == labels)
    return {
        name: torch.cat(tensors).cpu().numpy() for name, tensors in parts.items()
    }


def run(
    text: TextArguments, training: TrainingArguments, callbacks: Any = None
) -> dict[str, Any]:
    """Train, going on from the last whole checkpoint in `output_dir`; what `metrics.json` says."""
    if training.max_steps < 1:
        raise CourseError(
            "rows are counted here, not epochs", "--max_steps", "say --max_steps N"
        )
    model = make_model(text, training.seed)
    tokenizer = AutoTokenizer.from_pretrained(text.model_name_or_path)
    step = (
        training.train_batch_size
        * training.world_size
        * training.gradient_accumulation_steps
    )
    train = mask_file(
        text.train_file, text, tokenizer, training.seed, step * training.max_steps
    )
    held_out = mask_file(text.validation_file, text, tokenizer, training.seed)
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
    metrics = {
        "world": training.world_size,
        "rows a step": step,
        "losses": {
            log["step"]: log["loss"]
            for log in trainer.state.log_history
            if "loss" in log
        },
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
        raise CourseError(
            "there is no such folder", place, "write the folder of a model"
        )
    torch.manual_seed(seed)
    if text.from_scratch:
        return SparseMaskedLM(AutoConfig.from_pretrained(folder))
    return SparseMaskedLM.from_pretrained(folder, dtype=torch.float32)


def mask_file(
    file: str, text: TextArguments, tokenizer: Any, seed: int, rows: int = 0
) -> MaskedLines:
    """The lines of a file as masked rows."""
    path = Path(file)
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    if not lines:
        raise CourseError(
            "this file has no lines, or is not there", path, "write a row a line"
        )
    masking = Masking(text.mlm_probability, whole_words=text.whole_word)
    return MaskedLines(lines, tokenizer, masking, seed, text.max_seq_length, rows)


def last_checkpoint(folder: Path) -> str | None:
    """The newest checkpoint that was saved to its end: `trainer_state.json` is written last."""
    saved = {}
    for state in folder.glob("checkpoint-*/trainer_state.json"):
        number = state.parent.name.removeprefix("checkpoint-")
        if number.isdigit():
            saved[int(number)] = str(state.parent)
    return saved[max(saved)] if saved else None


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    kinds: Any = (TextArguments, TrainingArguments)
    run(*transformers.HfArgumentParser(kinds).parse_args_into_dataclasses())
