"""What is exported or compiled writes what the model writes."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_decoder import small_decoder
from transformers import (
    BertConfig,
    BertModel,
    DynamicCache,
    LlamaForCausalLM,
)

from stages.export import (
    CompiledDecoder,
    GraphModel,
    OnnxDecoder,
    card,
    check_graph,
    export_decoder,
    export_encoder,
    open_session,
    to_fewer_bits,
)
from stages.inference import Engine, Request, run_all
from utils.errors import CourseError


@pytest.fixture(scope="module")
def model() -> Any:
    return small_decoder(2)


@pytest.fixture(scope="module")
def graph(model: Any, tmp_path_factory: Any) -> Path:
    path = tmp_path_factory.mktemp("graph") / "model.onnx"
    assert export_decoder(model, path) < 1e-5
    return path


def greedy(model: Any, ids: torch.Tensor, most: int) -> list[int]:
    for _ in range(most):
        logits = model(ids, use_cache=False).logits[:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
    return ids[0, -most:].tolist()


@pytest.mark.parametrize("length", [1, 2, 9])
def test_a_graph_writes_what_the_model_writes(
    model: Any, graph: Path, length: int
) -> None:
    ids = torch.arange(3, 3 + length)[None]
    assert OnnxDecoder(graph).write(ids, 12) == greedy(model, ids, 12)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_a_graph_takes_any_rows_and_pieces(
    model: Any, graph: Path, rows: int
) -> None:
    ids = torch.randint(60, (rows, 10))
    decoder = OnnxDecoder(graph)
    parts, past = [], None
    for piece in ids.split([4, 1, 5], 1):
        logits, past = decoder.read(piece, past)
        parts.append(logits)
    own = model(ids, use_cache=False).logits
    assert torch.allclose(own, torch.cat(parts, 1), atol=1e-4)


def test_a_graph_of_other_weights_is_refused(model: Any, graph: Path) -> None:
    other = LlamaForCausalLM(model.config).eval()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[3] *= 1.05
    with pytest.raises(CourseError, match="logits are off"):
        check_graph(other, graph)


def test_a_graph_that_forgets_its_cache_is_refused(
    model: Any, graph: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = OnnxDecoder.read

    def forgetful(self: Any, ids: Any, past: Any = None, *more: Any) -> Any:
        return read(self, ids)

    monkeypatch.setattr(OnnxDecoder, "read", forgetful)
    with pytest.raises(CourseError, match="logits are off"):
        check_graph(model, graph)


def test_an_encoder_keeps_padding_out(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=50, intermediate_size=48, **sizes)
    encoder = BertModel(config).eval()
    export_encoder(encoder, tmp_path / "encoder.onnx")
    session = open_session(tmp_path / "encoder.onnx")
    ids = torch.randint(1, 50, (3, 9))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    (states,) = session.run(None, {"ids": ids.numpy(), "mask": mask.numpy()})
    alone = encoder(ids[1:2, :4]).last_hidden_state[0].detach().numpy()
    assert np.allclose(states[1, :4], alone, atol=1e-4)


def test_compiled_decoding_writes_the_same_twice(model: Any) -> None:
    decoder = CompiledDecoder(model, room=32)
    for ids in (torch.tensor([[4, 5, 6]]), torch.tensor([[7, 8, 9, 10, 11]])):
        assert decoder.write(ids, 10) == greedy(model, ids, 10)


def test_the_card_tells_the_graph_s_inputs(model: Any) -> None:
    text = card(model, 3e-7)
    assert "2 heads" in text and "3e-07" in text and "64 tokens" in text
    assert "{" not in text


@pytest.mark.parametrize("bits, most", [(8, 0.1), (4, 0.5)])
def test_fewer_bits_are_smaller_and_nearly_the_same(
    model: Any, graph: Path, tmp_path: Path, bits: int, most: float
) -> None:
    to_fewer_bits(graph, tmp_path / "few.onnx", bits)
    ids = torch.randint(60, (2, 20))
    logits, _ = OnnxDecoder(tmp_path / "few.onnx").read(ids)
    own = model(ids, use_cache=False).logits
    off = (logits - own).norm() / own.norm()
    assert 0 < off < most
    assert (tmp_path / "few.onnx").stat().st_size < graph.stat().st_size


def test_rounding_a_graph_says_nothing_and_leaves_logging_as_it_was(
    graph: Path, tmp_path: Path, capfd: Any, monkeypatch: Any
) -> None:
    name = "onnxruntime.quantization.matmul_nbits_quantizer"
    monkeypatch.delitem(sys.modules, name, raising=False)
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    to_fewer_bits(graph, tmp_path / "few.onnx", 8)
    assert (root.level, root.handlers) == before
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("slots", [1, 4])
def test_the_engine_drives_a_graph_like_a_model(
    model: Any, graph: Path, slots: int
) -> None:
    def asked() -> list[Request]:
        lengths = [(2 + 5 * k % 11, 3 + 7 * k % 16) for k in range(9)]
        return [
            Request(list(range(k, k + n)), most=m)
            for k, (n, m) in enumerate(lengths)
        ]

    alone = run_all(Engine(model, 1), asked())
    assert run_all(Engine(GraphModel(graph, model.config), slots), asked()) == alone


def test_a_graph_s_cache_can_be_cut_like_any_other(model: Any, graph: Path) -> None:
    ids = torch.arange(8)[None]
    cache = DynamicCache(config=model.config)
    called = GraphModel(graph, model.config)
    called(ids, past_key_values=cache)
    cache.crop(-3)
    logits = called(ids[:, 5:6], past_key_values=cache, logits_to_keep=1).logits
    own = model(ids[:, :6], use_cache=False).logits[:, -1:]
    assert logits.shape == own.shape and torch.allclose(logits, own, atol=1e-4)
