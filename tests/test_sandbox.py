"""Hostile programs stay in their cage, get no verdict they have not earned, and leave nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hostile import Hostile, read_programs
from sandbox_world import descendants, is_alive, new_world

from conftest import wait_until
from stages.sandbox import Limits, Sandbox, run_program
from utils.errors import CourseError

if sys.platform == "linux":
    from stages.cage import judge

THERE, REASON = Sandbox.available()
caged = pytest.mark.skipif(not THERE, reason=f"no cage here: {REASON}")
PROGRAMS = read_programs()
# Nothing fails here because a machine is busy.
PATIENT = Limits(seconds=120)
ADD = "def add(a, b): return a + b"


@pytest.fixture(scope="module")
def world():
    os.environ["COURSE_TEST_SECRET"] = "a secret of the environment"
    with new_world() as world:
        yield world
    del os.environ["COURSE_TEST_SECRET"]


@pytest.fixture(scope="module")
def sandbox(world):
    # Started when the secret is in the environment.
    with Sandbox(workers=1, limits=PATIENT) as sandbox:
        yield sandbox


def limits_of(hostile: Hostile) -> Limits:
    return Limits(seconds=hostile.patience, processes=hostile.processes)


def only(sandbox):
    """The one worker of a sandbox."""
    with sandbox.borrow() as worker:
        return worker


@caged
@pytest.mark.parametrize("hostile", PROGRAMS, ids=lambda hostile: hostile.name)
def test_a_hostile_program_stays_in_its_cage(hostile, sandbox, world):
    worker = only(sandbox)
    below = descendants(worker.process.pid)
    descriptors = os.listdir("/proc/self/fd")
    job = (hostile.program(world.places()), hostile.tests)
    (verdict,) = sandbox.judge([job], limits_of(hostile))
    world.check(hostile, verdict)
    assert "a secret of the environment" not in verdict.output
    assert descendants(worker.process.pid) == below and len(below) == 1
    # Fewer there may be, when what an earlier test has left is collected meanwhile.
    assert len(os.listdir("/proc/self/fd")) <= len(descriptors)
    assert only(sandbox) is worker, "the worker had to be replaced"


NAMESPACES = ["cgroup", "ipc", "mnt", "net", "pid", "user", "uts"]


def namespaces(pid: object) -> dict[str, str]:
    return {name: os.readlink(f"/proc/{pid}/ns/{name}") for name in NAMESPACES}


@pytest.fixture(scope="module")
def caged_process():
    """A program that waits in its cage: its folder in the system's process table."""
    if not THERE:
        pytest.skip(REASON)
    with Sandbox(workers=1) as own:
        worker = only(own)
        with judge.Trial(worker, Limits(seconds=60)) as trial:
            trial.start("script", "import time; time.sleep(1000)", trial.listen())
            (pid,) = descendants(worker.process.pid) - descendants_of_wardens(
                worker
            )
            try:
                os.readlink(f"/proc/{pid}/ns/net")
            except PermissionError:
                pytest.skip("only root can look into what may not be dumped")
            yield Path(f"/proc/{pid}")


def descendants_of_wardens(worker) -> set[int]:
    """The warden itself, which is the one child of the launcher."""
    children = Path(
        f"/proc/{worker.process.pid}/task/{worker.process.pid}/children"
    )
    return {int(pid) for pid in children.read_text().split()}


def has_nobody() -> bool:
    """Whether root here has another user to become; in a namespace of one user it has none."""
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        first, _, count = map(int, line.split())
        if first <= 65534 < first + count:
            return True
    return False


