"""Memory readings: they see what a process takes, and do not see what the system may drop."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import psutil
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from stages import memory
from stages.memory import predict_memory
from stages.tokens import split_rows
from utils.errors import ROOT, CourseError
from utils.machine import memory_of, private_memory_name
from utils.profiles import GPU

MB = 1_000_000
linux = pytest.mark.skipif(
    private_memory_name() != "RssAnon", reason="RssAnon is Linux's"
)


def hold(size: int, mark: str) -> int:
    """Hold memory until the watcher has read it: it writes a mark."""
    import os
    import time

    ballast = bytearray(size)
    open(mark + ".held", "w").close()
    while not os.path.exists(mark):
        time.sleep(0.005)
    return len(ballast)


def map_and_touch(path: str, mark: str) -> list[int]:
    import mmap
    import os
    import time

    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        touched = len(data[::4096])
        open(mark + ".held", "w").close()
        while not os.path.exists(mark):
            time.sleep(0.005)
        return [len(data), touched]


def use_a_name_from_outside() -> int:
    return MB


def wait_for_ever(path: str) -> None:
    import os
    import threading

    with open(path, "w") as file:
        file.write(str(os.getpid()))
    threading.Event().wait()


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """Run a function that holds memory until it was read twice while it held all of it."""
    real = memory.memory_of
    marks = iter(range(100))

    def run(function, *arguments) -> memory.FreshRun:
        mark = tmp_path / f"read {next(marks)}"
        seen = []

        def read(pid: int) -> dict[str, int]:
            if Path(f"{mark}.held").exists():
                seen.append(pid)
            result = real(pid)
            if len(seen) == 2:
                mark.touch()
            return result

        monkeypatch.setattr(memory, "memory_of", read)
        return memory.run_fresh(function, *arguments, str(mark))

    return run


def test_the_peak_is_what_the_function_took(watched):
    base = watched(hold, 0)
    large = watched(hold, 64 * MB)
    assert large.result == 64 * MB
    assert 60 * MB < large.private - base.private < 80 * MB
    assert large.resident >= large.private


@linux
def test_mapped_pages_are_resident_but_not_private(tmp_path, watched):
    path = tmp_path / "file"
    path.write_bytes(bytes(64 * MB))
    base = watched(hold, 0)
    mapped = watched(map_and_touch, str(path))
    assert mapped.result == [64 * MB, 64 * MB // 4096]
    assert mapped.private - base.private < 8 * MB
    assert mapped.resident - base.resident > 50 * MB


def test_memory_given_back_still_counts_in_the_peak(monkeypatch):
    sizes = iter([5, 60, 7])

    def read(pid: int) -> dict[str, int]:
        size = next(sizes, 0)
        return {"private": size, "resident": 2 * size}

    monkeypatch.setattr(memory, "memory_of", read)
    run = memory.run_fresh(add_slowly, 3)
    assert (run.result, run.private, run.resident) == (3, 60, 120)


def add_slowly(count: int) -> int:
    import time

    for _ in range(count):
        time.sleep(0.05)
    return count


def test_the_childs_memory_is_not_ours(watched):
    ballast = bytearray(128 * MB)
    assert watched(hold, 0).private < len(ballast)


def test_a_failure_names_the_function_and_the_reason():
    with pytest.raises(
        CourseError, match="use_a_name_from_outside failed .*'MB' is not defined"
    ):
        memory.run_fresh(use_a_name_from_outside)


def test_an_interrupt_leaves_no_process_behind(tmp_path, monkeypatch):
    path = tmp_path / "pid"

    def interrupt(pid: int) -> dict[str, int]:
        if path.exists() and path.read_text():
            raise KeyboardInterrupt
        return {"private": 0, "resident": 0}

    monkeypatch.setattr(memory, "memory_of", interrupt)
    with pytest.raises(KeyboardInterrupt):
        memory.run_fresh(wait_for_ever, str(path))
    assert not psutil.pid_exists(int(path.read_text()))


def test_a_child_that_ends_while_it_is_read_is_no_error(monkeypatch):
    child = subprocess.Popen([sys.executable, "-c", ""])

    def gone(pid: int) -> dict[str, int]:
        raise ProcessLookupError(pid)

    monkeypatch.setattr(memory, "memory_of", gone)
    assert memory.watch(child) == []
    assert child.returncode == 0


def train_step(wide: int = 64, tokens: int = 256) -> None:
    net = torch.nn.Sequential(
        torch.nn.Linear(wide, wide), torch.nn.GELU(), torch.nn.Linear(wide, 1)
    )
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(2):
        net(torch.ones(tokens, wide)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_live_tensors_are_counted_from_birth_to_death():
    with memory.LiveTensors() as live:
        a = torch.zeros(1000)
        b = a.view(10, 100)  # the same storage
        c = a + 1
        del a
        assert live.now == 8000  # the view keeps it
        del b
        assert live.now == 4000
        del c
    assert (live.now, live.peak) == (0, 8000)
    assert live.curve == [4000, 8000, 4000, 0]


def test_tensors_from_before_count_if_given():
    given = torch.zeros(1000)
    with memory.LiveTensors([given, given[:10]]) as live:
        pass
    assert live.now == live.peak == 4000


def test_a_tensor_from_before_counts_from_the_first_operation_that_returns_it():
    weight = torch.zeros(1000)
    with memory.LiveTensors() as live:
        weight.sum()
        assert live.now == 0
        weight.view(10, 100)
        assert live.now == 4000
    with memory.LiveTensors([weight]) as live:
        before = live.now
        weight.view(10, 100)
        assert live.now - before == 0


@pytest.mark.parametrize("sdpa", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("bf16", [False, True])
def test_predictions_hold_for_each_method(sdpa, checkpointing, bf16):
    def attend(layer, x):
        q, k, v = (
            part.view(8, 256, 4, 16).transpose(1, 2)
            for part in layer(x).chunk(3, -1)
        )
        if sdpa:
            mixed = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True
            )
        else:
            mixed = (q @ k.mT / 4).softmax(-1) @ v
        return x + mixed.transpose(1, 2).flatten(2)

    def steps():
        net = torch.nn.ModuleList([torch.nn.Linear(64, 192) for _ in range(3)])
        optimizer = torch.optim.AdamW(net.parameters())
        for _ in range(2):
            x = torch.ones(8, 256, 64)
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                for layer in net:
                    x = (
                        checkpoint(attend, layer, x, use_reentrant=False)
                        if checkpointing
                        else (attend(layer, x))
                    )
            x.float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    predicted = memory.predict_memory(steps).peak
    assert predicted == pytest.approx(memory.measure_peak(steps), rel=0.1)


def test_a_cycle_freed_in_the_middle_does_not_hide_the_peak():
    gc.collect()
    cycle = [torch.zeros(1_000_000)]
    cycle.append(cycle)
    del cycle
    assert memory.measure_peak(lambda: (gc.collect(), torch.zeros(1000))) >= 4000


class Driver:
    """NVIDIA's driver with a card for every UUID, which can go away."""

    NVMLError = RuntimeError

    def __init__(self, fails: bool) -> None:
        self.calls: list[str] = []
        self.fails = fails

    def nvmlInit(self) -> None:
        self.calls.append("init")

    def nvmlShutdown(self) -> None:
        self.calls.append("shutdown")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return f"card {uuid}"

    def nvmlDeviceGetMemoryInfo(self, card: str) -> SimpleNamespace:
        self.calls.append(card)
        if self.fails:
            raise RuntimeError("the driver went away")
        return SimpleNamespace(used=5 * MB, total=80 * MB)


