"""A soak: two hundred clients, half of them misbehaving, against two workers of one server.

    python -m benchmarks.serving soak                       ten minutes, kept in results/serving.json
    python -m benchmarks.serving soak --seconds 30 --clients 20 --no-keep
    python -m benchmarks.serving soak --each 2 --clients 20 --no-keep          by requests, not seconds

First the well-behaved half alone, then all of them, at the same rate. What must hold: no worker dies, every
answer is the model's own for its prompt, memory stays flat, and the 95th percentile of the well-behaved is
at most twice what it was in quiet. Only addresses of this machine are used, for a limited time.
`make bench` soaks for a minute with fewer clients, and shows the ten minutes that are kept beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, logging

from benchmarks.timing import Row, row
from course.checkout import clean_commit
from stages.guarded import Guarded, free_port
from stages.questions import questions
from stages.serving import command_for
from stages.serving_load import BAD_MANNERS, Outcome, ask, closed_loop
from stages.serving_protocol import KEYS, Limits
from utils.artifacts import read_json, write_json
from utils.errors import ROOT, CourseError, build_folder
from utils.machine import machine_facts

RECORD = ROOT / "results" / "serving.json"
NAME = "course-model"
# Longer than this many seconds, or with more clients, it is no test of a server but a nuisance.
MOST_SECONDS, MOST_CLIENTS = 900, 400
LIMITS = Limits(
    rows=8, length=256, most=200, waiting=32, per_caller=2, read_seconds=3
)
# An answer whose likeliest token leads by less is no measure: batches add up in another order.
CLEAR = 1e-3


@dataclasses.dataclass
class Tally:
    """What became of the requests of one phase."""

    good: list[tuple[int, Outcome]] = dataclasses.field(default_factory=list)
    bad: list[tuple[str, Outcome]] = dataclasses.field(default_factory=list)
    memory: list[int] = dataclasses.field(default_factory=list)
    pids: set[int] = dataclasses.field(default_factory=set)


def prepare(folder: Path, count: int, most: int) -> list[tuple[Any, str]]:
    """Conversations, and what the model answers to each, alone; only those with no near tie."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    pairs = []
    for one in questions("test", 4 * count, each=1, seed=0):
        talk = [{"role": "user", "content": f"Table {one.schema}. {one.text}"}]
        ids = tokenizer.apply_chat_template(talk, add_generation_prompt=True)
        text, margin = answer_of(model, tokenizer, ids["input_ids"], most)
        if margin > CLEAR:
            pairs.append((talk, text))
        if len(pairs) == count:
            break
    return pairs


