"""A web server for files, and the reader that asks it for ranges of bytes.

`datasets` reaches every remote place through fsspec, whose own reader for http needs a package that
the course does without. This one does the same with what Python has: one request a range.

    with RangeServer(folder, delay=0.02) as server:
        rows = load_dataset("parquet", data_files=server.url + "/a.parquet", streaming=True)
"""

from __future__ import annotations

import http.client
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem


class RangeServer(ThreadingHTTPServer):
    """Serves the files of a folder on this machine; `sent` holds the bytes of each answer.

    Every answer waits for `delay` seconds and takes its time over the bytes, as from far away.
    """

    daemon_threads = True

    def __init__(
        self, folder: Path | str, delay: float = 0.0, rate: float = 1e12
    ) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = Path(folder)
        self.delay = delay
        self.rate = rate
        self.sent: list[int] = []
        self.url = f"http://127.0.0.1:{self.server_port}"
        fsspec.register_implementation("http", RangeFileSystem, clobber=True)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Keep quiet where a client went away, or asked for what is not there."""


class Handler(BaseHTTPRequestHandler):
    """Answers HEAD with a file's length and GET with the range that was asked for."""

    server: RangeServer
    protocol_version = "HTTP/1.1"  # keeps a connection open for the next request

    def do_HEAD(self) -> None:
        """Answer with the length alone; nothing of the file is read."""
        path = self.find_file()
        self.answer(200, path.stat().st_size, b"")

    def do_GET(self) -> None:
        """Answer with the bytes from the first to the last that the header `Range` names."""
        path = self.find_file()
        span = self.headers["Range"].removeprefix("bytes=")
        first, last = map(int, span.split("-"))
        with path.open("rb") as file:
            file.seek(first)
            part = file.read(last + 1 - first)
        self.answer(206, len(part), part)

    def find_file(self) -> Path:
        """The file that is asked for; a name that leads out of the folder finds nothing."""
        time.sleep(self.server.delay)
        name = Path(self.path).name
        path = self.server.folder / name
        if path.is_file():
            return path
        self.answer(404, 0, b"")
        raise ConnectionAbortedError(name)

    def answer(self, status: int, length: int, body: bytes) -> None:
        """Send the header and the body, and note how much it was."""
        self.server.sent.append(len(body))
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        time.sleep(len(body) / self.server.rate)
        self.wfile.write(body)

    def log_message(self, *words: Any) -> None:
        """Keep quiet: the default writes a line for each request."""


class RangeFile(AbstractBufferedFile):
    """A remote file; fsspec decides which ranges it wants and keeps what may be read next."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        headers = {"Range": f"bytes={start}-{end - 1}"}
        return ask("GET", self.path, headers)[1]


class RangeFileSystem(AbstractFileSystem):
    """fsspec's view of a web server: files with a size that can be opened for reading."""

    protocol = "http"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        """Name and size of a file."""
        length, _ = ask("HEAD", path, {})
        return {
            "name": path,
            "size": length,
            "type": "file",
        }

    def glob(self, path: str, **options: Any) -> Any:
        """A web server lists nothing, so a name stands for itself."""
        return {path: self.info(path)} if options.get("detail") else [path]

    def _open(self, path: str, mode: str = "rb", **options: Any) -> RangeFile:
        return RangeFile(self, path, mode, **options)


def ask(method: str, url: str, headers: dict[str, str]) -> tuple[int, bytes]:
    """The length that a server states for one request, and what it sends."""
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.netloc)
    connection.request(method, place.path, headers=headers)
    answer = connection.getresponse()
    if answer.status >= 400:
        raise FileNotFoundError(url)
    body = answer.read()
    connection.close()
    return int(answer.headers["Content-Length"]), body