@pytest.mark.parametrize("fails", [False, True])
def test_the_driver_is_asked_for_torchs_card_and_let_go(monkeypatch, fails):
    driver = Driver(fails)
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    properties = lambda index: SimpleNamespace(uuid=f"uuid-{index}")
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    if fails:
        with pytest.raises(RuntimeError, match="went away"):
            memory.driver_bytes()
    else:
        assert memory.driver_bytes() == 5 * MB
    assert driver.calls == ["init", "card GPU-uuid-1", "shutdown"]


def test_without_nvidias_driver_torch_is_asked(monkeypatch):
    class Missing(Driver):
        def nvmlInit(self) -> None:
            raise RuntimeError("no driver")

    monkeypatch.setitem(sys.modules, "pynvml", Missing(fails=False))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    properties = lambda index: SimpleNamespace(uuid="unknown")
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 3 * MB)
    assert memory.driver_bytes() == 3 * MB


def test_prediction_counter_and_allocator_agree():
    predicted = memory.predict_memory(train_step).peak
    with memory.LiveTensors() as live:
        train_step()
    assert predicted == live.peak
    assert predicted == pytest.approx(memory.measure_peak(train_step), rel=0.01)


def test_prediction_sees_a_larger_model_and_a_larger_batch():
    base = memory.predict_memory(train_step).peak
    assert memory.predict_memory(lambda: train_step(wide=128)).peak > 1.5 * base
    assert memory.predict_memory(lambda: train_step(tokens=512)).peak > 1.5 * base


