"""What happens beside a training run: it is logged, judged, sampled, pushed, tracked and shown.

A run calls its callbacks on every rank, in their order, after each step and after each checkpoint.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm as plain_bar
from tqdm.auto import tqdm

from stages import checkpoints
from stages.tokens import Loader, Split, split_rows
from utils.errors import CourseError
from utils.evaluation import perplexity
from utils.machine import fastest_of, memory_of

IMPORTED_BY = os.getpid()


@dataclass(frozen=True)
class StepResult:
    """What a step was like: the loss over all ranks, the gradients' length, the share of the rate."""

    loss: float
    norm: float
    share: float
    seconds: float
    # What float16's gradients are multiplied by; None for the other types.
    scale: float | None = None


class Callback:
    """What a run calls; each method does nothing until a class says otherwise."""

    @property
    def in_use(self) -> set[Path]:
        """Checkpoints that must not be dropped."""
        return set()

    def after_step(self, run: Any, result: StepResult) -> None:
        """Look at a step that has been taken."""

    def after_line(self, run: Any, line: dict[str, Any]) -> None:
        """Take a line of the log."""

    def after_save(self, run: Any, path: Path) -> None:
        """Take a checkpoint that has been saved."""

    def close(self, run: Any) -> None:
        """Leave nothing open when the run ends."""


class DivergenceCheck(Callback):
    """Ends a run that is lost, and says what to do."""

    BAD_STEPS = 5
    LOST_STEPS = 20

    def __init__(self, vocabulary: int) -> None:
        self.loss_of_guessing = math.log(vocabulary)
        self.bad = 0
        self.lost = 0

    def after_step(self, run: Any, result: StepResult) -> None:
        """Look at a step that has been taken."""
        self.check_divergence(run, result)

    def check_divergence(self, run: Any, result: StepResult) -> None:
        """Stop a run whose gradients or loss say that it is lost."""
        # A scale that is too high is no fault of the run: it is halved until nothing overflows.
        overflow = (
            result.scale is not None
            and result.scale >= 1
            and math.isfinite(result.loss)
        )
        self.bad = 0 if math.isfinite(result.norm) or overflow else self.bad + 1
        self.lost = self.lost + 1 if result.loss > self.loss_of_guessing + 1 else 0
        where = f"step {run.step}"
        if self.bad >= self.BAD_STEPS:
            what = f"the gradients were not finite {self.bad} steps in a row; none of them was applied"
            newest = checkpoints.list_checkpoints(run.folder)[-1:]
            resume = f", or resume from {newest[0].name}" if newest else ""
            raise CourseError(
                what, where, f"lower the rate and start again{resume}"
            )
        if self.lost >= self.LOST_STEPS:
            guessing = f"{self.loss_of_guessing:.2f}"
            what = f"the run diverged: a loss of {result.loss:.2f}, guessing has {guessing}"
            raise CourseError(
                what, where, "lower the rate, and start again in another folder"
            )


# speed ------------------------------------------------------------------------------------------


def matmul_rate(device: str, dtype: torch.dtype) -> float:
    """Operations a second of this machine's matrix product: what utilization is measured against."""
    size = 8192 if device == "cuda" else 1024
    matrix = torch.ones(size, size, dtype=dtype, device=device)

    def work() -> None:
        matrix @ matrix
        if device == "cuda":
            torch.cuda.synchronize()

    return 2 * size**3 / fastest_of(work, repeats=8)[0]


