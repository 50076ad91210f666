"""The page on which one talks to the model: in a real browser, by keyboard, with hostile answers."""

from __future__ import annotations

import json
import re
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import browser as browsers
import pytest
from small_server import LIMITS, NAME, write_small

from stages.serving import serve
from stages.serving_page import Recorded, copy_of, policy, read_page, write_copy

PAGE = read_page()
HOSTILE = '</script><img src=x onerror="document.title=1"><b>bold</b>'
NEEDS_BROWSER = pytest.mark.skipif(
    bool(browsers.why_none()), reason=browsers.why_none() or "there is one"
)


@pytest.fixture(scope="module")
def browser():
    with browsers.start() as browser:
        yield browser


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = write_small(tmp_path_factory.mktemp("model"))
    with serve(folder, NAME, LIMITS) as url:
        yield url


class Scripted(BaseHTTPRequestHandler):
    """The page, and a model that writes markup."""

    def do_GET(self):
        if self.path == "/":
            rules = [("Content-Security-Policy", policy(PAGE))]
            self.answer("text/html; charset=utf-8", PAGE.encode(), rules)
        else:
            body = json.dumps({"data": [{"id": "scripted"}]}).encode()
            self.answer("application/json", body)

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        event = {"choices": [{"delta": {"content": HOSTILE}, "text": HOSTILE}]}
        data = f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode()
        self.answer("text/event-stream", data)

    def answer(self, kind, body, headers=()):
        self.send_response(200)
        for name, value in [
            ("Content-Type", kind),
            ("Content-Length", len(body)),
            *headers,
        ]:
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words):
        pass


