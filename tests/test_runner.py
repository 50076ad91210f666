"""The runner, through its command line, on small courses: what it refuses, resumes and ends."""

import json
import os
import shutil
import signal
import subprocess
import sys

import nbformat
import psutil
import pytest

from conftest import (
    LINUX,
    PARAMETERS,
    PATIENCE,
    POSIX,
    Course,
    lesson_cell,
    publish_cell,
    wait_until,
)
from course import __main__ as command
from course import execute, results, runner
from utils.profiles import SMOKE, Profile

pytestmark = pytest.mark.slow

LEAVE = """import subprocess
subprocess.Popen(["sleep", "77.25"], env={}, start_new_session=True)"""
# A lesson that starts a process of its own, tells of both, and goes on for ever.
HANG = """import os, subprocess, time
other = subprocess.Popen(["sleep", "1000"], env={}, start_new_session=True)
place = os.environ["MARK"]
with open(place + ".part", "w") as file:
    file.write(f"{os.getpid()} {other.pid} {os.getppid()}")
os.replace(place + ".part", place)
while True:
    time.sleep(1)"""
EXERCISE = """@lesson.exercise("08.1")
def check():
    assert answer == 2, "it is two\""""


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


# one run of a course in which nearly everything is wrong -----------------------------------------


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """The course, and what its only run said."""
    root = tmp_path_factory.mktemp("mixed")
    course = Course(root / "course")
    failing = (
        'with lesson.publish("thing") as folder:\n    raise ValueError("nope")'
    )
    course.add("00_fails.ipynb", PARAMETERS, lesson_cell("00"), failing)
    course.add(
        "01_needs.ipynb", PARAMETERS, lesson_cell("01"), 'lesson.need("thing")'
    )
    facts = 'import os, sys\n[sys.executable, os.environ["OMP_NUM_THREADS"], os.environ["COURSE_RUN"]]'
    course.add("02_free.ipynb", PARAMETERS, facts, "PROFILE")
    course.add("02_free-Copy1.ipynb", PARAMETERS, "1 / 0")
    course.add("03_syntax.ipynb", PARAMETERS, "x = (")
    course.add("04_dead.ipynb", PARAMETERS, "import os; os._exit(3)")
    course.add("05_leaves.ipynb", PARAMETERS, LEAVE)
    (course.root / "notebooks/07_half.ipynb").write_text('{"cells": [')
    solution = ('answer = 2\nlesson.solution("08.1")', "solution")
    course.add(
        "08_refused.ipynb",
        PARAMETERS,
        lesson_cell("08"),
        "answer = ...",
        EXERCISE,
        solution,
    )
    refusals = '# %% 08.1\nlesson.refuse("08.1", answer=[3, 4])\n'
    (course.root / "expected/refused/08.py").write_text(refusals)
    course.add("09_no_solution.ipynb", PARAMETERS, lesson_cell("09"))
    (course.root / "expected/refused/09.py").write_text(
        refusals.replace("08", "09")
    )
    figures = "\n".join(
        f'lesson.record("{name}", 7)' for name in ("good", "bad", "slow", "new")
    )
    course.add("10_figures.ipynb", PARAMETERS, lesson_cell("10"), figures)
    course.expect("""[10.check]
good = { value = 7 }
bad = { value = 8, tolerance = 0.5 }
[10.typical]
slow = { max = 1 }
""")
    path = course.add(
        "11_marked.ipynb",
        PARAMETERS,
        ("print('a  ')\nprint('b')", "nbval-check-output"),
    )
    notebook = nbformat.read(path, 4)
    notebook.cells[1].outputs = [nbformat.v4.new_output("stream", text="a\nc\n")]
    nbformat.write(notebook, path)
    rogue = root / "jupyter/kernels/python3"
    rogue.mkdir(parents=True)
    kernel = {
        "argv": ["false", "{connection_file}"],
        "display_name": "rogue",
        "language": "python",
    }
    (rogue / "kernel.json").write_text(json.dumps(kernel))
    return course, course.run("run", JUPYTER_PATH=str(root / "jupyter"))


