"""What a run does on every rank after each step: log, judge and sample it; and the push to a hub."""

from __future__ import annotations

import math
import statistics
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from tqdm import tqdm

from stages import checkpoints
from stages.evaluation import perplexity
from stages.recipe import flops_per_token
from stages.tokens import Loader, split_rows
from utils.artifacts import MANIFEST
from utils.errors import CourseError
from utils.machine import fastest_of, memory_of

# What a step was like: loss over all ranks, norm of the gradients, share of the rate, seconds.
Result = dict[str, float]


class Figures:
    """Loss and norm of the steps: kept on the device, and read some steps later, all at once.

    To read a number is to wait until a device has computed it, and while it waits it is given no work.
    """

    def __init__(self) -> None:
        self.unread: list[tuple[torch.Tensor, float]] = []
        self.seconds = 0.0

    def add(self, figures: torch.Tensor, share: float, seconds: float) -> None:
        """Keep those of a step."""
        self.unread.append((figures, share))
        self.seconds += seconds

    def read(self, accelerator: Any) -> list[Result]:
        """What the unread steps were like; all ranks must call."""
        began = time.perf_counter()
        table = torch.stack([figures for figures, _ in self.unread])
        losses = accelerator.reduce(table[:, 0].contiguous(), "mean")
        pairs = torch.stack([losses, table[:, 1]], 1).tolist()
        # The device has done by now what it was given.
        seconds = self.seconds + time.perf_counter() - began
        results = []
        for (loss, norm), (_, share) in zip(pairs, self.unread):
            result = {"loss": loss, "norm": norm, "rate": share}
            results.append({**result, "seconds": seconds / len(pairs)})
        self.unread.clear()
        self.seconds = 0.0
        return results


def start_trackers(run: Any) -> None:
    """Show trackers the recipe; a run that goes on draws its old line, without the steps taken again."""
    name = run.progress["name"]
    facts = run.recipe.model_dump(mode="json")
    known = {"name": name, "config": facts, "resume": "allow"}
    settings = {
        "tensorboard": {"purge_step": run.step + 1},
        "trackio": known,
        "wandb": {**known, "id": name},
    }
    run.accelerator.init_trackers("pretraining", init_kwargs=settings)


class DivergenceCheck:
    """Ends a run that is lost, and says what to do."""

    def __init__(self, vocabulary: int) -> None:
        self.guessing = math.log(vocabulary)
        self.bad = 0
        self.lost = 0

    def __call__(self, run: Any, step: Any, results: list[Result]) -> None:
        """Count the steps in a row that say that a run is lost."""
        # With a scale that is still to find, gradients overflow and nothing is wrong.
        overflow = step.scale.used and results and float(step.scale.value) > 1
        for result in results:
            finite = overflow or math.isfinite(result["norm"])
            self.bad = 0 if finite else self.bad + 1
            worse = result["loss"] > self.guessing + 1
            self.lost = self.lost + 1 if worse else 0
            self.judge(run, result["loss"])

    def judge(self, run: Any, loss: float) -> None:
        """Stop if there were too many."""
        what = ""
        if self.lost == 20:
            what = f"the run diverged: a loss of {loss:.2f}, guessing has {self.guessing:.2f}"
        if self.bad == 5:
            what = "the gradients were not finite 5 steps in a row; none of them was applied"
        if what:
            fix = "lower the rate, and start again in another folder"
            raise CourseError(what, f"step {run.step}", fix)


def matmul_rate(step: Any) -> float:
    """The operations a second of this rank's matrix products: what utilization is measured against."""
    size = 8192 if step.device.type == "cuda" else 1024
    matrix = torch.ones(size, size, dtype=step.dtype, device=step.device)
    # A GPU has computed a number when it is asked for it, and not before.
    seconds = fastest_of(lambda: float((matrix @ matrix)[0, 0]), repeats=8)
    return 2 * size**3 / seconds[0]


def find_stragglers(rates: list[float]) -> str:
    """Ranks that compute at less than 70% of the usual rate: all others wait for them.

    >>> find_stragglers([100.0, 98.0, 50.0, 101.0])
    'rank 2 computes at 51% of the rate of the others, who wait for it: a hot, shared or other card?'
    """
    usual = statistics.median(rates)
    slow = []
    for rank, rate in enumerate(rates):
        if rate < 0.7 * usual:
            slow.append(f"rank {rank} computes at {rate / usual:.0%}")
    if not slow:
        return ""
    return f"{', '.join(slow)} of the rate of the others, who wait for it: a hot, shared or other card?"


