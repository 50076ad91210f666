"""The page of the course on which one talks to the model, and a copy of it that needs no server.

    write_copy(folder / "21_chat.html", [Recorded("chat", "Who are you?", ["I am ", "a model."])])

The copy holds recorded answers and plays them again. It may fetch nothing, and text of a model
stays text in it as in the page itself.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from utils.artifacts import plain_disk_errors

PAGE = Path(__file__).with_name("chat.html")


@dataclass(frozen=True)
class Recorded:
    """A text that was sent, and the pieces in which the answer came."""

    way: Literal["chat", "complete"]
    text: str
    pieces: list[str]


def read_page() -> str:
    """The page as it is served."""
    return PAGE.read_text(encoding="utf-8")


def policy(page: str, own: bool = True) -> str:
    """What a browser may do with a page: run the program in it, ask its own server, nothing else."""
    rules = ["default-src 'none'", "base-uri 'none'", "form-action 'none'"]
    rules.append("connect-src 'self'" if own else "connect-src 'none'")
    rules.append("img-src data:")
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        value = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        rules.append(f"{tag}-src 'sha256-{value}'")
    return "; ".join(rules)


def copy_of(page: str, answers: list[Recorded]) -> str:
    """The page with recorded answers in it, and a policy that lets it fetch nothing."""
    data = json.dumps([asdict(one) for one in answers])
    # No text can end the element that it stands in.
    data = data.replace("<", "\\u003c")
    place = '<script type="application/json" id="recorded">'
    assert page.count(place + "[]") == 1
    rules = policy(page, own=False)
    meta = f'<meta http-equiv="Content-Security-Policy" content="{rules}">'
    page = page.replace(place + "[]", place + data)
    return page.replace("<head>", f"<head>\n{meta}", 1)


def write_copy(path: Path, answers: list[Recorded]) -> None:
    """Write the copy."""
    with plain_disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(copy_of(read_page(), answers), encoding="utf-8")
