"""A hub that fits in a process: enough of the Hugging Face hub's interface to push and pull.

It listens on 127.0.0.1 only and keeps everything in memory, so a lesson or a test can run the real
`huggingface_hub` client against it, without an account or a network:

    with StandInHub() as hub:
        subprocess.run([...], env={**os.environ, **hub.environment()})

`python tests/stand_in_hub.py` serves until its standard input is closed, and prints its address.
"""
from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_stand_in"  # the only one it accepts for writing; it opens nothing anywhere else


class StandInHub:
    """Repositories in memory behind a web server on a free port of this machine."""

    def __init__(self, user: str = "reader") -> None:
        self.user, self.requests = user, []
        self.repos: dict[str, dict[str, bytes]] = {}
        handler = type("Bound", (Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __enter__(self) -> StandInHub:
        return self

    def __exit__(self, *error: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def environment(self, home: str) -> dict[str, str]:
        """The variables that point a fresh process here; `home` keeps its cache apart."""
        return {"HF_ENDPOINT": self.url, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0", "HF_HOME": home,
                "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "NO_PROXY": "*"}

    def revision(self, repo: str) -> str:
        """A commit name made of the content, forty digits long as git's are."""
        files = sorted((name, blob_name(data)) for name, data in self.repos[repo].items())
        return hashlib.sha1(repr(files).encode()).hexdigest()

    def commit(self, repo: str, body: bytes) -> None:
        """Apply the lines of a commit: a header, files in base64, deletions; nothing else."""
        for line in map(json.loads, body.splitlines()):
            kind, value = line["key"], line["value"]
            if kind == "file":
                self.repos[repo][value["path"]] = base64.b64decode(value["content"])
            elif kind == "deletedFile":
                self.repos[repo].pop(value["path"], None)
            elif kind != "header":
                raise ValueError(f"this stand-in does not take {kind!r}")


class Handler(BaseHTTPRequestHandler):
    """One request: find the route, answer in the hub's own form."""

    hub: StandInHub
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Create a repository, say how files should come, take a commit."""
        path, body = self.path_logged(), self.rfile.read(int(self.headers["Content-Length"] or 0))
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            return self.answer({"error": "a token is needed to write"}, 401)
        if path == "/api/repos/create":
            given = json.loads(body)
            repo = f"{given.get('organization') or self.hub.user}/{given['name']}"
            status = 409 if repo in self.hub.repos else 200
            self.hub.repos.setdefault(repo, {})
            return self.answer({"url": f"{self.hub.url}/{repo}", "name": repo}, status)
        if path == "/api/validate-yaml":
            return self.answer({"warnings": [], "errors": []})
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/main", path)
        if not match or match[1] not in self.hub.repos:
            return self.answer({"error": "not found"}, 404)
        if match[2] == "preupload":
            names = [file["path"] for file in json.loads(body)["files"]]
            known = self.hub.repos[match[1]]
            how = {"uploadMode": "regular", "shouldIgnore": False}
            return self.answer({"files": [{"path": name, **how, "oid": blob_name(known.get(name))}
                                          for name in names]})
        self.hub.commit(match[1], body)
        revision = self.hub.revision(match[1])
        return self.answer({"success": True, "commitOid": revision,
                            "commitUrl": f"{self.hub.url}/{match[1]}/commit/{revision}"})

    def do_GET(self) -> None:
        """Who am I, what is in a repository, and the files themselves."""
        path = self.path_logged()
        if path == "/api/whoami-v2":
            return self.answer({"name": self.hub.user, "type": "user", "orgs": []})
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if file:
            return self.answer_file(file[1], unquote(file[3]))
        route = r"/api/models/([^/]+/[^/]+)(?:/revision/[^/]+|/tree/[^/]+/?(.*))?"
        match = re.fullmatch(route, path)
        if not match or match[1] not in self.hub.repos:
            return self.answer({"error": "not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        files = self.hub.repos[match[1]]
        if "/tree/" in path:
            inside = [{"type": "file", "path": name, "size": len(data), "oid": blob_name(data)}
                      for name, data in files.items() if name.startswith(match[2])]
            if not inside:
                return self.answer({"error": "not found"}, 404, {"X-Error-Code": "EntryNotFound"})
            return self.answer(inside)
        return self.answer({"id": match[1], "modelId": match[1], "private": True, "tags": [],
                            "sha": self.hub.revision(match[1]),
                            "siblings": [{"rfilename": name} for name in files]})

    do_HEAD = do_GET

    def answer_file(self, repo: str, name: str) -> None:
        """The bytes of a file, with the headers by which the client caches it."""
        data = self.hub.repos.get(repo, {}).get(name)
        if data is None:
            return self.answer({"error": "not found"}, 404, {"X-Error-Code": "EntryNotFound"})
        headers = {"ETag": f'"{blob_name(data)}"', "X-Repo-Commit": self.hub.revision(repo)}
        return self.send(data, "application/octet-stream", 200, headers)

    def path_logged(self) -> str:
        """The path without its query; every request is remembered, for the reader to see."""
        path = urlsplit(self.path).path
        self.hub.requests.append(f"{self.command} {path}")
        return path

    def answer(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        """Answer with JSON."""
        self.send(json.dumps(value).encode(), "application/json", status, headers or {})

    def send(self, data: bytes, kind: str, status: int, headers: dict[str, str]) -> None:
        """Send a status, headers and, but for HEAD, the bytes."""
        self.send_response(status)
        headers = {"Content-Type": kind, "Content-Length": str(len(data)), **headers}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Say nothing: the hub remembers its requests itself."""


def blob_name(data: bytes | None) -> str | None:
    """The name git gives to a file's content."""
    return None if data is None else hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


if __name__ == "__main__":
    with StandInHub() as running:
        print(json.dumps({"url": running.url}), flush=True)
        sys.stdin.read()
        print(json.dumps(running.requests), flush=True)
