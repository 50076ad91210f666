"""The machine's readings and choices, each with its reason."""

import mmap
import os
import random
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import psutil
import pynvml
import pytest
import torch

from conftest import POSIX, wait_until
from stages import launch
from stages.launch import start_method
from utils import machine, profiles
from utils.errors import CourseError
from utils.lesson import Lesson


def test_the_seed_reaches_every_generator():
    def draw():
        machine.set_seed(3)
        return random.random(), np.random.rand(), torch.rand(1).item()

    assert draw() == draw()


def test_bfloat16_is_chosen_only_where_it_is_faster(monkeypatch):
    """A lead within what a busy machine changes, under 1.3 times, does not count."""
    faster, slower, near = [2.0, 1.0], [1.0, 5.0], [1.25, 1.0]
    chosen = [
        (faster, torch.bfloat16),
        (slower, torch.float32),
        (near, torch.float32),
    ]
    for times, dtype in chosen:
        monkeypatch.setattr(machine, "fastest_of", lambda *given, repeats: times)
        assert machine.choose_dtype("cpu").value is dtype


@pytest.fixture(autouse=True)
def no_device_asked_for(monkeypatch):
    monkeypatch.delenv("COURSE_DEVICE", raising=False)


def fail_of_nvml(*given):
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


@pytest.fixture
def machine_with_a_gpu(monkeypatch):
    """A GPU that the driver describes; whatever would make a CUDA context raises."""

    def refuse(*given, **named):
        raise AssertionError("this makes a CUDA context")

    def is_available():
        return os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK") == "1" or refuse()

    for name in (
        "init",
        "_lazy_init",
        "current_device",
        "get_device_name",
        "get_device_properties",
        "get_device_capability",
        "is_bf16_supported",
        "mem_get_info",
        "set_device",
    ):
        monkeypatch.setattr(torch.cuda, name, refuse)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    # A build for another CUDA than the driver's is another test's matter.
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    cards = [
        ("T4", 7, "GPU-00-1"),
        ("L4", 8, "GPU-11-2"),
        ("A100", 8, "GPU-22-3"),
        ("H100", 9, "GPU-ab-4"),
    ]
    answers = {
        "Init": lambda: None,
        "Shutdown": lambda: None,
        "DeviceGetCount": lambda: len(cards),
        "SystemGetCudaDriverVersion": lambda: 12080,
        "DeviceGetMigMode": fail_of_nvml,
        "DeviceGetHandleByIndex": cards.__getitem__,
        "DeviceGetUUID": lambda card: card[2],
        "DeviceGetName": lambda card: card[0],
        "DeviceGetMemoryInfo": lambda card: SimpleNamespace(
            total=80 * 10**9, used=0
        ),
        "DeviceGetCudaComputeCapability": lambda card: (card[1], 0),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, f"nvml{name}", answer)


