"""The profile that a machine can carry, and sizes by profile."""

import pytest
import torch

from utils import profiles
from utils.errors import CourseError
from utils.machine import Card


def test_auto_takes_what_the_machine_can_carry(monkeypatch):
    monkeypatch.delenv("COURSE_PROFILE", raising=False)
    monkeypatch.setattr(
        profiles, "first_gpu", lambda: Card("H100", 0, 80 * 10**9, 9)
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        profiles, "why_no_cuda", lambda: "this torch is built for a CPU"
    )
    assert profiles.choose_profile("auto")[0] in (profiles.SMOKE, profiles.LAPTOP)
    monkeypatch.setattr(profiles, "why_no_cuda", lambda: "")
    assert profiles.choose_profile("auto")[0] is profiles.GPU
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert profiles.choose_profile("auto")[0] is profiles.CLUSTER
    monkeypatch.setattr(
        profiles, "first_gpu", lambda: Card("a slice of an H100", 0, 10 * 10**9, 9)
    )
    monkeypatch.setattr(profiles.os, "cpu_count", lambda: 2)
    assert profiles.choose_profile("auto")[0] is profiles.SMOKE
    monkeypatch.setenv("COURSE_PROFILE", "laptop")
    assert profiles.choose_profile("auto")[0] is profiles.LAPTOP


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
