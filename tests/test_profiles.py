"""The profile that a machine can carry, and sizes by profile."""

import json

import pytest
import torch

from utils import profiles
from utils.artifacts import write_json
from utils.errors import ROOT, Choice, CourseError
from utils.machine import Card


@pytest.fixture
def machine(monkeypatch):
    """A machine whose GPUs, cores and memory a test sets."""
    monkeypatch.delenv("COURSE_PROFILE", raising=False)
    card = Card("H100", 0, 80 * 10**9, 9)
    has = {"device": "cpu", "card": card, "cores": 2, "memory": 8 * 10**9}
    device = lambda: Choice(has["device"], "")
    monkeypatch.setattr(profiles, "choose_device", device)
    monkeypatch.setattr(profiles, "first_gpu", lambda: has["card"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(profiles, "count_cores", lambda: has["cores"])
    monkeypatch.setattr(profiles, "total_memory", lambda: has["memory"])
    return has


def test_auto_takes_what_the_machine_can_carry(machine, monkeypatch):
    assert profiles.choose_profile("auto")[0] is profiles.SMOKE
    machine["device"] = "cuda"
    assert profiles.choose_profile("auto")[0] is profiles.GPU
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert profiles.choose_profile("auto")[0] is profiles.CLUSTER
    machine["card"] = Card("a slice of an H100", 0, 10 * 10**9, 9)
    assert profiles.choose_profile("auto")[0] is profiles.SMOKE
    monkeypatch.setenv("COURSE_PROFILE", "laptop")
    assert profiles.choose_profile("auto")[0] is profiles.LAPTOP


@pytest.mark.parametrize(
    "cores, memory, profile, told",
    [
        (4, 8_200_000_000, profiles.LAPTOP, "4 cores, 8 GB"),
        (8, 7_600_000_000, profiles.LAPTOP, "8 cores, 8 GB"),
        (8, 6_000_000_000, profiles.SMOKE, "8 cores, 6 GB"),
        (2, 64_000_000_000, profiles.SMOKE, "2 cores, 64 GB"),
        (8, None, profiles.SMOKE, "memory that cannot be read"),
    ],
)
def test_a_laptop_of_eight_gigabytes_gets_lessons_that_mean_something(
    machine, cores, memory, profile, told
):
    machine |= {"cores": cores, "memory": memory}
    chosen, reason = profiles.choose_profile("auto")
    assert chosen is profile and told in reason


def test_a_lesson_that_took_more_memory_than_is_free_says_so(
    machine, monkeypatch, tmp_path
):
    record = {"notebooks": {"04": {"peak_bytes": 6_400_000_000}}}
    (tmp_path / "results").mkdir()
    write_json(tmp_path / "results" / "laptop.json", record)
    monkeypatch.setattr(profiles, "ROOT", tmp_path)
    assert "it took 6.4 GB of memory" in profiles.tight_memory(
        "04", profiles.LAPTOP
    )
    machine["memory"] = 16 * 10**9
    assert profiles.tight_memory("04", profiles.LAPTOP) == ""
    machine["memory"] = None
    assert profiles.tight_memory("04", profiles.LAPTOP) == ""
    machine["memory"] = 10**9
    assert profiles.tight_memory("99", profiles.LAPTOP) == ""
    assert profiles.tight_memory("04", profiles.CLUSTER) == ""


def test_all_laptop_lessons_but_one_fit_eight_gigabytes(machine):
    """What the rule of `auto` rests on."""
    machine["memory"] = 8 * 10**9
    record = json.loads((ROOT / "results" / "laptop.json").read_text())["notebooks"]
    tight = [n for n in record if profiles.tight_memory(n, profiles.LAPTOP)]
    assert len(record) > 10 and tight == ["04"]


def test_an_unknown_profile_names_the_nearest():
    with pytest.raises(CourseError, match="laptop, perhaps"):
        profiles.choose_profile("latop")


def test_sizes_fall_back_to_the_smaller_profile():
    assert profiles.CLUSTER.pick(smoke=1, gpu=3) == 3
    assert profiles.LAPTOP.pick(smoke=1, gpu=3) == 1


@pytest.mark.parametrize("sizes", [{"laptop": 1}, {"smoke": 1, "huge": 2}])
def test_a_misspelt_size_is_refused(sizes):
    with pytest.raises(ValueError, match="sizes are named"):
        profiles.SMOKE.pick(**sizes)