@pytest.mark.parametrize(
    "visible, said",
    [(None, "T4"), ("2,0", "A100"), ("GPU-ab-4", "H100"), ("GPU-ab", "H100")],
)
def test_a_lesson_asks_for_the_gpu_without_a_cuda_context(
    machine_with_a_gpu, monkeypatch, visible, said
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    held = torch.get_num_threads()
    try:
        lesson = Lesson("10", "smoke", 1)
    finally:
        torch.set_num_threads(held)
    assert str(lesson.device) == f"cuda ({said}, 80 GB)"
    assert lesson.dtype.value is (torch.float32 if said == "T4" else torch.bfloat16)
    assert torch.cuda.is_available() and not torch.cuda.is_initialized()
    monkeypatch.delitem(sys.modules, "accelerate.state", raising=False)
    if sys.platform == "linux":
        assert start_method().value == "fork"


def seen_by_cuda() -> int:
    """What torch counts on a machine of four cards."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    return len(visible.split(",")) if visible else 0


@pytest.mark.parametrize(
    "number, visible, left",
    [
        ("13", None, "0"),
        ("13", "2,0", "2"),
        ("16", "GPU-ab-4,GPU-11-2", "GPU-ab-4"),
        ("12", "3", "3"),
        ("10", None, None),
        ("14", "2,0", "2,0"),
    ],
)
def test_a_lesson_that_starts_no_processes_sees_one_of_several_gpus(
    machine_with_a_gpu, monkeypatch, capsys, number, visible, left
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # so that it is put back
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "device_count", seen_by_cuda)
    monkeypatch.setattr(machine, "BEFORE", {})
    all_gpus = seen_by_cuda()
    held = torch.get_num_threads()
    try:
        first = Lesson(number, "smoke", 1)
        second = Lesson(number, "smoke", 1)  # its cell may be run again
    finally:
        torch.set_num_threads(held)
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == left
    # As many would the Trainer take, and with them as many times the batch.
    assert seen_by_cuda() == (all_gpus if left == visible else 1)
    hides = left != visible
    assert ("; GPUs left alone here: " in capsys.readouterr().out) == hides
    assert first.device.value == second.device.value == "cuda"
    assert first.device.reason.startswith(second.device.reason)
    # A lesson that is run for an artifact chooses for itself.
    others = machine.environment_with_all_gpus()
    assert others.get("CUDA_VISIBLE_DEVICES") == visible
    # `notebook_launcher` gets what the lesson sees.
    monkeypatch.setattr(launch, "a_gpu_is_split", lambda: False)
    assert launch.count_gpus() == seen_by_cuda()


@pytest.fixture
def known_to_torch(monkeypatch):
    """What torch alone says of its first GPU."""
    card = SimpleNamespace(name="told by torch", total_memory=64 * 10**9, major=9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    return machine.Card(card.name, 0, card.total_memory, card.major)


def test_without_an_nvidia_driver_torch_describes_the_gpu(
    monkeypatch, known_to_torch
):
    monkeypatch.setattr(pynvml, "nvmlInit", fail_of_nvml)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert machine.first_gpu() == known_to_torch
    assert str(machine.choose_device()) == "cuda (told by torch, 64 GB)"


@pytest.mark.parametrize("visible, split", [("MIG-1234", 0), (None, 1)])
def test_of_a_part_of_a_card_only_torch_can_tell(
    machine_with_a_gpu, known_to_torch, monkeypatch, visible, split
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMigMode", lambda card: [split, split])
    assert machine.first_gpu() == known_to_torch


@pytest.mark.parametrize(
    "built, device", [("13.0", "cpu"), ("12.9", "cuda"), (None, "cuda")]
)
def test_a_gpu_whose_driver_is_too_old_for_torch_is_left_alone(
    machine_with_a_gpu, monkeypatch, built, device
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(torch.mps, "is_available", lambda: False)
    monkeypatch.delenv("COURSE_PROFILE", raising=False)
    assert (profiles.choose_profile()[0] is profiles.GPU) == (device == "cuda")
    chosen = machine.choose_device()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0", "a question changed something"
    machine.prepare(chosen, machine.Choice(torch.get_num_threads(), ""), 1)
    assert chosen.value == device
    too_old = "the driver is too old for CUDA 13.0: install a newer driver"
    assert chosen.reason.startswith(too_old) == (device == "cpu")
    # What runs with CUDA 12 has a build of its own.
    assert ("-m course setup --torch cuda" in chosen.reason) == (device == "cpu")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ("" if device == "cpu" else "0")


@pytest.mark.parametrize(
    "built, visible, reason",
    [
        (None, None, "T4 is here, but this PyTorch has no CUDA: type `"),
        ("12.6", "", "T4 is here, but CUDA_VISIBLE_DEVICES= hides it"),
        ("12.6", None, "T4 is here, but PyTorch for CUDA 12.6 does not see it"),
        ("13.0", None, "the driver is too old for CUDA 13.0"),
    ],
)
def test_a_card_that_torch_cannot_use_is_named_with_what_to_type(
    machine_with_a_gpu, monkeypatch, built, visible, reason
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", built)
    device = machine.choose_device()
    assert str(device).startswith(f"cpu ({reason}")
    assert ("setup --torch cuda`" in device.reason) == (built in (None, "13.0"))
    monkeypatch.setenv("COURSE_DEVICE", "cuda")
    with pytest.raises(CourseError, match="COURSE_DEVICE=cuda cannot be had: "):
        machine.choose_device()


@pytest.mark.parametrize("asked, line", [("", 0), ("cpu", 2)])
def test_a_card_that_lies_idle_is_the_first_that_a_lesson_says(
    machine_with_a_gpu, monkeypatch, capsys, asked, line
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    if asked:
        monkeypatch.setenv("COURSE_DEVICE", asked)
    held = torch.get_num_threads()
    try:
        Lesson("10", "smoke", 1)
    finally:
        torch.set_num_threads(held)
    lines = capsys.readouterr().out.splitlines()
    assert lines[line].startswith("device cpu (")
    assert ("setup --torch cuda`" in lines[0]) == (not asked)


@pytest.mark.parametrize("apple", [False, True])
def test_the_device_that_is_asked_for_is_taken_or_refused(
    machine_with_a_gpu, monkeypatch, apple
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.mps, "is_available", lambda: apple)
    monkeypatch.setenv("COURSE_DEVICE", "cpu")
    assert str(machine.choose_device()) == "cpu (COURSE_DEVICE asks for it)"
    assert profiles.measure_profile()[0] is not profiles.GPU
    monkeypatch.setenv("COURSE_DEVICE", "cuda")
    assert machine.choose_device().value == "cuda"
    monkeypatch.setenv("COURSE_DEVICE", "mps")
    if apple:
        assert machine.choose_device().value == "mps"
    else:
        with pytest.raises(CourseError, match="torch sees no Apple GPU here"):
            machine.choose_device()
    monkeypatch.setenv("COURSE_DEVICE", "gpu")
    with pytest.raises(CourseError, match="unknown device 'gpu'"):
        machine.choose_device()


def test_apples_gpu_is_named_and_left_alone(monkeypatch):
    monkeypatch.setattr(pynvml, "nvmlInit", fail_of_nvml)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.mps, "is_available", lambda: True)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "")
    device = machine.choose_device()
    assert str(device) == "cpu (an Apple GPU is here; COURSE_DEVICE=mps uses it)"
    machine.prepare(device, machine.Choice(torch.get_num_threads(), ""), 1)
    # Or Accelerate and the Trainer would take it.
    assert os.environ["ACCELERATE_USE_CPU"] == "true"


def test_a_container_has_the_memory_that_it_was_given(monkeypatch):
    whole = psutil.virtual_memory().total
    limit = {"text": "2000000000\n"}
    monkeypatch.setattr(
        machine.Path, "read_text", lambda path, encoding: limit["text"]
    )
    assert machine.total_memory() == 2_000_000_000
    limit["text"] = "max\n"
    assert machine.total_memory() == whole


@POSIX
def test_cores_are_the_machine_s_and_a_container_may_use_fewer(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3}, raising=False)
    assert machine.machine_facts()["cores"] == "64"
    assert machine.count_cores() == 1


@POSIX
def test_memory_that_nobody_tells_is_unknown_and_not_nothing(monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert abs(machine.total_memory() - os.sysconf("SC_PHYS_PAGES") * 4096) < 1e9
    monkeypatch.delattr(os, "sysconf")
    assert machine.total_memory() is None
    assert machine.machine_facts()["memory"] == "unknown"


def test_a_ratio_of_speeds_keeps_its_digits(monkeypatch):
    held = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(machine, "fastest_of", lambda *given, **named: [1.0, 25.0])
    torch.set_num_threads(2)
    try:
        assert "0.04x" in machine.choose_threads().reason
        assert "0.04x" in machine.choose_dtype("cpu").reason
    finally:
        torch.set_num_threads(held)


def test_threads_follow_the_measurement_the_profile_and_the_environment(
    monkeypatch,
):
    held = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    try:
        assert machine.choose_threads(1).value == 1
        torch.set_num_threads(2)
        for times, chosen in (([1.0, 0.9], 1), ([1.0, 5.0], 1), ([1.0, 0.6], 2)):
            monkeypatch.setattr(machine, "fastest_of", lambda *given: times)
            torch.set_num_threads(2)
            assert machine.choose_threads().value == chosen
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        assert machine.choose_threads().reason == "OMP_NUM_THREADS"
    finally:
        torch.set_num_threads(held)


def test_without_a_gpu_the_process_is_read(monkeypatch, capsys):
    monkeypatch.setattr(machine, "list_gpus", lambda: [])
    machine.print_gpu_utilization()
    assert "no NVIDIA GPU; this process holds" in capsys.readouterr().out


def test_with_a_gpu_each_card_is_a_line(monkeypatch, capsys):
    monkeypatch.setattr(
        machine,
        "list_gpus",
        lambda: [machine.Card("H100", 10**9, 80 * 10**9, 9)] * 2,
    )
    machine.print_gpu_utilization()
    assert (
        capsys.readouterr().out.splitlines()[1]
        == "GPU 1 (H100): 1 GB of 80 GB used"
    )


def test_memory_counts_what_is_allocated_and_forgets_what_is_mapped(tmp_path):
    path = tmp_path / "zeros"
    np.zeros(50_000_000, np.uint8).tofile(path)
    before = machine.memory_of()
    mapped = np.memmap(path, np.uint8, mode="r")
    # Straight from the system: an array may get memory that this process still holds.
    private = {"flags": mmap.MAP_PRIVATE} if hasattr(mmap, "MAP_PRIVATE") else {}
    own = mmap.mmap(-1, 40_000_000, **private)
    own.write(b"x" * len(own))

    def both_are_there():
        # The system may take mapped pages back at any time, so they are read again.
        assert mapped.sum() == 0
        return machine.memory_of()["resident"] - before["resident"] > 70_000_000

    wait_until(both_are_there, "the mapped file and the array are resident")
    after = machine.memory_of()
    if machine.private_memory_name() == "RssAnon":
        assert 35_000_000 < after["private"] - before["private"] < 55_000_000
    assert own[0] == ord("x")


def test_the_memory_of_another_process_is_its_own():
    command = [
        sys.executable,
        "-c",
        "block = b'x' * 200_000_000; print(1, flush=True); input()",
    ]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        child.stdout.readline()
        assert machine.memory_of(child.pid)["private"] > 200_000_000
        child.communicate(b"\n")
    with pytest.raises(psutil.NoSuchProcess):
        machine.memory_of(child.pid)


def test_the_fastest_run_is_kept_and_the_first_is_not_counted():
    pauses = iter([0.2, 0.0, 0.03])
    seconds = machine.fastest_of(
        lambda: machine.time.sleep(next(pauses)), repeats=2
    )
    assert seconds[0] < 0.03, (
        "the first, slow, run was counted or the fastest was not kept"
    )


@pytest.mark.skipif(
    machine.sys.platform == "win32", reason="Windows has no fine clock of a process"
)
def test_the_clock_of_the_processor_does_not_count_waiting():
    waiting = machine.fastest_of(
        lambda: machine.time.sleep(0.1), repeats=1, clock=machine.CPU_CLOCK
    )
    assert waiting[0] < 0.05
