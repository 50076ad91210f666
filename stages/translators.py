"""Translators that are asked and trained in one way: a frozen reader with a new writer, and a T5.

system = own_system(build_own(writer, 42), reader, writer)
points = fit(system, train, validation, judge, arguments)
translate(system, test, 48, num_beams=4)
"""

from __future__ import annotations

import contextlib
import io
import random
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
)

from stages.title_model import (
    Spelling,
    keep_tokens,
    load_t5_words,
    load_title_model,
    unknown_letters,
)
from stages.trainer_progress import TrainerProgress
from stages.translation import Pair, restore

MARKERS = [f"<x{number}>" for number in range(1, 10)]
UNKNOWN = 2  # T5's unknown token
Judge = Callable[[Sequence[str], Sequence[Pair]], float]


class System(NamedTuple):
    """A model and how it is asked: what belongs to one translator."""

    model: Any
    reader: Any  # the tokenizer of its source
    ask: Callable[[Pair], str]  # the source text of a pair
    encode: Callable[[Pair], dict[str, Any]]  # a pair as input_ids and labels
    tell: Callable[
        [Any, Pair], str
    ]  # the text of ids, with the pair's placeholders


def train_writer(train: Sequence[Pair]) -> PreTrainedTokenizerFast:
    """A byte-pair vocabulary of the training targets, in which each marker is one token."""
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    learned.decoder = decoders.Metaspace(prepend_scheme="first")
    special = ["<pad>", "<s>", "</s>", "<unk>", *MARKERS]
    plan = trainers.BpeTrainer(
        vocab_size=1500, show_progress=False, special_tokens=special
    )
    learned.train_from_iterator([pair.target for pair in train], plan)
    return PreTrainedTokenizerFast(
        tokenizer_object=learned,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )


def own_system(model: Any, reader: Any, writer: Any) -> System:
    """A model with two vocabularies. Markers stay when special tokens are removed."""

    def encode(pair: Pair) -> dict[str, Any]:
        source = reader(pair.source)
        target = writer(pair.target)
        labels = [*target["input_ids"], writer.eos_token_id]
        return {"input_ids": source["input_ids"], "labels": labels}

    def tell(ids: Any, pair: Pair) -> str:
        text = re.sub(r"</?s>|<pad>|<unk>", "", writer.decode(ids))
        return restore(text.strip(), pair.numbers)

    return System(model, reader, lambda pair: pair.source, encode, tell)


def t5_system(
    model: Any, spelling: Spelling, kept: Sequence[int], prefix: str
) -> System:
    """A T5 whose decoder has the tokens `kept` of the vocabulary."""
    place = {token: index for index, token in enumerate(kept)}

    def ask(pair: Pair) -> str:
        text = spelling.write(pair.source)
        return prefix + text

    def encode(pair: Pair) -> dict[str, Any]:
        labels = [place.get(token, UNKNOWN) for token in spelling.ids(pair.target)]
        return {
            "input_ids": spelling.vocabulary(ask(pair))["input_ids"],
            "labels": labels,
        }

    def tell(ids: Any, pair: Pair) -> str:
        return spelling.read([kept[index] for index in ids.tolist()], pair)

    return System(model, spelling.vocabulary, ask, encode, tell)


def t5_for(pairs: Sequence[Pair], folder: Path, prefix: str) -> System:
    """The packaged T5, untrained, with a decoder for the tokens of these translations."""
    words = load_t5_words(folder)
    written = "".join(pair.target for pair in pairs)
    letters = re.sub(r"<x\d>", "", written)
    spelling = Spelling(words, unknown_letters(letters, words))
    kept = {words.pad_token_id, words.eos_token_id, UNKNOWN}
    for pair in pairs:
        kept.update(spelling.ids(pair.target))
    model = load_title_model(folder)
    tokens = sorted(kept)
    keep_tokens(model, torch.tensor(tokens))
    return t5_system(model, spelling, tokens, prefix)


@torch.no_grad()
def translate(
    system: System, pairs: Sequence[Pair], longest: int, **options: Any
) -> list[str]:
    """Translations of pairs, 32 at a time, in their order."""
    said: list[str] = []
    for start in range(0, len(pairs), 32):
        part = pairs[start : start + 32]
        sources = [system.ask(pair) for pair in part]
        batch = system.reader(sources, padding=True, return_tensors="pt")
        ids = system.model.generate(
            **batch.to(system.model.device),
            **options,
            max_new_tokens=longest,
            do_sample=False,
        )
        said += [system.tell(one, pair) for one, pair in zip(ids, part)]
    return said


def next_tokens_of(system: System, pair: Pair, width: int) -> Callable[..., Any]:
    """A function from a beginning to its likeliest next tokens, with their log-probabilities."""
    model = system.model
    batch = system.reader([system.ask(pair)], return_tensors="pt").to(model.device)
    real = batch["attention_mask"]
    with torch.no_grad():
        read = model.get_encoder()(
            input_ids=batch["input_ids"], attention_mask=real
        )
    start = model.generation_config.decoder_start_token_id

    @torch.no_grad()
    def next_tokens(words: Sequence[int]) -> list[tuple[int, float]]:
        begun = [start, *words]
        ids = torch.tensor([begun], device=model.device)
        logits = model(
            encoder_outputs=read, attention_mask=real, decoder_input_ids=ids
        ).logits
        best = logits[0, -1].log_softmax(-1).topk(2 * width)
        return list(zip(best.indices.tolist(), best.values.tolist()))

    return next_tokens


