"""The small models by which lesson 07 compares vocabularies."""

import math

import torch

from stages import small_models
from stages.recipe import build_model
from stages.small_models import frequency_bits, train_small
from stages.tokenizer import train_bpe

TEXTS = [f"def f{n}(x):\n    return x + {n}\n" for n in range(60)]
SHAPE = {"width": 64, "layers": 1, "block": 16, "rows": 2}


def test_frequencies_leave_no_token_impossible():
    bits = frequency_bits(torch.tensor([3, 1, 0]), torch.tensor([0, 1, 2]))
    shares = [3.1 / 4.3, 1.1 / 4.3, 0.1 / 4.3]
    assert math.isclose(bits, -sum(map(math.log2, shares)), rel_tol=1e-5)


def test_frequencies_count_what_the_model_has_read_and_no_more():
    tokenizer = train_bpe(TEXTS, 290)
    yard = "Q" * 400  # no text but the last, which is far longer than what is read
    texts = [*TEXTS, "Q" * 200_000]
    few, many = (
        train_small(tokenizer, texts[:count], yard, 4e7, **SHAPE)
        for count in (len(TEXTS), len(texts))
    )
    assert few.frequencies[-1] > 7  # a token that was never read
    assert many.frequencies[0] > many.frequencies[-1]  # read, and more often later


def test_a_model_learns_and_repeats():
    tokenizer = train_bpe(TEXTS, 290)
    judged = [
        train_small(tokenizer, TEXTS, TEXTS[7] * 9, 8e8, **SHAPE) for _ in "12"
    ]
    assert judged[0] == judged[1]
    assert judged[0].bits[-1] < judged[0].bits[0]
    assert judged[0].bits[-1] < judged[0].frequencies[-1]


def test_a_seed_changes_the_first_weights(monkeypatch):
    made = []

    def build(recipe, tokenizer):
        made.append(build_model(recipe, tokenizer))
        return made[-1]

    monkeypatch.setattr(small_models, "build_model", build)
    tokenizer = train_bpe(TEXTS, 290)
    for seed in (42, 42, 43):
        train_small(tokenizer, TEXTS, TEXTS[7], 0, **SHAPE, seed=seed)
    first, again, other = (next(model.parameters()) for model in made)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_same_computing_reads_less_with_a_larger_vocabulary():
    small, large = (train_bpe(TEXTS, size) for size in (258, 300))
    tokens = []
    for tokenizer in (small, large):
        judged = train_small(tokenizer, TEXTS, TEXTS[0] * 9, 4e8, **SHAPE)
        ids = sum(len(tokenizer(text)["input_ids"]) + 1 for text in TEXTS)
        tokens.append(judged.characters_read * ids / sum(map(len, TEXTS)))
    assert tokens[1] < tokens[0]
