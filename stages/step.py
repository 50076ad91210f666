"""One update of a model: gradients of a step's rows, clipped, and applied. All ranks take it together."""

from __future__ import annotations

import contextlib
import random
from functools import partial
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch.optim import AdamW
from tqdm import tqdm

from stages.read_ahead import read_ahead
from stages.recipe import make_optimizers
from stages.sharding import is_sharded
from stages.tokens import Loader, Split, split_rows

# The large recipes' loaders gather so many micro-batches together: the next ones, while these are used.
BATCHES_AHEAD = 64


class LossScale:
    """What float16's losses are multiplied by, or small gradients would be zero: the largest that fits.

    It is halved when gradients overflow, and doubled after two thousand steps in which none did.
    """

    def __init__(self, progress: dict[str, Any], device: torch.device) -> None:
        self.used = progress["precision"] == "float16"
        value, calm = progress.get("loss_scale", (2.0**16, 0.0))
        self.value = torch.tensor(value, device=device)
        self.calm = torch.tensor(calm, device=device)

    def up(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss, scaled."""
        return loss * self.value if self.used else loss

    def down(self, model: Any) -> None:
        """The gradients as they would be without a scale."""
        if self.used:
            for parameter in model.parameters():
                parameter.grad /= self.value

    def update(self, bad: torch.Tensor) -> None:
        """Halve or double, on the device: nobody waits for it."""
        if self.used:
            self.calm += 1
            self.calm *= 1 - bad
            grown = self.calm.eq(2000).float()
            self.calm *= 1 - grown
            self.value *= 1 - bad / 2
            self.value *= 1 + grown

    def progress(self) -> dict[str, Any]:
        """What a run that goes on must know of it."""
        if not self.used:
            return {}
        value = float(self.value)
        calm = float(self.calm)
        return {"loss_scale": (value, calm)}


class Step:
    """One update: gradients of a step's rows, clipped, and applied. All ranks take it together."""

    def __init__(self, run: Any, model: Any, store: dict[str, Split]) -> None:
        recipe, accelerator = run.recipe, run.accelerator
        self.run = run
        self.recipe = recipe
        self.accelerator = accelerator
        self.device = accelerator.device
        self.rank = accelerator.process_index
        self.world = accelerator.num_processes
        self.ranks = {"rank": self.rank, "world": self.world}
        self.model = model
        self.optimizers = make_optimizers(model, recipe)
        self.split = store["train"]
        self.held_out = store["validation"]
        self.dtype = getattr(torch, run.progress["precision"])
        self.scale = LossScale(run.progress, self.device)
        self.sharded = is_sharded(model)
        # Matrix products in the run's precision; shards are gathered in it already.
        narrow = self.dtype != torch.float32 and not self.sharded
        kind = self.device.type
        self.autocast = partial(torch.autocast, kind, self.dtype, narrow)
        self.micro = self.fit_micro(run.progress["micro"])
        # Shards exchange their gradients by themselves, copies of a model by DDP.
        trained: Any = model if self.sharded else accelerator.prepare(model)
        # What is compiled around DDP is cut where its buckets end: they travel while others are computed.
        self.trained: Any = torch.compile(trained) if recipe.compile else trained
        self.go_to(run.step)

    def fit_micro(self, wanted: int) -> int:
        """The largest number of rows up to `wanted` into which a rank's share can be cut evenly."""
        share = self.recipe.rows // self.world
        while share % wanted:
            wanted -= 1
        return wanted

    def go_to(self, number: int) -> None:
        """Let the next rows be those of this step."""
        seed = self.recipe.seed
        start = number * self.recipe.rows
        loader = Loader(self.split, self.micro, seed, start, **self.ranks)
        self.batches = read_ahead(iter(loader), BATCHES_AHEAD)

    def take(self, number: int, share: float) -> torch.Tensor:
        """Step `number`, at a share of the full rate: this rank's loss, and the gradients' norm.

        Both are still on the device. To read them is to wait for it, and the next step need not.
        """
        loss = self.compute_gradients(number)
        norm = self.clip_gradients()
        self.apply(share, norm)
        figures = [loss, norm]
        return torch.stack(figures)

    def compute_gradients(self, number: int) -> torch.Tensor:
        """Forward and backward; where memory runs out, again from the start in halves of the rows."""
        while True:
            try:
                return self.forward_backward(number)
            except Exception as error:
                # Alone, one can try again; other ranks would wait for this one in an exchange.
                alone = self.world == 1 and self.micro > 1
                if not alone or not should_reduce_batch_size(error):
                    raise
            self.halve_micro(number)

    def halve_micro(self, number: int) -> None:
        """Halve the rows of a micro-batch; a step still has as many rows."""
        self.model.zero_grad()
        clear_device_cache(garbage_collection=True)
        before = self.micro
        self.micro = self.fit_micro(self.micro // 2)
        what = f"out of memory: {self.micro} rows at once from here on"
        tqdm.write(f"{what}, not {before}")
        self.go_to(number)

    def forward_backward(self, number: int) -> torch.Tensor:
        """Gradients of the mean loss over this rank's rows of a step; returns that loss."""
        noise = random.Random(f"{self.recipe.seed} {number} {self.rank}")
        torch.manual_seed(noise.getrandbits(63))
        pieces = self.recipe.rows // (self.world * self.micro)
        total = torch.zeros((), device=self.device)
        for piece in range(pieces):
            rows = next(self.batches)
            if self.device.type == "cuda":
                rows = rows.pin_memory()
            with self.exchange(last=piece == pieces - 1):
                with self.autocast():
                    parts = split_rows(rows.to(self.device, non_blocking=True))
                    loss = self.trained(**parts, use_cache=False).loss / pieces
                self.scale.up(loss).backward()
            total += loss.detach()
        return total

    def exchange(self, last: bool) -> Any:
        """Copies exchange gradients behind the last piece of a step only.

        Shards do so behind each piece: between two of them no rank keeps a gradient in full.
        """
        if last or self.sharded:
            return contextlib.nullcontext()
        return self.accelerator.no_sync(self.trained)

    def clip_gradients(self) -> torch.Tensor:
        """Shorten the gradients, taken as one vector, to `clip`; returns how long they were."""
        self.scale.down(self.model)
        weights = self.model.parameters()
        norm: Any = torch.nn.utils.clip_grad_norm_(weights, self.recipe.clip)
        if self.sharded:
            norm = norm.full_tensor()
        return norm

    def apply(self, share: float, norm: torch.Tensor) -> None:
        """Update the weights. The norm is the same on all ranks: all of them step, or none."""
        bad = 1 - torch.isfinite(norm).float()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["full_rate"] * share
            # AdamW itself leaves all as it is; Muon must be kept from it, and for that one must ask.
            if isinstance(optimizer, AdamW):
                optimizer.found_inf = bad  # type: ignore[attr-defined]
                optimizer.step()
            elif not bad:
                optimizer.step()
            optimizer.zero_grad()
        self.scale.update(bad)
