"""What lesson 20 builds by hand, held to what it should be where that is known."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize, quantize
from lesson_cells import cell, run_cells
from scipy.stats import chisquare
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

CELLS = "write absmax jobs continuous bits gguf draft speculate accept grammar grammar-class"


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    lesson = SimpleNamespace(pick=lambda **sizes: sizes["smoke"])
    return run_cells(
        "20", CELLS, {"lesson": lesson, "SEED": 42, "tokenizer": Letters()}
    )


class Letters:
    """A vocabulary of characters; its end is token 0."""

    eos_token_id = 0
    texts = ["", *map(chr, range(32, 127))]

    def decode(self, ids: Any) -> str:
        """The characters, one after the other."""
        numbers = (
            [int(ids)] if torch.as_tensor(ids).dim() == 0 else list(map(int, ids))
        )
        return "".join(self.texts[number] for number in numbers)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=12,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("many", [1, 3, 6])
def test_guesses_change_no_token(
    names: dict[str, Any], model: Any, many: int
) -> None:
    for start in range(4):
        ids = torch.arange(start, start + 5)[None]
        plain, _ = names["write"](model, ids, 20)
        tokens, passes = names["speculate"](model, ids, 20, many)
        assert tokens == plain
        assert 20 / (many + 1) <= passes <= 20


def test_right_guesses_save_passes(names: dict[str, Any], model: Any) -> None:
    ids = torch.arange(5)[None]
    plain, _ = names["write"](model, ids, 20)
    seer = dict(
        names, guess=lambda table, text, many: plain[len(text) - 5 :][:many]
    )
    exec(cell("20", "speculate"), seer)
    tokens, passes = seer["speculate"](model, ids, 20, 4)
    assert tokens[:20] == plain
    assert passes <= 5


def test_wrong_guesses_cost_passes_and_no_token(
    names: dict[str, Any], model: Any
) -> None:
    ids = torch.arange(5)[None]
    plain, _ = names["write"](model, ids, 20)

    def wrong(table: Any, text: list[int], many: int) -> list[int]:
        return [(token + 1) % 12 for token in plain[len(text) - 5 :][:many]]

    liar = dict(names, guess=wrong)
    exec(cell("20", "speculate"), liar)
    tokens, passes = liar["speculate"](model, ids, 20, 4)
    assert tokens == plain and passes == 20


def test_a_guess_is_what_followed_the_longest_ending(names: dict[str, Any]) -> None:
    table = names["remember"]({}, [1, 2, 3, 1, 2, 4, 9, 2])
    assert names["guess"](table, [7, 1, 2], 3) == [4, 9, 2]
    assert names["guess"](table, [3, 1], 1) == [2]
    assert names["guess"](table, [5], 4) == []
    assert names["guess"](table, [9], 0) == []


def test_the_cache_changes_no_token(names: dict[str, Any], model: Any) -> None:
    ids = torch.arange(6)[None]
    with_cache, _ = names["write"](model, ids, 20)
    without, _ = names["write"](model, ids, 20, cached=False)
    assert with_cache == without


def test_an_accepted_token_is_one_of_the_model_s(names: dict[str, Any]) -> None:
    draw = np.random.default_rng(3)
    for _ in range(4):
        p, q = draw.dirichlet([0.7] * 5, 2)
        drawn = [names["accept"](p, q, draw) for _ in range(8_000)]
        counts = np.bincount(drawn, minlength=5)
        assert chisquare(counts, 8_000 * p).pvalue > 1e-4


def test_a_wrong_rule_is_seen(names: dict[str, Any]) -> None:
    test = cell("20", "accept-test")
    right = dict(names, SEED=1)
    exec(test, right)
    swapped = dict(names, SEED=1, accept=names["accept_wrongly"])
    with pytest.raises(AssertionError):
        exec(test, swapped)


def test_q4_1_is_gguf_s(names: dict[str, Any]) -> None:
    for scale in (1e-3, 1.0, 50.0):
        weight = scale * torch.randn(16, 64)
        packed = quantize(weight.numpy(), GGMLQuantizationType.Q4_1)
        theirs = dequantize(packed, GGMLQuantizationType.Q4_1)
        ours = names["q4_1"](weight).numpy()
        # A code at the border between two may fall to either side.
        assert (np.abs(ours - theirs) > 1e-3 * scale).mean() < 0.01
        assert (
            names["error"](torch.from_numpy(theirs), torch.from_numpy(ours)) < 0.01
        )


@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_is_within_half_a_step(names: dict[str, Any], bits: int) -> None:
    weight = torch.randn(40, 64)
    for way in (names["absmax"], names["by_blocks"]):
        assert way(weight, bits).shape == weight.shape
    off = (weight - names["absmax"](weight, bits)).abs()
    step = weight.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    assert (off <= step / 2 + 1e-6).all()
    errors = [
        names["error"](weight, names[way](weight, bits))
        for way in ("absmax", "by_blocks")
    ]
    assert errors[1] < errors[0]


def test_plans_fill_slots_and_overlap_nowhere(names: dict[str, Any]) -> None:
    for way in (names["padded"], names["continuous"]):
        bars = way(names["JOBS"])
        assert [length for _, _, length in bars] == names["JOBS"]
        for one, other in itertools.combinations(bars, 2):
            if one[0] == other[0]:
                first, second = sorted([one, other], key=lambda bar: bar[1])
                assert first[1] + first[2] <= second[1]
    # Counted by hand: the longest of each four; and no slot is ever empty.
    ends = {
        way: max(start + length for _, start, length in names[way](names["JOBS"]))
        for way in ("padded", "continuous")
    }
    assert ends == {"padded": 10 + 12 + 8 + 8, "continuous": 76 // 4}


@pytest.mark.parametrize(
    "text",
    ['{"a": [1, 2.5, {"b": null}]}', "[true, false]", '"x\\n"', "-0.5", "{}", "[]"],
)
def test_json_fits_and_so_does_every_beginning(
    names: dict[str, Any], text: str
) -> None:
    json.loads(text)
    assert names["JSON"].fullmatch(text)
    for end in range(len(text)):
        assert names["JSON"].fullmatch(text[:end], partial=True)


@pytest.mark.parametrize(
    "text", ["{a", "[1,]", '{"a": 1,}', "01", "tru e", '{"a" 1', "}"]
)
def test_what_is_no_json_fits_at_no_time(names: dict[str, Any], text: str) -> None:
    assert not names["JSON"].fullmatch(text, partial=True)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_drawn_under_the_grammar_is_json(
    names: dict[str, Any], seed: int
) -> None:
    process = names["only_json"](0, most=96)
    draw = torch.Generator().manual_seed(seed)
    ids = torch.zeros(1, 0, dtype=torch.long)
    for step in range(60):
        scores = torch.randn(1, 96, generator=draw)
        if step > 20:  # hasten the end
            for sign in '"]}0':
                scores[0, Letters.texts.index(sign)] += 3
            scores[0, 0] += 8
        token = process(ids, scores).argmax(-1, keepdim=True)
        if token == 0:
            json.loads(Letters().decode(ids[0]))
            return
        ids = torch.cat([ids, token], 1)
    assert names["JSON"].fullmatch(Letters().decode(ids[0]), partial=True)


def test_bytes_of_a_cache_are_those_of_its_tensors(model: Any) -> None:
    found = run_cells("20", "bytes", {"config": model.config})
    cache = DynamicCache(config=model.config)
    model(torch.arange(7)[None], past_key_values=cache)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert held == 7 * found["per_token"]
