"""Every row of docs/inference.md is what the installed libraries do."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    QuantizedCache,
)

PAGE = (Path(__file__).parent.parent / "docs/inference.md").read_text("utf-8")
SHARES = torch.tensor([[0.5, 0.25, 0.12, 0.08, 0.05]])


def table(title: str) -> list[list[str]]:
    """The rows of the first table under a heading, without its head."""
    part = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"(?m)^\| (.*) \|$", part)
    assert rows, title
    return [row.split(" | ") for row in rows[1:]]


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=5,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("row", table("What each dial of sampling does"))
def test_a_dial_leaves_these_shares(row: list[str], model: Any) -> None:
    dial, *written = row
    scores = SHARES.log()
    found = re.fullmatch(r"`(\w+)=(.*)`", dial)
    if found:
        name, value = found[1], float(found[2])
        how = {name: int(value) if name == "top_k" else value}
        how = {"top_k": 0, **how}
        config = GenerationConfig(do_sample=True, **how)
        dials = model._get_logits_processor(generation_config=config)
        scores = dials(torch.zeros(1, 1, dtype=torch.long), scores)
    shares = scores.softmax(-1)[0].tolist()
    assert [f"{share:.3f}" for share in shares] == written


def test_dials_come_in_the_order_that_the_page_tells(model: Any) -> None:
    config = GenerationConfig(
        do_sample=True, temperature=0.5, top_k=3, top_p=0.9, min_p=0.1
    )
    names = [
        type(dial).__name__
        for dial in model._get_logits_processor(generation_config=config)
    ]
    wanted = ["Temperature", "TopK", "TopP", "MinP"]
    assert names == [f"{name}LogitsWarper" for name in wanted]


@pytest.mark.parametrize("backend", ["quanto", "hqq"])
def test_a_quantized_cache_names_the_package_that_it_needs(
    model: Any, backend: str
) -> None:
    package = {"quanto": "optimum-quanto", "hqq": "hqq"}[backend]
    assert f'`QuantizedCache("{backend}")`' in PAGE
    if importlib.util.find_spec("hqq" if backend == "hqq" else "optimum"):
        pytest.skip("it is installed")
    with pytest.raises(ImportError, match=package):
        model(
            torch.tensor([[1, 2]]),
            past_key_values=QuantizedCache(backend, model.config),
        )


def test_8_bit_floats_need_nothing_and_round_the_newest_too(model: Any) -> None:
    ids = torch.tensor([[1, 2, 3]])
    cache = QuantizedCache("fp8", model.config)
    model(ids, past_key_values=cache)
    whole = DynamicCache(config=model.config)
    model(ids, past_key_values=whole)
    layer = cache.layers[0]
    keys = layer._dequantize(layer._quantized_keys)
    newest = (keys - whole.layers[0].keys)[:, :, -1].abs().max()
    assert 0 < newest < 0.1 * whole.layers[0].keys.abs().max()
    scale = layer._quantized_keys[1]
    assert scale.numel() == 1, "one scale for all keys of a layer"


def test_old_calls_are_gone(model: Any) -> None:
    assert not hasattr(model, "to_bettertransformer")
    with pytest.raises(ImportError):
        importlib.import_module("optimum.bettertransformer")
    assert not hasattr(transformers, "onnx")
    cache = DynamicCache(config=model.config)
    model(torch.tensor([[1, 2, 3]]), past_key_values=cache)
    with pytest.raises(ValueError, match="negative"):
        cache.crop(2)
    cache.crop(-2)
    assert cache.get_seq_length() == 1


@pytest.mark.parametrize("name", ["use_flash_attention_2", "load_in_8bit"])
def test_old_arguments_are_refused(model: Any, name: str, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    with pytest.raises(TypeError, match=name):
        LlamaForCausalLM.from_pretrained(tmp_path, **{name: True})
