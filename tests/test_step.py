"""One step of the engine: nothing is read in it, float16 keeps its scale, memory is spared, losses stay."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import (  # noqa: F401
    GPT2,
    Killed,
    at_step,
    calm,
    die,
    inputs,
    log_lines,
    lose_gradients,
    losses,
    recipe,
    weights,
)
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoTokenizer

from stages.chunked_loss import IGNORED, ChunkedLoss, chunk_loss
from stages.memory import predict_memory
from stages.recipe import Recipe, build_model
from stages.run import Run
from stages.step import LossScale, Step
from stages.tokens import Loader, Split, open_store, split_rows
from stages.training import begin, make_accelerator, pretrain
from stages.training_callbacks import DivergenceCheck
from utils.errors import CourseError


class Reads(TorchDispatchMode):
    """Counts how often a number is fetched from a tensor: on a GPU each time waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.paused = False

    def pause(self, *_: Any) -> None:
        """Count no more, or again: transformers itself reads one number in a forward pass."""
        self.paused = not self.paused

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if operation is torch.ops.aten._local_scalar_dense.default:
            self.count += not self.paused
        return operation(*args, **(kwargs or {}))


def begun(recipe: Recipe) -> tuple[Run, Step]:
    tokenizer = AutoTokenizer.from_pretrained(recipe.tokenizer)
    run = Run(recipe, make_accelerator(recipe), tokenizer)
    run.folder.mkdir(parents=True, exist_ok=True)
    return run, begin(run)


@pytest.mark.parametrize(("optimizer", "most"), [("adamw", 0), ("muon", 1)])
def test_a_step_between_two_reports_reads_nothing(
    recipe: Recipe, optimizer: str, most: int
) -> None:
    """Muon must be told whether to step, AdamW reads it where it is."""
    rare = recipe.change(
        optimizer=optimizer, log_every=6, save_every=6, evaluate_every=6
    )
    run, step = begun(rare)
    reads = Reads()
    step.model.register_forward_pre_hook(reads.pause)
    step.model.register_forward_hook(reads.pause)
    with reads:
        for _ in range(4):
            step.take(run.step, 1.0)
    assert reads.count == 4 * most


