"""The server as a process: started and stopped by one command each, with one worker or several.

    python -m stages.serving start FOLDER --port 8000 --workers 2
    python -m stages.serving stop --port 8000

With several workers a parent opens the address, and each worker, a process with a model of its own,
takes connections from it; one that dies is replaced. In a notebook the server is a thread:

    with serve(folder, "course-model") as url: ...
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import uvicorn

from stages.guarded import answers, end, free_port
from stages.serving_http import end_with_parent, options
from stages.serving_protocol import KEYS, Callers, Limits
from utils.artifacts import read_json, write_json
from utils.errors import ROOT, CourseError, build_folder

if TYPE_CHECKING:
    from fastapi import FastAPI

# How a worker finds its settings, since it is started with no arguments. No key is in them.
SETTINGS = "COURSE_SERVE_SETTINGS"
START_SECONDS = 180


def app_from_settings() -> FastAPI:
    """The application of a worker, by what its environment says."""
    # The parent of several workers needs none of this, and starts without it.
    import torch

    from stages.serving_app import build_app

    keep_journal()
    given = json.loads(os.environ[SETTINGS])
    if given["workers"] > 1:
        end_with_parent(given["parent"])
    torch.set_num_threads(given["threads"])
    limits = Limits(**given["limits"])
    hosts = tuple(given["hosts"])
    callers = Callers.from_environment()
    return build_app(given["folder"], given["name"], limits, callers, hosts)


def keep_journal() -> None:
    """Write the server's line for each request to the output, which `start` keeps in a file."""
    lines = logging.StreamHandler()
    lines.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    journal = logging.getLogger("course.serving")
    journal.addHandler(lines)
    journal.setLevel(logging.INFO)


@contextmanager
def serve(
    folder: Path | str,
    name: str,
    limits: Limits | None = None,
    callers: Callers | None = None,
) -> Iterator[str]:
    """A server in a thread of this process, on a free port of this machine; its address.

    It ends with the block, also when something in the block fails.
    """
    from stages.serving_app import build_app

    limits = limits or Limits()
    app = build_app(folder, name, limits, callers or Callers())
    with serve_app(app, **options(limits)) as url:
        yield url


@contextmanager
def serve_app(app: FastAPI, **how: Any) -> Iterator[str]:
    """Any application, likewise."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        usual = {"log_level": "warning", "timeout_graceful_shutdown": 2}
        config = uvicorn.Config(app, **{**usual, **how})
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([place],), daemon=True)
        thread.start()
        try:
            while not server.started and thread.is_alive():
                time.sleep(0.01)
            if not server.started:
                raise CourseError("the server did not start", fix="see its message")
            yield f"http://127.0.0.1:{place.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(timeout=60)


def run(given: dict[str, Any]) -> None:
    """Serve until somebody ends it."""
    os.environ[SETTINGS] = json.dumps({**given, "parent": os.getpid()})
    limits = Limits(**given["limits"])
    uvicorn.run(
        "stages.serving:app_from_settings",
        factory=True,
        host=given["host"],
        port=given["port"],
        workers=given["workers"],
        timeout_worker_healthcheck=60,
        **options(limits),
    )


def command_for(
    folder: Path | str,
    name: str,
    port: int,
    limits: Limits | None = None,
    workers: int = 1,
    threads: int = 1,
    host: str = "127.0.0.1",
    hosts: list[str] | None = None,
) -> list[str]:
    """The command that serves a folder until it is ended."""
    given = {"folder": str(folder), "name": name, "host": host, "port": port}
    given |= {"workers": workers, "threads": threads, "hosts": hosts or []}
    given |= {"limits": (limits or Limits()).model_dump()}
    return [sys.executable, "-m", "stages.serving", "run", json.dumps(given)]


def note(port: int) -> Path:
    """Where it is noted which process serves a port."""
    return build_folder() / "serving" / f"{port}.json"


def start(folder: Path, name: str, port: int, **how: Any) -> str:
    """Start a server in the background and wait until it answers; its address."""
    path = note(port)
    path.parent.mkdir(parents=True, exist_ok=True)
    if find(port):
        raise CourseError("a server is running", path, f"stop --port {port}")
    url = f"http://127.0.0.1:{port}"
    if answers(url):
        raise CourseError(
            f"something else listens on port {port}", fix="take another"
        )
    command = command_for(folder, name, port, **how)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    journal = path.with_suffix(".log")
    with journal.open("wb") as file:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=environment,
            start_new_session=True,
        )
    begun = psutil.Process(child.pid).create_time()
    write_json(path, {"pid": child.pid, "begun": begun})
    wait_for(url, child, journal)
    return url


def wait_for(url: str, child: subprocess.Popen[bytes], journal: Path) -> None:
    """Return when a server answers; an error if it ends before that."""
    late = time.monotonic() + START_SECONDS
    while time.monotonic() < late and child.poll() is None:
        if answers(url):
            return
        time.sleep(0.2)
    end(psutil.Process(child.pid))
    raise CourseError("the server did not come up", journal, "read its last lines")


def find(port: int) -> psutil.Process | None:
    """The process that serves a port, if it is the one that was started here."""
    facts = read_json(note(port))
    try:
        process = psutil.Process(facts["pid"])
        # Another process may have the number by now.
        same = abs(process.create_time() - facts["begun"]) < 1
    except (TypeError, KeyError, psutil.NoSuchProcess):
        return None
    return process if same else None


def stop(port: int) -> bool:
    """End the server of a port and all its workers; whether there was one."""
    process = find(port)
    note(port).unlink(missing_ok=True)
    if process is None:
        return False
    end(process)
    return True


def read_arguments(words: list[str]) -> argparse.Namespace:
    """What was typed."""
    parser = argparse.ArgumentParser(prog="python -m stages.serving")
    commands = parser.add_subparsers(dest="command", required=True)
    begin = commands.add_parser("start", help="serve a model in the background")
    begin.add_argument("folder", help="a folder that `save_pretrained` has written")
    begin.add_argument(
        "--name", help="what callers call it; by default the folder's"
    )
    begin.add_argument("--host", default="127.0.0.1")
    begin.add_argument("--hosts", nargs="*", default=[], help="names it answers to")
    begin.add_argument("--port", type=int, default=8000)
    begin.add_argument("--workers", type=int, default=1)
    begin.add_argument("--threads", type=int, default=1, help="of each worker")
    begin.add_argument("--limits", type=json.loads, default={}, help="as JSON")
    over = commands.add_parser("stop", help="end it")
    over.add_argument("--port", type=int, default=8000)
    child = commands.add_parser("run", help="what `start` starts")
    child.add_argument("given", type=json.loads)
    return parser.parse_args(words)


def main(words: list[str]) -> int:
    """Start, stop, or serve until ended."""
    given = vars(read_arguments(words))
    command = given.pop("command")
    if command == "run":
        run(given["given"])
    elif command == "stop":
        print("stopped" if stop(given["port"]) else "no server of ours is there")
    else:
        folder = Path(given.pop("folder")).resolve()
        name = given.pop("name") or folder.name
        port = given.pop("port") or free_port()
        given["limits"] = Limits(**given["limits"])
        print(f"serving {name} at {start(folder, name, port, **given)}")
        if not os.environ.get(KEYS):
            print(f"anyone on this machine may ask: {KEYS} names no callers")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except CourseError as error:
        sys.exit(str(error))