def test_each_lesson_is_told_by_one_line_and_the_whole_by_its_status(mixed):
    _, done = mixed
    assert done.returncode == 1 and "Traceback" not in done.all
    marks = {
        line[2:4]: line[0] for line in done.stdout.splitlines() if line[0] in "✔✘–"
    }
    expected = {
        "00": "✘",
        "01": "–",
        "02": "✔",
        "03": "✘",
        "04": "✘",
        "05": "✘",
        "07": "✘",
    }
    assert marks == expected | {"08": "✔", "09": "✘", "10": "✔", "11": "✔"}


def test_a_failure_names_cell_and_file_and_blocks_only_what_needs_it(mixed):
    course, done = mixed
    assert (
        "cell [4]: ValueError: nope" in done.stdout
        and "00_fails.ipynb" in done.stdout
    )
    assert (
        "01_needs: blocked" in done.stderr
        and "it needs what 00_fails makes" in done.stdout
    )
    assert not (course.build / "artifacts/smoke/thing").exists()


def test_a_kernel_is_this_interpreter_at_the_profile_whatever_is_registered(mixed):
    course, _ = mixed
    executed = nbformat.read(course.build / "run/smoke/02_free.ipynb", 4)
    texts = [
        output.data["text/plain"]
        for cell in executed.cells
        for output in cell.outputs
    ]
    assert texts == [repr([sys.executable, "1", "1"]), "'smoke'"]


def test_faults_are_told_in_words(mixed):
    _, done = mixed
    assert "SyntaxError" in done.stdout
    assert "the kernel died" in done.stdout
    assert (
        "this notebook is not whole" in done.stdout
        and "07_half.ipynb" in done.stdout
    )


@LINUX
def test_a_process_that_outlives_its_kernel_is_ended_and_told(mixed):
    _, done = mixed
    assert "1 processes outlived the kernel" in done.stdout
    left = [
        p
        for p in psutil.process_iter(["cmdline"])
        if p.info["cmdline"] == ["sleep", "77.25"]
    ]
    assert not left


def test_wrong_answers_are_tried_behind_their_solution(mixed):
    course, done = mixed
    executed = nbformat.read(course.build / "run/smoke/08_refused.ipynb", 4)
    tried = [cell for cell in executed.cells if "refused" in cell.metadata.tags]
    assert len(tried) == 1 and len(tried[0].outputs) == 2
    assert executed.cells.index(tried[0]) == len(executed.cells) - 1
    assert "08_refused:" not in done.stderr
    assert (
        "09.py has wrong answers for 09.1, which has no solution cell"
        in done.stdout
    )


def test_figures_are_judged_and_typical_ones_fail_nothing(mixed):
    course, done = mixed
    assert "10_figures: figure bad: 7 is outside 8 ± 0.5" in done.stderr
    assert "figure new: recorded, not expected" in done.stderr
    assert "good" not in done.stderr and "slow" not in done.stderr
    index = (course.build / "report/index.html").read_text()
    assert '○ slow <span class="soft">unusual</span>' in index


def test_a_marked_output_that_differs_is_named(mixed):
    _, done = mixed
    assert "11_marked: cell [3] shows 'b', not 'c'" in done.stderr


def test_the_report_is_there_with_every_lesson_when_the_run_ends(mixed):
    course, done = mixed
    index = (course.build / "report/index.html").read_text()
    for name in ("00_fails", "02_free", "11_marked"):
        assert (
            f"smoke/{name}.html" in index
            and (course.build / f"report/smoke/{name}.html").exists()
        )
    assert (
        "it needs what 00_fails makes" in index
        and "report/index.html" in done.stdout
    )
    assert "http://" not in index and "https://" not in index


