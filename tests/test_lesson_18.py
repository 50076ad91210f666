"""What lesson 18 builds by hand, held to what it should be where that is known."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lesson_cells import cell, run_cells
from transformers import LlamaConfig, LlamaForCausalLM

CELLS = "surprise windows strided likelihood right order-test order-p power"


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    lesson = SimpleNamespace(pick=lambda **sizes: sizes["smoke"])
    given = {"device": "cpu", "SEED": 42, "lesson": lesson, "OUT": None}
    return run_cells("18", CELLS, given)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("window", [2, 5, 8])
@pytest.mark.parametrize("size", [2, 5, 8, 9, 23])
def test_every_target_counts_once_and_has_its_context(
    names: dict[str, Any], window: int, size: int
) -> None:
    for stride in range(1, window):
        targets = []
        for start, counted, end in names["windows"](size, window, stride):
            assert end - start <= window
            for target in range(counted, end):
                assert target - start >= min(target, window - stride)
                targets.append(target)
        assert targets == list(range(1, size))


def test_one_window_over_all_is_the_whole_context(
    names: dict[str, Any], model: Any
) -> None:
    ids = torch.randint(
        40, (30,), generator=torch.Generator().manual_seed(1)
    ).tolist()
    whole = names["surprise"](model, ids)
    assert torch.allclose(names["strided"](model, ids, 30, 7), whole, atol=1e-5)
    cut = names["strided"](model, ids, 10, 5)
    assert len(cut) == len(whole) == 29
    assert torch.allclose(cut[:9], whole[:9], atol=1e-5)
    assert not torch.allclose(cut[9:], whole[9:], atol=1e-3)


def test_endings_of_unequal_length_do_not_touch_each_other(
    names: dict[str, Any], model: Any
) -> None:
    context, endings = [3, 1, 4], [[1, 5], [9, 2, 6, 5], [3]]
    together = names["log_likelihoods"](model, context, endings)
    for found, ending in zip(together, endings, strict=True):
        nats = names["surprise"](model, context + ending)[len(context) - 1 :]
        assert math.isclose(found[0], -nats.sum().item(), rel_tol=1e-4)
        assert found[1] == len(ending)


def test_greedy_means_every_token_of_the_ending(
    names: dict[str, Any], model: Any
) -> None:
    with torch.no_grad():
        made = model.generate(
            torch.tensor([[3, 1, 4]]), max_new_tokens=3, do_sample=False
        )
    best = made[0, 3:].tolist()
    wrong = [*best[:2], (best[2] + 1) % 40]
    found = names["log_likelihoods"](model, [3, 1, 4], [best, wrong])
    assert [greedy for _, _, greedy in found] == [True, False]


def test_each_normalization_can_change_the_verdict(names: dict[str, Any]) -> None:
    item = SimpleNamespace(endings=(" ab", " abcdefgh", " abcdefghijkl"), answer=0)
    scores = [[(-4.0, 1, False), (-5.0, 2, False), (-6.0, 2, False)]]
    right = names["right"]
    assert right(scores, [item], "sum") == [1]
    item.answer = 1
    assert right(scores, [item], "per token") == [1]
    item.answer = 2
    assert right(scores, [item], "per character") == [1]


def test_the_order_is_found_by_a_reader_and_by_nobody_else(
    names: dict[str, Any],
) -> None:
    texts = [f"task {k}" for k in range(96)]

    def reader(group: list[str]) -> float:
        return float(sum(a < b for a, b in zip(group, group[1:], strict=False)))

    assert names["order_p"](names["order_gaps"](reader, texts)) < 0.01
    noise = np.random.default_rng(0)
    false = 0
    for _ in range(40):
        gaps = names["order_gaps"](lambda group: noise.normal(), texts)
        false += names["order_p"](gaps) < 0.05
    assert false <= 6


def test_more_items_and_pairs_find_more(names: dict[str, Any]) -> None:
    power = names["power"]
    assert power(5, 4000) > power(5, 200) > power(1, 200)
    assert power(5, 1000) > power(5, 1000, paired=False)
    assert power(0, 1000) < 0.06


def test_the_expressions_see_where_a_number_ends() -> None:
    given = {
        "replies": ["The answer is 16.", "The answer is 7"],
        "answers": ["16", "7"],
        "mean": np.mean,
    }
    marks = run_cells("18", "regex", given)["MARKS"]
    assert all(mark("So the answer is $16. Done.", "16") for mark in marks.values())
    for reply in (
        "The answer is 16.5.",
        "The answer is 16,000.",
        "The answer is 165",
    ):
        assert not any(mark(reply, "16") for mark in marks.values()), reply


def test_the_code_sample_comes_from_all_packages_and_without_licences() -> None:
    pages = [f"# licence\n{'a_line = 1  ' * 60}from {k // 50}" for k in range(500)]
    _, _, drawing = cell("18", "texts").partition("bodies = ")
    names = {"pages": pages, "documents": 41, "most": 1000}
    source = f"import random\nfrom stages.corpus import body\nbodies = {drawing}"
    exec(source, names)
    programs = names["programs"]
    assert len(programs) == 41
    assert len({text.rpartition(" ")[2] for text in programs}) >= 7
    assert not any("licence" in text for text in programs)


def test_where_the_hub_is_gpt_2_is_measured_on_wikitext(
    names: dict[str, Any], model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = " ".join(str(k % 37) for k in range(1500))
    asked = []

    def load_dataset(*arguments: str, **options: str) -> dict[str, list[str]]:
        asked.append((arguments, options))
        return {"text": [text, text]}

    class Reader:
        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [int(word) for word in text.split()]}

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    loaders = {
        "AutoModelForCausalLM": SimpleNamespace(from_pretrained=lambda name: model),
        "AutoTokenizer": SimpleNamespace(from_pretrained=lambda name: Reader()),
    }
    source = cell("18", "wikitext").replace(
        'os.environ.get("COURSE_ASSETS") == "hub"', "False"
    )
    given = {**names, **loaders}
    exec(source, given)
    found = given["wikitext"]()
    ids = Reader()(f"{text}\n\n{text}")["input_ids"][:2000]
    for value, stride in zip(found, (1023, 512), strict=True):
        nats = names["strided"](model, ids, 1024, stride)
        assert value == pytest.approx(math.exp(nats.mean()), rel=1e-4)
    wanted = ("Salesforce/wikitext", "wikitext-2-raw-v1")
    assert asked == [(wanted, {"split": "test"})]
