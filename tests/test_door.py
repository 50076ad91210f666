"""The way in: set-up, doctor, the choice of a build of PyTorch, a learner's own copies."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from course import __main__ as command
from course import doctor, fetch, lab, setup, torch_build, work
from course.torch_build import INDEX, Driver
from utils.errors import ROOT, CourseError

RTX = ["NVIDIA GeForce RTX 4060"]


def bare_python(*arguments, **options):
    """A Python that sees no package: `-S` leaves site-packages out, `-E` PYTHONPATH."""
    command = [sys._base_executable, "-S", "-E", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, **options
    )


# the choice of PyTorch --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "system, asked, driver, kind, place",
    [
        ("linux", "auto", None, "cpu", f"{INDEX}/cpu"),
        ("win32", "auto", None, "cpu", ""),
        ("darwin", "auto", None, "cpu", ""),
        ("linux", "auto", Driver(13.0, RTX, 8.9), "cuda", ""),
        ("linux", "auto", Driver(0, RTX), "cuda", ""),
        ("win32", "auto", Driver(13.2, RTX, 8.9), "cuda", f"{INDEX}/cu130"),
        ("linux", "auto", Driver(12.4, RTX, 8.9), "cuda", f"{INDEX}/cu126"),
        (
            "linux",
            "auto",
            Driver(13.0, ["GTX 1080"], 6.1),
            "cuda",
            f"{INDEX}/cu126",
        ),
        ("linux", "auto", Driver(11.8, RTX, 8.9), "cpu", f"{INDEX}/cpu"),
        ("linux", "cpu", Driver(13.0, RTX, 8.9), "cpu", f"{INDEX}/cpu"),
        ("linux", "cuda", None, "cuda", ""),
        ("win32", "cuda", None, "cuda", f"{INDEX}/cu130"),
    ],
)
def test_the_build_fits_system_driver_and_card(
    monkeypatch, system, asked, driver, kind, place
):
    monkeypatch.setattr(torch_build.sys, "platform", system)
    build = torch_build.choose_build(asked, driver)
    assert (build.kind, build.place) == (kind, place)
    assert build.reason


def test_the_lowest_of_several_cards_decides(monkeypatch):
    cards = [["A", "8.9"], ["B", "6.1"]]
    monkeypatch.setattr(torch_build, "newest_cuda", lambda: 13.0)
    monkeypatch.setattr(torch_build, "ask_nvidia_smi", lambda: cards)
    assert torch_build.find_driver() == Driver(13.0, ["A", "B"], 6.1)


def test_a_driver_that_is_too_old_is_named_with_what_to_do(monkeypatch):
    monkeypatch.setattr(torch_build.sys, "platform", "linux")
    reason = torch_build.choose_build("auto", Driver(11.4, RTX, 8.9)).reason
    assert "RTX 4060" in reason and "install a newer driver" in reason


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """An environment that holds no more than a version.py of PyTorch; what pip is asked is kept."""
    asked = []
    monkeypatch.setattr(setup, "VENV", tmp_path)
    monkeypatch.setattr(setup, "LOG", tmp_path / "setup.log")
    monkeypatch.setattr(setup, "install", lambda what, *rest: asked.append(rest))
    monkeypatch.setattr(setup, "interpreter", lambda: Path(sys.executable))
    monkeypatch.setattr(setup, "pip_settings", lambda python: {})
    monkeypatch.setattr(setup, "answers", lambda *given: True)
    monkeypatch.setattr(setup, "find_driver", lambda: None)
    monkeypatch.setattr(torch_build.sys, "platform", "linux")
    return asked


def put_torch(cuda: str) -> None:
    """As PyTorch writes it."""
    folder = setup.VENV / "lib/python3.11/site-packages/torch"
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"__version__ = '2.13.0+{'cu130' if cuda != 'None' else 'cpu'}'"]
    lines.append(f"cuda: Optional[str] = {cuda}")
    (folder / "version.py").write_text("\n".join(lines))


def test_without_a_driver_torch_comes_first_and_from_its_own_index(environment):
    setup.install_torch("auto")
    (options,) = environment
    assert re.fullmatch(r"torch==[\d.]+", options[1])
    assert options[0] == "--no-deps" and options[2:] == (
        "--index-url",
        f"{INDEX}/cpu",
    )


@pytest.mark.parametrize(
    "settings", [{"index-url": "https://a/simple"}, {"no-index": "1"}]
)
def test_a_mirror_of_ones_own_is_left_to_itself(
    environment, monkeypatch, capsys, settings
):
    monkeypatch.setattr(setup, "pip_settings", lambda python: settings)
    setup.install_torch("auto")
    assert environment == []
    assert next(iter(settings.values())) in capsys.readouterr().out


def test_an_index_that_does_not_answer_is_said_and_passed_over(
    environment, monkeypatch, capsys
):
    monkeypatch.setattr(setup, "answers", lambda *given: False)
    setup.install_torch("auto")
    assert environment == [] and "does not answer" in capsys.readouterr().out


def test_the_build_that_is_here_stays_until_another_is_asked_for(environment):
    put_torch("None")
    assert (setup.torch_version(), setup.torch_kind()) == ("2.13.0+cpu", "cpu")
    setup.install_torch("auto")
    setup.install_torch("cpu")
    assert environment == []
    setup.install_torch("cuda")
    assert (
        environment[0][0] == "--no-deps" and "--force-reinstall" in environment[0]
    )


def test_another_release_of_torch_keeps_its_build(environment, monkeypatch):
    put_torch("None")
    monkeypatch.setattr(setup, "pinned_torch", lambda: "2.14.0")
    setup.install_torch("auto")
    assert environment == [
        ("--no-deps", "torch==2.14.0", "--index-url", f"{INDEX}/cpu")
    ]


def test_what_was_asked_for_and_did_not_come_is_an_error(environment, monkeypatch):
    monkeypatch.setattr(setup, "make_environment", lambda: None)
    put_torch("'13.0'")
    assert setup.torch_kind() == "cuda"
    with pytest.raises(CourseError, match="PyTorch for cpu was asked for"):
        setup.run("cpu")
    with pytest.raises(CourseError, match="unknown build of PyTorch 'tpu'"):
        setup.run("tpu")


def test_a_set_up_that_is_done_is_not_done_again(environment, monkeypatch):
    monkeypatch.setattr(setup, "make_environment", lambda: None)
    monkeypatch.delenv("COURSE_TORCH", raising=False)
    put_torch("None")
    assert setup.run() is True
    count = len(environment)
    assert setup.run() is False and len(environment) == count
    assert setup.run(tests=True) is True
    assert setup.run(tests=True) is False and setup.run() is False
    (setup.VENV / ".installed").write_text("another requirements.txt")
    assert setup.run() is True


@pytest.mark.parametrize("keeps_nothing", [True, False])
def test_packages_are_compiled_once_where_python_keeps_nothing(
    tmp_path, environment, monkeypatch, keeps_nothing
):
    monkeypatch.setattr(setup.sys, "dont_write_bytecode", keeps_nothing)
    monkeypatch.setattr(setup, "make_environment", lambda: None)
    package = tmp_path / "lib" / "site-packages" / "toy"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("word = 'compiled'")
    (package / "old.py").write_text("print 'of another Python'")
    put_torch("None")
    assert setup.run() is True
    made = {path.name.split(".")[0] for path in package.rglob("*.pyc")}
    assert made == ({"__init__"} if keeps_nothing else set())


# the environment and pip ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "version, has_pip, problem, advice",
    [
        ((3, 15), True, "no wheels for a Python this new", "python3.14"),
        (
            (3, 12),
            False,
            "without venv and ensurepip",
            "sudo apt install python3-venv",
        ),
        ((3, 12), True, "", ""),
    ],
)
def test_a_python_that_cannot_make_it_is_told_what_to_do(
    tmp_path, monkeypatch, version, has_pip, problem, advice
):
    monkeypatch.setattr(setup.sys, "version_info", (*version, 0))
    spec = object() if has_pip else None
    monkeypatch.setattr(setup.importlib.util, "find_spec", lambda name: spec)
    assert problem in setup.why_no_environment()
    monkeypatch.setattr(setup, "VENV", tmp_path / ".venv")
    if problem:
        with pytest.raises(CourseError, match=problem) as error:
            setup.make_environment()
        assert advice in str(error.value)


def test_progress_counts_what_arrives_and_is_silent_in_a_log(capsys):
    progress = setup.Progress("packages")
    for line in (
        "Collecting a>=1 (from -r requirements.txt (line 5))",
        "  Downloading a-1.0-py3-none-any.whl.metadata (5 kB)",
        "  Downloading a-1.0-py3-none-any.whl (13.3 MB)",
        "Processing /opt/wheels/torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl (from -r x)",
        "  Using cached b_c-2.0.tar.gz",
    ):
        progress.read(line)
        progress.show()
    assert re.fullmatch(r"package 3 of at most \d{3}: b_c", progress.text)
    assert progress.text.endswith(": b_c")
    progress.read("Installing collected packages: a, b_c, torch")
    progress.end()
    out = capsys.readouterr().out.splitlines()
    assert out == ["installing packages", "  unpacking 3 packages"]


def test_on_a_terminal_one_line_moves(monkeypatch, capsys):
    monkeypatch.setattr(setup.sys.stdout, "isatty", lambda: True, raising=False)
    progress = setup.Progress("packages")
    progress.read("  Downloading torch-2.13.0-cp311-linux.whl (526.8 MB)")
    progress.show()
    shown = capsys.readouterr().out.partition("\r")[2]
    assert "package 1 of at most" in shown and "torch (526.8 MB)" in shown
    assert "\n" not in shown


@pytest.mark.parametrize(
    "words, advice",
    [
        (
            "ERROR: No matching distribution found for torch==2.13.0",
            "no matching version",
        ),
        ("OSError: [Errno 28] No space left on device", "make room"),
        ("ERROR: HTTPSConnectionPool", "connect to a network"),
    ],
)
def test_pips_failure_keeps_its_words_and_says_what_to_do(
    tmp_path, monkeypatch, words, advice
):
    monkeypatch.setattr(setup, "LOG", tmp_path / "setup.log")
    setup.LOG.write_text(f"Collecting torch\n{words}\n")
    text = str(setup.pip_failed("packages"))
    assert words in text and advice in text


def test_pip_is_run_and_its_words_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(setup, "LOG", tmp_path / "setup.log")
    monkeypatch.setattr(setup, "interpreter", lambda: Path(sys.executable))
    with pytest.raises(CourseError, match="pip could not install the thing"):
        setup.install("thing", "--no-index", "no-such-thing-as-this")
    assert "no-such-thing-as-this" in setup.LOG.read_text()


# without packages -------------------------------------------------------------------------------


def test_the_command_line_needs_no_package_to_start():
    help_text = bare_python("-m", "course", "--help")
    assert help_text.returncode == 0, help_text.stderr
    assert "setup" in help_text.stdout


def test_a_python_without_packages_is_told_where_they_are():
    run = bare_python("-m", "course", "run", "--only", "00")
    assert run.returncode == 2
    assert "this Python has no packages of the course" in run.stderr
    assert "python3 -m course setup" in run.stderr


def test_an_old_python_is_refused_before_anything_else():
    code = "import sys; sys.version_info = (3, 9, 0); import course"
    run = bare_python("-c", code)
    assert run.returncode == 1
    assert "the course needs Python 3.11 or newer" in run.stderr


def test_every_target_of_make_is_an_action_of_the_program():
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^([a-z-]+):.*## .*\n\t(.*)", makefile, re.M)
    actions = {*command.EARLY, *command.ACTIONS, *command.CHORES}
    calls = {
        target: re.search(r"(?:\$\(COURSE\)|-m course) ([a-z-]+)", recipe)
        for target, recipe in targets
    }
    assert {target for target, call in calls.items() if call is None} == {"help"}
    assert {call[1] for call in calls.values() if call} <= actions
    assert len(targets) == len(re.findall(r"^[a-z-]+:.*## ", makefile, re.M))


def test_the_program_is_declared_and_can_be_called():
    declared = (ROOT / "pyproject.toml").read_text()
    assert '[project.scripts]\ncourse = "course.__main__:main"' in declared
    with pytest.raises(SystemExit) as ended:
        command.main(["--help"])
    assert ended.value.code == 0


# the doctor -------------------------------------------------------------------------------------


def test_the_doctor_looks_before_anything_is_installed(monkeypatch):
    code = "import course.setup as s, pathlib; s.VENV = pathlib.Path('/nowhere')\n"
    code += (
        "s.answers = lambda *given: True\nfrom course import doctor; doctor.run()"
    )
    looked = bare_python("-c", code)
    assert looked.stderr == ""
    lines = looked.stdout.splitlines()
    assert all(line[:2] in ("✔ ", "✘ ", "· ") for line in lines)
    assert "nothing stops the course   → python3 -m course setup" in lines[-1]


@pytest.mark.parametrize(
    "name, value, line",
    [
        ("total_memory", lambda: None, "· .*memory: it cannot be read here"),
        ("total_memory", lambda: 2_000_000_000, "✘ .*memory: 2.0 GB;"),
        (
            "look_at_python",
            lambda: [doctor.Finding("✘", "old", "do")],
            "✘ old   → do",
        ),
    ],
)
def test_what_stops_the_course_ends_in_what_to_type(
    monkeypatch, capsys, name, value, line
):
    monkeypatch.setattr(doctor, name, value)
    monkeypatch.setattr(
        doctor, "LOOKS", [doctor.look_at_size, doctor.look_at_python]
    )
    status = doctor.run()
    out = capsys.readouterr().out
    assert re.search(line, out, re.M)
    assert status == int("✘" in out) and ("nothing stops" in out) != bool(status)


def test_a_torch_that_cannot_use_the_card_is_found(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "find_driver", lambda: Driver(13.0, RTX, 8.9))
    monkeypatch.setattr(setup, "torch_version", lambda: "2.13.0+cpu")
    monkeypatch.setattr(setup, "torch_kind", lambda: "cpu")
    monkeypatch.setattr(torch_build.sys, "platform", "linux")
    card, torch = map(str, doctor.look_at_torch())
    assert card == "✔ NVIDIA driver, up to CUDA 13.0: NVIDIA GeForce RTX 4060"
    assert torch.startswith("✘ PyTorch 2.13.0+cpu cannot use that card")
    assert torch.endswith("-m course setup --torch cuda")


@pytest.mark.parametrize("installed, mark", [("", "✘"), ("2.13.0", "·")])
def test_an_index_out_of_reach_stops_only_the_first_start(
    monkeypatch, installed, mark
):
    monkeypatch.setattr(setup, "answers", lambda *given: False)
    monkeypatch.setattr(setup, "pip_settings", lambda python: {})
    monkeypatch.setattr(setup, "torch_version", lambda: installed)
    (finding,) = doctor.look_at_index()
    assert finding.mark == mark


# a learner's own copies -------------------------------------------------------------------------


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """A course of two lessons."""
    folder = tmp_path / "notebooks"
    (folder / "images").mkdir(parents=True)
    (folder / "images" / "a.svg").write_text("<svg/>")
    monkeypatch.setattr("course.notebooks.ROOT", tmp_path)
    monkeypatch.setattr(work, "ROOT", tmp_path)
    monkeypatch.setattr(lab, "ROOT", tmp_path)
    for module in (work, lab):
        monkeypatch.setattr(module, "WORK", tmp_path / "work")
    monkeypatch.setattr(work, "STATE", tmp_path / "work" / ".editions.json")
    for name in ("00_a", "05_b"):
        write(folder / f"{name}.ipynb", "one")
    return folder


def write(path: Path, text: str, output: str = "") -> None:
    cell = nbformat.v4.new_code_cell(text, id="a")
    if output:
        cell.outputs = [nbformat.v4.new_output("stream", text=output)]
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), path)


def read(path: Path) -> str:
    return json.loads(path.read_text())["cells"][0]["source"][0]


def test_untouched_copies_are_renewed_and_changed_ones_are_kept(shelf, capsys):
    assert work.run() == 0
    ours, hers = shelf / "05_b.ipynb", work.WORK / "05_b.ipynb"
    assert (work.WORK / "images" / "a.svg").exists()
    write(hers, "mine")
    write(work.WORK / "00_a.ipynb", "one", output="she ran it")
    for path in (ours, shelf / "00_a.ipynb"):
        write(path, "two")
    work.run()
    assert "05_b.ipynb: you have changed yours, the new one is 05_b-new.ipynb" in (
        capsys.readouterr().out
    )
    beside = work.WORK / "05_b-new.ipynb"
    assert (read(hers), read(beside)) == ("mine", "two")
    assert read(work.WORK / "00_a.ipynb") == "two"
    # What she has seen is not offered again, and what she wrote into it is not lost.
    write(beside, "mine, too")
    work.run()
    assert sorted(path.name for path in work.WORK.glob("05*")) == [
        "05_b-new.ipynb",
        "05_b.ipynb",
    ]
    write(ours, "three")
    work.run()
    assert read(beside) == "mine, too"
    assert read(work.WORK / "05_b-new2.ipynb") == "three"


def test_a_copy_that_she_brought_up_to_date_herself_is_renewed_again(shelf):
    work.run()
    ours, hers = shelf / "05_b.ipynb", work.WORK / "05_b.ipynb"
    write(ours, "two")
    write(hers, "two")
    work.run()
    write(ours, "three")
    work.run()
    assert read(hers) == "three"


def test_what_she_wrote_into_the_lesson_itself_is_not_lost_either(
    shelf, monkeypatch
):
    ours, hers = shelf / "05_b.ipynb", work.WORK / "05_b.ipynb"
    write(ours, "mine")
    monkeypatch.setattr(work, "edited", lambda path: path == ours)
    work.run()
    # She undoes it there, and an update comes.
    write(ours, "two")
    monkeypatch.setattr(work, "edited", lambda path: False)
    work.run()
    assert (read(hers), read(work.WORK / "05_b-new.ipynb")) == ("mine", "two")


def test_the_lab_opens_her_copy_where_there_is_one(shelf, monkeypatch):
    called = []
    monkeypatch.setattr(fetch, "fetch_all", lambda items: called.append(len(items)))
    monkeypatch.setattr(
        lab.subprocess,
        "call",
        lambda line, cwd, env: called.append(line[-1].split("/tree/")[1]),
    )
    lab.run("")
    lab.run("05")
    work.run()
    lab.run("5")
    assert called[1::2] == [
        "notebooks/00_a.ipynb",
        "notebooks/05_b.ipynb",
        "work/05_b.ipynb",
    ]
    assert called[::2] == [0, 0, 0]


@pytest.mark.parametrize("user, told", [(0, True), (1000, False)])
def test_the_lab_opens_also_where_root_is_the_only_user(
    shelf, monkeypatch, user, told
):
    lines = []
    monkeypatch.setattr(fetch, "fetch_all", lambda items: [])
    monkeypatch.setattr(lab.os, "geteuid", lambda: user, raising=False)
    monkeypatch.setattr(
        lab.subprocess, "call", lambda line, cwd, env: lines.append(line)
    )
    lab.run("")
    assert ("--allow-root" in lines[0]) == told


SEES = """
import subprocess
from course import lab
lab.fetch.fetch_all = print
subprocess.call = lambda command, cwd, env: print("its terminals:", env.get("HF_HUB_OFFLINE"))
lab.run(None)
"""


@pytest.mark.parametrize("said, seen", [(None, "None"), ("1", "1")])
def test_a_terminal_in_the_lab_may_log_in_at_the_hub(said, seen):
    """A lesson goes offline by itself; what Jupyter starts has the variables of the reader's shell."""
    env = {
        name: os.environ[name] for name in os.environ if name != "HF_HUB_OFFLINE"
    }
    if said:
        env["HF_HUB_OFFLINE"] = said
    command = [sys.executable, "-c", SEES]
    run = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert f"its terminals: {seen}" in run.stdout, run.stderr
