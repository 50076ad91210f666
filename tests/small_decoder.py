"""A decoder of a few thousand weights, for the tests of inference and of its export."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def small_decoder(layers: int) -> LlamaForCausalLM:
    """Drawn wide, so that its likeliest tokens stand apart."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()
