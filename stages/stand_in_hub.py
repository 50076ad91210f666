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
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import unquote, urlsplit

# The only token it takes; it opens nothing anywhere else.
TOKEN = "hf_stand_in"

Headers = dict[str, str]


class StandInHub:
    """Repositories in memory, a log of requests, and a web server on a free port of this machine."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.requests: list[str] = []
        handler = type("BoundHandler", (Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def environment(self, home: str) -> dict[str, str]:
        """The variables that point a fresh process here; `home` keeps its cache apart."""
        names = {
            "HF_ENDPOINT": self.url,
            "HF_TOKEN": TOKEN,
            "HF_HOME": home,
            "NO_PROXY": "*",
        }
        switches = {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        return {**names, **switches, "HF_HUB_OFFLINE": "0"}

    def create(self, wish: dict[str, Any]) -> dict[str, str]:
        """Make a repository, unless there is one of that name."""
        repo = f"{wish.get('organization') or 'reader'}/{wish['name']}"
        private = wish.get("private") or wish.get("visibility") == "private"
        if private and repo not in self.repos:
            self.private.add(repo)
        self.repos.setdefault(repo, {})
        return {"url": f"{self.url}/{repo}", "name": repo}

    def commit(self, repo: str, body: bytes) -> dict[str, Any]:
        """Apply the lines of a commit: a header, files in base64, deletions; nothing else."""
        for line in map(json.loads, body.splitlines()):
            kind, value = line["key"], line["value"]
            if kind == "file":
                self.repos[repo][value["path"]] = base64.b64decode(value["content"])
            elif kind == "deletedFile":
                self.repos[repo].pop(value["path"], None)
            elif kind != "header":
                raise ValueError(f"this stand-in does not take {kind!r}")
        url = f"{self.url}/{repo}/commit/{self.revision(repo)}"
        return {"success": True, "commitOid": self.revision(repo), "commitUrl": url}

    def revision(self, repo: str) -> str:
        """A commit name made of the content, forty digits long as git's are."""
        digest = hashlib.sha1()
        for name, data in sorted(self.repos[repo].items()):
            digest.update(
                hashlib.sha1(name.encode()).digest() + hashlib.sha1(data).digest()
            )
        return digest.hexdigest()


class Handler(BaseHTTPRequestHandler):
    """One request: find what is asked, answer in the hub's own form."""

    hub: StandInHub
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Create a repository, say how files should come, take a commit."""
        path = self.log_path()
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        match = re.fullmatch(
            r"/api/models/([^/]+/[^/]+)/(preupload|commit)/main", path
        )
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            self.answer({"error": "a token is needed to write"}, 401)
        elif path == "/api/repos/create":
            self.answer(self.hub.create(json.loads(body)))
        elif path == "/api/validate-yaml":
            self.answer({"warnings": [], "errors": []})
        elif match is None or match[1] not in self.hub.repos:
            self.answer({}, 404, {"X-Error-Code": "RepoNotFound"})
        elif match[2] == "commit":
            self.answer(self.hub.commit(match[1], body))
        else:
            files = json.loads(body)["files"]
            plan = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
            self.answer(
                {"files": [{"path": file["path"], **plan} for file in files]}
            )

    def do_GET(self) -> None:
        """Who am I, what is in a repository, and the files themselves."""
        path = self.log_path()
        match = re.match(
            r"/(?:api/models/)?([^/]+/[^/]+)(?:/(resolve|tree)/[^/]+/(.+))?", path
        )
        files = self.hub.repos.get(match[1]) if match else None
        if path == "/api/whoami-v2":
            self.answer({"name": "reader", "type": "user", "orgs": []})
        elif match is None or files is None:
            self.answer({}, 404, {"X-Error-Code": "RepoNotFound"})
        elif match[2] is None:
            names = [{"rfilename": name} for name in files]
            facts = {"id": match[1], "sha": self.hub.revision(match[1])}
            is_private = match[1] in self.hub.private
            self.answer({**facts, "siblings": names, "private": is_private})
        elif match[2] == "resolve" and unquote(match[3]) in files:
            data = files[unquote(match[3])]
            tag = f'"{hashlib.sha1(data).hexdigest()}"'
            self.answer(
                data,
                200,
                {"ETag": tag, "X-Repo-Commit": self.hub.revision(match[1])},
            )
        else:
            self.answer({}, 404, {"X-Error-Code": "EntryNotFound"})

    do_HEAD = do_GET

    def answer(
        self, content: Any, status: int = 200, headers: Headers | None = None
    ) -> None:
        """Send the bytes of a file, or anything else as JSON; for HEAD, the headers alone."""
        data = (
            content if isinstance(content, bytes) else json.dumps(content).encode()
        )
        self.send_response(status)
        for name, value in {
            **(headers or {}),
            "Content-Length": str(len(data)),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_path(self) -> str:
        """The path without its query; every request is remembered, for the reader to see."""
        path = urlsplit(self.path).path
        self.hub.requests.append(f"{self.command} {path}")
        return path

    def log_message(self, *_: object) -> None:
        """Print nothing: the hub has its own log."""
