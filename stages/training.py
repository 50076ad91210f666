"""Floor 5: the training loop, the same on one CPU, one GPU, in a notebook and on a cluster.

    python -m stages.training launch/recipes/modern.toml steps=200 folder=build/mine
    accelerate launch --config_file launch/ddp.yaml -m stages.training launch/recipes/...
    notebook_launcher(pretrain, (recipe,), num_processes=2)

What a step sees follows from its number: rows and noise are computed from the seed and kept nowhere.
So a run that goes on, after a kill or on other machines, needs weights, optimizers and a step.
"""
from __future__ import annotations

import ast
import contextlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from tqdm import tqdm as tqdm_plain
from tqdm.auto import tqdm

from stages import checkpoints
from utils.errors import CourseError
from utils.machine import choose_dtype, choose_threads, fastest_of, memory_of, set_seed
from utils.artifacts import read_json, read_manifest, write_json
from stages.tokens import Loader, open_store, Split, split_rows
from utils.evaluation import perplexity
from stages.recipe import (build_model, flops_per_token, make_optimizers, Recipe,
                           share_of_rate)

IMPORTED_BY = os.getpid()
BAD_STEPS = 5  # so many in a row, and the run stops


def matmul_rate(device: str, dtype: torch.dtype) -> float:
    """Operations a second of this machine's matrix product: what utilization is measured against."""
    size = 8192 if device == "cuda" else 1024
    one = torch.ones(size, size, dtype=dtype, device=device)

    def work() -> None:
        one @ one
        if device == "cuda":
            torch.cuda.synchronize()
    return 2 * size**3 / fastest_of(work, repeats=8)[0]


