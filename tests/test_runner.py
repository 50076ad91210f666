"""The runner, through its command line, on small courses: what it refuses, resumes and ends."""
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import nbformat
import psutil
import pytest
from conftest import PARAMETERS, Course, lesson_cell

from course.guard import TOKEN

PUBLISH = 'with lesson.publish("thing", size=3) as folder:\n    (folder / "a.txt").write_text("a")'

pytestmark = pytest.mark.slow


def kernels(course: Course) -> list[psutil.Process]:
    """Live processes that a run of this course started with its token."""
    found = []
    for process in psutil.process_iter():
        try:
            env = process.environ()
        except psutil.Error:
            continue
        if TOKEN in env and env.get("COURSE_ROOT") == str(course.root):
            found.append(process)
    return found


def test_an_empty_notebook_runs_and_leaves_its_copy(course):
    course.add("00_a.ipynb", PARAMETERS, "1 + 1")
    done = course.run("run")
    assert done.returncode == 0, done.all
    executed = nbformat.read(course.build / "run/smoke/00_a.ipynb", 4)
    assert any(o.get("data", {}).get("text/plain") == "2" for c in executed.cells for o in c.outputs)
    assert 'PROFILE = "smoke"' in "".join(c.source for c in executed.cells)


@pytest.mark.parametrize("arguments, said", [
    (["run", "-p", "SEEED=1"], "unknown parameter SEEED"),
    (["run", "-p", "SEED"], "-p SEED is not understood"),
    (["run", "--only", "7"], "there is no notebook 7"),
    (["run", "--only", "x"], "ONLY=x is not understood"),
    (["run", "--profile", "smok"], "unknown profile 'smok'"),
])
def test_bad_arguments_get_one_message(course, arguments, said):
    course.add("00_a.ipynb", PARAMETERS)
    command = course.command(*arguments)
    if "--profile" in arguments:
        command = command[:-2]
    done = subprocess.run(command, env=course.env, text=True, capture_output=True)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


def test_a_notebook_without_parameters_is_refused(course):
    course.add("00_a.ipynb", "1 + 1")
    done = course.run("run")
    assert done.returncode == 2 and "no cell is tagged `parameters`" in done.stderr


def test_a_failure_names_cell_and_file_and_blocks_only_what_needs_it(course):
    course.add("00_fails.ipynb", PARAMETERS, lesson_cell("00"),
               'with lesson.publish("thing") as folder:\n    raise ValueError("nope")')
    course.add("01_needs.ipynb", PARAMETERS, lesson_cell("01"), 'lesson.need("thing")')
    course.add("02_free.ipynb", PARAMETERS, "1")
    done = course.run("run")
    assert done.returncode == 1
    assert "cell [4]: ValueError: nope" in done.stdout and "00_fails.ipynb" in done.stdout
    assert "– 01_needs" in done.stdout and "✔ 02_free" in done.stdout
    assert not (course.build / "artifacts/smoke/thing").exists()


def test_done_notebooks_are_not_run_again_until_something_changes(course):
    course.add("00_a.ipynb", PARAMETERS, lesson_cell("00"), PUBLISH)
    course.add("01_b.ipynb", PARAMETERS, lesson_cell("01"), 'lesson.need("thing", size=3)')
    assert course.run("run").returncode == 0
    assert course.run("run").stdout.count("done before") == 3  # two lines and the sum
    course.add("00_a.ipynb", PARAMETERS, lesson_cell("00"), PUBLISH, "2")
    done = course.run("run").stdout  # the same artifact is made again: what takes it still holds
    assert done.count("done before") == 2 and "done before" not in done.splitlines()[1]
    shutil.rmtree(course.build / "artifacts/smoke/thing")
    assert "done before" not in course.run("run").stdout.splitlines()[1]


