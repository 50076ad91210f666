"""A decoder as an ONNX graph: what goes in and out is tokens, logits and the key-value cache.

A graph has no memory, so the cache is among its inputs and, grown by what was read, among its
outputs. ONNX Runtime then executes the graph without torch and without Python.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, StaticCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from utils.errors import CourseError
from utils.show import count_parameters

Past = list[torch.Tensor]
FREE = torch.export.Dim.DYNAMIC
# A sum in another order moves a 32-bit logit by about a millionth of the largest.
TOLERANCE = 1e-4


class DecoderStep(torch.nn.Module):
    """A decoder whose cache goes in and out as a flat list: key, value, key, value, …"""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        ids: torch.Tensor,
        places: torch.Tensor,
        mask: torch.Tensor,
        past: Past,
    ) -> tuple[torch.Tensor, Past]:
        """The logits of some tokens behind a cache, and the cache grown by them."""
        made = self.model(
            ids,
            position_ids=places,
            attention_mask=mask,
            past_key_values=DynamicCache(list(zip(past[::2], past[1::2]))),
            use_cache=True,
        )
        grown = []
        for layer in made.past_key_values.layers:
            grown += [layer.keys, layer.values]
        return made.logits, grown


def cache_names(layers: int) -> list[str]:
    """What the parts of the cache are called in the graph.

    >>> cache_names(1)
    ['key.0', 'value.0']
    """
    return [
        f"{part}.{layer}" for layer in range(layers) for part in ("key", "value")
    ]


@torch.no_grad()
def export_decoder(model: Any, path: Path) -> float:
    """Write a decoder as a graph; how far its logits are off, relative to the largest.

    A graph that is off by more than `TOLERANCE` is an error.
    """
    step = DecoderStep(model).eval()
    # Two rows of three tokens behind four: sizes that are all different stay apart.
    ids = torch.arange(14).view(2, 7) % model.config.vocab_size
    empty: Any = DynamicCache(config=model.config)
    model(ids[:, :4], past_key_values=empty, use_cache=True)
    past = [part for layer in empty.layers for part in (layer.keys, layer.values)]
    names = cache_names(len(past) // 2)
    places = torch.arange(4, 7).expand(2, -1)
    free = {0: FREE, 1: FREE}
    sizes = (free, free, free, [{0: FREE, 2: FREE} for _ in past])
    with quiet():
        program: Any = torch.onnx.export(
            step,
            (ids[:, 4:], places, torch.ones_like(ids), past),
            dynamo=True,
            verbose=False,
            # ONNX Runtime folds and fuses when it loads, and faster.
            optimize=False,
            dynamic_shapes=sizes,
            input_names=["ids", "places", "mask", *names],
            output_names=["logits", *[f"new.{name}" for name in names]],
        )
    program.save(path)
    return check_graph(model, path)


@contextmanager
def quiet() -> Iterator[None]:
    """The exporter lists what other packages could add, and warns of its own calls."""
    messages = logging.getLogger("torch.onnx")
    level = messages.level
    messages.setLevel(logging.ERROR)
    with warnings.catch_warnings(action="ignore"):
        yield
    messages.setLevel(level)


@torch.no_grad()
def check_graph(model: Any, path: Path) -> float:
    """How far a graph's logits are off, for another number of rows and another length."""
    decoder = OnnxDecoder(path)
    ids = torch.arange(33).view(3, 11) % model.config.vocab_size
    first, past = decoder.read(ids[:, :6])
    rest, _ = decoder.read(ids[:, 6:], past)
    own = model(ids, use_cache=False).logits
    gap = (own - torch.cat([first, rest], 1)).abs().max() / own.abs().max()
    if not gap <= TOLERANCE:
        what = f"the graph's logits are off by {gap:.1e} of the largest"
        raise CourseError(what, path, "export it anew from the model in 32 bits")
    return float(gap)


