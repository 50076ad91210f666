"""What the lessons rely on in a library and an older release does wrong: it decides the ranges."""

import json
import time

import numpy as np
import pyarrow as pa
import pytest
import tiktoken
import torch
from datasets import Dataset, Value, load_dataset
from tokenizers import Tokenizer, models, pre_tokenizers


@pytest.mark.parametrize("shards", [1, 3])
def test_a_mapped_stream_goes_on_where_it_stopped(shards):
    def stream():
        rows = Dataset.from_dict({"row": range(300)})
        return rows.to_iterable_dataset(shards).map(lambda row: row)

    stopped = stream()
    stopped.load_state_dict(stopped.state_dict())
    going = iter(stopped)
    for _ in range(41):
        next(going)
    state = json.loads(json.dumps(stopped.state_dict()))
    rest = [row["row"] for row in going]
    again = stream()
    again.load_state_dict(state)
    assert [row["row"] for row in again] == rest


def test_a_stream_skips_as_many_rows_as_it_is_told(tmp_path):
    schema = pa.schema({"row": pa.int64()})
    place = tmp_path / "rows.arrow"
    with (
        pa.OSFile(str(place), "wb") as sink,
        pa.ipc.new_stream(sink, schema) as out,
    ):
        for start in range(0, 90, 30):
            out.write_table(pa.table({"row": range(start, start + 30)}, schema))
    rows = load_dataset(
        "arrow", data_files=str(place), split="train", streaming=True
    )
    firsts = [next(iter(rows.skip(number)))["row"] for number in (0, 29, 30, 75)]
    assert firsts == [0, 29, 30, 75]


def test_a_column_cast_to_large_string_has_offsets_of_64_bits():
    rows = Dataset.from_dict({"content": ["rice", "fish"]})
    kinds = [rows.data["content"].type]
    cast = rows.cast_column("content", Value("large_string"))
    kinds.append(cast.data["content"].type)
    assert kinds == [pa.string(), pa.large_string()]
    offsets = cast.data["content"].chunk(0).buffers()[1]
    assert np.frombuffer(offsets, np.int64)[:3].tolist() == [0, 4, 8]
    assert cast["content"][:] == ["rice", "fish"]


def test_windows_of_a_long_text_lose_no_word():
    words = [f"w{number}" for number in range(12)]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)})
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(6, stride=2)
    first = tokenizer.encode(" ".join(words))
    windows = [window.ids for window in [first, *first.overflowing]]
    assert windows == [[*range(6)], [*range(4, 10)], [*range(8, 12)]]


def test_a_long_run_of_spaces_costs_in_proportion():
    """By processor time, which other work leaves alone; the square of the length would be 256 times."""
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"  ": 256}
    encoding = tiktoken.Encoding(
        "spaces", pat_str=r"\s+|\S+", mergeable_ranks=ranks, special_tokens={}
    )

    def cost(count):
        start = time.process_time()
        assert len(encoding.encode(" " * count)) == count // 2
        return time.process_time() - start

    short, long = (min(cost(n) for _ in range(5)) for n in (2_000, 32_000))
    assert long < 100 * short


def test_a_trainer_divides_gpt2s_loss_by_one_label_too_many(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    sizes = {"vocab_size": 64, "n_positions": 32, "n_embd": 16, "n_layer": 1}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "n_head": 1}
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**sizes, **ends)).eval()
    rows = torch.randint(64, (4, 32))
    data = [{"input_ids": row, "labels": row} for row in rows]
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True}
    plan = TrainingArguments(str(tmp_path), per_device_eval_batch_size=4, **quiet)
    truth = model(input_ids=rows, labels=rows).loss.item()

    def ratio():
        trainer = Trainer(model, plan, eval_dataset=data)
        return trainer.evaluate()["eval_loss"] / truth

    # Of 32 tokens only 31 have a successor that is asked for.
    assert ratio() == pytest.approx(31 / 32, abs=1e-4)
    model.loss_type = "ForCausalLM"
    assert ratio() == pytest.approx(1, abs=1e-4)
