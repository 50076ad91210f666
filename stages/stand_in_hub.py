"""A hub that fits in a process: enough of the Hugging Face hub's interface to push and pull.

It listens on 127.0.0.1 only and keeps everything in memory, so the real client can be run against
it without an account or a network:

    with StandInHub() as hub, tempfile.TemporaryDirectory() as home:
        subprocess.run([...], env={**os.environ, **hub.environment(home)})
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import unquote, urlsplit

# The only token it takes; it opens nothing anywhere else.
TOKEN = "hf_stand_in"
# Where a hub has a file.
FILE = "{repo_id}/resolve/{revision}/{filename}"


class StandInHub(ThreadingHTTPServer):
    """A web server on a free port of this machine, with repositories in memory and a log."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.requests: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_port}"
        # Where no cache is named, none of the reader's own may hear of our repositories.
        self.cache = tempfile.TemporaryDirectory()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()

    def environment(self, home: str) -> dict[str, str]:
        """The variables that point a fresh process here; `home` keeps its cache apart."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_TOKEN": TOKEN,
            "HF_HOME": home,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "NO_PROXY": "*",
        }

    def add(self, repo: str, folder: Path) -> str:
        """Put the files of a folder into a repository; gives the name of its commit."""
        files: dict[str, bytes] = {}
        for file in sorted(folder.iterdir()):
            files[file.name] = file.read_bytes()
        self.repos[repo] = files
        return self.revision(repo)

    def ask(
        self, call: Callable[[], object], offline: bool = False
    ) -> list[dict[str, Any]]:
        """Make a call with this as its hub: what it asked of repositories."""
        self.requests.clear()
        with self.reached(offline):
            call()
        asked = []
        for request in self.requests:
            row = self.describe(request)
            if row:
                asked.append(row)
        return asked

    @contextmanager
    def reached(self, offline: bool) -> Iterator[None]:
        """For a while this process takes this server for its hub.

        The client reads the address, and whether it is offline, once, when it is imported.
        """
        from huggingface_hub import close_session, constants

        settings: dict[str, Any] = {
            "ENDPOINT": self.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": f"{self.url}/{FILE}",
            "HF_HUB_CACHE": self.cache.name,
            "HF_HUB_OFFLINE": offline,
        }
        # An open session would keep its proxy; between a machine and itself there is none.
        no_proxy = patch.dict(os.environ, NO_PROXY="*")
        close_session()
        try:
            with patch.multiple(constants, **settings), no_proxy:
                yield
        finally:
            close_session()

    def describe(self, request: str) -> dict[str, Any]:
        """A request as a row of a table; nothing if it was not about a repository."""
        method, path = request.split(" ", 1)
        repo, name = split_path(path)
        if repo not in self.repos:
            return {}
        sent = 0
        if method == "GET" and name in self.repos[repo]:
            sent = len(self.repos[repo][name])
        return {
            "method": method,
            "address": path,
            "bytes sent": sent,
        }

    def tree(self, repo: str) -> list[dict[str, Any]]:
        """The files of a repository with their sizes, as the hub lists them."""
        listing = []
        files = self.repos[repo]
        for name, data in files.items():
            file = {
                "type": "file",
                "path": name,
                "size": len(data),
                "oid": name,
            }
            listing.append(file)
        return listing

    def create(self, wish: dict[str, Any]) -> dict[str, str]:
        """Make a repository, unless there is one of that name."""
        repo = f"{wish.get('organization') or 'reader'}/{wish['name']}"
        private = wish.get("private") or wish.get("visibility") == "private"
        if private and repo not in self.repos:
            self.private.add(repo)
        self.repos.setdefault(repo, {})
        return {"url": f"{self.url}/{repo}", "name": repo}

    def commit(self, repo: str, body: bytes) -> dict[str, Any]:
        """Take the files of a commit, which come in base64, a line each after a header."""
        for line in body.splitlines()[1:]:
            file = json.loads(line)["value"]
            self.repos[repo][file["path"]] = base64.b64decode(file["content"])
        revision = self.revision(repo)
        url = f"{self.url}/{repo}/commit/{revision}"
        return {"success": True, "commitOid": revision, "commitUrl": url}

    def revision(self, repo: str) -> str:
        """A commit name made of the content, forty digits long as git's are."""
        digest = hashlib.sha1()
        files = self.repos[repo]
        for name, data in sorted(files.items()):
            digest.update(name.encode())
            digest.update(data)
        return digest.hexdigest()


def split_path(path: str) -> tuple[str, str]:
    """The repository that a request is about, and the file in it.

    >>> split_path("/api/models/course/tiny/tree/main")
    ('course/tiny', '')
    >>> split_path("/course/tiny/resolve/main/config.json")
    ('course/tiny', 'config.json')
    """
    # /api/models/OWNER/NAME/ACTION/REVISION/FILE, or without the first two
    place = unquote(path)
    place = place.removeprefix("/api/models")
    parts = place.split("/")
    repo = "/".join(parts[1:3])
    file = "/".join(parts[5:])
    return repo, file


class Handler(BaseHTTPRequestHandler):
    """One request: find what is asked, answer in the hub's own form."""

    server: StandInHub
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Create a repository, say how files should come, take a commit."""
        path, repo, _ = self.read_path()
        length = self.headers["Content-Length"]
        body = self.rfile.read(int(length or 0))
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            self.answer({"error": "a token is needed to write"}, 401)
        elif path == "/api/repos/create":
            self.answer(self.server.create(json.loads(body)))
        elif path == "/api/validate-yaml":
            self.answer({"warnings": [], "errors": []})
        elif repo not in self.server.repos:
            self.answer({}, 404, error="RepoNotFound")
        elif path.endswith("/commit/main"):
            self.answer(self.server.commit(repo, body))
        else:
            plan = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
            asked = json.loads(body)["files"]
            files = [{"path": file["path"], **plan} for file in asked]
            self.answer({"files": files})

    def do_GET(self) -> None:
        """Who am I, what is in a repository, and the files themselves."""
        hub = self.server
        path, repo, name = self.read_path()
        if path == "/api/whoami-v2":
            reader = {"name": "reader", "type": "user", "orgs": []}
            return self.answer(reader)
        if repo not in hub.repos:
            return self.answer({}, 404, error="RepoNotFound")
        files = hub.repos[repo]
        revision = hub.revision(repo)
        if name in files:
            return self.answer(files[name], commit=revision)
        if name:
            # With the commit, so that the library may note that this file never was in it.
            return self.answer({}, 404, commit=revision, error="EntryNotFound")
        if "/tree/" in path:
            return self.answer(hub.tree(repo))
        facts: dict[str, Any] = {"id": repo, "sha": revision}
        facts["private"] = repo in hub.private
        siblings = [{"rfilename": name} for name in files]
        facts["siblings"] = siblings
        return self.answer(facts)

    do_HEAD = do_GET

    def read_path(self) -> tuple[str, str, str]:
        """The path, its repository and file; every request is remembered, for the reader to see."""
        path = urlsplit(self.path).path
        self.server.requests.append(f"{self.command} {path}")
        repo, name = split_path(path)
        return path, repo, name

    def answer(
        self, content: Any, status: int = 200, error: str = "", commit: str = ""
    ) -> None:
        """Send the bytes of a file, or anything else as JSON; for HEAD, the headers alone."""
        data = (
            content if isinstance(content, bytes) else json.dumps(content).encode()
        )
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        if error:
            self.send_header("X-Error-Code", error)
        if commit:
            self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
            self.send_header("X-Repo-Commit", commit)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Print nothing: the hub has its own log."""
