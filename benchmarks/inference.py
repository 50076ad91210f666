"""Ways to write faster with SmolLM2, beside the library's plain `generate`, in one run.

    python -m benchmarks.inference      writes results/20_inference.json

All on one thread. Two peers are no requirement of the course. They are measured where they lie in
`build/peers`:

    pip install --no-deps --target build/peers ctranslate2 torchao
"""

from __future__ import annotations

import contextlib
import importlib.metadata as metadata
import inspect
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.timing import Row, row
from course.checkout import clean_commit
from stages.export import (
    CompiledDecoder,
    GraphModel,
    OnnxDecoder,
    export_decoder,
    to_fewer_bits,
)
from stages.inference import Engine, Request, run_all
from utils.artifacts import write_json
from utils.assets import asset
from utils.errors import ROOT, CourseError, build_folder
from utils.machine import in_turn, machine_facts

RESULT = ROOT / "results" / "20_inference.json"
PROMPT = '<|endoftext|>def mean(numbers):\n    """Return the arithmetic mean."""\n'
CASE = """    def test_{0}(self):
        result = calculate("{1}", 6, 3)
        self.assertEqual(result, {2})

"""
TESTS = "<|endoftext|>class CalculateTest(TestCase):\n"
TESTS += CASE.format("add", "+", 9) + CASE.format("subtract", "-", 3)
TESTS += "    def test_multi"
MOST = 48
ROUNDS = 3
Way = Callable[[], Any]


