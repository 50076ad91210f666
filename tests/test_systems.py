"""Windows and macOS, as far as another system can tell: names, encodings, narrow consoles, processes."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import psutil
import pytest

from course import checkout, execute, notebooks, runner
from course.results import Result
from stages import memory
from utils import show
from utils.errors import ROOT

PRODUCT = ["utils", "stages", "course", "benchmarks"]
# What Python on Windows lacks, or does in another way.
POSIX_ALONE = {
    "os.fork", "os.mkfifo", "os.killpg", "os.getuid", "os.geteuid", "os.setsid",
    "os.sysconf", "os.kill", "os.symlink", "signal.SIGKILL", "signal.SIGSTOP",
    "signal.SIGUSR1", "signal.SIGALRM", "signal.pause",
}  # fmt: skip
# Colab and Kaggle, and what is made to be like them.
LINUX_ALONE = ("bootstrap.py", "elsewhere.py")
FORBIDDEN = re.compile(r'[<>:"|?*\\\x00-\x1f]|[ .](/|$)')
DEVICES = re.compile(r"(?i)(^|/)(con|prn|aux|nul|com\d|lpt\d)(\.|/|$)")


def tracked() -> list[str]:
    return checkout.git("ls-files", "-z").strip("\0").split("\0")


def test_every_name_can_be_written_on_every_system() -> None:
    names = tracked()
    if names == [""]:
        pytest.skip("this is no clone")
    assert [name for name in names if FORBIDDEN.search(name)] == []
    assert [name for name in names if DEVICES.search(name)] == []
    # Where capitals do not count, one of the two would replace the other.
    counts = Counter(name.lower() for name in names)
    assert [name for name, count in counts.items() if count > 1] == []
    # Windows ends a path at 260 characters, of which a reader's own folders take half.
    assert max(map(len, names)) <= 120


def texts() -> Iterator[tuple[str, str]]:
    """Each piece of the product's code with its place; of lessons only those that CI runs elsewhere."""
    for package in PRODUCT:
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.name not in LINUX_ALONE:
                yield path.name, path.read_text(encoding="utf-8")
    for path in notebooks.select("00-02"):
        for code in notebooks.code_cells(path):
            yield path.name, code


def unencoded(code: str) -> list[int]:
    """Lines that read or write text without saying in which encoding."""
    lines = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            names = {word.arg for word in node.keywords}
            # read_text(encoding), write_text(text, encoding)
            most = {"read_text": 0, "write_text": 1}.get(node.func.attr)
            if (
                most is not None
                and "encoding" not in names
                and len(node.args) <= most
            ):
                lines.append(node.lineno)
            if "text" in names and "encoding" not in names:
                lines.append(node.lineno)
    return lines


def test_no_text_is_read_or_written_in_the_system_s_own_encoding() -> None:
    found = {}
    for place, code in texts():
        if unencoded(code):
            found[place] = unencoded(code)
    assert found == {}


def test_an_encoding_that_is_not_said_is_seen() -> None:
    code = "a.read_text()\na.read_text('utf-8')\na.write_text(b)\nrun(c)\n"
    assert unencoded(code + "subprocess.run(c, text=True)") == [1, 3, 5]


def names_used(node: ast.AST) -> set[str]:
    """Names such as `os.fork` in a piece of code."""
    used = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
            used.add(f"{part.value.id}.{part.attr}")
    return used


def unmarked(code: str) -> list[str]:
    """Tests that use what POSIX alone has and do not say so by a mark."""
    tree = ast.parse(code)
    marks = {"POSIX", "LINUX", "LINKS", "MOUNTS", "pipes", "proc", "forks"}
    found = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            over = " ".join(ast.unparse(mark) for mark in node.decorator_list)
            marked = "skipif" in over or "slow" in over
            marked = marked or bool(marks & set(re.findall(r"\w+", over)))
            if not marked and names_used(node) & POSIX_ALONE:
                found.append(node.name)
    return found


def test_what_posix_alone_has_is_marked_in_the_tests() -> None:
    found = {}
    for path in sorted((ROOT / "tests").glob("test_*.py")):
        code = path.read_text(encoding="utf-8")
        # A file of slow tests is left out where they would not run.
        if "\npytestmark = pytest.mark.slow" not in code and unmarked(code):
            found[path.name] = unmarked(code)
    assert found == {}


def test_a_test_without_its_mark_is_seen() -> None:
    code = "def test_a():\n    os.mkfifo('a')\n"
    assert unmarked(code) == ["test_a"] and unmarked("@POSIX\n" + code) == []


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_a_console_without_our_signs_ends_no_command(course, encoding: str) -> None:
    course.add("00_a.ipynb", "1 + 1")
    env = {**course.env, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    env |= {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "course", "check", "--profile", "smoke"]
    done = subprocess.run(command, env=env, capture_output=True)
    words = done.stderr.decode(encoding)
    assert done.returncode == 1 and "? 00_a: no finished run" in words
    assert "Traceback" not in words


def test_memory_that_cannot_be_read_is_not_measured(monkeypatch) -> None:
    class Closed:
        def memory_full_info(self):
            raise psutil.AccessDenied(1)

        memory_info = memory_full_info

    class Enough(Exception):
        pass

    def one_pause(seconds: float) -> None:
        raise Enough

    result = Result("00_a")
    monkeypatch.setattr(execute, "below", lambda: [Closed()])
    monkeypatch.setattr(execute.time, "sleep", one_pause)
    with pytest.raises(Enough):
        execute.watch_memory(result)
    assert result.peak_bytes is None
    assert show.format_memory(result.peak_bytes) == "not measured"


def test_on_a_mac_a_child_s_memory_is_what_it_tells_of_others(monkeypatch) -> None:
    class Guarded(psutil.Process):
        def memory_full_info(self):
            raise psutil.AccessDenied(self.pid)

    assert execute.memory_of([Guarded(os.getpid())]) > 1e6


def test_on_windows_the_interpreter_itself_is_measured(monkeypatch) -> None:
    monkeypatch.setattr(sys, "_base_executable", "C:/Python/python.exe")
    monkeypatch.setattr(memory, "WINDOWS", True)
    program, env = memory.real_interpreter()
    assert program == "C:/Python/python.exe"
    assert env["__PYVENV_LAUNCHER__"] == sys.executable
    monkeypatch.setattr(memory, "WINDOWS", False)
    assert memory.real_interpreter()[0] == sys.executable


def test_a_lesson_does_not_take_the_runner_s_interrupts() -> None:
    windows = sys.platform == "win32"
    wanted = "creationflags" if windows else "start_new_session"
    assert list(runner.APART) == [wanted]


def test_a_kernel_listens_on_a_local_socket_where_there_are_some(
    monkeypatch,
) -> None:
    assert execute.make_kernel("/tmp/k").transport == (
        "tcp" if sys.platform == "win32" else "ipc"
    )
    # A socket's path has a limit.
    assert execute.make_kernel("/tmp/" + "k" * 99).transport == "tcp"
    monkeypatch.setattr(execute.sys, "platform", "win32")
    assert execute.make_kernel("C:/k").transport == "tcp"


def test_a_console_that_is_not_a_file_is_left_alone(monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    show.tolerate_narrow_consoles()
