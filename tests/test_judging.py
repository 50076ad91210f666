"""The published questions are read as the harness reads them, and a culprit has read its text."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from stages import benchmarks
from stages.contamination import BLOCK, cut, read_again
from utils.errors import CourseError

SCENE = {
    "activity_label": "Baking",
    "ctx_a": "A bowl stands [step] on a table.",
    "ctx_b": "she",
    "endings": ["stirs.", "[title] sleeps.", "runs  off.", "sings."],
    "label": "2",
}
GOAL = {
    "goal": "Open a door.",
    "sol1": "Turn the knob.",
    "sol2": "Sing.",
    "label": 0,
}
PASSAGE = {"query": "He called his dog and", "answers_text": ["Rex"]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An asset as it is on disk, with ten rows of each set."""
    for name, row in {"hellaswag": SCENE, "piqa": GOAL}.items():
        rows = [{**row, "ind": place} for place in range(10)]
        place = tmp_path / benchmarks.PLACES[name]
        datasets.Dataset.from_list(rows).save_to_disk(str(place))
    for name in ("lambada", "gsm8k"):
        place = tmp_path / benchmarks.PLACES[name]
        place.parent.mkdir(parents=True)
        lines = [json.dumps({"doc": {**PASSAGE, "id": k}}) for k in range(10)]
        place.write_bytes(gzip.compress("\n".join(lines).encode()))
    return tmp_path


def test_a_scene_has_no_marks_and_the_true_ending_keeps_its_place(
    folder: Path,
) -> None:
    item = benchmarks.read_items(folder, "hellaswag", 1)[0]
    assert item.context == "Baking: A bowl stands on a table. She"
    # The harness keeps this second space as well.
    assert item.endings[1] == "  sleeps."
    assert item.endings[2] == " runs off."
    assert item.answer == 2


def test_an_ending_begins_with_its_space_and_a_context_does_not_end_with_one(
    folder: Path,
) -> None:
    for name in benchmarks.TO_ITEM:
        for item in benchmarks.read_items(folder, name, 3):
            assert item.context == item.context.rstrip()
            assert all(ending.startswith(" ") for ending in item.endings)


def test_a_small_sample_is_the_beginning_of_a_larger_one(folder: Path) -> None:
    small = benchmarks.sample_rows(folder, "piqa", 3)
    large = benchmarks.sample_rows(folder, "piqa", 8)
    assert small == large[:3]
    assert sorted(row["ind"] for row in large) != [row["ind"] for row in large]


def test_an_unknown_set_is_an_error_that_names_the_known(folder: Path) -> None:
    with pytest.raises(CourseError, match="there is no set 'mmlu'"):
        benchmarks.read_rows(folder, "mmlu")
    with pytest.raises(CourseError, match="'gsm8k' has no endings"):
        benchmarks.read_items(folder, "gsm8k", 1)


def test_the_recorded_harness_has_the_lessons_items() -> None:
    kept = json.loads(Path("results/18_harness.json").read_text("utf-8"))
    assert kept["versions"]["lm_eval"] == "0.4.13"
    for layers, many in {"2": 16, "30": 200}.items():
        for name, endings in {"lambada": 1, "hellaswag": 4, "piqa": 2}.items():
            items = kept["layers"][layers][name]
            assert len(items) == many
            assert {len(one["log_likelihoods"]) for one in items} == {endings}


@pytest.mark.parametrize("first", [2, 100, BLOCK])
@pytest.mark.parametrize("size", [3, BLOCK, 3 * BLOCK + 1])
def test_blocks_hold_the_whole_text_in_its_order(first: int, size: int) -> None:
    blocks = cut(range(size), first)
    held = torch.cat(blocks).tolist()
    # A block of one token teaches nothing, and only the last can be one.
    assert held in (list(range(size)), list(range(size - 1)))
    assert max(map(len, blocks)) <= BLOCK


def test_who_reads_a_text_again_knows_it_better_after_each_pass() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    )
    text = np.random.default_rng(0).integers(50, size=400).tolist()
    asked = torch.tensor([text])
    losses = [model(asked, labels=asked).loss.item()]
    for reader in read_again(model, text, passes=8, seed=0, rate=1e-2):
        assert not reader.training
        with torch.no_grad():
            losses.append(reader(asked, labels=asked).loss.item())
    assert len(losses) == 9
    assert losses[-1] < losses[0] - 0.5


def test_two_readers_with_one_seed_are_one() -> None:
    config = LlamaConfig(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    ends = []
    for seed in (1, 1, 2):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        text = [k % 20 for k in range(600)]
        *_, last = read_again(model, text, passes=2, seed=seed)
        ends.append(last.lm_head.weight.detach().clone())
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])