def open_session(path: Path, threads: int = 1) -> Any:
    """ONNX Runtime with a graph, on the processor."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # errors
    providers = ["CPUExecutionProvider"]
    return onnxruntime.InferenceSession(str(path), options, providers=providers)


class OnnxDecoder:
    """A graph of `export_decoder`, read and written with like a model.

    decoder = OnnxDecoder(folder / "model.onnx")
    tokens = decoder.write(ids, 20)
    """

    def __init__(self, path: Path, threads: int = 1) -> None:
        self.path = path
        self.session = open_session(path, threads)
        parts = self.session.get_inputs()[3:]
        self.names = [part.name for part in parts]
        _, self.heads, _, self.width = parts[0].shape

    def read(
        self,
        ids: torch.Tensor,
        past: Past | None = None,
        places: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Past]:
        """The logits of some tokens behind a cache, and the cache grown by them.

        Unless told otherwise, the tokens follow those of the cache, and nothing is padding.
        """
        rows, many = ids.shape
        if past is None:
            nothing = torch.zeros(rows, self.heads, 0, self.width)
            past = [nothing] * len(self.names)
        start = past[0].shape[2]
        if places is None:
            places = torch.arange(start, start + many).expand(rows, -1)
        if mask is None:
            mask = torch.ones(rows, start + many, dtype=torch.long)
        inputs = {"ids": ids, "places": places, "mask": mask}
        inputs |= dict(zip(self.names, past))
        given = {name: part.numpy(force=True) for name, part in inputs.items()}
        logits, *grown = map(torch.from_numpy, self.session.run(None, given))
        return logits, grown

    def write(self, ids: torch.Tensor, most: int) -> list[int]:
        """The likeliest tokens behind a prompt."""
        tokens: list[int] = []
        past = None
        while len(tokens) < most:
            logits, past = self.read(ids, past)
            ids = logits[:, -1].argmax(-1, keepdim=True)
            tokens.append(int(ids))
        return tokens


class GraphModel:
    """A graph that is called like the model it was made of, so that the same loops drive it.

    engine = Engine(GraphModel(folder / "model.onnx", model.config))
    """

    device = torch.device("cpu")

    def __init__(self, path: Path, config: Any, threads: int = 1) -> None:
        self.decoder = OnnxDecoder(path, threads)
        self.config = config

    def eval(self) -> GraphModel:
        """A graph knows no training."""
        return self

    def __call__(
        self,
        input_ids: torch.Tensor,
        past_key_values: Any,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        logits_to_keep: int = 0,
        use_cache: bool = True,
    ) -> CausalLMOutputWithPast:
        """The logits of some tokens; the cache grows by them."""
        layers = past_key_values.layers
        past = None
        if past_key_values.get_seq_length():
            past = [part for layer in layers for part in (layer.keys, layer.values)]
        logits, grown = self.decoder.read(
            input_ids, past, position_ids, attention_mask
        )
        for number, (keys, values) in enumerate(zip(grown[::2], grown[1::2])):
            if past is None:
                past_key_values.update(keys, values, number)
            else:
                layers[number].keys, layers[number].values = keys, values
        kept = logits[:, -logits_to_keep:]
        return CausalLMOutputWithPast(logits=kept, past_key_values=past_key_values)


CARD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---
# A small model that answers in SQL

{name} with {parameters:,} parameters and a context of {context} tokens. It was pretrained on Python
source (lesson 09) and tuned with LoRA to turn a table's schema and a question into a query
(lesson 17); the adapter is merged into these weights.

**Use** the chat template: a user message with the schema and the question, as in lesson 17.
**Do not use** it for anything that matters. It knows one kind of question, it has seen little text,
and its queries must be run with the right to read and nothing else.

| file | what it is |
|:--|:--|
| `model.safetensors`, `config.json` | the model for transformers, 32 bits |
| `tokenizer.json`, `chat_template.jinja` | tokenizer and template |
| `model.onnx` | the same for ONNX Runtime; its logits differ by {gap:.0e} of the largest |

Inputs of the graph are `ids`, their `places` (rows, tokens), the `mask` (rows, all tokens) and, for
each layer, `key.N` and `value.N` (rows, {heads} heads, tokens so far, {width}). Outputs are `logits`
and the grown cache, `new.key.N` and `new.value.N`.
"""


