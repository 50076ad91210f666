"""Fine-tuning on completions: the prompt is read and not learned, padding is neither."""

import pytest
import torch

from stages.sampling import START
from stages.tuning import IGNORED, collate, encode, tune
from tests.test_sampling import model, tokenizer  # noqa: F401


def test_only_the_completion_and_its_end_are_learned(tokenizer):
    ids, labels = encode(tokenizer, "def f():", "\n    return 1")
    learned = [token for token in labels if token != IGNORED]
    assert tokenizer.decode(ids) == START + "def f():\n    return 1\n\n\n" + START
    assert tokenizer.decode(learned) == "\n    return 1\n\n\n" + START
    assert labels[-len(learned) :] == ids[-len(learned) :]


def test_padding_is_neither_read_nor_learned():
    batch = collate([([5, 6, 7], [IGNORED, 6, 7]), ([8], [8])])
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[IGNORED, 6, 7], [8, IGNORED, IGNORED]]
    assert batch["input_ids"][1, 0] == 8


def test_a_seed_names_a_training_and_the_loss_falls(model, tokenizer):
    import copy

    rows = [
        encode(tokenizer, f"def f{k}():", f"\n    return {k}") for k in range(4)
    ]
    runs = [
        tune(copy.deepcopy(model), rows, 3e-3, 12, seed, 4) for seed in (1, 1, 2)
    ]
    assert runs[0] == pytest.approx(runs[1])
    assert runs[0] != runs[2]
    assert runs[0][-1] < 0.8 * runs[0][0]


def test_the_model_is_ready_to_write_afterwards(model, tokenizer):
    rows = [encode(tokenizer, "a", "b")]
    before = [weight.clone() for weight in model.parameters()]
    tune(model, rows, 0.0, 1, 0, 1)
    assert not model.training
    assert all(map(torch.equal, before, model.parameters()))