def answer_of(model: Any, tokenizer: Any, ids: list[int], most: int) -> Any:
    """The greedy answer, and by how much its least certain token led."""
    made = model.generate(
        torch.tensor([ids]),
        max_new_tokens=most,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tops = torch.stack(made.logits)[:, 0].topk(2).values
    margin = float((tops[:, 0] - tops[:, 1]).min())
    text = tokenizer.decode(made.sequences[0, len(ids) :], skip_special_tokens=True)
    return text, margin


@dataclasses.dataclass
class Stretch:
    """How long each client of a phase goes on, and how long it thinks on average."""

    until: float
    each: int  # requests of every client, however long they take; 0: as many as there is time for
    pause: float

    def turns(self) -> Iterator[int]:
        """The numbers of a client's requests."""
        for turn in itertools.count():
            over = time.monotonic() >= self.until
            if turn >= self.each if self.each else over:
                return
            yield turn

    async def think(self, draw: random.Random) -> None:
        """Do nothing for a while, but not past the end."""
        seconds = draw.expovariate(1 / self.pause)
        if not self.each:
            seconds = min(seconds, max(0.0, self.until - time.monotonic()))
        await asyncio.sleep(seconds)


async def behave(
    url: str, number: int, pairs: Any, tally: Tally, stretch: Stretch
) -> None:
    """A client that asks, reads, thinks, and asks again."""
    draw = random.Random(number)
    await asyncio.sleep(draw.random() * stretch.pause)
    for _ in stretch.turns():
        which = draw.randrange(len(pairs))
        body = {"model": NAME, "messages": pairs[which][0], "temperature": 0}
        body |= {"max_tokens": 24, "stream": True}
        tally.good.append((which, await ask(url, body, f"good-{number}")))
        await stretch.think(draw)


async def misbehave(
    url: str, number: int, pairs: Any, tally: Tally, stretch: Stretch
) -> None:
    """A client that does something else that is bad each time."""
    draw = random.Random(-number)
    names = list(BAD_MANNERS)
    await asyncio.sleep(draw.random() * stretch.pause)
    for turn in stretch.turns():
        name = names[(number + turn) % len(names)]
        body = {"model": NAME, "messages": pairs[0][0], "temperature": 0}
        try:
            async with asyncio.timeout(90):
                outcome = await BAD_MANNERS[name][0](url, body, f"bad-{number}")
        except (OSError, TimeoutError) as error:
            # No status of its own, because 0 is what some of them should get.
            outcome = Outcome(0.0, status=-1, error=type(error).__name__)
        tally.bad.append((name, outcome))
        await stretch.think(draw)


async def watch(server: Guarded, tally: Tally) -> None:
    """Memory of the server and the numbers of its processes, every few seconds."""
    while True:
        family = server.family()[1:]
        tally.pids |= {one.pid for one in family}
        tally.memory.append(sum(own_memory(one) for one in family))
        await asyncio.sleep(2)


def own_memory(process: psutil.Process) -> int:
    """Bytes of a process that no file stands behind."""
    try:
        return process.memory_full_info().uss
    except psutil.NoSuchProcess:
        return 0


async def phase(
    server: Guarded, url: str, pairs: Any, given: argparse.Namespace, bad: bool
) -> Tally:
    """One stretch of time with the good clients, and perhaps the bad ones."""
    seconds = given.seconds if bad else given.quiet
    stretch = Stretch(time.monotonic() + seconds, given.each, given.pause)
    tally, half = Tally(), given.clients // 2
    work = [behave(url, k, pairs, tally, stretch) for k in range(half)]
    if bad:
        work += [misbehave(url, k, pairs, tally, stretch) for k in range(half)]
    watching = asyncio.create_task(watch(server, tally))
    await asyncio.gather(*work)
    if watching.done():
        watching.result()  # it ends by itself only if it fails
    watching.cancel()
    return tally


def seconds_of(tally: Tally) -> np.ndarray:
    """Seconds from a request to the end of its answer, for those that got one."""
    return np.array([one.ended - one.due for _, one in tally.good if one.whole])


def judge(quiet: Tally, loud: Tally, pairs: Any) -> dict[str, Any]:
    """The figures, and whether each bar holds."""
    wrong = [
        one.text
        for tally in (quiet, loud)
        for which, one in tally.good
        if one.whole and one.text != pairs[which][1]
    ]
    lost = Counter(
        one.error or f"status {one.status}"
        for tally in (quiet, loud)
        for _, one in tally.good
        if not one.whole
    )
    unlike = [
        f"{name}: {one.status} {one.error}"
        for name, one in loud.bad
        if one.status not in BAD_MANNERS[name][1] | {429}
    ]
    p95 = [float(np.percentile(seconds_of(one), 95)) for one in (quiet, loud)]
    # Once everything has been touched, it must not grow.
    settled = loud.memory[len(loud.memory) // 4 :]
    quarter = max(1, len(settled) // 4)
    growth = float(np.mean(settled[-quarter:]) / np.mean(settled[:quarter]) - 1)
    died = len(loud.pids | quiet.pids) - max(len(quiet.pids), 1)
    figures = {
        "well-behaved, answers": len(quiet.good)
        + len(loud.good)
        - sum(lost.values()),
        "well-behaved, wrong or mixed": len(wrong),
        "well-behaved, without an answer": dict(lost),
        "misbehaving, requests": len(loud.bad),
        "misbehaving, by kind": dict(Counter(name for name, _ in loud.bad)),
        "misbehaving, answered otherwise": dict(Counter(unlike)),
        "processes that died": died,
        "p95 in quiet, s": round(p95[0], 3),
        "p95 beside the others, s": round(p95[1], 3),
        "p95, ratio": round(p95[1] / p95[0], 2),
        "memory, last over first quarter": round(growth, 4),
        "memory, MB": round(float(np.mean(settled)) / 1e6),
    }
    bars = {
        "no process died": died == 0,
        "no wrong or mixed answer": not wrong,
        "every well-behaved request answered": not lost,
        "every other one refused as it should be": not unlike,
        "memory flat within 3%": growth < 0.03,
        "p95 within twice that of quiet": p95[1] <= 2 * p95[0],
    }
    return {"figures": figures, "holds": bars}


def soak(given: argparse.Namespace) -> dict[str, Any]:
    """Both phases against a server of two workers, and what came of it."""
    given.seconds = min(given.seconds, MOST_SECONDS)
    given.quiet = min(given.quiet, MOST_SECONDS)
    given.clients = min(given.clients, MOST_CLIENTS)
    pairs = prepare(given.folder, given.questions, most=24)
    half = given.clients // 2
    names = [f"{kind}-{k}" for kind in ("good", "bad") for k in range(half)]
    keys = {KEYS: ",".join(f"{name}:{name}" for name in names)}
    port = free_port()
    command = command_for(given.folder, NAME, port, LIMITS, workers=given.workers)
    with Guarded(command, OMP_NUM_THREADS="1", **keys) as server:
        url = server.wait_for(f"http://127.0.0.1:{port}")
        quiet = asyncio.run(phase(server, url, pairs, given, bad=False))
        loud = asyncio.run(phase(server, url, pairs, given, bad=True))
        return judge(quiet, loud, pairs)


def read_arguments(words: list[str]) -> argparse.Namespace:
    """What was typed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving")
    parser.add_argument("command", choices=["soak"])
    parser.add_argument(
        "--folder", type=Path, help="of the model; else lesson 17's"
    )
    parser.add_argument("--seconds", type=float, default=600, help="of all of them")
    parser.add_argument("--quiet", type=float, default=120, help="seconds before")
    parser.add_argument(
        "--each", type=int, default=0, help="requests of a client, not seconds"
    )
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--questions", type=int, default=24)
    parser.add_argument(
        "--pause", type=float, default=40, help="seconds, on average"
    )
    parser.add_argument("--no-keep", action="store_true")
    return parser.parse_args(words)


def merged(profile: str = "laptop") -> Path:
    """The folder of lesson 17's model, its adapter merged in."""
    from peft import PeftModel

    shelf = build_folder() / "artifacts"
    if not (shelf / profile / "instruct-adapter").exists():
        profile = "smoke"
    if not (shelf / profile / "instruct-adapter").exists():
        what = "the artifact 'instruct-adapter' is missing"
        raise CourseError(what, shelf, "make run ONLY=17")
    shelf, target = shelf / profile, build_folder() / "serving" / f"model-{profile}"
    base = AutoModelForCausalLM.from_pretrained(
        shelf / "pretrained", dtype=torch.float32
    )
    model = PeftModel.from_pretrained(base, shelf / "instruct-adapter")
    model.merge_and_unload().save_pretrained(target)
    AutoTokenizer.from_pretrained(shelf / "instruct-adapter").save_pretrained(
        target
    )
    return target


def throughput() -> Iterator[Row]:
    """Eight callers at once over one who waits for each answer, through the whole server."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder, port = merged(), free_port()
    talks = [talk for talk, _ in prepare(folder, 24, most=24)]

    def make(number: int) -> dict[str, Any]:
        talk = talks[number % len(talks)]
        wanted = {"max_tokens": 24, "temperature": 0, "stream": True}
        return {"model": NAME, "messages": talk, **wanted}

    limits = Limits(rows=8, length=256, per_caller=16)
    with Guarded(command_for(folder, NAME, port, limits)) as server:
        url = server.wait_for(f"http://127.0.0.1:{port}")
        rates: dict[int, list[float]] = {1: [], 8: []}
        for _ in range(4):
            for callers in rates:
                begin = time.perf_counter()
                done = asyncio.run(closed_loop(url, callers, 48 // callers, make))
                rate = len(done) / (time.perf_counter() - begin)
                rates[callers].append(rate)
    # The first round warms up.
    alone, eight = (float(np.median(found[1:])) for found in rates.values())
    what = "one worker, eight callers at once against one after the other"
    yield row("serving", what, "requests/s", eight, {"one caller": alone}, 3)


def bars_of(figures: dict[str, Any], what: str, measured: str) -> Iterator[Row]:
    """What must hold of a soak, as rows."""
    wrong, growth = (
        "well-behaved, wrong or mixed",
        "memory, last over first quarter",
    )
    fixed: dict[str, Any] = {"higher_is_better": False, "measured": measured}
    p95 = {"in quiet": figures["p95 in quiet, s"]}
    loud = figures["p95 beside the others, s"]
    names = [
        f"{name}: {what}" for name in ("wrong answers", "p95", "growth of memory")
    ]
    yield row("soak", names[0], "answers", figures[wrong], {}, 0, **fixed)
    yield row("soak", names[1], "s", loud, p95, 2, **fixed)
    yield row("soak", names[2], "of all", figures[growth], {}, 0.03, **fixed)


def short_soak() -> Iterator[Row]:
    """A minute now."""
    words = ["soak", "--seconds", "60", "--quiet", "30"]
    words += ["--clients", "40", "--pause", "8", "--no-keep"]
    given = read_arguments(words)
    given.folder = merged().resolve()
    figures = soak(given)["figures"]
    what = f"{given.clients} clients for {given.seconds:.0f} s"
    yield from bars_of(figures, what, "now")


def kept_soak() -> Iterator[Row]:
    """The last one of the record."""
    soaks = read_json(RECORD)
    if not soaks:
        fix = "python -m benchmarks.serving soak"
        raise CourseError("no soak is kept", RECORD, fix)
    kept = soaks[-1]
    what = f"{kept['clients']} clients for {kept['seconds']:.0f} s"
    yield from bars_of(kept["figures"], what, "recorded")


PARTS = (throughput, short_soak, kept_soak)


def main(words: list[str]) -> int:
    """Soak, print what came of it, keep it; 1 if a bar does not hold."""
    given = read_arguments(words)
    commit = "" if given.no_keep else clean_commit()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    given.folder = (given.folder or merged()).resolve()
    result = soak(given)
    for part in result.values():
        for name, value in part.items():
            print(f"{name}: {value}")
    if not given.no_keep:
        facts: dict[str, Any] = {"commit": commit}
        facts["command"] = f"python -m benchmarks.serving {' '.join(words)}"
        facts |= {"model": given.folder.name, "clients": given.clients}
        facts |= {"seconds": given.seconds, "seconds in quiet": given.quiet}
        facts |= {"workers": given.workers, **result, "facts": machine_facts()}
        kept = read_json(RECORD) or []
        write_json(RECORD, [*kept, facts])
    return int(not all(result["holds"].values()))


if __name__ == "__main__":
    # The clients' own threads would take what the server needs.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main(sys.argv[1:]))
