"""A model that answers in microseconds, and what it says to whom: enough to test a server with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from stages.serving_load import BAD_MANNERS
from stages.serving_protocol import Callers, Limits, digest

NAME = "small"
LIMITS = Limits(
    rows=4,
    length=256,
    most=200,
    waiting=32,
    per_caller=4,
    read_seconds=1,
    write_seconds=1,
    body=20_000,
)
TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }} {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant {% endif %}"
)


def small_tokenizer() -> Any:
    """Bytes as tokens, so that a character may need several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"</s>": 0, "<s>": 1}
    vocabulary |= {sign: 2 + at for at, sign in enumerate(alphabet)}
    engine = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=engine, bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def small_model() -> Any:
    """Random weights, large enough that its likeliest tokens are no ties."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=0,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config).eval()
    model.generation_config.pad_token_id = 0
    return model


def write_small(folder: Path) -> Path:
    """Both as a folder."""
    small_model().save_pretrained(folder)
    small_tokenizer().save_pretrained(folder)
    return folder


def callers() -> Callers:
    """Two of them, and one for each kind of bad client."""
    keys = {
        "alice": "key-a",
        "mallory": "key-m",
        **{name: name for name in BAD_MANNERS},
    }
    return Callers({name: digest(key) for name, key in keys.items()})


def truth(model: Any, ids: list[int], most: int) -> list[int]:
    """An answer by the library, alone."""
    made = model.generate(torch.tensor([ids]), max_new_tokens=most, do_sample=False)
    return made[0, len(ids) :].tolist()
