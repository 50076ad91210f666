"""A run's folder and where it stands: lock, checkpoints, log, a polite end, and the roll call of ranks."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from filelock import FileLock, Timeout
from torch.distributed import PrefixStore, ReduceOp
from torch.distributed.distributed_c10d import _get_default_store
from tqdm import tqdm

from stages import checkpoints
from stages import training_callbacks as callbacks
from stages.recipe import Recipe, find_difference
from utils.artifacts import plain_disk_errors, read_json, write_json
from utils.errors import CourseError
from utils.machine import choose_dtype, choose_threads

# The environment's name for a file that stops a run, politely, as soon as it is there.
STOP_FILE = "COURSE_STOP_FILE"
# So long a rank may be silent: more than a checkpoint takes, or the first step of a compiler.
PATIENCE = timedelta(minutes=20)


class Run:
    """A run's folder and where it stands; all ranks have one, the first writes."""

    def __init__(self, recipe: Recipe, accelerator: Any, tokenizer: Any) -> None:
        self.recipe = recipe
        self.folder = recipe.place("folder")
        self.tokenizer = tokenizer
        self.accelerator = accelerator
        self.world = accelerator.num_processes
        self.is_main = accelerator.is_main_process
        self.callbacks: list[Any] = []
        self.figures = callbacks.Figures()
        self.hub: callbacks.HubPush | None = None
        self.stopping = False
        self.asked = False
        self.stop_file = Path(os.environ.get(STOP_FILE) or os.devnull)
        self.unwritten = b""
        # The checkpoint that is being written while the training goes on.
        self.writer = ThreadPoolExecutor(1, initializer=self.take_device)
        self.saving: Future | None = None
        self.saving_step = 0
        # Processors talk to each other beside their GPUs, which nobody has to wait for then.
        self.hosts: Any = None
        self.savers: Any = None
        if self.world > 1:
            gloo: dict[str, Any] = {"backend": "gloo", "timeout": PATIENCE}
            self.hosts = torch.distributed.new_group(**gloo)
            self.savers = torch.distributed.new_group(**gloo)
        # What the machine that begins a run decides, it decides for all that go on with it.
        precision: str = recipe.precision
        if precision == "auto":
            dtype = choose_dtype(accelerator.device.type).value
            precision = str(dtype).removeprefix("torch.")
        self.progress: dict[str, Any] = {
            "step": 0,
            "log_bytes": 0,
            "precision": precision,
            "threads": choose_threads(recipe.threads).value,
            "micro": recipe.micro,
            # What trackers call the run, as long as it goes on.
            "name": f"{self.folder.name}-{secrets.token_hex(3)}",
        }

    @property
    def step(self) -> int:
        """The number of steps that are done."""
        return self.progress["step"]

    @property
    def ends_here(self) -> bool:
        """Whether the run has taken its last step, or was asked to stop."""
        if self.stopping:
            return True
        return self.step >= self.recipe.steps

    def is_due(self, every: int | None) -> bool:
        """Whether something that happens every so many steps, and at the end, happens now."""
        if every is None:
            return False
        return self.ends_here or self.step % every == 0

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder, which two runs at once would spoil."""
        lock = FileLock(self.folder.with_name(f".{self.folder.name}.lock"))
        try:
            if self.is_main:
                with plain_disk_errors(self.folder):
                    self.folder.mkdir(parents=True, exist_ok=True)
                lock.acquire(timeout=0)
            yield
        except Timeout as error:
            what = "another process trains in this folder"
            fix = "wait for it, or choose another folder"
            raise CourseError(what, self.folder, fix) from error
        finally:
            # Nobody else may write here while a checkpoint is on its way.
            self.writer.shutdown()
            lock.release()

    @contextlib.contextmanager
    def stoppable(self) -> Iterator[None]:
        """Take Ctrl-C and SIGTERM for a wish to stop."""
        previous = {}
        # Only the main thread may.
        with contextlib.suppress(ValueError):
            for kind in (signal.SIGINT, signal.SIGTERM):
                previous[kind] = signal.signal(kind, self.stop)
        try:
            yield
        finally:
            for kind, handler in previous.items():
                signal.signal(kind, handler)

    def stop(self, *_: Any) -> None:
        """Save after this step and leave; one process that is asked twice leaves at once."""
        # To many, Ctrl-C comes twice: from the terminal, and from their launcher.
        if self.asked and self.world == 1:
            raise KeyboardInterrupt
        self.asked = True

    def take_device(self) -> None:
        """Let a thread have this rank's GPU, and not the first one, for what it asks of it."""
        if self.accelerator.device.type == "cuda":
            torch.cuda.set_device(self.accelerator.device)

    def call_roll(self) -> None:
        """All ranks are here, and stop together if one of them was asked to."""
        asked = self.asked or (self.is_main and self.stop_file.is_file())
        wish = torch.tensor(float(asked))
        if self.world > 1:
            torch.distributed.all_reduce(wish, ReduceOp.MAX, group=self.hosts)
        self.stopping = bool(wish)

    def find_missing(self) -> str:
        """Which ranks leave no word where all of them met; no group in which an exchange failed can tell."""
        names = [f"rank {rank}" for rank in range(self.world)]
        missing = []
        with contextlib.suppress(Exception):
            store = PrefixStore("missing", _get_default_store())
            store.set(names[self.accelerator.process_index], "here")
            with contextlib.suppress(Exception):
                store.wait(names, timedelta(seconds=10))
            missing = [name for name in names if not store.check([name])]
        return " and ".join(missing) or "another rank"

    def find_checkpoint(self, tokens: str | None) -> Path | None:
        """The checkpoint to go on from; the first rank looks, and all take up what it finds."""
        path = None
        folder = self.folder
        if self.is_main:
            recipe = self.recipe.model_dump(mode="json")
            with plain_disk_errors(folder):
                path = checkpoints.newest_checkpoint(folder)
                self.take_up(path, {"recipe": recipe, "tokens": tokens})
                path = path or self.branch_off(tokens)
        found: list[Any] = [path, self.progress]
        broadcast_object_list(found)
        path, self.progress = found
        return path

    def take_up(self, path: Path | None, facts: dict) -> None:
        """Stand where a checkpoint of this run stands, and write down what the run is."""
        place = self.folder / "recipe.json"
        if path:
            old = read_json(place) or facts
            self.progress |= read_json(path / checkpoints.PROGRESS)
            self.check_facts(old, facts["tokens"])
            # What was learned of the memory is kept, unless the recipe says otherwise by now.
            if old["recipe"]["micro"] != self.recipe.micro:
                self.progress["micro"] = self.recipe.micro
        write_json(place, facts)

    def branch_off(self, tokens: str | None) -> Path | None:
        """The checkpoint of another run with which this one begins, if its recipe names one."""
        if not self.recipe.start_from:
            return None
        path = self.recipe.place("start_from")
        old = read_json(path.parent / "recipe.json")
        progress = read_json(path / checkpoints.PROGRESS)
        if not old or not progress:
            fix = "name a folder like pretraining/checkpoint-001000"
            raise CourseError("there is no checkpoint to start from", path, fix)
        # Of its own it has the log and the name.
        own = {"log_bytes": 0, "name": self.progress["name"]}
        self.progress |= {**progress, **own}
        self.check_facts(old, tokens)
        return path

    def check_facts(self, old: dict, tokens: str | None) -> None:
        """Refuse to go on with a run of another recipe, or of other tokens."""
        theirs = Recipe(**old["recipe"])
        difference = find_difference(theirs, self.recipe, self.step)
        if not difference and old["tokens"] != tokens:
            difference = f"token store {old['tokens']!r}, not {tokens!r}"
        if difference:
            raise CourseError(
                f"the folder holds another run: {difference}",
                self.folder,
                "choose another folder, or delete this one",
            )

    def save(self, step: Any) -> None:
        """A checkpoint; a full disk costs this one and not the run, unless it is the last."""
        self.finish_saving()
        self.progress |= step.scale.progress()
        beside = self.recipe.save_beside
        write = checkpoints.prepare_checkpoint(
            self.folder,
            step.model,
            step.optimizers,
            self.tokenizer,
            self.progress,
            group=self.savers,
            copy=beside,
        )
        self.saving = self.writer.submit(write) if beside else run_now(write)
        self.saving_step = self.step
        if self.ends_here or not beside:
            self.finish_saving()

    def finish_saving(self) -> None:
        """Wait for the checkpoint that is being written, if one is, and tidy up behind it."""
        if self.saving is None:
            return
        saving, self.saving = self.saving, None
        path = None
        try:
            path = saving.result()
        except CourseError as error:
            # The last one must be there.
            if self.ends_here and self.saving_step == self.step:
                raise
            what = f"no checkpoint at step {self.saving_step}, the run goes on"
            tqdm.write(f"{what}: {error}")
        self.accelerator.wait_for_everyone()
        in_use = None
        if path and self.hub:
            last = self.ends_here and self.saving_step == self.step
            in_use = self.hub.push(path, wait=last)
        if path and self.is_main:
            checkpoints.drop_checkpoints(self.folder, self.recipe.keep, in_use)

    def log(self, kind: str, **values: Any) -> None:
        """One line in `log.jsonl`, and its figures for trackers; on a full disk it waits for the next."""
        if not self.is_main:
            return
        line = {"kind": kind, "step": self.step, **values}
        self.unwritten += json.dumps(line).encode() + b"\n"
        with (self.folder / "log.jsonl").open("ab", buffering=0) as file:
            # What lies behind is torn, or of steps that are taken again.
            size = min(file.tell(), self.progress["log_bytes"])
            file.truncate(size)
            with contextlib.suppress(OSError):
                if file.write(self.unwritten) == len(self.unwritten):
                    size = file.tell()
                    self.unwritten = b""
            file.truncate(size)
        self.progress["log_bytes"] = size
        figures = {}
        for name, value in values.items():
            if isinstance(value, (int, float)):
                figures[f"{kind}/{name}"] = value
        self.accelerator.log(figures, step=self.step)


def run_now(work: Callable[[], Path]) -> Future:
    """Do something at once, in a form as if a thread had done it."""
    done: Future = Future()
    try:
        done.set_result(work())
    except CourseError as error:
        done.set_exception(error)
    return done