def test_the_kernel_is_this_interpreter_whatever_is_registered(course, tmp_path):
    rogue = tmp_path / "jupyter/kernels/python3"
    rogue.mkdir(parents=True)
    (rogue / "kernel.json").write_text(json.dumps(
        {"argv": ["false", "{connection_file}"], "display_name": "rogue", "language": "python"}))
    course.add("00_a.ipynb", PARAMETERS, "import sys\nassert sys.executable == %r" % sys.executable)
    done = course.run("run", JUPYTER_PATH=str(tmp_path / "jupyter"))
    assert done.returncode == 0, done.all


def test_nothing_is_left_beside_the_notebooks(course):
    course.add("00_a.ipynb", PARAMETERS, "1")
    course.run("run")
    assert [p.name for p in (course.root / "notebooks").iterdir()] == ["00_a.ipynb"]


def test_a_run_cut_off_after_fresh_does_not_trust_what_it_overwrote(course):
    course.add("00_a.ipynb", PARAMETERS, lesson_cell("00"), "import os, time\n"
               "time.sleep(60 if 'HANG' in os.environ else 0)", 'lesson.record("a", 7)')
    (course.root / "expected/smoke.toml").write_text('["00"]\na = { value = 7 }\n')
    assert course.run("run").returncode == 0
    cut = subprocess.Popen(course.command("run", "--fresh"), env={**course.env, "HANG": "1"},
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(9)
    cut.kill()
    cut.wait()
    done = course.run("run")
    assert done.returncode == 0 and "done before" not in done.stdout, done.all


def test_a_changed_input_is_not_reused_even_from_another_run(course):
    publish = 'with lesson.publish("thing") as folder:\n    (folder / "a").write_text("{0}")'
    course.add("00_a.ipynb", PARAMETERS, lesson_cell("00"), publish.format(1))
    course.add("01_b.ipynb", PARAMETERS, lesson_cell("01"), 'lesson.need("thing")')
    course.run("run")
    course.add("00_a.ipynb", PARAMETERS, lesson_cell("00"), publish.format(2))
    course.run("run", "--only", "00")
    done = course.run("run")
    assert done.stdout.count("done before") == 2, done.all  # 00 and the sum, not 01


def test_a_damaged_artifact_is_made_again(course):
    course.add("00_a.ipynb", PARAMETERS, lesson_cell("00"), PUBLISH)
    course.run("run")
    (course.build / "artifacts/smoke/thing/a.txt").write_text("b")
    done = course.run("run")
    assert done.returncode == 0 and "done before" not in done.stdout
    assert (course.build / "artifacts/smoke/thing/a.txt").read_text() == "a"


def test_a_cell_that_does_not_parse_fails_its_notebook_only(course):
    course.add("00_a.ipynb", PARAMETERS, "x = (")
    course.add("01_b.ipynb", PARAMETERS, "1")
    done = course.run("run")
    assert done.returncode == 1 and "SyntaxError" in done.stdout and "✔ 01_b" in done.stdout


def test_a_kernel_that_cannot_start_is_a_failure_with_a_reason(course, tmp_path):
    (tmp_path / "ipykernel_launcher.py").write_text("raise SystemExit('broken install')")
    course.add("00_a.ipynb", PARAMETERS, "1")
    done = course.run("run", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1 and "broken install" in done.stdout and "Traceback" not in done.all


@pytest.mark.skipif(sys.platform != "linux", reason="Linux lets us adopt orphans")
def test_a_process_that_sheds_its_environment_is_ended_too(course):
    course.add("00_a.ipynb", PARAMETERS, "import subprocess\n"
               "subprocess.Popen(['sleep', '77.25'], env={}, start_new_session=True)")
    done = course.run("run")
    assert done.returncode == 1 and "outlived the kernel" in done.stdout
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "77.25"]]


def test_fresh_for_one_keeps_the_results_of_the_others(course):
    for name in ("00_a.ipynb", "01_b.ipynb"):
        course.add(name, PARAMETERS, "1")
    course.run("run")
    course.run("run", "--only", "00", "--fresh")
    assert course.run("run").stdout.count("done before") == 3