def card(model: Any, gap: float) -> str:
    """The model card of the course's own model."""
    config = model.config
    width = config.hidden_size // config.num_attention_heads
    return CARD.format(
        name=type(model).__name__,
        parameters=count_parameters(model),
        context=config.max_position_embeddings,
        heads=config.num_key_value_heads,
        width=getattr(config, "head_dim", None) or width,
        gap=gap,
    )


class States(torch.nn.Module):
    """An encoder that takes tensors by position and returns one, as a graph does."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The last hidden states of some texts."""
        made = self.model(input_ids=ids, attention_mask=mask)
        return made.last_hidden_state


def export_encoder(model: Any, path: Path) -> None:
    """Write an encoder as a graph for any number of texts of any length."""
    ids = torch.arange(14).view(2, 7)
    sizes = {0: FREE, 1: FREE}
    with quiet():
        program: Any = torch.onnx.export(
            States(model).eval(),
            (ids, torch.ones_like(ids)),
            dynamo=True,
            verbose=False,
            optimize=False,
            dynamic_shapes=(sizes, sizes),
            input_names=["ids", "mask"],
            output_names=["states"],
        )
    program.save(path)


class CompiledDecoder:
    """Greedy decoding whose pass for one token is one compiled program.

    The cache has room for `room` tokens from the beginning, so that no shape changes.
    """

    def __init__(self, model: Any, room: int) -> None:
        self.model = model
        self.cache = StaticCache(config=model.config, max_cache_len=room)
        self.fast = torch.compile(self.step, dynamic=False)

    def step(self, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """The likeliest token behind some others."""
        made = self.model(ids, past_key_values=self.cache, position_ids=places)
        return made.logits[:, -1].argmax(-1, keepdim=True)

    @torch.no_grad()
    def write(self, ids: torch.Tensor, most: int) -> list[int]:
        """The likeliest tokens behind a prompt, which is read uncompiled: its length varies."""
        self.cache.reset()
        start = ids.shape[1]
        tokens = [self.step(ids, torch.arange(start)[None])]
        for place in range(start, start + most - 1):
            tokens.append(self.fast(tokens[-1], torch.tensor([[place]])))
        return torch.cat(tokens, 1)[0].tolist()


@contextmanager
def unheard() -> Iterator[None]:
    """Whoever is imported or called here may set up logging for everybody: nobody hears it."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    yield
    logging.disable(before)
    root.setLevel(level)
    root.handlers[:] = handlers


def to_fewer_bits(path: Path, target: Path, bits: int) -> None:
    """Round the matrices of a graph to 8 or 4 bits, in blocks of 32 with a scale each.

    Activations are rounded block by block as they come, and whole numbers are multiplied.
    """
    import onnx

    with tempfile.TemporaryDirectory() as folder:
        folded = Path(folder, "folded.onnx")
        fold_constants(path, folded)
        graph = onnx.load(folded)
    whole_numbers = 4  # the operator's name for kernels that multiply in eight bits
    with unheard():
        from onnxruntime.quantization import matmul_nbits_quantizer as rounding

        quantizer = rounding.MatMulNBitsQuantizer(
            graph, bits=bits, block_size=32, accuracy_level=whole_numbers
        )
        quantizer.process()
    onnx.save(quantizer.model.model, target)


def fold_constants(path: Path, target: Path) -> None:
    """Compute beforehand what depends on no input: only a matrix that is there can be rounded."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    levels = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(target)
    providers = ["CPUExecutionProvider"]
    onnxruntime.InferenceSession(str(path), options, providers=providers)
