"""What lesson 00 says of logging in and of figures, tried on the real client and on its own cells."""

import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from textwrap import fill

import pytest

from course import doctor, notebooks, verdicts
from stages.stand_in_hub import StandInHub
from utils.artifacts import read_json
from utils.errors import ROOT
from utils.profiles import PROFILES

TOKEN = "hf_" + "x" * 34
ASK = "from huggingface_hub import auth_check\nprint(auth_check('someone/{}'))"


class GatedHub(BaseHTTPRequestHandler):
    """Lets whoever has the token into one of its models."""

    def do_GET(self):
        sent = self.headers.get("Authorization")
        welcome = sent == f"Bearer {TOKEN}" and "/approved" in self.path
        self.send_response(200 if welcome else 403 if sent else 401)
        if not welcome:
            missing = "/missing" in self.path
            code = "RepoNotFound" if missing else "GatedRepo"
            self.send_header("X-Error-Code", code)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def gated_hub():
    hub = HTTPServer(("127.0.0.1", 0), GatedHub)
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{hub.server_port}"
    hub.shutdown()
    hub.server_close()


def settings(home, token="", **more):
    fixed = {"HF_HOME": str(home), "HF_TOKEN": token, "NO_PROXY": "*"}
    return os.environ | fixed | more


@pytest.mark.parametrize(
    "token, model, says",
    [
        ("", "approved", "GatedRepoError: 401"),
        ("", "other", "GatedRepoError: 401"),
        ("", "missing", "RepositoryNotFoundError: 401"),
        (TOKEN, "other", "GatedRepoError: 403"),
        (TOKEN, "approved", "None"),
    ],
)
def test_a_refusal_has_a_number_and_shows_no_token(
    gated_hub, tmp_path, token, model, says
):
    env = settings(tmp_path, token, HF_ENDPOINT=gated_hub, HF_HUB_OFFLINE="0")
    command = [sys.executable, "-c", ASK.format(model)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert says in done.stdout + done.stderr
    assert TOKEN not in done.stdout + done.stderr


def test_login_asks_the_hub_before_it_keeps_a_token(tmp_path):
    code = f"from huggingface_hub import login\nlogin(token={TOKEN!r})"
    env = settings(tmp_path, HF_HUB_OFFLINE="1")
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert "offline mode is enabled" in done.stderr
    assert not list(tmp_path.rglob("token*"))


def test_in_a_cell_the_command_waits_for_keys(tmp_path):
    """IPython gives a command behind `!` a terminal of its own, so it asks, and nobody can answer."""
    pexpect = pytest.importorskip("pexpect")
    code = "from huggingface_hub.cli.hf import main\nmain()"
    env = settings(tmp_path, HF_HUB_OFFLINE="1")
    child = pexpect.spawn(
        sys.executable, ["-c", code, "auth", "login"], env=env, timeout=60
    )
    child.expect("How would you like to log in")
    assert child.expect([pexpect.EOF, pexpect.TIMEOUT], timeout=2) == 1
    child.close(force=True)


def test_behind_a_pipe_as_on_windows_the_command_does_not_ask(tmp_path):
    code = "from huggingface_hub.cli.hf import main\nmain()"
    command = [sys.executable, "-c", code, "auth", "login"]
    env = settings(tmp_path, HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="0")
    done = subprocess.run(
        command, env=env, input="", capture_output=True, text=True
    )
    assert "How would you like" not in done.stdout + done.stderr
    assert "device" in done.stdout + done.stderr


@pytest.fixture
def lesson_cells():
    (lesson,) = notebooks.select("00")
    cells = notebooks.cells(notebooks.read(lesson), "code")
    return {cell["id"]: notebooks.source(cell) for cell in cells}


def test_a_token_asked_for_is_not_printed_and_goes_to_child_processes(
    lesson_cells, monkeypatch, capfd
):
    monkeypatch.setenv("HF_TOKEN", "")
    names = {"os": os, "LOG_IN": True}
    monkeypatch.setattr("getpass.getpass", lambda prompt: TOKEN)
    monkeypatch.setattr(
        "huggingface_hub.get_token", lambda: os.environ.get("HF_TOKEN") or None
    )
    exec(lesson_cells["log-in"], names)
    assert capfd.readouterr().out == "a token is set\n"
    code = "import os\nprint(os.environ['HF_TOKEN'])"
    child = [sys.executable, "-c", code]
    done = subprocess.run(child, capture_output=True, text=True)
    assert TOKEN in done.stdout


def test_online_the_cell_asks_the_hub_for_a_model_by_name(lesson_cells, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    lesson = (
        "import types\nlesson = types.SimpleNamespace(record=lambda *_: None)\n"
    )
    code = f"{lesson}from huggingface_hub import is_offline_mode\n{lesson_cells['unknown']}"
    with StandInHub() as hub:
        hub.add("HuggingFaceTB/SmolLM2-135M-Instruct", folder)
        env = os.environ | hub.environment(str(tmp_path / "home"))
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "llama", done.stderr


def test_login_in_a_cell_says_that_the_course_is_offline(lesson_cells, capfd):
    exec(lesson_cells["login-here"], {"fill": fill})
    out = capfd.readouterr().out
    assert "OfflineModeIsEnabled" in out and TOKEN not in out


@pytest.mark.parametrize("profile", ["smoke", "laptop", "gpu"])
def test_the_figure_shown_as_red_is_off_and_ours_is_not(
    lesson_cells, capfd, profile
):
    class Best:
        values = (0.218,)

    exec(lesson_cells["held"], {"best": Best, "lesson": PROFILES[profile]})
    ours, higher = capfd.readouterr().out.splitlines()
    assert ours.startswith("✔") and higher.startswith("✘")


def test_only_two_profiles_have_ranges_that_a_figure_can_leave():
    held = [name for name in PROFILES if verdicts.expectations(name, "00")]
    assert held == ["smoke", "laptop"]


def test_at_smoke_every_lesson_stays_below_the_memory_that_the_lesson_gives():
    lessons = read_json(ROOT / "results" / "smoke.json")["notebooks"]
    assert max(lesson["peak_bytes"] for lesson in lessons.values()) < 3e9


def test_doctor_ends_with_the_words_that_the_lesson_gives(monkeypatch, capfd):
    healthy = [lambda: iter([doctor.Finding("✔", "git")])]
    monkeypatch.setattr(doctor, "LOOKS", healthy)
    assert doctor.run() == 0
    assert "nothing stops the course" in capfd.readouterr().out.splitlines()[-1]


def test_the_reference_lists_what_the_summary_says():
    from transformers import GenerationConfig

    for name in ("repetition_penalty", "stop_strings"):
        assert name in (GenerationConfig.__doc__ or "")