def middle(seconds: list[float]) -> float:
    """The median of the rounds."""
    return sorted(seconds)[len(seconds) // 2]


class Bench:
    """SmolLM2 and what writes with it, on one thread."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.folder = asset("smollm2")
        options = {"dtype": torch.float32}
        loaded = AutoModelForCausalLM.from_pretrained(self.folder, **options)
        self.model: Any = loaded.eval()
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder)
        self.ids = self.encode(PROMPT)
        # Whether CTranslate2 writes in 32 bits what `generate` writes.
        self.same_text = False
        self.code = self.encode(inspect.getsource(statistics))[:, :512]
        self.losses = {"32 bits": self.loss(lambda ids: self.model(ids).logits)}

    def encode(self, text: str) -> torch.Tensor:
        """Token ids of a text, as a batch of one."""
        return self.tokenizer(text, return_tensors="pt")["input_ids"]

    @torch.no_grad()
    def loss(self, read: Callable[[torch.Tensor], torch.Tensor]) -> float:
        """Nats for each token of the code, by the logits that `read` makes of its ids."""
        logits = read(self.code)
        return F.cross_entropy(logits[0, :-1], self.code[0, 1:]).item()

    def generate(
        self, ids: torch.Tensor, model: Any = None, **how: Any
    ) -> list[int]:
        """What the library writes, at its plainest unless told how."""
        made = (model or self.model).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=MOST,
            max_new_tokens=MOST,
            **how,
        )
        return made[0, ids.shape[1] :].tolist()

    def decoders(self, folder: Path) -> dict[str, Way]:
        """Ways to decode for one caller; each of 32 bits writes what `generate` does."""
        path = folder / "model.onnx"
        export_decoder(self.model, path)
        eight = folder / "int8.onnx"
        to_fewer_bits(path, eight, 8)
        compiled = CompiledDecoder(self.model, room=128)
        exported = OnnxDecoder(path)
        rounded = OnnxDecoder(eight)
        ways: dict[str, Way] = {
            "generate": lambda: self.generate(self.ids),
            "compiled": lambda: compiled.write(self.ids, MOST),
            "ONNX": lambda: exported.write(self.ids, MOST),
        }
        for name, way in ways.items():
            self.hold_to_generate(name, way())
        ways["ONNX, 8 bits"] = lambda: rounded.write(self.ids, MOST)
        self.losses["ONNX, 8 bits"] = self.loss(lambda ids: rounded.read(ids)[0])
        return ways | self.peers(folder)

    def hold_to_generate(self, name: str, tokens: list[int]) -> None:
        """A way of 32 bits writes what `generate` writes, or its speed means nothing."""
        if tokens != self.generate(self.ids):
            raise CourseError(f"{name} writes another text than generate")

    def peers(self, folder: Path) -> dict[str, Way]:
        """The ways of libraries that lie in build/peers."""
        sys.path.append(str(build_folder() / "peers"))
        ways: dict[str, Way] = {}
        for add in (self.add_ctranslate2, self.add_torchao):
            try:
                add(ways, folder)
            except ImportError as error:
                print(f"not measured: {error}")
        return ways

    def add_ctranslate2(self, ways: dict[str, Way], folder: Path) -> None:
        """CTranslate2 in 32 and in 8 bits, greedily, from the same weights."""
        import ctranslate2
        from ctranslate2.converters import TransformersConverter

        tokens = self.tokenizer.convert_ids_to_tokens(self.ids[0].tolist())
        how = {"max_length": MOST, "min_length": MOST, "sampling_topk": 1}
        for kind, name in (
            ("float32", "CTranslate2"),
            ("int8", "CTranslate2, 8 bits"),
        ):
            place = folder / kind
            TransformersConverter(self.folder).convert(
                str(place), quantization=kind
            )
            threads = {"intra_threads": 1, "inter_threads": 1}
            peer = ctranslate2.Generator(str(place), device="cpu", **threads)

            def write(peer: Any = peer) -> list[int]:
                made = peer.generate_batch(
                    [tokens], include_prompt_in_result=False, **how
                )
                return list(made[0].sequences_ids[0])

            ways[name] = write
        self.same_text = ways["CTranslate2"]() == self.generate(self.ids)

    def add_torchao(self, ways: dict[str, Way], folder: Path) -> None:
        """torchao's weights of eight bits, in the library's own loop."""
        import copy

        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        packed = copy.deepcopy(self.model)
        quantize_(packed, Int8WeightOnlyConfig())
        ways["torchao, 8 bits"] = lambda: self.generate(self.ids, packed)
        self.losses["torchao, 8 bits"] = self.loss(lambda ids: packed(ids).logits)

    def callers(self) -> list[Request]:
        """Eight callers with four requests each, of different lengths."""
        requests = []
        for k in range(32):
            ids = self.ids[0, : 4 + 2 * k % 12].tolist()
            requests.append(Request(ids, most=4 + 5 * k % 24))
        return requests


def speeds(found: dict[str, list[float]], tokens: int) -> dict[str, float]:
    """Tokens a second of each way."""
    return {way: tokens / middle(seconds) for way, seconds in found.items()}


def rows() -> Iterator[Row]:
    """One caller, eight callers, guesses, and the peers."""
    bench = Bench()
    with tempfile.TemporaryDirectory() as folder:
        found = in_turn(bench.decoders(Path(folder)), ROUNDS)
        yield from one_caller(speeds(found, MOST), bench.same_text)
        yield from lost_in_bits(bench.losses)
        graph = GraphModel(Path(folder, "model.onnx"), bench.model.config)
        yield from eight_callers(bench, graph)
    yield guesses(bench)


def one_caller(speed: dict[str, float], same_text: bool) -> Iterator[Row]:
    """Each way over `generate`, and ours over a peer's with the same weights."""
    plain = {"generate": speed["generate"]}
    fastest = max(("compiled", "ONNX", "ONNX, 8 bits"), key=lambda way: speed[way])
    unit = "tokens a second"
    for way in speed:
        if way != "generate":
            # The bar is for the fastest of ours; the others are there to compare.
            bar = 2.0 if way == fastest else 0.0
            yield row(f"decode: {way}", "one caller", unit, speed[way], plain, bar)
    pairs = {
        "CTranslate2": ("compiled", "ONNX"),
        "CTranslate2, 8 bits": ("ONNX, 8 bits",),
    }
    for peer, ours in pairs.items():
        if peer not in speed:
            continue
        best = max(speed[way] for way in ours)
        what = f"the same weights, {' or '.join(ours)}"
        theirs = {peer: speed[peer]}
        id = f"against {peer}"
        yield row(id, what, unit, best, theirs, 0.7, valid=same_text)


def lost_in_bits(losses: dict[str, float]) -> Iterator[Row]:
    """What the loss on code becomes with weights of eight bits: a hundredth more at most."""
    exact = {"32 bits": losses["32 bits"]}
    unit = "nats a token"
    for way, nats in losses.items():
        if way not in exact:
            what = "loss on 511 tokens of Python's statistics.py"
            bar = {"bar": 1.01, "higher_is_better": False}
            yield row(f"loss: {way}", what, unit, nats, exact, **bar)


def eight_callers(bench: Bench, graph: GraphModel) -> Iterator[Row]:
    """Continuous batching with eight slots over one request at a time, in torch and in ONNX."""
    texts: dict[str, list[list[int]]] = {}
    ways: dict[str, Way] = {}
    for name, model in (("torch", bench.model), ("ONNX", graph)):
        for slots in (1, 8):
            way = f"{name} {slots}"
            ways[way] = serving(bench, model, slots, texts, way)
    found = in_turn(ways, 2)
    alone = texts["torch 1"]
    speed = speeds(found, sum(map(len, alone)))
    for name in ("torch", "ONNX"):
        yield row(
            f"batching, {name}",
            "32 requests of eight callers",
            "tokens a second",
            speed[f"{name} 8"],
            {"one at a time": speed[f"{name} 1"]},
            3.0,
            valid=texts[f"{name} 8"] == alone,
        )


def serving(
    bench: Bench,
    model: Any,
    slots: int,
    texts: dict[str, list[list[int]]],
    way: str,
) -> Way:
    """All requests through an engine with some slots; what they get is noted in `texts`."""

    def work() -> None:
        texts[way] = run_all(Engine(model, slots), bench.callers())

    return work


def guesses(bench: Bench) -> Row:
    """The library's prompt lookup on a file of similar tests."""
    ids = bench.encode(TESTS)

    def plain() -> list[int]:
        return bench.generate(ids)

    def lookup() -> list[int]:
        return bench.generate(ids, prompt_lookup_num_tokens=8)

    same = plain() == lookup()
    found = in_turn({"plain": plain, "lookup": lookup}, ROUNDS)
    speed = speeds(found, MOST)
    peers = {"generate": speed["plain"]}
    unit = "tokens a second"
    what = "prompt lookup on code that repeats itself"
    return row("guesses", what, unit, speed["lookup"], peers, 1.3, valid=same)


def versions(*names: str) -> dict[str, str]:
    """The versions of those packages that are there."""
    found = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def main() -> None:
    """Measure all, and keep it with the machine and the commit."""
    made_from = clean_commit()
    found = []
    for one in rows():
        print(one["id"], one["what"], one["ours"], one["peers"], flush=True)
        print("   ratio", one["ratio"], one["bar"], one["holds"], flush=True)
        found.append(one)
    facts: dict[str, Any] = {"command": "python -m benchmarks.inference"}
    facts["commit"] = made_from
    facts |= {"machine": machine_facts(), "threads": 1}
    facts |= {"peers": versions("ctranslate2", "torchao"), "rows": found}
    write_json(RESULT, facts)


if __name__ == "__main__":
    main()