def status_of(folder: Path) -> dict[str, str]:
    lines = (folder / "status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines)


@caged
def test_every_namespace_is_another_one(caged_process):
    inside, outside = namespaces(caged_process.name), namespaces("self")
    warden = namespaces(status_of(caged_process)["PPid"])
    for name in NAMESPACES:
        assert len({inside[name], outside[name], warden[name]}) == 3, name


# The other thread asks for its turn so often that it has nearly always just asked.
AMONG_THREADS = """
import os, sys, threading
from stages.cage import kernel

sys.setswitchinterval(1e-6)
memory = bytearray(b"x") * 100_000_000
over = threading.Event()

def spin():
    while not over.is_set():
        pass

threading.Thread(target=spin, daemon=True).start()
for _ in range(20):
    pid = kernel.clone(kernel.NAMESPACES)
    if pid == 0:
        sum(range(1000))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
over.set()
"""


@caged
def test_a_copy_does_not_wait_for_a_thread_it_does_not_have():
    command = [sys.executable, "-c", AMONG_THREADS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["0"] * 20, done.stderr


@caged
def test_no_right_is_left(caged_process):
    status = status_of(caged_process)
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(status[name], 16) == 0, name
    assert status["NoNewPrivs"] == "1" and status["Seccomp"] == "2"
    assert not has_nobody() or "0" not in status["Uid"].split(), (
        "root is not nobody"
    )
    assert status["Groups"].split() in ([], ["65534"])


@caged
def test_only_the_scratch_folder_can_be_written(caged_process):
    writable = []
    for line in (caged_process / "mountinfo").read_text().splitlines():
        place, options = line.split()[4:6]
        assert {"nosuid", "nodev"} <= set(options.split(",")), line
        if "rw" in options.split(","):
            writable.append(place)
    assert writable == ["/tmp"]


@caged
def test_the_kernel_counts(caged_process):
    lines = (caged_process / "limits").read_text().splitlines()
    limits = {line[:25].strip(): line[26:].split()[:2] for line in lines[1:]}
    assert limits["Max processes"] == ["1", "1"]
    assert limits["Max open files"] == ["64", "64"]
    assert limits["Max core file size"] == ["0", "0"]
    assert limits["Max cpu time"] == ["62", "62"]
    assert limits["Max file size"] == [str(16 << 20)] * 2
    assert 256 << 20 < int(limits["Max address space"][0]) < 512 << 20


@caged
@pytest.mark.slow
def test_eight_at_once_beside_a_busy_process(world):
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        with Sandbox(workers=8) as sandbox:
            jobs = [
                (hostile.program(world.places()), hostile.tests)
                for hostile in PROGRAMS
            ]
            kinds = sorted({limits_of(hostile) for hostile in PROGRAMS}, key=str)
            for limits in kinds:
                chosen = [
                    k for k, h in enumerate(PROGRAMS) if limits_of(h) == limits
                ]
                verdicts = sandbox.judge([jobs[k] for k in chosen], limits)
                for k, verdict in zip(chosen, verdicts, strict=True):
                    world.check(PROGRAMS[k], verdict)
    finally:
        busy.kill()
        busy.wait()


def test_there_are_many_of_many_kinds():
    assert len(PROGRAMS) >= 80
    assert len({hostile.name for hostile in PROGRAMS}) == len(PROGRAMS)
    assert len({hostile.kind for hostile in PROGRAMS}) >= 10


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has namespaces")
def test_the_cage_is_there_where_the_kernel_gives_namespaces():
    command = ["unshare", "--user", "--mount", "--pid", "--net", "--fork", "true"]
    given = subprocess.run(command, capture_output=True).returncode == 0
    assert not given or THERE, REASON


@caged
def test_a_right_program_passes_and_a_wrong_one_fails(sandbox):
    tests = "assert add(1, 2) == 3\nassert add('a', 'b') == 'ab'"
    jobs = [(ADD, tests), (ADD.replace("+", "-"), tests), ("x = 1", tests)]
    right, wrong, none = sandbox.judge(jobs)
    assert right.passed and right.outcome == "passed"
    assert wrong.outcome == "failed" and wrong.message == "assert add(1, 2) == 3"
    assert none.outcome == "error" and "'add' is not defined" in none.message


VALUES = [
    "None, True, -1, 1.5, 'a', b'a', bytearray(b'a'), 2 + 1j, 10 ** 50, -(10 ** 50)",
    "[], (), {}, set(), frozenset({1}), range(1, 9, 2), [(1, [2]), {'a': {3}}]",
    "float('inf'), -float('inf'), {1: 2, (1, 2): [3]}, '\\ud800\\n\\0', [True, 1, 1.0]",
]


@caged
@pytest.mark.parametrize("values", VALUES)
def test_a_plain_value_crosses_as_it_is(values, sandbox):
    tests = f"given = [{values}]\nback = [same(value) for value in given]\n"
    tests += "assert back == given\n"
    tests += "assert [type(value) for value in back] == [type(v) for v in given]\n"
    tests += "assert repr(back) == repr(given)"
    (verdict,) = sandbox.judge([("def same(x): return x", tests)])
    assert verdict.passed, verdict


RIGHT = {
    "a class of the program": (
        "class Node:\n    def __init__(self, x): self.x, self.next = x, None\n"
        "def total(node): return 0 if node is None else node.x + total(node.next)",
        "node = Node(1)\nnode.next = Node(2)\nassert total(node) == 3\nassert node.x == 1",
    ),
    "a generator": (
        "def count(n):\n    for k in range(n): yield k",
        "assert list(count(3)) == [0, 1, 2]\nassert next(count(1)) == 0",
    ),
    "an argument changed in place": (
        "def extend(rows): rows.append(3)",
        "rows = [1]\nextend(rows)\nassert rows == [1, 3]",
    ),
    "an exception": (
        "def half(x):\n    if x % 2: raise ValueError('odd')\n    return x // 2",
        "try: half(1)\nexcept ValueError as error: assert str(error) == 'odd'\n"
        "else: assert False\nassert half(4) == 2",
    ),
    "counted words": (
        "from collections import Counter, OrderedDict\n"
        "def count(x): return Counter(x)\ndef order(x): return OrderedDict(x)",
        "assert count('aab') == {'a': 2, 'b': 1}\nassert order([(1, 2)]) == {1: 2}",
    ),
    "a function by a built-in's name": (
        "def sum(a, b): return a + b",
        "from program import sum\nassert sum(1, 2) == 3",
    ),
    "a class that a test calls a method of": (
        "class Box:\n    def put(self, x): return [x]",
        "assert Box().put(1) == [1]",
    ),
    "words by name": (
        "def name(a, *, b=1): return a + b",
        "assert name(1, b=2) == 3",
    ),
    "a value of the program": ("LIMIT = 3", "assert LIMIT == 3"),
    "two processes": (
        "import os\ndef run():\n    pid = os.fork()\n    if pid == 0: os._exit(7)\n"
        "    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])",
        "assert run() == 7",
    ),
    "threads": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "def squares(n):\n    with ThreadPoolExecutor(2) as pool:\n"
        "        return list(pool.map(lambda x: x * x, range(n)))",
        "assert squares(4) == [0, 1, 4, 9]",
    ),
    "files of its own": (
        "def keep(x):\n    open('a.txt', 'w').write(x)\n    return open('a.txt').read()",
        "assert keep('x') == 'x'",
    ),
}


@caged
@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_passes(name, sandbox):
    several = name in ("two processes", "threads")
    limits = Limits(seconds=120, processes=4 if several else 0)
    (verdict,) = sandbox.judge([RIGHT[name]], limits)
    assert verdict.passed, verdict


@caged
def test_tests_that_judge_nothing_pass_nothing(sandbox):
    tests = [
        "assert add(",
        "raise SystemExit(0)",
        "import os; os._exit(0)",
        "assert add(lambda: 1, 2) == 3",
        "try: add(object(), 1)\nexcept BaseException: pass",
    ]
    verdicts = sandbox.judge([(ADD, text) for text in tests])
    assert [verdict.outcome for verdict in verdicts] == ["refused"] * len(tests)


@caged
def test_what_ended_the_tests_cannot_be_caught(sandbox):
    program = "import os\ndef solve(x): os._exit(0)"
    tests = "try: solve(1)\nexcept BaseException: pass"
    (verdict,) = sandbox.judge([(program, tests)])
    assert verdict.outcome == "crashed"


@caged
def test_calls_give_their_results_as_text():
    program = ADD + "\nprint('said')"
    calls = ["add(1, 2)", "add([1], [2])", "add(1, 'a')", "add(1.5, 1)"]
    verdict = run_program(program, calls, PATIENT)
    assert verdict.results[:2] == ("3", "[1, 2]")
    assert verdict.results[2].startswith("raised TypeError")
    assert verdict.results[3] == "2.5" and not verdict.passed
    assert verdict.output == "said\n"


@caged
@pytest.mark.parametrize(
    "program, outcome, message",
    [
        ("print('a')", "passed", "the program came to its end"),
        ("import sys; sys.exit(3)", "error", "exit status 3"),
        ("1 / 0", "error", "ZeroDivisionError: division by zero"),
        ("x = bytearray(10 ** 12)", "memory", "MemoryError"),
        ("import os; os.abort()", "crashed", "ended the program"),
        ("if __name__ == '__main__': raise SystemExit(0)", "passed", ""),
    ],
)
def test_a_script_ends_as_it_ends(program, outcome, message):
    verdict = run_program(program, None, PATIENT)
    assert verdict.outcome == outcome and message in verdict.message, verdict


@caged
@pytest.mark.parametrize(
    "before", ["", "with closed: pass\n"], ids=["never entered", "left"]
)
def test_a_sandbox_that_is_closed_says_so_and_does_not_wait(before):
    program = f"""from stages.sandbox import Sandbox
closed = Sandbox(1)
{before}closed.run([("x = 1", None)])"""
    # another process, which can be ended if it waits after all
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "CourseError: the sandbox is closed" in done.stderr, done.stderr


@caged
def test_a_set_has_one_order_in_every_cage():
    program = "print(list(set('transformer')))"
    said = set()
    for _ in range(3):
        with Sandbox(2) as sandbox:
            verdicts = sandbox.run([(program, None)] * 2)
        said |= {verdict.output for verdict in verdicts}
    assert len(said) == 1


def test_a_worker_that_is_killed_is_replaced_and_takes_all_with_it(sandbox):
    worker = only(sandbox)
    below = descendants(worker.process.pid)
    worker.process.kill()
    with pytest.raises(CourseError, match="parent process is gone"):
        sandbox.judge([(ADD, "assert add(1, 2) == 3")])
    (verdict,) = sandbox.judge([(ADD, "assert add(1, 2) == 3")])
    assert verdict.passed
    wait_until(
        lambda: not any(is_alive(pid) for pid in below),
        "something outlived its worker",
    )


@caged
def test_the_cage_ends_with_its_judge():
    code = "import sys, time; from stages.sandbox import Sandbox\n"
    code += "sandbox = Sandbox(1).__enter__()\nprint('ready', flush=True)\n"
    code += "sandbox.run([('while True: pass', None)])"
    judge = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert judge.stdout.readline() == b"ready\n"
    below = descendants(judge.pid)
    judge.kill()
    judge.wait()
    judge.stdout.close()
    wait_until(
        lambda: not any(is_alive(pid) for pid in below),
        "something outlived its judge",
    )


@caged
def test_a_cage_that_cannot_be_built_runs_nothing_and_says_why(sandbox):
    limits = Limits()
    worker = only(sandbox)
    request = {**vars(limits), "files_mb": "no number of "}
    with judge.Trial(worker, limits) as trial, pytest.raises(CourseError) as error:
        output = trial.listen()
        text = judge.text_file("print('ran')")
        order = {"do": "start", "role": "script", "limits": request}
        worker.ask(order, [text, output])
    os.close(text)
    assert "mount tmpfs on /tmp" in str(error.value)
    assert sandbox.judge([(ADD, "assert add(1, 2) == 3")])[0].passed


@pytest.mark.parametrize(
    "changes",
    [{"seconds": 0}, {"memory_mb": 1}, {"output_bytes": -1}, {"processes": -1}],
)
def test_limits_without_sense_are_refused(changes):
    with pytest.raises(CourseError, match="is not between"):
        Limits(**changes)


def test_without_a_cage_nothing_runs(monkeypatch):
    nowhere = staticmethod(lambda: (False, "no namespaces"))
    monkeypatch.setattr(Sandbox, "available", nowhere)
    with pytest.raises(CourseError, match="cannot be caged: no namespaces"):
        run_program("print(1)")