def test_prediction_needs_no_memory():
    before = memory_of()["private"]
    assert memory.predict_memory(lambda: torch.zeros(10**12) + 1).peak == 8 * 10**12
    assert memory_of()["private"] - before < 50 * MB


def test_the_allocators_curve_returns_to_where_it_began():
    curve = memory.allocator_curve(lambda: torch.zeros(1000) + torch.ones(1000))
    assert curve[0] == curve[-1] == 0 and max(curve) >= 12_000


def test_saved_bytes_of_lesson_12_are_what_the_backward_pass_needs():
    notebook = nbformat.read(
        ROOT / "notebooks/12_memory_and_speed.ipynb", as_version=4
    )
    names = {"torch": torch}
    exec(
        next(cell.source for cell in notebook.cells if cell.id == "saved-bytes"),
        names,
    )
    saved_bytes = names["saved_bytes"]
    x = torch.ones(10, requires_grad=True)
    # the result of exp
    assert saved_bytes(lambda: x.exp().sum()) == 40
    assert saved_bytes(lambda: (x + 1).sum()) == 0
    # a parameter is not counted
    assert saved_bytes(lambda: (x * x).sum(), [x]) == 0
    with torch.no_grad():
        assert saved_bytes(lambda: x.exp().sum()) == 0


# the sizes of profile gpu ------------------------------------------------------------------------

# A T4 has 15.8e9 bytes; CUDA, its libraries and gaps between blocks take their part.
CARD = 14e9


def cells_of(lesson: str, *wanted: str) -> str:
    """The source of some cells of a lesson."""
    (path,) = (ROOT / "notebooks").glob(f"{lesson}_*.ipynb")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    sources = {cell["id"]: "".join(cell["source"]) for cell in cells}
    return "\n\n".join(sources[name] for name in wanted)


def made_at_gpu() -> tuple[int, int]:
    """The vocabulary and the block that lessons 07 and 08 make at profile `gpu`."""
    names: dict[str, Any] = {"lesson": GPU, "VOCABULARY": None, "BLOCK": None}
    code = cells_of("07", "corpus") + "\n" + cells_of("08", "lesson")
    for line in code.splitlines():
        if line.startswith(("VOCABULARY = ", "BLOCK = ")):
            exec(line, names)
    return names["VOCABULARY"], names["BLOCK"]


@pytest.mark.slow
def test_the_ladder_of_lesson_12_fits_a_t4_in_float32():
    words, block = made_at_gpu()
    text = cells_of("12", "data-rows")
    line = next(line for line in text.splitlines() if line.startswith("size = "))
    names: dict[str, Any] = {
        "lesson": GPU,
        "torch": torch,
        "device": "cpu",
        "SEED": 0,
    }
    exec(line, names)
    width, layers, batch = names["size"]
    names |= {"width": width, "layers": layers, "batch": batch}
    names |= {"tokenizer": range(words), "rows": torch.zeros(batch, block + 1)}
    exec(cells_of("12", "rung", "build", "step", "step-2"), names)
    exec(cells_of("12", "session", "fake-session"), names)
    peak = predict_memory(lambda: names["fake_session"](names["Rung"]())).peak
    assert CARD / 3 < peak < CARD
    # The curve of a step is drawn on the CPU, and Colab has 12.7 GB for all.
    assert peak < 9e9


@pytest.mark.slow
def test_the_main_run_of_lesson_09_fits_a_t4_in_float32():
    from stages.recipe import Recipe, build_model, make_optimizers

    words, block = made_at_gpu()
    modern = Recipe.load(ROOT / "launch/recipes/modern.toml")
    modern = modern.change(model={**modern.model, "max_position_embeddings": block})
    names: dict[str, Any] = {"lesson": GPU, "modern": modern, "scratch": Path("x")}
    names |= {"PROMPTS": ["a"], "SEED": 0, "NARROW": {}}
    exec(cells_of("09", "main-recipe-2"), names)
    main = names["main"]

    class Words(SimpleNamespace):
        def __len__(self) -> int:
            return words

    tokenizer = Words(bos_token_id=0, eos_token_id=0, pad_token_id=0)
    counted = []

    def two_steps() -> None:
        model = build_model(main, tokenizer)
        counted.append(sum(weight.numel() for weight in model.parameters()))
        optimizers = make_optimizers(model, main)
        for _ in range(2):
            rows = torch.zeros(main.micro, block + 1, dtype=torch.long)
            model(**split_rows(rows), use_cache=False).loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    assert predict_memory(two_steps).peak < CARD
    assert counted[0] > 5 * 5_000_000, "several times the model of the laptop"
