"""Completions in a batch: what each would be alone, whoever leaves; temperature and top-p."""

import re

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from stages import sampling
from stages.problems import Problem
from stages.sampling import START, choose, complete


@pytest.fixture(scope="module")
def tokenizer():
    """Bytes, and the mark between documents."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({one: k for k, one in enumerate(letters)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=START)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(
        vocab_size=257, num_attention_heads=4, num_key_value_heads=2, **sizes
    )
    model = LlamaForCausalLM(config).eval()
    # Random weights repeat one token for ever; larger ones say more.
    for weight in model.parameters():
        weight.data *= 4 if weight.dim() > 1 else 1
    return model


def problems(*prompts):
    return [Problem(text, 0, text, "", "") for text in prompts]


def alone(model, tokenizer, prompt, most):
    """The greedy completion by the library, without any cut."""
    ids = tokenizer(START + prompt, return_tensors="pt")["input_ids"]
    made = model.generate(ids, max_new_tokens=most, do_sample=False, pad_token_id=0)
    written = made[0, ids.shape[1] :].tolist()
    if tokenizer.eos_token_id in written:
        written = written[: written.index(tokenizer.eos_token_id)]
    return tokenizer.decode(written)


PROMPTS = ["def a():", "x", "def a_longer_one(with_names):", "if y"]


def up_to_the_end(text, ends):
    """A text up to the token with which a cut would begin."""
    for size in range(len(text) + 1):
        if ends.search(text[:size]):
            return text[:size]
    return text


def test_greedy_completions_are_the_librarys(model, tokenizer):
    asked = problems(*PROMPTS)
    made = complete(model, tokenizer, asked, most=20)
    for one, (text,) in zip(asked, made):
        whole = alone(model, tokenizer, one.prompt, 20)
        assert text == up_to_the_end(whole, one.stops)


def ending_early(tokenizer, model):
    """Problems that end at a letter which their own completion has, early or late."""
    asked = problems(*PROMPTS, "z = ", "while")
    ends = []
    for place, one in enumerate(asked):
        text = alone(model, tokenizer, one.prompt, 20)
        letter = text[(3 * place) % len(text)] if text else "?"
        ends.append(re.compile(re.escape(letter)))
    return [
        Problem(one.name, 0, one.prompt, "", "", (), end, end)
        for one, end in zip(asked, ends)
    ]


@pytest.mark.parametrize("crowded", [0.0, 0.8, 1.0])
def test_who_leaves_the_batch_changes_nothing_for_the_others(
    model, tokenizer, crowded, monkeypatch
):
    monkeypatch.setattr(sampling, "CROWDED", crowded)
    asked = ending_early(tokenizer, model)
    made = complete(model, tokenizer, asked, samples=2, most=20)
    assert len({len(texts[0]) for texts in made}) > 2  # they do not end together
    for one, texts in zip(asked, made):
        whole = alone(model, tokenizer, one.prompt, 20)
        assert texts == [up_to_the_end(whole, one.stops)] * 2


def test_the_completions_come_in_the_order_of_the_problems(model, tokenizer):
    asked = problems(*PROMPTS)
    at_once = complete(model, tokenizer, asked, most=6)
    for rows in (1, 2):
        assert complete(model, tokenizer, asked, most=6, rows=rows) == at_once


def test_a_seed_names_the_draw(model, tokenizer):
    def draw(seed):
        return complete(
            model, tokenizer, problems(*PROMPTS), 5, 1.0, most=8, seed=seed
        )

    assert draw(1) == draw(1) != draw(2)
    assert all(len(set(texts)) > 1 for texts in draw(1))


def shares(logits, temperature, top_p, size=20_000):
    draw = torch.Generator().manual_seed(0)
    rows = torch.tensor(logits).log().expand(size, -1)
    tokens = choose(rows, temperature, top_p, draw)
    return (torch.bincount(tokens, minlength=len(logits)) / size).tolist()


def test_temperature_and_top_p_are_what_they_are_called():
    chances = [0.1, 0.5, 0.3, 0.1]
    assert shares(chances, 1.0, 1.0) == pytest.approx(chances, abs=0.02)
    flat = [chance**0.5 for chance in chances]
    flat = [chance / sum(flat) for chance in flat]
    assert shares(chances, 2.0, 1.0) == pytest.approx(flat, abs=0.02)
    assert shares(chances, 1.0, 0.7) == pytest.approx(
        [0, 0.625, 0.375, 0], abs=0.02
    )
    assert shares(chances, 1.0, 0.01) == [0, 1, 0, 0]
    assert shares(chances, 0.0, 1.0) == [0, 1, 0, 0]


def test_a_flat_row_is_drawn_from_all_that_top_p_keeps(monkeypatch):
    monkeypatch.setattr(sampling, "NEAR", 2)
    flat = [0.1, 0.2, 0.15, 0.05, 0.3, 0.2]
    sharp = [0.05, 0.9, 0.02, 0.01, 0.01, 0.01]
    rows = torch.tensor([flat, sharp]).log().repeat(10_000, 1)
    tokens = choose(rows, 1.0, 0.94, torch.Generator().manual_seed(0))
    counts = [
        torch.bincount(tokens[place::2], minlength=6) / 10_000 for place in (0, 1)
    ]
    # 0.95 of the flat row are its five likeliest.
    assert counts[0].tolist() == pytest.approx(
        [0.1 / 0.95, 0.2 / 0.95, 0.15 / 0.95, 0, 0.3 / 0.95, 0.2 / 0.95], abs=0.02
    )
    assert counts[1].tolist() == pytest.approx(
        [0.05 / 0.95, 0.9 / 0.95, 0, 0, 0, 0], abs=0.02
    )