class StepLog(Callback):
    """Loss, norm, tokens a second and utilization: a line of the log, and a bar that stays one line."""

    def __init__(
        self, every: int, tokens: int, utilization_of_token: float
    ) -> None:
        self.every = every
        self.tokens = tokens
        self.utilization_of_token = utilization_of_token
        self.seconds: list[float] = []
        self.bar: Any = None

    def after_step(self, run: Any, result: StepResult) -> None:
        """Look at a step that has been taken."""
        self.bar = self.bar or self.make_bar(run)
        self.seconds.append(result.seconds)
        if run.is_due(self.every):
            speed = len(self.seconds) * self.tokens / sum(self.seconds)
            used = speed * self.utilization_of_token
            self.seconds.clear()
            figures = {
                "loss": result.loss,
                "norm": result.norm,
                "rate": result.share,
            }
            run.log("step", **figures, tokens_per_second=speed, utilization=used)
            text = f"loss {result.loss:.3f}, {speed:,.0f} tokens/s, {used:.0%} of matmul"
            self.bar.set_postfix_str(text, refresh=False)
        self.bar.update()

    def make_bar(self, run: Any) -> Any:
        """A bar; none where nobody looks, and one of plain text in a fork of a notebook's kernel."""
        forked = os.getpid() != IMPORTED_BY
        on_page = forked or "ipykernel" in sys.modules
        hidden = not run.is_main or (None if not on_page else False)
        bar = plain_bar if forked else tqdm
        return bar(
            total=run.steps,
            initial=run.step - 1,
            unit="step",
            mininterval=1,
            disable=hidden,
        )

    def close(self, run: Any) -> None:
        """Leave nothing open when the run ends."""
        if self.bar is not None:
            self.bar.close()


# quality ----------------------------------------------------------------------------------------


def sum_losses(
    model: Any,
    split: Split,
    rows: int,
    micro: int,
    seed: int,
    rank: int = 0,
    world: int = 1,
    autocast: Any = contextlib.nullcontext,
) -> torch.Tensor:
    """This rank's sum of losses over tokens, and its count of tokens: add over ranks, then divide.

    Means of batches would be wrong with a short last batch, and means of ranks with one that has none.
    """
    device = next(model.parameters()).device
    rows = min(rows, len(split))
    batches = iter(Loader(split, micro, seed, stop=rows, rank=rank, world=world))
    idle = torch.zeros(1, split.header["block"] + 1, dtype=torch.int64)
    total = torch.zeros(2, dtype=torch.float64)
    training = model.training
    model.eval()
    with torch.no_grad(), autocast():
        # As often on every rank: one without rows must not leave the others waiting for its weights.
        for _ in range(math.ceil(rows / (micro * world))):
            batch = next(batches, idle)
            parts = split_rows(batch.to(device))
            loss = float(model(**parts, use_cache=False).loss)
            count = 0 if batch is idle else parts["labels"].numel()
            total += torch.tensor([loss * count, count], dtype=torch.float64)
    model.train(training)
    return total


class Evaluation(Callback):
    """The mean loss over the tokens of held-out rows, the same on any number of ranks."""

    def __init__(
        self, step: Any, split: Split, rows: int, every: int, save_every: int
    ) -> None:
        self.step = step
        self.split = split
        self.rows = rows
        self.every = every
        self.save_every = save_every

    def measure(self) -> float:
        """The mean loss over the tokens of the split, the same on any number of ranks."""
        step = self.step
        accelerator = step.accelerator
        ranks = (accelerator.process_index, accelerator.num_processes)
        sums = sum_losses(
            step.model,
            self.split,
            self.rows,
            step.micro,
            step.seed,
            *ranks,
            step.autocast,
        )
        # Apple's GPUs have no float64.
        dtype = torch.float32 if step.device.type == "mps" else torch.float64
        loss, count = accelerator.reduce(
            sums.to(step.device, dtype), "sum"
        ).tolist()
        return loss / count

    def after_step(self, run: Any, result: StepResult) -> None:
        """Look at a step that has been taken."""
        if not run.is_due(self.every) and not run.is_due(self.save_every):
            return
        loss = self.measure()
        run.progress["validation_loss"] = loss
        on_gpu = self.step.device.type == "cuda"
        memory = (
            torch.cuda.max_memory_allocated() if on_gpu else memory_of()["resident"]
        )
        figures = {"loss": loss, "perplexity": perplexity(loss), "memory": memory}
        run.log(
            "validation", **figures, bits_per_byte=self.split.bits_per_byte(loss)
        )


