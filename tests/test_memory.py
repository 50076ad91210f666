"""Memory readings: they see what a process takes, and do not see what the system may drop."""
from __future__ import annotations

import gc
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from stages import memory
from utils.errors import CourseError

MB = 1_000_000
linux = pytest.mark.skipif(memory.measure() != "RssAnon", reason="RssAnon is Linux's")


def hold(size: int) -> int:
    import time

    held = bytearray(size)
    time.sleep(0.1)
    return len(held)


def hold_for_a_moment(size: int) -> int:
    import time

    held = bytearray(size)
    time.sleep(0.1)
    del held
    time.sleep(0.1)
    return 0


def map_and_touch(path: str) -> list[int]:
    import mmap
    import time

    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        touched = len(data[::4096])
        time.sleep(0.1)
        return [len(data), touched]


def use_a_name_from_outside() -> int:
    return MB


def sleep_long(path: str) -> None:
    import os
    import time

    with open(path, "w") as file:
        file.write(str(os.getpid()))
    time.sleep(60)


def test_the_peak_is_what_the_function_took():
    base = memory.run_fresh(hold, 0)
    large = memory.run_fresh(hold, 64 * MB)
    assert large.result == 64 * MB
    assert 60 * MB < large.private - base.private < 80 * MB
    assert large.resident >= large.private
    assert large.readings > 5


def test_memory_given_back_still_counts_in_the_peak():
    base = memory.run_fresh(hold, 0).private
    assert memory.run_fresh(hold_for_a_moment, 64 * MB).private - base > 60 * MB


@linux
def test_mapped_pages_are_resident_but_not_private(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(64 * MB))
    base, mapped = memory.run_fresh(hold, 0), memory.run_fresh(map_and_touch, str(path))
    assert mapped.result == [64 * MB, 64 * MB // 4096]
    assert mapped.private - base.private < 8 * MB
    assert mapped.resident - base.resident > 50 * MB


def test_the_childs_memory_is_not_ours():
    ballast = bytearray(128 * MB)
    assert memory.run_fresh(hold, 0).private < len(ballast)


def test_a_failure_names_the_function_and_the_reason():
    with pytest.raises(CourseError, match="use_a_name_from_outside failed .*'MB' is not defined"):
        memory.run_fresh(use_a_name_from_outside)


def test_an_interrupt_leaves_no_process_behind(tmp_path, monkeypatch):
    path = tmp_path / "pid"

    def interrupt(pid: int) -> dict[str, int]:
        if path.exists() and path.read_text():
            raise KeyboardInterrupt
        return {"private": 0, "resident": 0}

    monkeypatch.setattr(memory, "memory_of", interrupt)
    with pytest.raises(KeyboardInterrupt):
        memory.run_fresh(sleep_long, str(path))
    assert not psutil.pid_exists(int(path.read_text()))


def test_a_process_that_ended_is_not_read_as_empty():
    child = subprocess.Popen([sys.executable, "-c", ""])
    deadline = time.monotonic() + 30
    while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    try:
        with pytest.raises((OSError, psutil.Error)):
            memory.memory_of(child.pid)
    finally:
        child.wait()


@linux
def test_the_parts_make_the_whole():
    found = memory.memory_of()
    assert found["private"] + found["mapped"] == found["resident"]


def test_systems_without_rssanon_say_what_they_count(monkeypatch):
    monkeypatch.setattr(memory, "measure", lambda: "RSS, mapped files included")
    found = memory.memory_of()
    assert found["resident"] >= found["private"] > 0
    assert found["mapped"] == found["resident"] - found["private"]


def train_step(wide: int = 64, tokens: int = 256) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(wide, wide), torch.nn.GELU(), torch.nn.Linear(wide, 1))
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
        q, k, v = (part.view(8, 256, 4, 16).transpose(1, 2) for part in layer(x).chunk(3, -1))
        if sdpa:
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
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
                    x = checkpoint(attend, layer, x, use_reentrant=False) if checkpointing else (
                        attend(layer, x))
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


def test_a_device_without_a_peak_is_refused():
    with pytest.raises(CourseError, match="reports no peak"):
        memory.measure_peak(train_step, "mps")


@pytest.mark.parametrize("fails", [False, True])
def test_the_driver_is_asked_for_torchs_card_and_let_go(monkeypatch, fails):
    calls = []

    def used(handle: str) -> SimpleNamespace:
        calls.append(handle)
        if fails:
            raise RuntimeError("the driver went away")
        return SimpleNamespace(used=5 * MB, total=80 * MB)

    driver = SimpleNamespace(nvmlInit=lambda: calls.append("init"),
                             nvmlShutdown=lambda: calls.append("shutdown"),
                             nvmlDeviceGetHandleByUUID=lambda uuid: f"card {uuid}",
                             nvmlDeviceGetMemoryInfo=used)
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties",
                        lambda index: SimpleNamespace(uuid=f"uuid-{index}"))
    if fails:
        with pytest.raises(RuntimeError, match="went away"):
            memory.driver_bytes()
    else:
        assert memory.driver_bytes() == 5 * MB
    assert calls == ["init", "card GPU-uuid-1", "shutdown"]


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
    before = memory.memory_of()["private"]
    assert memory.predict_memory(lambda: torch.zeros(10**12) + 1).peak == 8 * 10**12
    assert memory.memory_of()["private"] - before < 50 * MB


def test_the_allocators_curve_returns_to_where_it_began():
    curve = memory.allocator_curve(lambda: torch.zeros(1000) + torch.ones(1000))
    assert curve[0] == curve[-1] == 0 and max(curve) >= 12_000


def test_saved_bytes_are_what_the_backward_pass_needs():
    x = torch.ones(10, requires_grad=True)
    assert memory.saved_bytes(lambda: x.exp().sum()) == 40  # the result of exp
    assert memory.saved_bytes(lambda: (x + 1).sum()) == 0
    assert memory.saved_bytes(lambda: (x * x).sum(), [x]) == 0  # a parameter is not counted
    with torch.no_grad():
        assert memory.saved_bytes(lambda: x.exp().sum()) == 0