def test_nothing_is_left_beside_the_notebooks(mixed):
    course, _ = mixed
    assert {path.suffix for path in (course.root / "notebooks").iterdir()} == {
        ".ipynb"
    }


# what is refused before anything runs -------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--only", "99"], "there is no notebook 99"),
        (["--only", "x"], "write it as 05, 04-07"),
        (["--profile", "smok"], "unknown profile 'smok'"),
        (["-p", "SEEED=1", "--only", "00"], "no chosen lesson has that parameter"),
        (["-p", "SEED", "--only", "00"], "write -p NAME=VALUE; they have"),
    ],
)
def test_bad_arguments_get_one_message(arguments, message, capsys):
    assert command.main(["run", "--profile", "smoke", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("jobs", ["many", "0", "-1"])
def test_jobs_is_a_number_above_zero(monkeypatch, capsys, jobs):
    monkeypatch.setenv("JOBS", jobs)
    assert (
        command.main(["run", "--profile", "smoke", "--only", "00", "--fresh"]) == 2
    )
    assert f"JOBS={jobs} is not a number" in capsys.readouterr().err


def test_without_a_kernel_the_message_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(
        command.importlib.util,
        "find_spec",
        lambda name: name != "ipykernel" or None,
    )
    assert command.main(["run", "--profile", "smoke"]) == 2
    assert "ipykernel is missing" in capsys.readouterr().err


def test_a_notebook_without_parameters_is_refused(course):
    course.add("00_a.ipynb", "1 + 1")
    done = course.run("run")
    assert done.returncode == 1 and "no cell is tagged `parameters`" in done.stdout


def test_a_folder_that_cannot_be_is_one_message(course):
    course.add("00_a.ipynb", PARAMETERS)
    done = course.run("run", COURSE_BUILD="/dev/null/build")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "cannot write here" in done.stderr


def test_a_dial_reaches_the_lessons_that_have_it_and_their_results(course):
    source = PARAMETERS[0] + "\nSTEPS = 5"
    course.add("00_a.ipynb", (source, "parameters"), "assert STEPS == 20")
    course.add("01_b.ipynb", PARAMETERS, "assert 'STEPS' not in globals()")
    done = course.run("run", "-p", "STEPS=20")
    assert done.returncode == 0, done.all
    assert "figures are not compared" in done.stdout
    assert reused(course.run("run", "-p", "STEPS=20")) == ["00_a", "01_b"]
    done = course.run("run")
    assert done.returncode == 1 and "✘ 00_a" in done.stdout
    assert reused(done) == ["01_b"]


# in what order, and how many at once --------------------------------------------------------------


def test_two_lessons_run_at_once_and_with_jobs_1_one(course):
    meet = """import os, pathlib, time
place = pathlib.Path(os.environ["MARK"])
(place / "{0}").touch()
while not (place / "{1}").exists():
    time.sleep(0.02)"""
    course.add("00_a.ipynb", PARAMETERS, meet.format("a", "b"))
    course.add("01_b.ipynb", PARAMETERS, meet.format("b", "a"))
    assert course.run("run", MARK=str(course.root), JOBS="2").returncode == 0
    alone = (
        'import os\nos.close(os.open(os.environ["MARK"], os.O_CREAT | os.O_EXCL))\n'
    )
    course.add("00_a.ipynb", PARAMETERS, alone, 'os.remove(os.environ["MARK"])')
    course.add("01_b.ipynb", PARAMETERS, alone, 'os.remove(os.environ["MARK"])')
    done = course.run("run", MARK=str(course.root / "alone"), JOBS="1")
    assert done.returncode == 0, done.all


def plan_of(course, monkeypatch):
    monkeypatch.setattr("course.notebooks.ROOT", course.root)
    monkeypatch.setattr(results, "recorded", lambda profile: {})
    return runner.make_plan(sorted((course.root / "notebooks").iterdir()), SMOKE)


def test_lessons_that_others_wait_for_come_first(course, monkeypatch):
    course.add("00_alone.ipynb", PARAMETERS)
    course.add("01_first.ipynb", PARAMETERS, 'lesson.publish("one")')
    course.add(
        "02_second.ipynb", PARAMETERS, 'lesson.need("one"); lesson.publish("two")'
    )
    course.add(
        "03_third.ipynb", PARAMETERS, 'lesson.need("two"); lesson.need("one")'
    )
    plan = plan_of(course, monkeypatch)
    assert list(plan) == ["01_first", "02_second", "00_alone", "03_third"]
    assert plan["03_third"].makers == {"01_first", "02_second"}


def test_a_lesson_starts_only_where_core_and_memory_are_free(monkeypatch):
    memory = psutil.virtual_memory()._replace(available=5_000_000_000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    peaks = {"big": 9e9, "middle": 3.5e9, "small": 2.5e9, "other": 2e9}
    plan = {name: runner.Planned(None, set(), peak) for name, peak in peaks.items()}
    run = runner.Run(plan, SMOKE, {"SEED": 42})
    run.jobs = 2
    # What is alone may take all there is.
    assert run.has_room("big")
    run.running["other"] = None
    assert not run.has_room("middle")
    assert run.has_room("small")
    run.jobs = 1
    assert not run.has_room("small")


def test_a_missing_input_is_made_first_and_the_reader_is_told(course):
    course.add("00_a.ipynb", PARAMETERS, lesson_cell("00"), publish_cell("one"))
    course.add(
        "01_b.ipynb",
        PARAMETERS,
        lesson_cell("01"),
        'lesson.need("one")',
        publish_cell("two"),
    )
    course.add("02_c.ipynb", PARAMETERS, lesson_cell("02"), 'lesson.need("two")')
    course.add("03_d.ipynb", PARAMETERS)
    done = course.run("run", "--only", "02")
    assert done.returncode == 0, done.all
    assert "02_c needs 'two', which is missing: 01_b runs first" in done.stdout
    assert "01_b needs 'one', which is missing: 00_a runs first" in done.stdout
    assert "03_d" not in done.stdout


# what is done before ------------------------------------------------------------------------------


def reused(done) -> list[str]:
    lines = [
        line for line in done.stdout.splitlines() if line.endswith("done before")
    ]
    return sorted(line[2:6] for line in lines)


def test_what_a_lesson_takes_is_fetched_before_it_runs(monkeypatch, tmp_path):
    from types import SimpleNamespace

    here, away = tmp_path / "here", tmp_path / "away"
    here.mkdir()
    items = [SimpleNamespace(folder=here), SimpleNamespace(folder=away)]
    fetched = []
    monkeypatch.setattr(runner.fetch, "taken_by", lambda *paths: items)
    monkeypatch.setattr(runner.fetch, "fetch_all", fetched.extend)
    monkeypatch.setattr(
        runner, "read_manifest", lambda folder: {} if folder == here else None
    )
    runner.fetch_missing([])
    assert fetched == items[1:]


def test_done_lessons_are_not_run_again_until_something_changes(course):
    course.add("00_a.ipynb", PARAMETERS, lesson_cell("00"), publish_cell("thing"))
    course.add("01_b.ipynb", PARAMETERS, lesson_cell("01"), 'lesson.need("thing")')
    assert course.run("run").returncode == 0
    # The same artifact is made again: what takes it still holds.
    course.add(
        "00_a.ipynb", PARAMETERS, lesson_cell("00"), publish_cell("thing"), "2"
    )
    assert reused(course.run("run")) == ["01_b"]
    # Another artifact, even from another run.
    course.add(
        "00_a.ipynb", PARAMETERS, lesson_cell("00"), publish_cell("thing", "b")
    )
    assert reused(course.run("run", "--only", "00")) == []
    assert reused(course.run("run")) == ["00_a"]
    (course.build / "artifacts/smoke/thing/a.txt").write_text("damaged")
    torn = course.build / "run/smoke/01_b.json"
    torn.write_text(torn.read_text()[:30])
    done = course.run("run")
    assert done.returncode == 0 and reused(done) == []
    assert (course.build / "artifacts/smoke/thing/a.txt").read_text() == "b"
    assert reused(course.run("run", "--only", "00", "--fresh")) == []
    assert reused(course.run("run")) == ["00_a", "01_b"]


@pytest.fixture
def lesson(course, monkeypatch):
    """A lesson whose fingerprint is taken here, with the code that it may use beside it."""
    for module in (results, sys.modules["course.verdicts"]):
        monkeypatch.setattr(module, "ROOT", course.root)
    monkeypatch.setattr(results, "CHECKOUT", course.root)
    return course.add("00_a.ipynb", PARAMETERS)


@pytest.mark.parametrize(
    "file",
    [
        "utils/lesson.py",
        "utils/assets.toml",
        "stages/opt_out.txt",
        "launch/recipes/modern.toml",
        "launch/ddp.yaml",
        "results/leaderboard.json",
        "results/kills.json",
        "benchmarks/race.py",
        "expected/refused/00.py",
        "assets.txt",
    ],
)
def test_the_fingerprint_changes_with_all_that_a_lesson_runs(lesson, course, file):
    place = course.root / file
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("# %% 00.1\n1")
    marks = []
    for text in ("# %% 00.1\n1", "# %% 00.1\n1", "# %% 00.1\n2"):
        place.write_text(text)
        results.shared_fingerprint.cache_clear()
        marks.append(results.fingerprint(lesson, {}))
    results.shared_fingerprint.cache_clear()
    assert marks[0] == marks[1] != marks[2]


@POSIX
def test_a_second_run_of_a_profile_is_refused(course):
    mark = course.root / "mark"
    course.add("00_a.ipynb", PARAMETERS, HANG)
    first = course.start("run", MARK=str(mark))
    wait_until(mark.exists, "the first run has not begun")
    second = course.run("run", MARK=str(mark))
    assert second.returncode == 2
    assert "another run of this profile is going on" in second.stderr
    first.terminate()
    first.communicate(timeout=PATIENCE)


# however it ends ----------------------------------------------------------------------------------


@POSIX
@pytest.mark.parametrize(
    "number, status", [("SIGKILL", -9), ("SIGINT", 130), ("SIGTERM", 143)]
)
def test_a_run_that_is_ended_leaves_no_process_and_no_half_artifact(
    course, number, status
):
    mark = course.root / "mark"
    inside = HANG.replace("\n", "\n        ")
    slow = f"{publish_cell('thing')}\n    import os\n    if 'MARK' in os.environ:\n        {inside}"
    course.add("00_a.ipynb", PARAMETERS, lesson_cell("00"), slow)
    if (
        number == "SIGKILL"
    ):  # what an earlier run has left must not be taken for this one's
        assert course.run("run").returncode == 0
        shutil.rmtree(course.build / "artifacts")
    started = course.start("run", "--fresh", MARK=str(mark))
    wait_until(mark.exists, "the lesson has not begun")
    pids = [int(word) for word in mark.read_text().split()]
    started.send_signal(getattr(signal, number))
    text, _ = started.communicate(timeout=PATIENCE)
    assert started.returncode == status, text
    for pid in pids:
        wait_until(lambda pid=pid: gone(pid), "a process outlived the run")
    assert ("interrupted" in text) == (
        number == "SIGINT"
    ) and "Traceback" not in text
    assert not (course.build / "artifacts/smoke/thing").exists()
    done = course.run("run")
    assert done.returncode == 0 and reused(done) == []
    assert (course.build / "artifacts/smoke/thing/a.txt").exists()


@LINUX
def test_a_lesson_whose_process_is_killed_fails_and_leaves_nothing(course):
    mark = course.root / "mark"
    course.add("00_a.ipynb", PARAMETERS, HANG)
    # The next lesson waits for the end of what the first has left, while the run goes on.
    look = """import os, psutil, time
pid = int(open(os.environ["MARK"]).read().split()[1])
end = time.monotonic() + 60
while psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie":
    assert time.monotonic() < end, "it is still there"
    time.sleep(0.02)"""
    course.add("01_b.ipynb", PARAMETERS, look)
    started = course.start("run", MARK=str(mark), JOBS="1")
    wait_until(mark.exists, "the lesson has not begun")
    kernel, other, child = (int(word) for word in mark.read_text().split())
    os.kill(child, signal.SIGKILL)
    text, _ = started.communicate(timeout=PATIENCE)
    assert (
        started.returncode == 1
        and "the lesson's process ended with status -9" in text
    )
    assert "✔ 01_b" in text, text
    assert gone(kernel) and gone(other)


@pytest.mark.parametrize(
    "limits, message",
    [
        ((1, 900), "the cell ran past its 1 s"),
        ((900, 4), "the notebook ran past the 4 s of profile smoke"),
    ],
)
def test_what_hangs_is_ended(course, monkeypatch, limits, message):
    monkeypatch.setenv("COURSE_BUILD", str(course.build))
    path = course.add(
        "98_a.ipynb", PARAMETERS, "import time\nwhile True: time.sleep(1)"
    )
    hurried = Profile("smoke", "", *limits, threads=1)
    (result,) = runner.run_course([path], hurried, {"SEED": 42})
    assert result.status == "failed" and message in result.error


def test_memory_is_measured_where_the_system_hides_the_rest():
    class Hidden:
        def memory_full_info(self):
            raise psutil.AccessDenied

        def memory_info(self):
            return psutil.Process().memory_info()

    assert execute.memory_of([Hidden()]) > 1e6


def test_a_system_that_refuses_to_list_processes_ends_no_run(monkeypatch):
    def refuse(*_, **__):
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil.Process, "children", refuse)
    assert execute.below() == []


def test_a_kernel_that_cannot_start_is_a_failure_with_a_reason(course, tmp_path):
    (tmp_path / "ipykernel_launcher.py").write_text(
        "raise SystemExit('broken install')"
    )
    course.add("00_a.ipynb", PARAMETERS)
    done = course.run(
        "run", PYTHONPATH=os.pathsep.join([course.env["PYTHONPATH"], str(tmp_path)])
    )
    assert (
        done.returncode == 1
        and "broken install" in done.stdout
        and "Traceback" not in done.all
    )


# disks --------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A disk of one megabyte, where we may mount one."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if (
        not shutil.which("mount")
        or subprocess.run(mount, capture_output=True).returncode
    ):
        pytest.skip("no right to mount a small disk")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_is_one_message_and_leaves_no_half_artifact(course, small_disk):
    full = 'with lesson.publish("thing") as folder:\n    (folder / "a").write_bytes(bytes(3 << 20))'
    course.add("00_a.ipynb", PARAMETERS, lesson_cell("00"), full)
    done = course.run("run", COURSE_BUILD=str(small_disk / "build"))
    assert done.returncode == 1 and "CourseError: the disk is full" in done.stdout
    assert "Traceback" not in done.all
    assert not [
        path
        for path in (small_disk / "build/artifacts/smoke").iterdir()
        if path.is_dir()
    ]


def test_a_read_only_disk_is_one_message(course, small_disk):
    course.add("00_a.ipynb", PARAMETERS)
    remount = ["mount", "-o", "remount,ro", str(small_disk)]
    if subprocess.run(remount, capture_output=True).returncode:
        pytest.skip("no right to mount it read-only")
    done = course.run("run", COURSE_BUILD=str(small_disk / "build"))
    assert (
        done.returncode == 2
        and "cannot write here: Read-only file system" in done.stderr
    )
    assert "Traceback" not in done.stderr