class Samples(Callback):
    """How the model goes on from each prompt, always taking the likeliest token."""

    def __init__(
        self, step: Any, tokenizer: Any, prompts: list[str], every: int | None
    ) -> None:
        self.step = step
        self.tokenizer = tokenizer
        self.prompts = prompts
        self.every = every

    def after_step(self, run: Any, result: StepResult) -> None:
        """Look at a step that has been taken."""
        # A shard of a model says nothing by itself: then all ranks write together.
        if run.is_due(self.every) and (run.is_main or self.step.sharded):
            run.log(
                "sample", samples=[self.complete(prompt) for prompt in self.prompts]
            )

    def complete(self, prompt: str) -> str:
        """A prompt and how the model goes on from it."""
        model = self.step.model
        text = self.tokenizer.eos_token + prompt
        ids = self.tokenizer(text, return_tensors="pt").input_ids.to(
            self.step.device
        )
        model.eval()
        pad = self.tokenizer.pad_token_id
        longer = model.generate(
            ids,
            max_new_tokens=48,
            do_sample=False,
            use_cache=True,
            pad_token_id=pad,
        )
        model.train()
        return self.tokenizer.decode(longer[0, 1:], skip_special_tokens=True)


# places for the result --------------------------------------------------------------------------


class HubPush(Callback):
    """Pushes checkpoints to a hub while the training goes on; a push that fails costs nothing."""

    def __init__(self, repository: str, public: bool) -> None:
        self.repository = repository
        self.public = public
        self.worker = ThreadPoolExecutor(max_workers=1)
        self.pushes: dict[Path, Future] = {}
        kind = "PUBLIC" if public else "private"
        tqdm.write(f"checkpoints are pushed to {repository}, a {kind} repository")

    def after_save(self, run: Any, path: Path) -> None:
        """Take a checkpoint that has been saved."""
        # Where pushing is slower than saving, those that wait make room for the newest.
        for waiting, push in list(self.pushes.items()):
            if push.cancel():
                del self.pushes[waiting]
        self.report()
        self.pushes[path] = self.worker.submit(self.push, path)

    def push(self, path: Path) -> None:
        """Upload one checkpoint, without its training state."""
        from huggingface_hub import HfApi

        hub = HfApi()
        hub.create_repo(self.repository, private=not self.public, exist_ok=True)
        if not self.public and not hub.repo_info(self.repository).private:
            raise PermissionError(
                "it is public, and the recipe does not say hub_public = true"
            )
        ours = [checkpoints.STATE, checkpoints.PROGRESS, "manifest.json"]
        hub.upload_folder(
            repo_id=self.repository,
            folder_path=path,
            commit_message=path.name,
            ignore_patterns=ours,
        )

    @property
    def in_use(self) -> set[Path]:
        """Checkpoints that are still being uploaded."""
        return {path for path, push in self.pushes.items() if not push.done()}

    def report(self) -> None:
        """Say which pushes have failed, and forget those that have ended."""
        for path, push in list(self.pushes.items()):
            if push.done():
                del self.pushes[path]
                if push.exception():
                    failure = push.exception()
                    tqdm.write(
                        f"a push to {self.repository} failed, the run goes on: {failure}"
                    )

    def close(self, run: Any) -> None:
        """Leave nothing open when the run ends."""
        self.worker.shutdown(wait=True)
        self.report()


class Trackers(Callback):
    """Figures for TensorBoard, trackio or W&B, by way of accelerate."""

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator
        accelerator.init_trackers("pretraining")

    def after_line(self, run: Any, line: dict[str, Any]) -> None:
        """Take a line of the log."""
        names = [
            name for name, value in line.items() if isinstance(value, (int, float))
        ]
        figures = {
            f"{line['kind']}/{name}": line[name] for name in names if name != "step"
        }
        if figures:
            self.accelerator.log(figures, step=line["step"])

    def close(self, run: Any) -> None:
        """Leave nothing open when the run ends."""
        self.accelerator.end_training()
