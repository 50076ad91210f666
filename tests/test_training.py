"""The engine against a plain loop, and a run against kills, full disks, lost memory and launchers."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import (  # noqa: F401
    GPT2,
    Killed,
    at_step,
    calm,
    check_ended,
    check_same_bits,
    checkpoint_names,
    die,
    inputs,
    launch,
    log_lines,
    lose_gradients,
    losses,
    recipe,
    reset_accelerate,
    small_recipe,
    train_on,
    weights,
    write_recipe,
)
from torch.nn import functional as F
from transformers import AutoTokenizer

from conftest import POSIX
from stages import checkpoints, training
from stages import run as runs
from stages.recipe import Recipe, build_model
from stages.stand_in_hub import Handler, StandInHub
from stages.tokens import Loader, open_store, permute, split_rows
from stages.training import Run, Step, main, make_accelerator, pretrain
from stages.training_callbacks import sum_losses
from utils.errors import ROOT, Choice, CourseError
from utils.machine import set_seed

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")


# a plain loop beside the engine -----------------------------------------------------------------


def plain_loop(recipe: Recipe) -> Iterator[float]:
    """AdamW, a cosine behind a warm-up of three steps, clipping: nothing of the engine but its weights."""
    model = build_model(
        recipe, AutoTokenizer.from_pretrained(recipe.tokenizer)
    ).train()
    vectors = [p for p in model.parameters() if p.dim() < 2]
    others = [p for p in model.parameters() if p.dim() >= 2]
    groups = [
        {"params": others, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95))
    split = open_store(Path(recipe.tokens))["train"]
    for step in range(12):
        places = permute(np.arange(4 * step, 4 * step + 4), len(split), recipe.seed)
        rows = torch.from_numpy(split.gather(places).astype(np.int64))
        loss = F.cross_entropy(
            model(rows[:, :-1]).logits.flatten(0, 1), rows[:, 1:].flatten()
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        cosine = 0.1 + 0.9 * (1 + math.cos(math.pi * (step - 3) / 9)) / 2
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * ((step + 1) / 3 if step < 3 else cosine)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def test_the_engine_equals_a_plain_loop(recipe: Recipe) -> None:
    fields = {"optimizer": "adamw", "rate": 1e-2, "weight_decay": 0.1, "clip": 0.3}
    fields |= {"schedule": "cosine", "warmup": 0.25}
    plain = Recipe(**{**vars(recipe), **fields, "model": GPT2})
    pretrain(plain)
    assert list(losses(plain).values()) == pytest.approx(
        list(plain_loop(plain)), abs=2e-5
    )
    assert min(line["norm"] for line in log_lines(plain)) > 0.3, (
        "clipping has something to do"
    )


@pytest.mark.parametrize("micro", [1, 2, 3])
def test_accumulation_equals_the_large_batch(
    recipe: Recipe, calm: Recipe, micro: int
) -> None:
    # Three do not divide four: then it is two at a time.
    pretrain(recipe.change(micro=micro))
    assert losses(recipe) == pytest.approx(losses(calm), abs=1e-4)


def test_the_comparison_notices_other_rows(
    recipe: Recipe,
    calm: Recipe,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_order = lambda self, places: places % len(self.split)
    monkeypatch.setattr(Loader, "rows_at", in_order)
    pretrain(recipe)
    assert losses(recipe) != pytest.approx(losses(calm), abs=1e-3)


def test_it_learns(recipe: Recipe) -> None:
    pretrain(recipe.change(steps=60, evaluate_every=60, save_every=60))
    assert losses(recipe)[60] < losses(recipe)[1] - 0.8


def test_what_is_due_happens_then_and_at_the_end(recipe: Recipe) -> None:
    changes = {
        "evaluate_every": 5,
        "save_every": 4,
        "log_every": 7,
        "sample_every": 9,
        "keep": None,
    }
    pretrain(recipe.change(**changes, prompts=["def ", "import "]))
    assert list(losses(recipe, "validation")) == [4, 5, 8, 10, 12]
    assert list(losses(recipe)) == [7, 12]
    samples = log_lines(recipe, "sample")
    assert [line["step"] for line in samples] == [9, 12]
    assert [text[:4] for text in samples[0]["samples"]] == ["def ", "impo"]
    assert checkpoint_names(recipe) == [
        "checkpoint-000004",
        "checkpoint-000008",
        "checkpoint-000012",
    ]


def test_the_disk_is_not_asked_at_every_step(
    recipe: Recipe,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    real = checkpoints.list_checkpoints
    monkeypatch.setattr(
        checkpoints, "list_checkpoints", lambda f: calls.append(f) or real(f)
    )
    pretrain(recipe.change(steps=40, save_every=40, evaluate_every=40))
    assert len(calls) < 6


def test_rows_that_processes_cannot_share_are_refused(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setattr(training.Accelerator, "num_processes", 3)
    with pytest.raises(CourseError, match="4 rows a step cannot be shared by 3"):
        make_accelerator(recipe)


def test_a_model_with_too_few_positions_is_refused(recipe: Recipe) -> None:
    with pytest.raises(CourseError, match="16 positions"):
        pretrain(recipe.change(model={"max_position_embeddings": 16}))


@pytest.mark.parametrize("name", ["vocabulary", "block"])
def test_tokens_of_another_size_than_the_recipe_wants_are_refused(
    recipe: Recipe, name: str
) -> None:
    size = open_store(Path(recipe.tokens))["train"].header[name]
    with pytest.raises(
        CourseError, match=f"a {name} of 32,768 tokens, .* {size:,}"
    ):
        pretrain(recipe.change(**{name: 32_768}))
    pretrain(recipe.change(**{name: size}, steps=1))


def test_few_tokens_for_many_steps_are_counted_in_epochs(
    recipe: Recipe, calm: Recipe, capfd: pytest.CaptureFixture
) -> None:
    rows = len(open_store(Path(recipe.tokens))["train"])
    few = recipe.change(steps=math.ceil(5 * rows / recipe.rows))
    # The count comes before the first step, which here is not taken.
    with pytest.raises(CourseError, match="positions"):
        pretrain(few.change(model={"max_position_embeddings": 16}))
    assert "epochs" in "".join(capfd.readouterr())
    pretrain(recipe)
    assert "epochs" not in "".join(capfd.readouterr())


# evaluation -------------------------------------------------------------------------------------


def test_a_ragged_evaluation_counts_tokens(recipe: Recipe) -> None:
    step = make_step(recipe)
    split = open_store(Path(recipe.tokens))["validation"]
    places = permute(np.arange(21), len(split), 42)
    rows = torch.from_numpy(split.gather(places).astype(np.int64))
    with torch.no_grad():
        exact = float(step.model(**split_rows(rows)).loss)
    for micro in (4, 16, 21):
        total, count = sum_losses(step.model, Loader(split, micro, 42, stop=21))
        assert count == 21 * 32
        assert float(total / count) == pytest.approx(exact, abs=1e-5)


@pytest.mark.parametrize("world", [2, 3, 5])
def test_ranks_together_evaluate_each_row_once(recipe: Recipe, world: int) -> None:
    model = make_step(recipe).model.train()
    split = open_store(Path(recipe.tokens))["validation"]
    parts = []
    for rank in range(world):
        loader = Loader(split, 8, 42, stop=21, rank=rank, world=world)
        parts.append(sum_losses(model, loader))
    alone = sum_losses(model, Loader(split, 8, 42, stop=21))
    assert torch.stack(parts).sum(0).tolist() == pytest.approx(alone.tolist())
    assert model.training, "evaluating leaves a model in its mode"


# going on ---------------------------------------------------------------------------------------


def test_a_killed_run_goes_on_to_the_same_bits(
    recipe: Recipe,
    calm: Recipe,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch, pytest.raises(Killed):
        at_step(patch, 6, die)
        pretrain(recipe)
    assert max(losses(recipe)) == 6
    # Nothing of the process that it wakes up in may matter.
    set_seed(7)
    pretrain(recipe)
    check_same_bits(recipe, calm)
    assert losses(recipe, "validation") == losses(calm, "validation")


ALL_AT_ONCE: list[dict[str, Any]] = [
    {},
    {"precision": "bfloat16", "micro": 2},
    {"precision": "auto", "micro": 1, "optimizer": "adamw", "recompute": True},
    {
        "precision": "bfloat16",
        "loss_chunk": 40,
        "save_beside": True,
        "log_every": 3,
    },
]


@pytest.mark.slow
@pytest.mark.parametrize("changes", ALL_AT_ONCE)
def test_whatever_a_recipe_asks_for_goes_on_to_the_same_bits(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    check_resume(recipe.change(**changes), monkeypatch)


def check_resume(plain: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout besides: kill it, go on, and hold it to a run that nobody killed."""
    noisy = plain.change(model={"attention_dropout": 0.3})
    twin = noisy.change(folder=plain.folder + "-twin")
    pretrain(twin)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        at_step(patch, 7, die)
        pretrain(noisy)
    pretrain(noisy)
    check_same_bits(noisy, twin)


