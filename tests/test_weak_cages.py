"""Each attack gets out of some weak cage and out of no true one; the right answer passes in all."""

from __future__ import annotations

import sys

import pytest

from stages.sandbox import Limits, Sandbox
from stages.weak_cages import (
    CAGES,
    MARK,
    TESTS,
    Attack,
    Yard,
    attacks,
    gets_out_of,
)

THERE, REASON = Sandbox.available()
caged = pytest.mark.skipif(not THERE, reason=f"no cage here: {REASON}")
posix = pytest.mark.skipif(sys.platform == "win32", reason="forks are POSIX")
HOSTILE = [name for name in attacks() if name != "right answer"]
# The first cage that stops an attack; without one, only the sandbox does.
STOPPED_BY = {
    "endless loop": "a time limit",
    "early exit": "a process, its last line",
    "memory": "limits of the kernel",
    "reading the environment": "limits of the kernel",
}


@pytest.fixture
def yard(tmp_path):
    # Only what never ends has a short time; nothing fails because a machine is busy.
    yard = Yard(tmp_path, seconds=60)
    yield yard
    yard.close()


@pytest.mark.slow
@posix
@pytest.mark.parametrize("name", HOSTILE)
def test_an_attack_gets_out_of_the_cages_before_the_one_that_stops_it(name, yard):
    if "parent's" in name and sys.platform != "linux":
        pytest.skip("only Linux has /proc")
    if name == "endless loop":
        yard.seconds = 1
    results = {}
    for cage, run in CAGES.items():
        attempt = run(yard.text_of(attacks()[name]), yard)
        results[cage] = attempt.succeeded
    stopping = STOPPED_BY.get(name)
    last = list(CAGES)[-1]
    assert any(results.values()), results
    assert results[stopping or last] is (stopping is None), results


@pytest.mark.slow
@posix
@pytest.mark.parametrize("cage", CAGES)
def test_the_right_answer_passes_in_every_weak_cage(cage, yard):
    assert CAGES[cage](yard.text_of(attacks()["right answer"]), yard).passed


@caged
def test_no_attack_gets_out_of_the_sandbox(yard):
    jobs = [(yard.text_of(attack), TESTS) for attack in attacks().values()]
    with Sandbox(workers=2) as sandbox:
        verdicts = sandbox.judge(jobs, Limits(seconds=5))
    for name, verdict in zip(attacks(), verdicts, strict=True):
        assert verdict.passed is (name == "right answer"), (name, verdict)
        assert MARK not in verdict.output, (name, verdict)
    assert not yard.mark.exists()


@pytest.mark.slow
@posix
def test_the_strongest_cage_that_an_attack_gets_out_of():
    assert gets_out_of(attacks()["early exit"]) == "a process, its exit status"
    harmless = Attack("nothing", "does nothing", "def double(x): return x")
    assert gets_out_of(harmless) == "none"