class StepLog:
    """Loss, norm, tokens a second and utilization: a line of the log, and a bar that stays one line."""

    def __init__(self, run: Any, step: Any) -> None:
        mine = torch.tensor(matmul_rate(step), device=step.device)
        rates = run.accelerator.gather(mine[None]).tolist()
        stragglers = find_stragglers(rates)
        # Processes of one CPU take turns, which says nothing.
        if stragglers and run.is_main and step.device.type != "cpu":
            tqdm.write(stragglers)
        block = step.split.header["block"]
        self.tokens = run.recipe.rows * block
        self.utilization_of_token = flops_per_token(step.model, block) / sum(rates)
        self.seconds: list[float] = []
        # None: hidden, unless somebody looks at a terminal. A page is none, and somebody looks at it.
        hidden = False if "ipykernel" in sys.modules else None
        hidden = hidden if run.is_main else True
        span = {"total": run.recipe.steps, "initial": run.step, "unit": "step"}
        self.bar = tqdm(**span, mininterval=1, disable=hidden)

    def __call__(self, run: Any, step: Any, results: list[Result]) -> None:
        """Log the last step if it is time to, and move the bar."""
        seconds = self.seconds
        seconds += [result["seconds"] for result in results]
        if run.is_due(run.recipe.log_every):
            speed = len(seconds) * self.tokens / sum(seconds)
            used = speed * self.utilization_of_token
            seconds.clear()
            last = results[-1]
            run.log("step", **last, tokens_per_second=speed, utilization=used)
            text = f"loss {last['loss']:.3f}, {speed:,.0f} tokens/s"
            text += f", {used:.0%} of matmul"
            self.bar.set_postfix_str(text, refresh=False)
        self.bar.update()
        if run.ends_here:
            self.bar.close()


def sum_losses(model: Any, loader: Loader, autocast: Any = nullcontext) -> Any:
    """A rank's sum of losses over tokens, and its count of tokens: add over ranks, then divide.

    Means of batches would be wrong with a short last batch, and means of ranks with one that has none.
    """
    assert loader.stop, "an endless loader has no mean"
    block = loader.split.header["block"]
    idle = torch.zeros(1, block + 1, dtype=torch.int64)
    total = torch.zeros(2, dtype=torch.float64)
    batches = iter(loader)
    training = model.training
    model.eval()
    with torch.no_grad(), autocast():
        # As often on every rank: one without rows must not leave the others waiting for its weights.
        for _ in range(math.ceil(loader.stop / (loader.batch * loader.world))):
            batch = next(batches, idle)
            parts = split_rows(batch.to(model.device))
            loss = float(model(**parts, use_cache=False).loss)
            count = 0 if batch is idle else parts["labels"].numel()
            total += torch.tensor([loss * count, count], dtype=torch.float64)
    model.train(training)
    return total


def evaluate(run: Any, step: Any, results: list[Result]) -> None:
    """The mean loss over the tokens of held-out rows, the same on any number of ranks."""
    recipe = run.recipe
    if not run.is_due(recipe.evaluate_every) and not run.is_due(recipe.save_every):
        return
    split = step.held_out
    rows = min(recipe.evaluate_rows, len(split))
    loader = Loader(split, step.micro, recipe.seed, stop=rows, **step.ranks)
    sums = sum_losses(step.model, loader, step.autocast)
    # Apple's GPUs have no float64.
    dtype = torch.float32 if step.device.type == "mps" else torch.float64
    sums = run.accelerator.reduce(sums.to(step.device, dtype), "sum")
    total, count = sums.tolist()
    loss = total / count
    run.progress["validation_loss"] = loss
    memory = memory_of()["resident"]
    if step.device.type == "cuda":
        memory = torch.cuda.max_memory_allocated()
    figures = {"loss": loss, "perplexity": perplexity(loss), "memory": memory}
    run.log("validation", **figures, bits_per_byte=split.bits_per_byte(loss))


def write_samples(run: Any, step: Any, results: list[Result]) -> None:
    """How the model goes on from each prompt, always taking the likeliest token."""
    # A shard of a model says nothing by itself: then all ranks write together.
    if not run.is_due(run.recipe.sample_every) or not (run.is_main or step.sharded):
        return
    tokenizer = run.tokenizer
    how = {"max_new_tokens": 48, "do_sample": False, "use_cache": True}
    how["pad_token_id"] = tokenizer.pad_token_id
    samples = []
    step.model.eval()
    for prompt in run.recipe.prompts:
        rows = tokenizer(tokenizer.eos_token + prompt, return_tensors="pt")
        longer = step.model.generate(rows.input_ids.to(step.device), **how)
        samples.append(tokenizer.decode(longer[0, 1:], skip_special_tokens=True))
    step.model.train()
    run.log("sample", samples=samples)


class HubPush:
    """Pushes checkpoints to a hub while the training goes on; a push that fails costs nothing."""

    def __init__(self, repository: str) -> None:
        self.repository = repository
        self.worker = ThreadPoolExecutor(max_workers=1)
        self.path = Path()
        self.upload: Future = Future()
        self.upload.set_result(None)
        tqdm.write(f"checkpoints are pushed to {repository}, a private repository")

    def push(self, path: Path, wait: bool) -> Path:
        """Begin to upload a checkpoint; while another is on its way, wait for it or leave this one out.

        Returns the one that is on its way, which must not be dropped.
        """
        if wait or self.upload.done():
            self.wait()
            self.path = path
            self.upload = self.worker.submit(self.send, path)
        return self.path

    def wait(self) -> None:
        """Let the upload end, and say if it failed."""
        failure = self.upload.exception()
        if failure:
            what = f"a push to {self.repository} failed, the run goes on"
            tqdm.write(f"{what}: {failure}")

    def send(self, path: Path) -> None:
        """Upload one checkpoint, without its training state."""
        hub = HfApi()
        hub.create_repo(self.repository, private=True, exist_ok=True)
        if not hub.repo_info(self.repository).private:
            raise PermissionError("it is public: anybody could read what is pushed")
        hub.upload_folder(
            repo_id=self.repository,
            folder_path=path,
            commit_message=path.name,
            ignore_patterns=[*checkpoints.OF_TRAINING, MANIFEST],
        )