@pytest.mark.slow
def test_precision_and_threads_are_chosen_once(
    recipe: Recipe,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A choice by measuring may come out otherwise when a run goes on."""
    measured = recipe.change(precision="auto", threads=None)
    twin = measured.change(folder=recipe.folder + "-twin")
    narrow = lambda device: Choice(torch.bfloat16, "as measured")
    wide = lambda device: Choice(torch.float32, "as measured today")
    monkeypatch.setattr(runs, "choose_dtype", narrow)
    monkeypatch.setattr(runs, "choose_threads", lambda fixed: Choice(1, ""))
    pretrain(twin)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        at_step(patch, 6, die)
        pretrain(measured)
    monkeypatch.setattr(runs, "choose_dtype", wide)
    monkeypatch.setattr(runs, "choose_threads", lambda fixed: Choice(2, ""))
    pretrain(measured)
    assert losses(measured) == losses(twin)
    starts = [
        (line["precision"], line["threads"])
        for line in log_lines(measured, "start")
    ]
    assert starts[-1] == ("bfloat16", 1)
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(
    "torn", [b'{"kind": "step", "st', b'{}}\n\xff\n{"step": 3}\n']
)
def test_a_torn_end_of_the_log_is_written_again(
    recipe: Recipe,
    calm: Recipe,
    monkeypatch: pytest.MonkeyPatch,
    torn: bytes,
) -> None:
    with monkeypatch.context() as patch, pytest.raises(Killed):
        at_step(patch, 6, die)
        pretrain(recipe)
    with (recipe.place("folder") / "log.jsonl").open("ab") as file:
        file.write(torn)
    pretrain(recipe)
    assert losses(recipe) == losses(calm)
    assert len(log_lines(recipe)) == 12, "each step once"
    assert [line["step"] for line in log_lines(recipe, "start")] == [0, 4]


def test_killed_while_saving_leaves_no_half_of_a_checkpoint(
    recipe: Recipe,
    calm: Recipe,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = checkpoints.save_file

    def dying(tensors: dict[str, torch.Tensor], path: Path) -> None:
        if "000008" in str(path):
            raise Killed
        real(tensors, path)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(checkpoints, "save_file", dying)
        pretrain(recipe)
    assert checkpoint_names(recipe) == ["checkpoint-000004"]
    pretrain(recipe)
    assert losses(recipe) == losses(calm)


def test_a_flipped_byte_is_found_and_said(
    recipe: Recipe,
    calm: Recipe,
    capfd: pytest.CaptureFixture,
) -> None:
    pretrain(recipe)
    file = recipe.place("folder") / "checkpoint-000012" / checkpoints.WEIGHTS
    times = file.stat()
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    # A bad disk does not tell the time: it is the hash that notices.
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    pretrain(recipe)
    assert "checkpoint-000012: model.safetensors has changed" in "".join(
        capfd.readouterr()
    )
    assert losses(recipe) == losses(calm)


@pytest.mark.parametrize("file", [checkpoints.PROGRESS, "manifest.json"])
def test_a_damaged_checkpoint_does_not_end_the_run_that_skipped_it(
    recipe: Recipe,
    calm: Recipe,
    monkeypatch: pytest.MonkeyPatch,
    file: str,
) -> None:
    with monkeypatch.context() as patch, pytest.raises(Killed):
        at_step(patch, 9, die)
        pretrain(recipe)
    (recipe.place("folder") / "checkpoint-000008" / file).write_text("{")
    pretrain(recipe.change(keep=1))
    assert losses(recipe) == losses(calm)
    assert (recipe.place("folder") / ".damaged-checkpoint-000008").is_dir()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rate": 0.1}, "rate 0.006, not 0.1"),
        ({"model": {"hidden_size": 64}}, "hidden_size"),
    ],
)
def test_another_recipe_does_not_go_on(
    recipe: Recipe,
    change: dict[str, Any],
    message: str,
) -> None:
    pretrain(recipe.change(steps=12))
    with pytest.raises(CourseError, match=message):
        pretrain(recipe.change(**change))


def test_what_a_machine_decides_may_change(
    recipe: Recipe,
    calm: Recipe,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch, pytest.raises(Killed):
        at_step(patch, 5, die)
        pretrain(recipe)
    pretrain(recipe.change(micro=2, keep=5))
    assert losses(recipe) == pytest.approx(losses(calm), abs=1e-4)


def test_what_decides_nothing_of_a_run_may_change(
    recipe: Recipe,
    calm: Recipe,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch, pytest.raises(Killed):
        at_step(patch, 5, die)
        pretrain(recipe)
    other = {"evaluate_every": 3, "evaluate_rows": 8, "sample_every": 6}
    pretrain(recipe.change(**other, prompts=["class "]))
    assert losses(recipe) == losses(calm)
    assert list(losses(recipe, "validation")) == [4, 6, 8, 9, 12]
    assert [line["step"] for line in log_lines(recipe, "sample")] == [6, 12]


# a late decision ----------------------------------------------------------------------------------


@pytest.fixture
def at_the_top(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """A run whose rate is at its top until step 6, and which was killed behind step 4."""
    with monkeypatch.context() as patch, pytest.raises(Killed):
        at_step(patch, 5, die)
        pretrain(recipe)
    return recipe


def test_how_long_a_run_is_may_be_decided_before_its_rate_falls(
    at_the_top: Recipe,
) -> None:
    longer = at_the_top.change(steps=20, cooldown=0.25)
    twin = longer.change(folder=at_the_top.folder + "-twin")
    pretrain(twin)
    pretrain(longer)
    assert losses(longer) == losses(twin)
    mine, theirs = weights(longer, 20), weights(twin, 20)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 20}, "steps 12, not 20"),
        ({"cooldown": 0.1}, "cooldown 0.5, not 0.1"),
    ],
)
def test_a_rate_that_falls_falls_to_its_end(
    recipe: Recipe, change: dict[str, Any], message: str
) -> None:
    pretrain(recipe)
    with pytest.raises(CourseError, match=message):
        pretrain(recipe.change(**change))


def test_a_cooldown_branches_into_another_folder(at_the_top: Recipe) -> None:
    place = at_the_top.place("folder")
    start = place / "checkpoint-000004"
    before = {
        path: path.read_bytes() for path in place.rglob("*") if path.is_file()
    }
    fields = {"steps": 8, "cooldown": 0.5, "folder": at_the_top.folder + "-branch"}
    branch = at_the_top.change(**fields, start_from=str(start))
    pretrain(branch)
    assert list(losses(branch)) == [5, 6, 7, 8], "the first steps were the other's"
    rates = [line["rate"] for line in log_lines(branch)]
    assert rates == [1.0, 0.75, 0.5, 0.25]
    after = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    assert after == before
    alone = branch.change(folder=at_the_top.folder + "-alone", start_from=None)
    pretrain(alone)
    assert losses(branch) == {n: losses(alone)[n] for n in range(5, 9)}


def test_a_branch_of_nothing_and_one_of_another_run_are_refused(
    at_the_top: Recipe,
) -> None:
    fields: dict[str, Any] = {"folder": at_the_top.folder + "-branch"}
    fields["start_from"] = at_the_top.folder + "/checkpoint-000099"
    with pytest.raises(CourseError, match="no checkpoint to start from"):
        pretrain(at_the_top.change(**fields))
    fields["start_from"] = at_the_top.folder + "/checkpoint-000004"
    with pytest.raises(CourseError, match="rate 0.006, not 0.1"):
        pretrain(at_the_top.change(**fields, rate=0.1))


# saving beside the training -----------------------------------------------------------------------


def test_a_checkpoint_is_written_while_the_training_goes_on(
    recipe: Recipe, calm: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writing of step 4 waits until step 7 is taken: it still holds the weights of step 4."""
    twin = recipe.change(folder=recipe.folder + "-twin", keep=None)
    pretrain(twin)
    gate = threading.Event()
    real = checkpoints.save_file

    def slow(tensors: dict[str, torch.Tensor], path: Path) -> None:
        assert gate.wait(60)
        real(tensors, path)

    monkeypatch.setattr(checkpoints, "save_file", slow)
    at_step(monkeypatch, 7, lambda step: gate.set())
    pretrain(recipe.change(save_beside=True, keep=None))
    assert losses(recipe) == losses(calm)
    assert checkpoint_names(recipe) == checkpoint_names(twin)
    for step in (4, 8, 12):
        for name in (checkpoints.WEIGHTS, checkpoints.STATE, checkpoints.PROGRESS):
            file = f"checkpoint-{step:06}/{name}"
            mine = (recipe.place("folder") / file).read_bytes()
            theirs = (twin.place("folder") / file).read_bytes()
            # The log's size is that of the clock's digits.
            assert mine == theirs or name == checkpoints.PROGRESS


def test_a_disk_that_is_full_beside_the_training_costs_a_checkpoint(
    recipe: Recipe,
    calm: Recipe,
    small_disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
) -> None:
    on_disk = recipe.change(folder=str(small_disk / "run"), save_beside=True)
    at_step(monkeypatch, 6, lambda step: fill(small_disk))
    at_step(monkeypatch, 11, lambda step: (small_disk / "ballast").unlink())
    pretrain(on_disk)
    assert "no checkpoint at step 8, the run goes on: the disk is full" in "".join(
        capfd.readouterr()
    )
    assert losses(on_disk) == losses(calm)
    assert checkpoint_names(on_disk) == ["checkpoint-000004", "checkpoint-000012"]


def test_other_tokens_do_not_go_on(recipe: Recipe) -> None:
    pretrain(recipe)
    place = recipe.place("folder") / "recipe.json"
    facts = json.loads(place.read_text())
    place.write_text(json.dumps({**facts, "tokens": "0" * 16}))
    with pytest.raises(CourseError, match="token store '0000000000000000', not"):
        pretrain(recipe)


@POSIX
def test_asked_to_stop_it_saves_and_leaves(
    recipe: Recipe,
    calm: Recipe,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        at_step(patch, 5, lambda step: os.kill(os.getpid(), signal.SIGTERM))
        pretrain(recipe)
    assert "stopped at step 6" in capsys.readouterr().out
    assert weights(recipe, 6)
    assert signal.getsignal(signal.SIGTERM) is before
    pretrain(recipe)
    assert losses(recipe) == losses(calm)


def test_a_file_stops_a_run_too(
    recipe: Recipe, calm: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "stop"
    with monkeypatch.context() as patch:
        patch.setenv(runs.STOP_FILE, str(file))
        at_step(patch, 5, lambda step: file.touch())
        pretrain(recipe)
    assert checkpoint_names(recipe)[-1] == "checkpoint-000006"
    pretrain(recipe)
    assert losses(recipe) == losses(calm)


def test_two_runs_do_not_share_a_folder(recipe: Recipe) -> None:
    accelerator = make_accelerator(recipe)
    one, two = (Run(recipe, accelerator, None) for _ in range(2))
    with (
        one.locked(),
        pytest.raises(CourseError, match="another process trains"),
        two.locked(),
    ):
        pass
    with two.locked():
        pass


# gradients and losses that are lost ---------------------------------------------------------------


def test_gradients_that_are_not_finite_are_not_applied(
    recipe: Recipe,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lose_gradients(monkeypatch)
    with pytest.raises(
        CourseError, match="not finite 5 steps in a row.*\n.*\n.*lower the rate"
    ):
        pretrain(recipe)
    one, two = weights(recipe, 4), weights(recipe, 8)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_run_that_diverges_is_stopped(recipe: Recipe) -> None:
    wild = recipe.change(
        optimizer="adamw", rate=50.0, clip=1e9, steps=60, save_every=60
    )
    with pytest.raises(CourseError, match="diverged.*\n.*\n.*lower the rate"):
        pretrain(wild)


def make_step(recipe: Recipe) -> Step:
    tokenizer = AutoTokenizer.from_pretrained(recipe.tokenizer)
    run = Run(recipe, make_accelerator(recipe), tokenizer)
    return Step(
        run, build_model(recipe, tokenizer), open_store(Path(recipe.tokens))
    )


# memory that runs out -----------------------------------------------------------------------------


def allocate_far_too_much(*_: Any) -> None:
    """The real allocator's real error: a million gigabytes."""
    torch.empty(2**48)


def run_out(step: Step) -> None:
    if step.micro > 1:
        allocate_far_too_much()


def run_out_in_forward(patch: pytest.MonkeyPatch) -> None:
    def fail(step: Step) -> None:
        step.model.register_forward_hook(lambda *_: run_out(step))

    at_step(patch, 5, fail)


def run_out_in_backward(patch: pytest.MonkeyPatch) -> None:
    def fail(step: Step) -> None:
        # The embedding's gradient comes last: all others have been added up by then.
        next(step.model.parameters()).register_hook(lambda _: run_out(step))

    at_step(patch, 5, fail)


@pytest.mark.parametrize("phase", [run_out_in_forward, run_out_in_backward])
def test_memory_that_ends_before_the_update_costs_nothing(
    recipe: Recipe,
    calm: Recipe,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
    phase: Any,
) -> None:
    with monkeypatch.context() as patch:
        phase(patch)
        pretrain(recipe)
    assert "1 rows at once from here on, not 2" in "".join(capfd.readouterr())
    assert losses(recipe) == pytest.approx(losses(calm), abs=1e-4)
    # What has been learned of the memory is kept for those that go on.
    progress = json.loads(
        (recipe.place("folder") / "checkpoint-000012" / "progress.json").read_text()
    )
    assert progress["micro"] == 1


def run_out_in_clipping(patch: pytest.MonkeyPatch, number: int) -> None:
    real = Step.clip_gradients

    def clip(self: Step) -> torch.Tensor:
        norm = real(self)
        if self.taking == number:
            allocate_far_too_much()
        return norm

    at_step(patch, number, lambda step: setattr(step, "taking", number), "take")
    patch.setattr(Step, "taking", -1, raising=False)
    patch.setattr(Step, "clip_gradients", clip)


def run_out_in_optimizer(which: int, when: str) -> Any:
    def prepare(patch: pytest.MonkeyPatch, number: int) -> None:
        def fail(step: Step) -> None:
            register = getattr(step.optimizers[which], f"register_step_{when}_hook")
            register(allocate_far_too_much)

        at_step(patch, number, fail, "take")

    return prepare


PHASES = {
    "clipping": run_out_in_clipping,
    "before AdamW": run_out_in_optimizer(0, "pre"),
    "behind AdamW": run_out_in_optimizer(0, "post"),
    "before Muon": run_out_in_optimizer(1, "pre"),
    "behind Muon": run_out_in_optimizer(1, "post"),
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("number", [0, 5])
def test_memory_that_ends_within_the_update_ends_the_run(
    recipe: Recipe,
    calm: Recipe,
    monkeypatch: pytest.MonkeyPatch,
    phase: str,
    number: int,
) -> None:
    with monkeypatch.context() as patch:
        PHASES[phase](patch, number)
        with pytest.raises(CourseError, match="memory ran out"):
            pretrain(recipe)
    assert max(losses(recipe), default=0) == number, (
        "nothing is logged of a step that was not"
    )
    pretrain(recipe)
    check_same_bits(recipe, calm)


# In a process of its own, because one that ran other tests has free memory of its own.
NO_ROOM_FOR_STATES = """
import os, resource, sys
from stages import training
from stages.recipe import Recipe
from stages.step import Step

def apply(step, share, norm):
    pages = int(open("/proc/self/statm").read().split()[0])
    size = pages * os.sysconf("SC_PAGE_SIZE")
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + 2**24, limits[1]))
    try:
        real(step, share, norm)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)

real, Step.apply = Step.apply, apply
training.pretrain(Recipe.load(sys.argv[1]))
"""


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="limits of memory are Linux's"
)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_states_that_the_machine_cannot_hold_end_the_run(
    recipe: Recipe, optimizer: str
) -> None:
    """A real limit on the process: the first update allocates the optimizer's states."""
    large = recipe.change(optimizer=optimizer, model={"vocab_size": 600_000})
    path = write_recipe(large)
    command = [sys.executable, "-c", NO_ROOM_FOR_STATES, str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "CourseError" in done.stderr and "memory ran out" in done.stderr


def test_one_row_too_many_for_memory_is_a_plain_error(
    recipe: Recipe,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_step(monkeypatch, 2, allocate_far_too_much)
    with pytest.raises(
        CourseError, match="memory ran out.*\n.*step 3, 1 rows at once"
    ):
        pretrain(recipe)


def test_other_errors_are_not_taken_for_memory(
    recipe: Recipe,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_step(monkeypatch, 2, lambda step: torch.ones(2, 3) @ torch.ones(2, 3))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        pretrain(recipe)


# a full disk ------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path, calm: Recipe) -> Iterator[Path]:
    """A disk in memory that holds three checkpoints and a half."""
    files = (calm.place("folder") / "checkpoint-000012").iterdir()
    size = sum(path.stat().st_size for path in files) * 7 // 2
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "small", str(disk)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a small disk cannot be mounted here: {error}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk: Path) -> None:
    """Leave not one free byte on a disk."""
    with (
        contextlib.suppress(OSError),
        (disk / "ballast").open("ab", buffering=0) as file,
    ):
        while file.write(b"x" * 4096):
            pass


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(
    recipe: Recipe,
    calm: Recipe,
    small_disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
) -> None:
    """The real library on a real disk, full from step 6 to step 10."""
    on_disk = recipe.change(folder=str(small_disk / "run"))
    at_step(monkeypatch, 6, lambda step: fill(small_disk))
    at_step(monkeypatch, 10, lambda step: (small_disk / "ballast").unlink())
    pretrain(on_disk)
    assert "no checkpoint at step 8, the run goes on: the disk is full" in "".join(
        capfd.readouterr()
    )
    assert checkpoint_names(on_disk) == ["checkpoint-000004", "checkpoint-000012"]
    assert losses(on_disk) == losses(calm), "no line of the log is lost or torn"
    assert losses(on_disk, "validation") == losses(calm, "validation")


def test_a_last_checkpoint_that_is_missing_is_an_error(
    recipe: Recipe,
    calm: Recipe,
    small_disk: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_disk = recipe.change(folder=str(small_disk / "run"))
    with (
        monkeypatch.context() as patch,
        pytest.raises(CourseError, match="the disk is full"),
    ):
        at_step(patch, 6, lambda step: fill(small_disk))
        pretrain(on_disk)
    (small_disk / "ballast").unlink()
    pretrain(on_disk)
    assert losses(on_disk) == losses(calm)


def test_a_disk_that_is_full_at_the_start_is_a_plain_error(
    recipe: Recipe,
    small_disk: Path,
) -> None:
    fill(small_disk)
    with pytest.raises(CourseError, match="the disk is full"):
        pretrain(recipe.change(folder=str(small_disk / "run")))


# launchers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("launched", ["bf16", "fp16"])
def test_the_recipe_decides_the_precision_and_not_the_launcher(
    recipe: Recipe,
    calm: Recipe,
    monkeypatch: pytest.MonkeyPatch,
    launched: str,
) -> None:
    reset_accelerate()
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    pretrain(recipe)
    assert losses(recipe) == losses(calm)
    assert log_lines(recipe, "start")[0]["precision"] == "float32"
    reset_accelerate()


@pytest.mark.slow
def test_accelerate_launch_trains_like_one_process(
    recipe: Recipe, calm: Recipe
) -> None:
    start = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1")
    start += (
        "--num_machines",
        "1",
        "--mixed_precision",
        "bf16",
        "--dynamo_backend",
        "no",
    )
    launch(recipe, start=start)
    assert log_lines(recipe, "start")[0]["precision"] == "float32"
    assert losses(recipe) == pytest.approx(losses(calm), abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["shard=true"]], ids=["replicas", "shards"])
def test_two_processes_train_like_one(
    recipe: Recipe, calm: Recipe, more: list[str]
) -> None:
    launch(recipe, *more, start=TORCHRUN)
    # Sums come in another order, and Muon magnifies what is small.
    tolerance = 2e-3 if more else 1e-4
    for kind in ("step", "validation"):
        assert losses(recipe, kind) == pytest.approx(
            losses(calm, kind), abs=tolerance
        )
    assert len(log_lines(recipe)) == 12, "one process writes the log"
    mine, theirs = weights(recipe), weights(calm)
    assert all(mine[name].shape == theirs[name].shape for name in theirs)


@pytest.mark.slow
def test_shards_and_one_process_go_on_from_each_other(
    recipe: Recipe,
    calm: Recipe,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch, pytest.raises(Killed):
        at_step(patch, 5, die)
        pretrain(recipe)
    check_ended(train_on(2, recipe.change(shard=True)))
    newest = recipe.place("folder") / "checkpoint-000012"
    shutil.rmtree(newest)
    pretrain(recipe)
    assert losses(recipe) == pytest.approx(losses(calm), abs=2e-3)


def ask_second(recipe: Recipe) -> None:
    """Train, and let the second rank alone get a signal in step 6."""
    real = Step.forward_backward

    def asked(step: Step, number: int) -> torch.Tensor:
        if number == 5 and step.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(step, number)

    Step.forward_backward = asked  # type: ignore[method-assign]
    pretrain(recipe)


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform == "win32", reason="there SIGTERM ends a process at once"
)
@pytest.mark.parametrize("shard", [False, True], ids=["replicas", "shards"])
def test_if_one_rank_is_asked_to_stop_all_save_and_leave(
    recipe: Recipe, shard: bool
) -> None:
    """What was cut off goes on to the bits of what was not."""
    both = recipe.change(shard=shard)
    twin = both.change(folder=recipe.folder + "-twin")
    check_ended(train_on(2, twin))
    words = train_on(2, both, ask_second)
    check_ended(words)
    assert "stopped at step 6" in words[0]
    assert checkpoint_names(both)[-1] == "checkpoint-000006"
    check_ended(train_on(2, both))
    check_same_bits(both, twin)


def measure_otherwise(recipe: Recipe) -> None:
    """Train, where each rank would measure another precision."""
    mine = torch.bfloat16 if os.environ["RANK"] == "0" else torch.float32
    runs.choose_dtype = lambda device: Choice(mine, "")
    real = training.advance

    def advance(run: Run, step: Step) -> None:
        assert step.dtype == torch.bfloat16, step.dtype
        real(run, step)

    training.advance = advance
    pretrain(recipe)


@pytest.mark.slow
def test_ranks_agree_on_what_the_first_one_measured(recipe: Recipe) -> None:
    auto = recipe.change(precision="auto")
    check_ended(train_on(2, auto, measure_otherwise))
    assert len(log_lines(auto)) == 12


def test_processes_that_believe_they_are_alone_are_stopped(
    recipe: Recipe,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The state of accelerate is that of the first call, when there was one process.
    make_accelerator(recipe)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(CourseError, match="each believes it is alone"):
        pretrain(recipe)


# hubs and trackers ------------------------------------------------------------------------------


class WatchedHub(StandInHub):
    """A stand-in that remembers what repositories were asked for, and can be made slow."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[dict[str, Any]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.RequestHandlerClass = WatchedHandler


class WatchedHandler(Handler):
    server: WatchedHub

    def do_POST(self) -> None:
        connection = self.rfile
        body = connection.read(int(self.headers["Content-Length"] or 0))
        self.rfile = io.BytesIO(body)
        if self.path == "/api/repos/create":
            self.server.asked.append(json.loads(body))
        if "/commit/" in self.path:
            self.server.gate.wait(60)
        super().do_POST()
        self.rfile = connection


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WatchedHub]:
    from huggingface_hub import constants

    with WatchedHub() as hub:
        for name, value in hub.environment(str(tmp_path / "home")).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        yield hub


def is_private(request: dict[str, Any]) -> bool:
    """Old clients say `private`, new ones `visibility`."""
    return request.get("private") is True or request.get("visibility") == "private"


def test_a_repository_is_private_and_gets_no_optimizer(
    recipe: Recipe,
    hub: WatchedHub,
    capfd: pytest.CaptureFixture,
) -> None:
    pretrain(recipe.change(hub="reader/tiny"))
    assert is_private(hub.asked[0])
    assert "reader/tiny, a private repository" in "".join(capfd.readouterr())
    files = hub.repos["reader/tiny"]
    assert {"model.safetensors", "tokenizer.json", "config.json"} <= set(files)
    assert not {checkpoints.STATE, checkpoints.PROGRESS, "manifest.json"} & set(
        files
    )
    newest = recipe.place("folder") / "checkpoint-000012" / checkpoints.WEIGHTS
    assert files["model.safetensors"] == newest.read_bytes()


def test_nothing_goes_into_a_public_repository(
    recipe: Recipe,
    hub: WatchedHub,
    capfd: pytest.CaptureFixture,
) -> None:
    hub.repos["reader/tiny"] = {}  # somebody made it before, for all to read
    pretrain(recipe.change(hub="reader/tiny"))
    assert "it is public" in "".join(capfd.readouterr())
    assert hub.repos["reader/tiny"] == {}, "nothing went where all can read it"


def test_a_slow_push_holds_nobody_up_and_its_folder_is_not_dropped(
    recipe: Recipe,
    hub: WatchedHub,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The hub answers when the last step begins: by then other checkpoints have come and gone."""
    hub.gate.clear()
    seen = []

    def open_gate(step: Step) -> None:
        seen.append(checkpoint_names(recipe))
        hub.gate.set()

    at_step(monkeypatch, 11, open_gate)
    pretrain(
        recipe.change(hub="reader/tiny", save_every=2, evaluate_every=100, keep=1)
    )
    assert "checkpoint-000002" in seen[0], "it is being uploaded"
    assert "checkpoint-000004" not in seen[0] or "checkpoint-000006" not in seen[0]
    commits = [request for request in hub.requests if "/commit/" in request]
    assert 2 <= len(commits) <= 3, "what waited made room for the newest"
    newest = recipe.place("folder") / "checkpoint-000012" / checkpoints.WEIGHTS
    assert hub.repos["reader/tiny"]["model.safetensors"] == newest.read_bytes()
    assert len(checkpoint_names(recipe)) <= 2, "once it is there the folder goes"


@pytest.mark.slow
def test_a_hub_that_is_not_there_does_not_stop_a_run(recipe: Recipe) -> None:
    said = launch(recipe.change(hub="reader/tiny"), HF_HUB_OFFLINE="1")
    assert "a push to reader/tiny failed, the run goes on" in said
    assert len(log_lines(recipe)) == 12


def test_tensorboard_holds_the_same_figures(recipe: Recipe) -> None:
    from tensorboard.backend.event_processing.event_accumulator import (
        EventAccumulator,
    )

    reset_accelerate()
    pretrain(recipe.change(log_to=["tensorboard"]))
    place = next(recipe.place("folder").rglob("events*")).parent
    events = EventAccumulator(str(place)).Reload()
    found = [line.value for line in events.Scalars("step/tokens_per_second")]
    wanted = [line["tokens_per_second"] for line in log_lines(recipe)]
    assert found == pytest.approx(wanted, rel=1e-6)


def read_scalars(recipe: Recipe, name: str) -> list[Any]:
    """What TensorBoard would draw of a run."""
    from tensorboard.backend.event_processing.event_accumulator import (
        EventAccumulator,
    )

    place = recipe.place("folder") / "pretraining"
    return EventAccumulator(str(place)).Reload().Scalars(name)


def test_tensorboard_draws_each_step_of_a_resumed_run_once(
    recipe: Recipe, calm: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    reset_accelerate()
    drawn = recipe.change(log_to=["tensorboard"])

    def flush_and_die(step: Step) -> None:
        step.accelerator.trackers[0].writer.flush()
        die()

    with monkeypatch.context() as patch, pytest.raises(Killed):
        at_step(patch, 6, flush_and_die)
        pretrain(drawn)
    assert [one.step for one in read_scalars(drawn, "step/loss")][-1] == 6
    pretrain(drawn)
    found = {one.step: one.value for one in read_scalars(drawn, "step/loss")}
    assert list(found) == list(range(1, 13))
    assert found == pytest.approx(losses(calm), rel=1e-6)
    assert len(read_scalars(drawn, "step/loss")) == 12


def test_other_trackers_are_told_the_recipe_and_a_name_that_stays(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither is installed here: what they would be given."""
    told = []

    def note(accelerator: Any, project: str, init_kwargs: dict[str, Any]) -> None:
        told.append(init_kwargs)

    monkeypatch.setattr(training.Accelerator, "init_trackers", note)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        at_step(patch, 6, die)
        pretrain(recipe)
    pretrain(recipe)
    branch = {"folder": recipe.folder + "-branch", "steps": 12}
    start = recipe.place("folder") / "checkpoint-000008"
    pretrain(recipe.change(**branch, start_from=str(start)))
    first, second, third = (one["wandb"] for one in told)
    assert first["config"] == recipe.model_dump(mode="json")
    assert first["id"] == second["id"] != third["id"]
    assert second["resume"] == "allow"
    assert told[1]["trackio"]["name"] == first["name"]


def test_a_recorded_run_says_what_made_it(calm: Recipe, tmp_path: Path) -> None:
    from benchmarks.record import record

    record_of_run = json.loads(record(calm.place("folder"), tmp_path).read_text())
    assert [line["step"] for line in record_of_run["steps"]] == list(range(1, 13))
    assert record_of_run["validation"][-1]["bits_per_byte"] > 0
    assert record_of_run["memory"] > 1e6
    assert {"machine", "commit", "command", "recipe"} <= set(record_of_run)
    assert str(ROOT) not in json.dumps(record_of_run), (
        "a path of one machine is no result"
    )


# the program ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([], 2, ""),
        (["-h"], 0, "name=value"),
        (["no.toml"], 1, "cannot be read"),
        (
            [str(ROOT / "launch/recipes/modern.toml"), "stepz=3"],
            1,
            "did you mean 'steps'",
        ),
        (
            [str(ROOT / "launch/recipes/modern.toml"), "save_every=0"],
            1,
            "save_every is 0",
        ),
    ],
)
def test_the_command_line_says_what_is_wrong(
    arguments: list[str], status: int, message: str, capsys: pytest.CaptureFixture
) -> None:
    assert main(arguments) == status
    assert message in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("missing", "lesson"), [("tokenizer", "07"), ("tokens", "08")]
)
def test_what_is_not_there_yet_names_its_lesson(
    missing: str,
    lesson: str,
    inputs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setenv("COURSE_BUILD", str(tmp_path / "build"))
    other = {"tokens": "tokenizer", "tokenizer": "tokens"}[missing]
    arguments = [
        str(ROOT / "launch/recipes/modern.toml"),
        f"{other}={inputs / other}",
    ]
    assert main(arguments) == 1
    said = "".join(capsys.readouterr())
    assert f"make run ONLY={lesson} PROFILE=laptop" in said
    assert str(tmp_path / "build" / "artifacts" / "laptop" / missing) in said