def sum_losses(model: Any, split: Split, rows: int, micro: int, seed: int, rank: int = 0,
               world: int = 1, autocast: Any = contextlib.nullcontext) -> torch.Tensor:
    """This rank's sum of losses over tokens, and its count of tokens: add over ranks, then divide.

    Means of batches would be wrong with a short last batch, and means of ranks with one that has none.
    """
    device = next(model.parameters()).device
    total, training, rows = torch.zeros(2, dtype=torch.float64), model.training, min(rows, len(split))
    batches = iter(Loader(split, micro, seed, stop=rows, rank=rank, world=world))
    idle = torch.zeros(1, split.header["block"] + 1, dtype=torch.int64)
    model.eval()
    with torch.no_grad(), autocast():
        for _ in range(-(-rows // (micro * world))):  # as often on every rank: one without rows
            batch = next(batches, idle)  # must not leave the others waiting for its weights
            parts = split_rows(batch.to(device))
            loss = float(model(**parts, use_cache=False).loss)
            count = 0 if batch is idle else parts["labels"].numel()
            total += torch.tensor([loss * count, count], dtype=torch.float64)
    model.train(training)
    return total


def shard_model(model: Any, world: int) -> None:
    """Spread each layer's weights over the processes, and the rest of the model's (FSDP2)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(next(model.parameters()).device.type, (world,))
    for layer in next(part for part in model.modules() if isinstance(part, torch.nn.ModuleList)):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


class Pretraining:
    """A run in progress, on one rank."""

    def __init__(self, recipe: Recipe) -> None:
        from accelerate import Accelerator, DistributedType
        from transformers import AutoTokenizer

        self.recipe, self.folder = recipe, Path(recipe.folder)
        alone = os.environ.get("ACCELERATE_USE_CPU") == "true" or not (
            torch.cuda.is_available() or torch.mps.is_available())  # then accelerate must be
        half = "fp16" if recipe.precision == "float16" else None  # accelerate scales the loss then
        self.accelerator = Accelerator(cpu=alone, log_with=recipe.log_to or None,  # told, or each
                                       project_dir=self.folder, mixed_precision=half)  # one is alone
        if half and self.accelerator.device.type != "cuda":
            raise CourseError("float16 needs a GPU: elsewhere it is slow or silently float32",
                              "precision in the recipe", "take bfloat16, float32 or auto")
        if int(os.environ.get("WORLD_SIZE", 1)) != self.accelerator.num_processes:
            raise CourseError("the launcher started several processes, and each believes it is alone",
                              "the launch command", "use torchrun, or see launch/README.md")
        if self.accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP):
            raise CourseError("this loop shards and accumulates by itself", "the launch configuration",
                              "take launch/ddp.yaml, and shard=true in the recipe")
        self.rank, self.world = self.accelerator.process_index, self.accelerator.num_processes
        self.main = self.accelerator.is_main_process
        self.device = self.accelerator.device
        self.tokenizer = AutoTokenizer.from_pretrained(recipe.tokenizer)
        self.store = open_store(Path(recipe.tokens), self.tokenizer)
        self.block = self.store["train"].header["block"]
        self.dtype = choose_dtype(self.device.type).value if recipe.precision == "auto" else getattr(
            torch, recipe.precision)
        self.micro = self.fit_micro(recipe.micro)
        self._build()
        threads = choose_threads(recipe.threads or None).value if alone else torch.get_num_threads()
        self.progress: dict[str, Any] = {"step": 0, "validation_loss": None, "threads": threads}
        self.bad, self.lost, self.pushes, self.stopping = 0, 0, [], False

    def _build(self) -> None:
        """The model, raw and as it is trained, and its optimizers."""
        recipe = self.recipe
        torch.set_float32_matmul_precision("high")
        self.model = build_model(recipe, self.tokenizer)
        sizes = self.model.config
        if (most := getattr(sizes, "max_position_embeddings", self.block)) < self.block:
            raise CourseError(f"blocks have {self.block} tokens, the model has {most} positions",
                              "the recipe", f"set the model's positions to {self.block}")
        self.flops = flops_per_token(self.model, self.block)
        self.sharded = recipe.shard and self.world > 1
        if self.sharded:
            shard_model(self.model.to(self.device), self.world)
        self.optimizers = make_optimizers(self.model, recipe)
        trained = torch.compile(self.model) if recipe.compile else self.model
        if self.sharded:
            self.trained, self.stepped = trained, self.optimizers
        else:
            self.trained, *self.stepped = self.accelerator.prepare(trained, *self.optimizers)
        set_seed(recipe.seed)

    def fit_micro(self, wanted: int) -> int:
        """The largest number of rows up to `wanted` into which a rank's share can be cut evenly."""
        mine, rest = divmod(self.recipe.rows, self.world)
        if rest or not mine:
            raise CourseError(f"{self.recipe.rows} rows a step cannot be shared by {self.world} processes",
                              "rows in the recipe", f"make it a multiple of {self.world}")
        return next(size for size in range(min(wanted, mine), 0, -1) if mine % size == 0)

    def autocast(self) -> Any:
        """Lower precision where the recipe says so and the launcher does not already."""
        ours = self.accelerator.mixed_precision == "no" and self.dtype != torch.float32
        return torch.autocast(self.device.type, self.dtype, enabled=ours)

    def batches(self) -> Iterator[torch.Tensor]:
        """This rank's rows from the next step on, in pieces of `micro` rows."""
        start = self.progress["step"] * self.recipe.rows
        split = self.store["train"]
        for rows in Loader(split, self.micro, self.recipe.seed, start, rank=self.rank, world=self.world):
            yield rows.pin_memory() if self.device.type == "cuda" else rows

    def forward_backward(self, batches: Iterator[torch.Tensor]) -> torch.Tensor:
        """Gradients of the mean loss over this rank's rows of a step; returns that loss."""
        pieces = self.recipe.rows // (self.world * self.micro)
        total = torch.zeros((), device=self.device)
        for piece in range(pieces):
            rows = next(batches).to(self.device, non_blocking=True)
            last = piece == pieces - 1  # ranks exchange gradients once a step
            if self.sharded:
                self.model.set_requires_gradient_sync(last)
            alone = not (last or self.sharded)
            with self.accelerator.no_sync(self.trained) if alone else contextlib.nullcontext():
                with self.autocast():
                    loss = self.trained(**split_rows(rows), use_cache=False).loss / pieces
                self.accelerator.backward(loss)
            total += loss.detach()
        return total

    def take_step(self, batches: Iterator[torch.Tensor]) -> tuple[float, float]:
        """One update; returns the loss over all ranks and the norm of the gradients."""
        step = self.progress["step"]
        torch.manual_seed(hash((self.recipe.seed, step, self.rank)) % 2**63)  # dropout, if any
        loss = self.forward_backward(batches)
        self.accelerator.unscale_gradients()  # of float16; nothing otherwise
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        norm = float(checkpoints.whole(norm))
        share = share_of_rate(step, self.recipe)
        for optimizer in self.stepped:
            for group in optimizer.param_groups:
                group["lr"] = group["full_rate"] * share
            if math.isfinite(norm) or self.accelerator.scaler:  # the same on every rank: all step,
                optimizer.step()  # or none; a scaler skips by itself, and learns from it
            optimizer.zero_grad()
        self.bad = 0 if math.isfinite(norm) else self.bad + 1
        self.progress["step"] += 1
        return float(self.accelerator.reduce(loss, "mean")), norm

    def take_step_in_memory(self, batches: Iterator[torch.Tensor]) -> tuple[Any, float, float]:
        """The same, and if memory runs out: half the rows at once, twice as often, and go on."""
        from accelerate.utils.memory import should_reduce_batch_size

        while True:
            try:
                return batches, *self.take_step(batches)
            except Exception as error:
                if not should_reduce_batch_size(error) or self.micro == 1:
                    raise
                if self.world > 1:  # the other ranks wait for this one inside a collective
                    fix = f"micro={self.micro // 2}; the run goes on from its last checkpoint"
                    raise CourseError("a rank ran out of memory", f"rank {self.rank}", fix) from error
            for optimizer in self.stepped:
                optimizer.zero_grad()
            before, self.micro = self.micro, self.fit_micro(self.micro // 2)
            tqdm.write(f"out of memory: {self.micro} rows at once from here on, not {before}; "
                       f"a step still has {self.recipe.rows}")
            batches = self.batches()

    def evaluate(self) -> float:
        """The mean loss over tokens of the validation split, the same on any number of ranks."""
        sums = sum_losses(self.model, self.store["validation"], self.recipe.evaluate_rows, self.micro,
                          self.recipe.seed, self.rank, self.world, self.autocast)
        sums = self.accelerator.reduce(sums.to(self.device, torch.float32 if self.device.type == "mps"
                                               else torch.float64), "sum")
        return float(sums[0] / sums[1])

    def sample(self) -> list[str]:
        """How the model goes on from each prompt, always taking the likeliest token."""
        from transformers import GenerationConfig

        said, plan = [], GenerationConfig(max_new_tokens=48, do_sample=False, use_cache=True,
                                          pad_token_id=self.tokenizer.pad_token_id)
        self.model.eval()
        for prompt in self.recipe.prompts:
            ids = self.tokenizer(self.tokenizer.eos_token + prompt, return_tensors="pt").to(self.device)
            ids.pop("token_type_ids", None)
            made = self.model.generate(**ids, generation_config=plan)
            said.append(self.tokenizer.decode(made[0, 1:], skip_special_tokens=True))
        self.model.train()
        return said

    def log(self, kind: str, **values: Any) -> None:
        """One line in `log.jsonl`, and figures to the trackers."""
        if self.main:
            line = {"kind": kind, "step": self.progress["step"], **values}
            with (self.folder / "log.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            figures = {f"{kind}/{k}": v for k, v in values.items() if isinstance(v, (int, float))}
            if self.recipe.log_to and figures:
                self.accelerator.log(figures, step=self.progress["step"])

    def save(self) -> None:
        """A checkpoint; a full disk costs this one and not the run."""
        state = checkpoints.pack_state(self.optimizers, keep=self.main)
        weights = {name: checkpoints.whole(v) for name, v in self.model.state_dict().items()}
        if self.main:
            try:
                path = checkpoints.save_checkpoint(self.folder, self.model, state, weights,
                                                   self.tokenizer, self.progress)
                checkpoints.drop_checkpoints(self.folder, self.recipe.keep)
                self.push(path)
            except CourseError as error:
                tqdm.write(f"no checkpoint at step {self.progress['step']}, the run goes on: {error}")
        self.accelerator.wait_for_everyone()

    def push(self, path: Path) -> None:
        """Send a checkpoint's model to the hub, in the background; a failure costs nothing."""
        if self.recipe.hub:
            from huggingface_hub import HfApi

            self.pushes = [push for push in self.pushes if not push.done() or self.pushed(push)]
            api = HfApi()
            with contextlib.suppress(Exception):  # the upload itself will say what is wrong
                api.create_repo(self.recipe.hub, exist_ok=True)
            self.pushes.append(api.upload_folder(
                repo_id=self.recipe.hub, folder_path=path, run_as_future=True,
                commit_message=f"step {self.progress['step']}",
                ignore_patterns=[checkpoints.STATE, checkpoints.PROGRESS, "manifest.json"]))

    def pushed(self, push: Any) -> bool:
        """Report on a push that has ended; False, so that it is dropped."""
        if error := push.exception():
            tqdm.write(f"a push to {self.recipe.hub} failed, the run goes on: {error}")
        return False

    def resume(self) -> None:
        """Go on from the newest whole checkpoint of the folder, if there is one."""
        facts = {"recipe": vars(self.recipe), "tokens": (read_manifest(Path(self.recipe.tokens))
                                                        or {}).get("hash")}
        path, damaged = checkpoints.newest_checkpoint(self.folder)
        if path:
            old = read_json(self.folder / "recipe.json") or facts
            differs = self.recipe.same_run(old["recipe"])
            if not differs and old["tokens"] != facts["tokens"]:
                differs = "the token store is another one"
            if differs:
                raise CourseError(f"the folder holds another run: {differs}", self.folder,
                                  "choose another folder, or delete this one")
            self.progress = checkpoints.load_checkpoint(path, self.model, self.optimizers)
        self.accelerator.wait_for_everyone()
        if self.main:
            for bad, said in damaged.items():
                aside = checkpoints.set_aside(bad).name
                tqdm.write(f"skipped a damaged checkpoint, {bad.name}: {said}; it is now {aside}")
            checkpoints.forget_after(self.folder / "log.jsonl", self.progress["step"])
            write_json(self.folder / "recipe.json", facts)
        self.accelerator.wait_for_everyone()

    def look(self, loss: float) -> None:
        """Stop a run that is lost, and say what to do."""
        step, chance = self.progress["step"], math.log(len(self.tokenizer))
        newest = checkpoints.list_checkpoints(self.folder)
        back = f"lower the rate and start again, or resume from {newest[-1].name}" if newest else (
            "lower the rate and start again")
        if self.bad >= BAD_STEPS:
            raise CourseError(f"the gradients were not finite {self.bad} steps in a row; none of them "
                              "was applied", f"step {step}", back)
        self.lost = self.lost + 1 if loss > chance + 1 else 0
        if self.lost >= 20:
            raise CourseError(f"the run diverged: a loss of {loss:.2f}, guessing has {chance:.2f}",
                              f"step {step}", "lower the rate, and start again in another folder")

    @contextlib.contextmanager
    def own_folder(self) -> Iterator[None]:
        """Hold the run's folder, which two runs at once would spoil."""
        lock = FileLock(self.folder.with_name(f".{self.folder.name}.lock")) if self.main else None
        try:
            with lock.acquire(timeout=0) if lock else contextlib.nullcontext():
                yield
        except Timeout as error:
            raise CourseError("another process trains in this folder", self.folder,
                              "wait for it, or choose another folder") from error

    def train(self) -> None:
        """From where the run stands to its last step."""
        recipe = self.recipe
        self.resume()
        if recipe.log_to:
            self.accelerator.init_trackers("pretraining", config={"steps": recipe.steps})
        torch.set_num_threads(self.progress["threads"])  # as before: sums depend on it, in the last bit
        rate = matmul_rate(self.device.type, self.dtype) * self.world
        bar, batches = self.make_bar(), self.batches()
        self.trained.train()
        self.clock, self.done = time.perf_counter(), self.progress["step"]
        while self.progress["step"] < recipe.steps and not self.stopping:
            batches = self.advance(batches, rate, bar)
            self.clock += self.side_work(self.progress["step"])
        bar.close()
        self.finish()

    def advance(self, batches: Iterator[torch.Tensor], rate: float, bar: Any) -> Iterator[torch.Tensor]:
        """One step and what is said of it; returns where the next rows come from."""
        recipe = self.recipe
        batches, loss, norm = self.take_step_in_memory(batches)
        step = self.progress["step"]
        self.look(loss)
        if step % recipe.log_every == 0 or step == recipe.steps:
            now = time.perf_counter()
            speed = (step - self.done) * recipe.rows * self.block / (now - self.clock)
            self.log("step", loss=loss, norm=norm, rate=share_of_rate(step - 1, recipe),
                     tokens_per_second=speed, utilization=speed * self.flops / rate)
            bar.set_postfix_str(f"loss {loss:.3f}, {speed:,.0f} tokens/s, "
                                f"{speed * self.flops / rate:.0%} of matmul", refresh=False)
            self.clock, self.done = now, step
        bar.update()
        return batches

    def make_bar(self) -> Any:
        """One line that stays one line; none where nobody looks."""
        forked = os.getpid() != IMPORTED_BY  # by notebook_launcher: widgets do not reach the page
        quiet = {} if forked or "ipykernel" in sys.modules else {"disable": None}
        quiet = quiet if self.main else {"disable": True}
        return (tqdm_plain if forked else tqdm)(total=self.recipe.steps, initial=self.progress["step"],
                                                unit="step", mininterval=1, **quiet)

    def side_work(self, step: int) -> float:
        """Evaluate, sample and save where they are due; the seconds it took."""
        recipe, start = self.recipe, time.perf_counter()
        last = step == recipe.steps or self.stopping
        saving = last or step % recipe.save_every == 0
        if saving or step % recipe.evaluate_every == 0:
            loss = self.progress["validation_loss"] = self.evaluate()
            held = (torch.cuda.max_memory_allocated() if self.device.type == "cuda"
                    else process_memory()["rss"])
            self.log("validation", loss=loss, perplexity=perplexity(loss), memory=held,
                     bits_per_byte=self.store["validation"].bits_per_byte(loss))
        due = recipe.sample_every and (last or step % recipe.sample_every == 0)
        if due and (self.main or self.sharded):  # a part of a model says nothing by itself
            self.log("sample", samples=self.sample())
        if saving:
            self.save()
        return time.perf_counter() - start

    def finish(self) -> None:
        """Wait for pushes, close trackers, say where the result lies."""
        for push in self.pushes:
            with contextlib.suppress(Exception):
                push.result(timeout=300)
            self.pushed(push)
        if self.recipe.log_to:
            self.accelerator.end_training()
        if self.stopping and self.main:
            print(f"stopped at step {self.progress['step']}; the same command goes on from there")

    def stop(self, *_: Any) -> None:
        """What Ctrl-C and SIGTERM do: save after this step and leave; at once if asked twice."""
        if self.stopping or self.world > 1:  # many ranks cannot agree in a hurry
            raise KeyboardInterrupt
        self.stopping = True


def pretrain(recipe: Recipe) -> None:
    """Train by a recipe, from its beginning or from where its folder stands."""
    run = Pretraining(recipe)
    kept = {}
    with contextlib.suppress(ValueError):  # not the main thread
        kept = {kind: signal.signal(kind, run.stop) for kind in (signal.SIGINT, signal.SIGTERM)}
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
        with run.own_folder():
            run.train()
    finally:
        for kind, handler in kept.items():
            signal.signal(kind, handler)


def parse_value(text: str) -> Any:
    """A value of the command line: Python's if it is one, else the text itself.

    >>> parse_value("0.5"), parse_value("adamw"), parse_value("['def ']")
    (0.5, 'adamw', ['def '])
    """
    try:
        return {"true": True, "false": False}[text] if text in ("true", "false") else ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def main(arguments: list[str]) -> int:
    """`RECIPE [name=value …]`; `model.name=value` reaches into the model."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print("python -m stages.training RECIPE.toml [name=value | model.name=value …]")
        return 0 if arguments else 2
    changes: dict[str, Any] = {"model": {}}
    for text in arguments[1:]:
        name, _, value = text.partition("=")
        place = changes["model"] if name.startswith("model.") else changes
        place[name.removeprefix("model.")] = parse_value(value)
    try:
        pretrain(Recipe.load(arguments[0], **changes))
    except CourseError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main(sys.argv[1:]))
