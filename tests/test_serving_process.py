"""The server as processes: started and stopped, two workers, none left behind; a short soak."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import psutil
import pytest
from small_server import LIMITS, NAME, write_small

from benchmarks import serving as soak
from conftest import LINUX, POSIX, wait_until
from stages import serving
from stages.guarded import Guarded, answers, free_port
from stages.serving_protocol import KEYS
from utils.errors import ROOT, CourseError

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_small(tmp_path_factory.mktemp("model"))


def has_ended(pid):
    """Whether a process is over; one that nobody has waited for yet is over too."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def gone(pids):
    return all(has_ended(pid) for pid in pids)


def test_a_guarded_command_ends_with_its_block_and_all_it_started():
    two = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c',"
    two += " 'import time; time.sleep(600)']); time.sleep(600)"
    with Guarded([sys.executable, "-c", two]) as server:
        wait_until(lambda: len(server.family()) == 3, "three processes")
        pids = [one.pid for one in server.family()]
    assert gone(pids)


@POSIX
def test_a_guarded_command_ends_when_its_owner_is_killed():
    program = f"from stages.guarded import Guarded\ng = Guarded({SLEEP!r})\n"
    program += "import time\nwhile len(g.family()) < 2: time.sleep(0.05)\n"
    program += "print(*[p.pid for p in g.family()], flush=True)\ntime.sleep(600)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    owner = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    pids = [int(word) for word in owner.stdout.readline().split()]
    assert len(pids) == 2
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    wait_until(lambda: gone(pids), "the command outlives its owner")


def test_a_command_that_ends_at_once_says_why():
    broken = Guarded([sys.executable, "-c", "raise SystemExit('no such model')"])
    with pytest.raises(CourseError, match="no such model"):
        broken.wait_for("http://127.0.0.1:9", seconds=60)


def post(port, body, headers):
    """The status of an answer."""
    url = f"http://127.0.0.1:{port}/v1/completions"
    letter = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(letter, timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.slow
def test_start_and_stop_are_one_command_each(folder, tmp_path, request):
    port = free_port()
    environment = {**os.environ, "COURSE_BUILD": str(tmp_path)}
    environment |= {KEYS: "ann:top-secret", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "stages.serving"]

    def run(*words):
        done = subprocess.run(
            [*command, *words],
            capture_output=True,
            text=True,
            env=environment,
            cwd=ROOT,
        )
        return done.returncode, done.stdout + done.stderr

    # Also when an assertion fails: the server is no child of this process.
    request.addfinalizer(lambda: run("stop", "--port", str(port)))
    code, words = run("start", str(folder), "--port", str(port), "--workers", "2")
    assert code == 0 and f"http://127.0.0.1:{port}" in words
    facts = json.loads((tmp_path / "serving" / f"{port}.json").read_text())
    parent = psutil.Process(facts["pid"])
    family = [parent, *parent.children(recursive=True)]
    letter = {"model": folder.name, "prompt": "my card", "max_tokens": 2}
    for key, status in (("top-secret", 200), ("wrong", 401)):
        headers = {
            "Authorization": f"Bearer {key}",
            "Content-Type": "application/json",
        }
        assert post(port, letter, headers) == status
    journal = (tmp_path / "serving" / f"{port}.log").read_text()
    assert re.search("ann: (length|stop), ", journal)
    assert "-: refused, 401" in journal
    assert "my card" not in journal
    # No key in what was written or in what every user can see of a process.
    for path in (tmp_path / "serving").iterdir():
        assert "top-secret" not in path.read_text()
    assert not any("top-secret" in " ".join(one.cmdline()) for one in family)
    code, words = run("start", str(folder), "--port", str(port))
    assert code != 0 and "stop --port" in words
    code, words = run("stop", "--port", str(port))
    assert code == 0 and "stopped" in words
    assert gone([one.pid for one in family])
    assert not answers(f"http://127.0.0.1:{port}")
    assert "no server" in run("stop", "--port", str(port))[1]


@pytest.mark.slow
@LINUX
def test_a_worker_that_dies_is_replaced_and_none_outlives_its_parent(folder):
    port = free_port()
    command = serving.command_for(folder, NAME, port, LIMITS, workers=2)
    with Guarded(command) as server:
        url = server.wait_for(f"http://127.0.0.1:{port}")

        def workers():
            found = [one for one in server.family()[2:] if not has_ended(one.pid)]
            return [one for one in found if "spawn_main" in " ".join(one.cmdline())]

        wait_until(lambda: len(workers()) == 2, "two workers")
        first = workers()[0]
        first.kill()

        def replaced():
            pids = [one.pid for one in workers()]
            return len(pids) == 2 and first.pid not in pids

        wait_until(replaced, "a new worker")
        wait_until(lambda: answers(url), "an answer")
        pids = [one.pid for one in workers()]
        server.family()[1].kill()
        wait_until(lambda: gone(pids), "a worker outlives its parent")


@pytest.mark.slow
def test_a_short_soak_holds_its_bars(folder, monkeypatch):
    """The long one is kept in results/serving.json; here all but the clock is held."""
    words = ["soak", "--each", "1", "--clients", "24", "--pause", "1"]
    given = soak.read_arguments([*words, "--no-keep", "--questions", "6"])
    given.folder = folder
    result = soak.soak(given)
    held = result["holds"]
    clocks = {"p95 within twice that of quiet", "memory flat within 3%"}
    assert all(held[name] for name in held.keys() - clocks), result
    # Each of twelve asks once in quiet and once beside the others, however slow the machine is.
    assert result["figures"]["well-behaved, answers"] == 24
    assert result["figures"]["misbehaving, requests"] == 12
    kinds = result["figures"]["misbehaving, by kind"]
    assert kinds.keys() == soak.BAD_MANNERS.keys()


def test_the_kept_soaks_hold_every_bar_but_the_clocks():
    if not soak.RECORD.exists():
        pytest.skip("no soak is kept yet: python -m benchmarks.serving soak")
    soaks = json.loads(soak.RECORD.read_text())
    for record in soaks:
        held = record["holds"]
        assert all(held[name] for name in held if "p95" not in name), record
        kinds = record["figures"]["misbehaving, by kind"]
        assert len(kinds) == len(soak.BAD_MANNERS)
        assert record["clients"] >= 200
    assert max(record["seconds"] for record in soaks) >= 600


def test_a_port_that_is_taken_is_named(folder, tmp_path, monkeypatch):
    from fastapi import FastAPI

    monkeypatch.setenv("COURSE_BUILD", str(tmp_path))
    with serving.serve_app(FastAPI()) as url:
        port = int(url.rpartition(":")[2])
        with pytest.raises(CourseError, match="something else listens"):
            serving.start(folder, NAME, port)
        with pytest.raises(urllib.request.HTTPError):
            urllib.request.urlopen(url, timeout=30)


def test_another_process_with_the_number_of_ours_is_left_alone(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("COURSE_BUILD", str(tmp_path))
    path = serving.note(8123)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"pid": os.getpid(), "begun": time.time() - 10**6}))
    assert serving.stop(8123) is False