def test_check_refuses_the_run_of_an_older_notebook(course):
    course.add("00_a.ipynb", PARAMETERS, "1")
    course.run("run")
    assert "no finished run" not in course.run("check").all
    course.add("00_a.ipynb", PARAMETERS, "2")
    assert "no finished run of this notebook" in course.run("check").all


def test_two_runs_at_once_are_refused(course):
    course.add("00_a.ipynb", PARAMETERS, "import time; time.sleep(8)")
    first = subprocess.Popen(course.command("run"), env=course.env, stdout=subprocess.DEVNULL)
    time.sleep(5)
    second = course.run("run")
    assert second.returncode == 2 and "another run of this profile is going on" in second.stderr
    assert first.wait() == 0


def test_a_cell_has_a_time_limit(course, monkeypatch):
    from utils import profiles
    from course import runner

    path = course.add("00_a.ipynb", PARAMETERS, "import time; time.sleep(60)")
    hurried = profiles.Profile("smoke", "", cell_seconds=2, notebook_seconds=90)
    with runner.guarded() as token:
        result = runner.execute(path, course.root / "out.ipynb", {}, hurried, token)
    assert result.status == "failed" and "ran past the 2 s" in result.error


def test_a_notebook_has_a_time_limit(course):
    from utils import profiles
    from course import runner

    path = course.add("00_a.ipynb", PARAMETERS, *["import time; time.sleep(1.5)"] * 9)
    hurried = profiles.Profile("smoke", "", cell_seconds=60, notebook_seconds=3)
    with runner.guarded() as token:
        result = runner.execute(path, course.root / "out.ipynb", {}, hurried, token)
    assert result.status == "failed" and "the notebook ran past the 3 s" in result.error


def test_a_process_that_outlives_its_kernel_is_ended_and_told(course):
    course.add("00_a.ipynb", PARAMETERS, "import subprocess, sys\nsubprocess.Popen([sys.executable, "
               "'-c', 'import time; time.sleep(300)'], start_new_session=True)")
    done = course.run("run")
    assert done.returncode == 1 and "1 processes outlived the kernel" in done.stdout
    assert not kernels(course)


def test_a_dead_kernel_is_a_failure_with_a_reason(course):
    course.add("00_a.ipynb", PARAMETERS, "import os; os._exit(3)")
    done = course.run("run")
    assert done.returncode == 1 and "the kernel died" in done.stdout


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
def test_killing_the_runner_leaves_no_kernel_no_half_artifact_and_resumes(course):
    course.add("00_first.ipynb", PARAMETERS, "1")
    slow = PUBLISH + "\n    import time, os\n    open(os.environ['MARK'], 'w').close()\n    time.sleep(4)"
    course.add("01_slow.ipynb", PARAMETERS, lesson_cell("01"), slow, 'lesson.record("a", 7)')
    (course.root / "expected/smoke.toml").write_text('["01"]\na = { value = 7 }\n')
    mark = course.root / "mark"
    for _ in range(2):
        mark.unlink(missing_ok=True)
        runner = subprocess.Popen(course.command("run"), env={**course.env, "MARK": str(mark)},
                                  stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while not mark.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert mark.exists() and kernels(course)
        runner.send_signal(signal.SIGKILL)
        runner.wait()
        deadline = time.monotonic() + 5
        while kernels(course) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not kernels(course), "a kernel outlived the runner by five seconds"
        assert not (course.build / "artifacts/smoke/thing").exists()
    done = course.run("run", MARK=str(mark))
    assert done.returncode == 0, done.all
    assert "done before" in done.stdout and (course.build / "artifacts/smoke/thing/a.txt").exists()
    leftovers = [p.name for p in (course.build / "artifacts/smoke").iterdir() if p.name != "thing"]
    assert leftovers == []


def test_an_interrupt_stops_at_once_with_status_130(course):
    course.add("00_a.ipynb", PARAMETERS, "import time; time.sleep(60)")
    runner = subprocess.Popen(course.command("run"), env=course.env, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 30
    while not kernels(course) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1)
    runner.send_signal(signal.SIGINT)
    _, said = runner.communicate(timeout=20)
    assert runner.returncode == 130 and "interrupted" in said and not kernels(course)


def test_a_figure_outside_expected_fails_the_run(course):
    course.add("00_a.ipynb", PARAMETERS, lesson_cell("00"), 'lesson.record("a", 7)')
    (course.root / "expected/smoke.toml").write_text('["00"]\na = { value = 8, tolerance = 0.5 }\n')
    done = course.run("run")
    assert done.returncode == 1 and "figure a: 7 is outside 8 ± 0.5" in done.stderr


def test_a_folder_that_cannot_be_is_one_message(course):
    course.add("00_a.ipynb", PARAMETERS, "1")
    done = course.run("run", COURSE_BUILD="/dev/null/build")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "cannot write here" in done.stderr


@pytest.fixture
def small_disk(tmp_path):
    """A disk of one megabyte, where we may mount one."""
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)],
                      capture_output=True).returncode:
        pytest.skip("no right to mount a small disk")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.skipif(not shutil.which("mount"), reason="Linux")
