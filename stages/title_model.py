"""The packaged T5 as a model of the library that can be trained, and its spelling of messages.

model = load_title_model(folder)
spelling = Spelling(load_t5_words(folder), unknown)
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import numpy_helper
from transformers import (
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from stages.translation import Pair, restore
from utils.errors import CourseError

Weights = dict[str, torch.Tensor]
SHAPE: dict[str, Any] = {
    "vocab_size": 32128,
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 1024,
    "num_layers": 8,
    "num_heads": 6,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,  # and so the outputs are not scaled down
    "decoder_start_token_id": 0,
}


def unknown_letters(text: str, vocabulary: Any) -> list[str]:
    """The letters of a text that a vocabulary cannot write, sorted."""
    unknown = vocabulary.unk_token_id
    letters = sorted(set("".join(text.split())))
    return [one for one in letters if unknown in vocabulary(one)["input_ids"]]


class Spelling:
    """Messages as T5's vocabulary can spell them: markers as words, no unknown capitals."""

    def __init__(self, vocabulary: Any, unknown: Collection[str]) -> None:
        self.vocabulary = vocabulary
        self.unknown = unknown

    def write(self, text: str) -> str:
        """The text for the model."""
        text = re.sub(r"<x(\d)>", r"X\1", text)
        for one in self.unknown:
            small = one.lower()
            text = text.replace(one, small)
        return text

    def ids(self, text: str) -> list[int]:
        """The ids of the text, with the end."""
        written = self.write(text)
        encoded = self.vocabulary(written)
        return encoded["input_ids"]

    def read(self, tokens: list[int], pair: Pair) -> str:
        """What the model said; the first letter as in the source, placeholders put in."""
        text = self.vocabulary.decode(tokens, skip_special_tokens=True).strip()
        if pair.source[:1].isupper():
            text = text[:1].upper() + text[1:]
        return restore(re.sub(r"X(\d)", r"<x\1>", text), pair.numbers)


def load_t5_words(folder: Path) -> PreTrainedTokenizerFast:
    """The vocabulary of the packaged T5."""
    return PreTrainedTokenizerFast(
        tokenizer_file=str(Path(folder) / "tokenizer.json"),
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
    )


def read_onnx(path: Path) -> Weights:
    """Weights of an 8-bit ONNX graph as float tensors: a number q stands for (q - zero) * scale."""
    graph = onnx.load(str(path)).graph
    tensors = {one.name: numpy_helper.to_array(one) for one in graph.initializer}

    def dequantize(name: str) -> torch.Tensor:
        quantized = tensors[f"{name}_quantized"]
        zero = tensors[f"{name}_zero_point"]
        scale = tensors[f"{name}_scale"]
        numbers = torch.tensor(quantized).float()
        return (numbers - float(zero)) * float(scale)

    weights = {}
    for name in tensors:
        if name.endswith(".weight"):
            weights[name] = torch.tensor(tensors[name])
        elif name.endswith(".weight_quantized"):  # embeddings
            plain = name.removesuffix("_quantized")
            weights[plain] = dequantize(plain)
    for node in graph.node:
        if node.op_type == "MatMulInteger":  # ONNX multiplies from the other side
            plain = node.name.strip("/").removesuffix("/MatMul_quant")
            matrix = dequantize(node.input[1].removesuffix("_quantized"))
            weights[f"{plain}/weight".replace("/", ".")] = matrix.T
    return weights


def load_title_model(folder: Path) -> T5ForConditionalGeneration:
    """The packaged T5 as a model of the library, whose weights have gradients.

    Its configuration is not in the package; the shapes of the tensors give it away. Embeddings
    and output are two matrices, which the configuration of this library's T5 hides.
    """
    weights = {}
    for name, tensor in read_onnx(Path(folder) / "encoder.onnx").items():
        weights[re.sub("^enc", "encoder", name)] = tensor
    for name, tensor in read_onnx(Path(folder) / "decoder.onnx").items():
        weights[re.sub(r"^(m|dec)\.", "", name)] = tensor
    model = T5ForConditionalGeneration(T5Config(**SHAPE))
    output = torch.empty_like(model.shared.weight)
    model.lm_head.weight = torch.nn.Parameter(output)
    model.config.tie_word_embeddings = False  # so that nothing ties them again
    missing = set(model.load_state_dict(weights, strict=False).missing_keys)
    if missing - {"decoder.embed_tokens.weight"}:  # another name of `shared`
        what = f"the packaged T5 lacks {len(missing)} tensors"
        raise CourseError(what, folder, "fetch the asset `title-model` anew")
    return model.eval()


def keep_tokens(model: T5ForConditionalGeneration, kept: torch.Tensor) -> None:
    """Give the decoder a vocabulary of its own, the tokens `kept`; the encoder's is frozen."""
    chosen = model.shared.weight.detach()[kept].clone()
    model.decoder.embed_tokens = torch.nn.Embedding.from_pretrained(
        chosen, freeze=False
    )
    output = model.lm_head.weight.detach()[kept].clone()
    model.lm_head.weight = torch.nn.Parameter(output)
    model.lm_head.out_features = model.config.vocab_size = len(kept)
    model.shared.weight.requires_grad_(False)