class Watch(TrainerCallback):
    """CPU-seconds of the training steps alone, and the score at each evaluation."""

    def __init__(self) -> None:
        self.start = 0.0
        self.spent = 0.0
        self.points: list[tuple[float, float]] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Look at the clock."""
        self.start = time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Add what the step has cost."""
        now = time.process_time()
        self.spent += now - self.start

    def on_evaluate(
        self, args: Any, state: Any, control: Any, **facts: Any
    ) -> None:
        """Note the score and what has been spent until now."""
        self.points.append((self.spent, facts["metrics"]["eval_score"]))


def metric(
    system: System, pairs: Sequence[Pair], judge: Judge
) -> Callable[..., Any]:
    """A metric for the Trainer: the judge's score of the generated texts."""

    def compute(prediction: Any) -> dict[str, float]:
        real = prediction.predictions >= 0
        ids = np.where(real, prediction.predictions, 0)
        said = []
        for one, pair in zip(ids, pairs):
            text = system.tell(one, pair)
            said.append(text)
        score = judge(said, pairs)
        return {"score": float(score)}

    return compute


def fit(
    system: System,
    train: Sequence[Pair],
    watched: Sequence[Pair],
    judge: Judge,
    arguments: Seq2SeqTrainingArguments,
) -> list[tuple[float, float]]:
    """Train with `Seq2SeqTrainer`: CPU-seconds spent and score, at each evaluation."""
    weights = [one for one in system.model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(weights, arguments.learning_rate, fused=True)
    examples = in_batches(
        [system.encode(pair) for pair in train],
        arguments.max_steps,
        arguments.per_device_train_batch_size,
        arguments.seed,
    )
    trainer = Seq2SeqTrainer(
        system.model,
        arguments,
        DataCollatorForSeq2Seq(system.reader, system.model),
        Dataset.from_list(examples),
        Dataset.from_list([system.encode(pair) for pair in watched]),
        compute_metrics=metric(system, watched, judge),
        optimizers=(optimizer, None),
    )
    watch = Watch()
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(TrainerProgress)
    trainer.add_callback(watch)
    trainer.train()
    system.model.eval()
    return watch.points


@dataclass
class ScriptArguments:
    """The options of `run_translation.py` itself that the classic line uses."""

    model_name_or_path: str
    dataset_name: str | None = None
    dataset_config_name: str | None = None
    source_lang: str | None = None
    target_lang: str | None = None
    source_prefix: str | None = None

    def __post_init__(self) -> None:
        """What the script itself refuses, behind the parser."""
        if self.dataset_name is None:
            raise ValueError("no data set is named")
        if self.source_lang is None or self.target_lang is None:
            raise ValueError("a language is missing")


def parse_line(line: dict[str, str]) -> tuple[Any, Any] | None:
    """The script's arguments and the Trainer's, from a command line; None if the parser gives up."""
    words = [word for option in line.items() for word in option]
    words += ["--report_to", "none", "--disable_tqdm", "True"]
    words += ["--dataloader_pin_memory", "False"]
    kinds: Any = [ScriptArguments, Seq2SeqTrainingArguments]
    parser: Any = HfArgumentParser(kinds)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return parser.parse_args_into_dataclasses(words)
    except SystemExit:  # argparse calls sys.exit
        return None


def evaluate_line(
    line: dict[str, str],
    system_of: Callable[[str], System],
    pairs: Sequence[Pair],
    judge: Judge,
    longest: int,
) -> str:
    """What `run_translation.py` would report for a command line, on pairs that are here."""
    try:
        parsed = parse_line(line)
    except ValueError as error:
        return f"the script stops: {error}"
    if parsed is None:
        return "the parser ends the program"
    script, arguments = parsed
    if not arguments.do_eval:
        return "nothing is evaluated"
    system = system_of(script.source_prefix or "")
    compute = None
    if arguments.predict_with_generate:
        compute = metric(system, pairs, judge)
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
        trainer = Seq2SeqTrainer(
            system.model,
            arguments,
            DataCollatorForSeq2Seq(system.reader, system.model),
            eval_dataset=Dataset.from_list([system.encode(pair) for pair in pairs]),
            compute_metrics=compute,
        )
        trainer.remove_callback(PrinterCallback)
        told = trainer.evaluate(max_length=longest)
    names = {"eval_loss": "loss", "eval_score": "chrF"}
    return ", ".join(
        f"{names[key]} {told[key]:.2f}" for key in names if key in told
    )


def in_batches(examples: list[Any], steps: int, batch: int, seed: int) -> list[Any]:
    """Examples for all steps, so that a batch holds labels of similar length, in random order."""
    draw = random.Random(seed)
    size = len(examples) // batch * batch
    rows: list[Any] = []
    while len(rows) < steps * batch:
        mixed = draw.sample(examples, size)
        for start in range(0, size, 8 * batch):
            pool = mixed[start : start + 8 * batch]
            pool.sort(key=lambda example: len(example["labels"]))
            batches = [pool[k : k + batch] for k in range(0, len(pool), batch)]
            draw.shuffle(batches)
            rows += [example for one in batches for example in one]
    return rows[: steps * batch]