def test_a_full_disk_is_one_message_and_leaves_no_half_artifact(course, small_disk):
    course.add("00_a.ipynb", PARAMETERS, lesson_cell("00"),
               'with lesson.publish("thing") as folder:\n    (folder / "a").write_bytes(bytes(3 << 20))')
    done = course.run("run", COURSE_BUILD=str(small_disk / "build"))
    assert done.returncode == 1 and "CourseError: the disk is full" in done.stdout
    assert "Traceback" not in done.all
    assert list((small_disk / "build/artifacts/smoke").iterdir()) == []


@pytest.mark.skipif(not shutil.which("mount"), reason="Linux")
def test_a_read_only_disk_is_one_message(course, small_disk):
    course.add("00_a.ipynb", PARAMETERS, "1")
    if subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], capture_output=True).returncode:
        pytest.skip("no right to mount it read-only")
    done = course.run("run", COURSE_BUILD=str(small_disk / "build"))
    assert done.returncode == 2 and "cannot write here: Read-only file system" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_kernel_the_message_says_what_to_install(monkeypatch, capsys):
    import importlib.util

    from course import __main__ as command

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert command.main(["run", "--profile", "smoke"]) == 2
    assert "ipykernel is missing" in capsys.readouterr().err


def test_the_report_is_one_file_with_every_notebook(course):
    course.add("00_a.ipynb", PARAMETERS, lesson_cell("00"), 'lesson.record("pieces & <b>words", 7)')
    course.run("run")
    assert course.run("report").returncode == 0
    page = (course.build / "report/index.html").read_text()
    assert "pieces &amp; &lt;b&gt;words" in page and "smoke/00_a.html" in page
    assert "http://" not in page and "https://" not in page  # self-contained
    assert (course.build / "report/smoke/00_a.html").exists()


def test_state_survives_being_cut_off_while_written(course):
    course.add("00_a.ipynb", PARAMETERS, "1")
    course.run("run")
    state = course.build / "run/smoke/state.json"
    (state.parent / ".state.json.1.part").write_text('{"half')
    assert json.loads(state.read_text())["00_a"]["status"] == "passed"
    assert "done before" in course.run("run").stdout


def test_a_notebook_is_written_rarely_while_it_runs_and_always_at_its_end():
    from types import SimpleNamespace

    from course.runner import saved_rarely

    written = []
    manager = SimpleNamespace(save=lambda **_: written.append("file"))
    with pytest.raises(KeyboardInterrupt), saved_rarely(manager, seconds=60):
        for _ in range(100):
            manager.save()
        raise KeyboardInterrupt
    assert written == ["file"]
    manager.save()
    manager.save()
    assert written == ["file"] * 3