@pytest.fixture
def scripted():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def luminance(colour):
    values = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [
        v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_and_edges_have_the_contrast_of_aa(theme):
    colours = dict(
        re.findall(
            r"--(\w+): (#\w{6})",
            re.findall(r"color-scheme:[^}]*|:root \{ --[^}]*", PAGE)[theme],
        )
    )
    for ground in ("page", "card"):
        for ink in ("ink", "soft", "link", "bad"):
            assert contrast(colours[ink], colours[ground]) >= 4.5, (ink, ground)
        assert contrast(colours["line"], colours[ground]) >= 3, ("line", ground)
    assert contrast(colours["on"], colours["link"]) >= 4.5


def test_the_page_asks_no_other_host_and_writes_no_markup():
    assert not re.findall(r"(?:src|href)=[\"']?(?:https?:)?//", PAGE)
    assert not re.findall(
        r"@import|url\(|innerHTML|outerHTML|insertAdjacent|document\.write|eval",
        PAGE.replace("there is no innerHTML here", ""),
    )
    assert "default-src 'none'" in policy(PAGE) and "connect-src 'self'" in policy(
        PAGE
    )


def test_every_field_has_a_label_and_the_state_is_a_live_region():
    fields = re.findall(r"<(?:input|textarea|select)[^>]*?id=\"([\w-]+)\"", PAGE)
    assert {"text", "most", "heat", "key", "recorded-text"} <= set(fields)
    for name in fields:
        assert f'for="{name}"' in PAGE, name
    assert re.search(r'id="state" role="status" aria-live="polite"', PAGE)
    assert '<html lang="en">' in PAGE and "<legend>" in PAGE


def test_recorded_text_cannot_leave_its_element():
    page = copy_of(PAGE, [Recorded("chat", HOSTILE, [HOSTILE])])
    assert HOSTILE not in page and "<img" not in page and "<b>bold" not in page
    data = re.search(r'id="recorded">(.*?)</script>', page, re.DOTALL)[1]
    assert json.loads(data)[0]["pieces"] == [HOSTILE]
    assert "connect-src 'none'" in page


SEND = "return document.querySelector('#state').textContent.startsWith('The answer is complete')"


@NEEDS_BROWSER
def test_a_question_is_asked_and_answered_by_keyboard_alone(browser, url):
    browser.open(url + "/")
    browser.wait(
        "return document.querySelector('#state').textContent.startsWith('Ready')",
    )
    # Tab by tab to the text field: the skip link, the choice of two, the text.
    for _ in range(12):
        browser.press("Tab")
        if browser.run("return document.activeElement.id") == "text":
            break
    assert browser.run("return document.activeElement.id") == "text"
    browser.press(*"hello")
    control = [
        {"type": "keyDown", "value": "\ue009"},
        {"type": "keyDown", "value": "\ue007"},
    ]
    control += [
        {"type": "keyUp", "value": "\ue007"},
        {"type": "keyUp", "value": "\ue009"},
    ]
    device = {"type": "key", "id": "keys", "actions": control}
    browser.ask("POST", "/actions", actions=[device])
    browser.wait(SEND)
    talk = browser.run(
        "return [...document.querySelectorAll('#talk pre')].map(p => p.textContent)"
    )
    assert talk[0] == "hello" and len(talk) == 2 and talk[1]
    body = {"model": NAME, "messages": [{"role": "user", "content": "hello"}]}
    body |= {"max_tokens": 64, "temperature": 0}
    letter = urllib.request.Request(
        url + "/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(letter, timeout=60) as answer:
        assert talk[1] == json.load(answer)["choices"][0]["message"]["content"]
    asked = [
        one for one in browser.requests() if not one.startswith(("data:", "chrome"))
    ]
    assert asked and all(one.startswith(url) for one in asked)


@NEEDS_BROWSER
def test_escape_stops_an_answer_and_frees_its_row(browser, url):
    browser.open(url + "/")
    browser.wait(
        "return document.querySelector('#state').textContent.startsWith('Ready')",
    )
    browser.run(
        "document.querySelector('#most').value = 200; document.querySelector('#text').focus()"
    )
    browser.press(*"go")
    browser.run(
        "document.querySelector('#form').requestSubmit(); document.querySelector('#halt').click()"
    )
    state = browser.wait(
        "return document.querySelector('#send').disabled ? '' : document.querySelector('#state').textContent",
    )
    assert state == "Stopped."
    end = time.monotonic() + 20
    while time.monotonic() < end:
        with urllib.request.urlopen(url + "/metrics", timeout=60) as answer:
            if b"requests_open 0" in answer.read():
                return
    raise AssertionError("its row is still taken")


@NEEDS_BROWSER
def test_an_error_of_the_server_is_said_in_words(browser, url):
    browser.open(url + "/")
    browser.wait(
        "return document.querySelector('#state').textContent.startsWith('Ready')",
    )
    browser.run(
        "document.querySelector('#text').value = 'x'.repeat(500);"
        "document.querySelector('#form').requestSubmit()"
    )
    state = browser.wait("return document.querySelector('#state.bad')?.textContent")
    assert "tokens" in state
    assert (
        browser.run("return document.querySelector('#state').getAttribute('role')")
        == "status"
    )


@NEEDS_BROWSER
@pytest.mark.parametrize("way", ["chat", "complete"])
def test_what_a_model_writes_stays_text(browser, scripted, way):
    browser.open(scripted)
    browser.wait(
        "return document.querySelector('#state').textContent.startsWith('Ready')",
    )
    browser.run(
        f"document.querySelector('input[value={way}]').checked = true;"
        "document.querySelector('#text').value = 'x';"
        "document.querySelector('#form').requestSubmit()"
    )
    browser.wait(SEND)
    assert HOSTILE in browser.run(
        "return [...document.querySelectorAll('#talk pre')].at(-1).textContent"
    )
    assert (
        browser.run(
            "return document.querySelectorAll('#talk img, #talk b:not(li > b)').length"
        )
        == 0
    )
    assert browser.run("return document.title") == "Talk to the course's model"


@NEEDS_BROWSER
def test_a_copy_plays_without_a_server_and_asks_nobody(browser, tmp_path):
    write_copy(
        tmp_path / "copy.html",
        [
            Recorded("chat", "Who?", ["A ", "mo", "del."]),
            Recorded("complete", "def f", ["(x)"]),
        ],
    )
    browser.requests()
    browser.open((tmp_path / "copy.html").as_uri())
    browser.wait(
        "return document.querySelector('#state').textContent.includes('recorded')",
    )
    browser.run("document.querySelector('#form').requestSubmit()")
    browser.wait(SEND)
    assert (
        browser.run(
            "return [...document.querySelectorAll('#talk pre')].at(-1).textContent"
        )
        == "A model."
    )
    browser.run(
        "document.querySelector('#text').value = 'else'; document.querySelector('#form').requestSubmit()"
    )
    assert "no server" in browser.wait(
        "return document.querySelector('#state.bad')?.textContent"
    )
    asked = [
        one
        for one in browser.requests()
        if not one.startswith(("data:", "chrome", "file:"))
    ]
    assert asked == []