def test_rows_are_read_beside_the_training(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a thread, also of the batches that follow: a slow disk then holds nobody up."""
    real = Split.gather
    readers = set()

    def gather(self: Split, rows: Any) -> Any:
        readers.add(threading.current_thread().name.partition("_")[0])
        return real(self, rows)

    monkeypatch.setattr(Split, "gather", gather)
    run, step = begun(recipe)
    step.take(run.step, 1.0)
    assert readers == {"read-ahead"}


def test_rare_reports_change_no_loss(recipe: Recipe, calm: Recipe) -> None:
    pretrain(recipe.change(log_every=5))
    mine, theirs = losses(recipe), losses(calm)
    assert mine == {number: theirs[number] for number in (5, 10, 12)}
    ours, others = weights(recipe), weights(calm)
    assert all(torch.equal(ours[name], others[name]) for name in others)
    assert all(line["seconds"] > 0 for line in log_lines(recipe))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_lost_gradients_are_noticed_at_a_rare_report_and_nothing_bad_is_saved(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    lose_gradients(monkeypatch)
    with pytest.raises(CourseError, match="not finite 5 steps in a row"):
        pretrain(recipe.change(log_every=12, optimizer=optimizer))
    one, two = weights(recipe, 4), weights(recipe, 8)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert all(tensor.isfinite().all() for tensor in two.values())


# float16 ----------------------------------------------------------------------------------------


def start_scale(patch: pytest.MonkeyPatch, exponent: int) -> None:
    real = LossScale.__init__

    def init(self: LossScale, progress: dict, device: torch.device) -> None:
        real(self, {"loss_scale": (2.0**exponent, 0.0)} | progress, device)

    patch.setattr(LossScale, "__init__", init)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_float16_learns_like_float32(
    recipe: Recipe, calm: Recipe, optimizer: str
) -> None:
    wide = recipe.change(optimizer=optimizer, folder=recipe.folder + "-wide")
    narrow = recipe.change(optimizer=optimizer, precision="float16")
    pretrain(wide)
    pretrain(narrow)
    assert losses(narrow) == pytest.approx(losses(wide), abs=0.03)
    assert losses(narrow) != losses(wide)
    norms = [[line["norm"] for line in log_lines(run)] for run in (narrow, wide)]
    assert norms[0][0] == pytest.approx(norms[1][0], rel=0.02), "without the scale"


@pytest.mark.slow
def test_the_scale_changes_no_update(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Powers of two: what both optimizers see is the same as long as nothing overflows."""
    found = []
    for exponent in (10, 14):
        run = recipe.change(
            precision="float16", steps=4, folder=f"{recipe.folder}-{exponent}"
        )
        with monkeypatch.context() as patch:
            start_scale(patch, exponent)
            pretrain(run)
        found.append(weights(run, 4))
    for name, tensor in found[0].items():
        assert torch.allclose(tensor, found[1][name], atol=2e-3), name


@pytest.mark.slow
def test_a_scale_that_is_too_large_is_no_fault(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_scale(monkeypatch, 34)
    narrow = recipe.change(precision="float16", steps=40, save_every=20)
    pretrain(narrow)
    lines = log_lines(narrow)
    overflows = [line["step"] for line in lines if not math.isfinite(line["norm"])]
    assert len(overflows) > 5, "more in a row than a run may have without a scale"
    assert overflows[:6] == [1, 2, 3, 4, 5, 6]
    assert losses(narrow)[40] < losses(narrow)[1] - 0.1


def test_a_scale_that_cannot_be_found_is_a_fault(recipe: Recipe) -> None:
    _, step = begun(recipe.change(precision="float16"))
    check = DivergenceCheck(500)
    lost = [{"loss": 1.0, "norm": math.inf}] * 9
    check(None, step, lost)
    step.scale.value /= 2.0**20
    with pytest.raises(CourseError, match="not finite"):
        check(step.run, step, lost)


@pytest.mark.slow
def test_float16_goes_on_to_the_same_bits(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scale falls on the way to the checkpoint, and is not found anew behind it."""
    start_scale(monkeypatch, 24)
    narrow = recipe.change(precision="float16")
    twin = narrow.change(folder=recipe.folder + "-twin")
    pretrain(twin)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        at_step(patch, 6, die)
        pretrain(narrow)
    pretrain(narrow)
    # Not finite: no number equals it.
    assert str(log_lines(narrow)[4:]) and losses(narrow) == losses(twin)
    mine, theirs = weights(narrow), weights(twin)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_a_scale_is_halved_and_doubled() -> None:
    scale = LossScale({"precision": "float16"}, torch.device("cpu"))
    bad, good = torch.tensor(1.0), torch.tensor(0.0)
    scale.update(bad)
    assert float(scale.value) == 2.0**15
    for _ in range(2000):
        assert float(scale.value) == 2.0**15
        scale.update(good)
    assert scale.progress() == {"loss_scale": (2.0**16, 0.0)}


# memory -----------------------------------------------------------------------------------------


def rows_of(inputs: Path) -> dict[str, torch.Tensor]:
    return split_rows(
        next(iter(Loader(open_store(inputs / "tokens")["train"], 4, 1)))
    )


def loss_and_gradients(model: Any, parts: dict, scale: float = 1.0) -> Any:
    loss = model(**parts, use_cache=False).loss
    (loss * scale).backward()
    return loss.detach(), [p.grad / scale for p in model.parameters()]


@pytest.mark.parametrize("kind", ["nanochat", "gpt2"])
@pytest.mark.parametrize("size", [1, 48, 10_000])
def test_chunks_have_the_loss_and_the_gradients_of_the_whole(
    recipe: Recipe, inputs: Path, kind: str, size: int
) -> None:
    sizes = GPT2 if kind == "gpt2" else recipe.model
    tokenizer = AutoTokenizer.from_pretrained(recipe.tokenizer)
    one, two = (build_model(Recipe(model=sizes), tokenizer) for _ in range(2))
    chunk_loss(two, size)
    loss, gradients = loss_and_gradients(one, rows_of(inputs))
    other, others = loss_and_gradients(two, rows_of(inputs))
    assert torch.allclose(loss, other, rtol=1e-6)
    for mine, theirs in zip(gradients, others):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("padding", ["some", "a chunk", "all"])
@pytest.mark.parametrize("narrow", [False, True])
def test_padding_has_no_loss_and_no_gradient(padding: str, narrow: bool) -> None:
    """Held to torch's own loss of the logits of all tokens."""
    draw = torch.Generator().manual_seed(0)
    targets = torch.randint(50, (24,), generator=draw)
    hidden_rows = {"some": [0, 5, 23], "a chunk": range(8, 16), "all": range(24)}
    targets[list(hidden_rows[padding])] = IGNORED
    made = torch.randn(24, 6, generator=draw), torch.randn(50, 6, generator=draw)
    results = []
    for chunked in (True, False):
        hidden, weight = (one.clone().requires_grad_() for one in made)
        with torch.autocast("cpu", torch.bfloat16, narrow):
            if chunked:
                loss = ChunkedLoss.apply(hidden, weight, targets, 8)
            else:
                loss = F.cross_entropy(hidden @ weight.T, targets)
        (loss * 3).backward()
        results.append((loss.detach(), hidden.grad, weight.grad))
    near = {"rtol": 0.05, "atol": 0.02} if narrow else {"rtol": 1e-5, "atol": 1e-6}
    for mine, theirs in zip(*results):
        assert torch.allclose(mine, theirs, equal_nan=True, **near)


def test_a_label_that_is_no_word_is_refused() -> None:
    wrong = torch.tensor([1, -5])
    with pytest.raises(IndexError, match="-5 is out of bounds"):
        ChunkedLoss.apply(torch.ones(2, 3), torch.ones(9, 3), wrong, 1)


def test_chunks_keep_small_gradients_in_float16(
    recipe: Recipe, inputs: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(recipe.tokenizer)
    one, two = (build_model(recipe, tokenizer) for _ in range(2))
    chunk_loss(two, 16)
    _, wide = loss_and_gradients(one, rows_of(inputs))
    with torch.autocast("cpu", torch.float16):
        _, narrow = loss_and_gradients(two, rows_of(inputs), 2.0**14)
    for mine, theirs in zip(wide, narrow):
        assert (mine - theirs).norm() < 0.02 * mine.norm()


def test_a_model_that_chunks_still_writes(recipe: Recipe) -> None:
    tokenizer = AutoTokenizer.from_pretrained(recipe.tokenizer)
    model = build_model(recipe, tokenizer)
    row = torch.tensor([[1, 2, 3]])
    before = model(row).logits
    how = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    text = model.generate(row, **how)
    chunk_loss(model, 2)
    assert torch.equal(model(row).logits, before)
    assert torch.equal(model.generate(row, **how), text)


def test_a_head_that_does_more_than_multiply_is_not_cut(recipe: Recipe) -> None:
    capped = recipe.change(loss_chunk=8, model={"final_logit_softcapping": 15.0})
    with pytest.raises(CourseError, match="final_logit_softcapping"):
        pretrain(capped)


@pytest.mark.parametrize("change", [{"loss_chunk": 40}, {"recompute": True}])
def test_what_spares_memory_changes_no_loss(
    recipe: Recipe, calm: Recipe, change: dict[str, Any]
) -> None:
    pretrain(recipe.change(**change))
    assert losses(recipe) == pytest.approx(losses(calm), abs=1e-4)
    assert losses(recipe, "validation") == pytest.approx(
        losses(calm, "validation"), abs=1e-4
    )


def peak(
    sizes: dict, tokenizer: Any, chunk: int | None = None, **fields: Any
) -> int:
    """The most bytes alive at once in a step of two rows of 128, on fake tensors."""
    recipe = Recipe(model=sizes, **fields)

    def one_step() -> None:
        model = build_model(recipe, tokenizer).train()
        if chunk:
            chunk_loss(model, chunk)
        parts = split_rows(torch.zeros(2, 129, dtype=torch.long))
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**parts, use_cache=False).loss
        loss.backward()

    return predict_memory(one_step).peak


def test_memory_falls_with_each_that_spares_it(recipe: Recipe) -> None:
    tokenizer = AutoTokenizer.from_pretrained(recipe.tokenizer)
    sizes = {**GPT2, "n_positions": 128, "n_layer": 6, "n_embd": 64}
    wordy = {**sizes, "vocab_size": 20_000, "n_layer": 1}
    logits = 2 * 128 * 20_000
    # In float32, and their gradient: what never exists with chunks.
    assert (
        peak(wordy, tokenizer) - peak(wordy, tokenizer, chunk=16) > 2 * 4 * logits
    )
    plain = peak(sizes, tokenizer)
    tanh = {"activation_function": "gelu_pytorch_tanh"}
    fused = peak({**sizes, **tanh}, tokenizer)
    least = peak({**sizes, **tanh}, tokenizer, recompute=True)
    assert plain - fused > 6 * 256 * 64 * 4 * 4, "at least four bytes a hidden unit"
    assert least < 0.6 * fused
