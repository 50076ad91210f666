"""What a reader is shown: nothing of a text is lost, and nothing of it becomes markup."""

import base64
import html
import io
import re
import time
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import pyplot as plt

from stages.trainer_progress import TrainerProgress
from utils import show


@pytest.fixture
def shown(monkeypatch):
    """What was displayed, as data by media type."""
    outputs = []
    monkeypatch.setattr(
        "IPython.display.display", lambda data, **_: outputs.append(data)
    )
    return outputs


class Reader(HTMLParser):
    """Reads a table as a browser does: the text of each cell, and every tag that was met."""

    def __init__(self):
        super().__init__()
        self.tags, self.cells, self.inside = set(), [], False

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag == "td":
            self.cells.append("")
            self.inside = True

    def handle_endtag(self, tag):
        self.inside = self.inside and tag != "td"

    def handle_data(self, data):
        if self.inside:
            self.cells[-1] += data


def read(outputs):
    reader = Reader()
    reader.feed(outputs[-1]["text/html"])
    reader.close()
    return reader


def test_special_tokens_are_seen_and_scripts_are_text(shown):
    show.show_table(
        [{"token": "</s> <unk> <pad>", "text": "<script>alert(1)</script>"}]
    )
    reader = read(shown)
    assert reader.cells == ["</s> <unk> <pad>", "<script>alert(1)</script>"]
    assert "script" not in reader.tags and "s" not in reader.tags


@given(st.text(alphabet=st.characters(exclude_categories=["Cs", "Cc"])))
def test_any_text_comes_out_as_it_went_in(text):
    cell = show.cell_html(text)
    assert set(re.findall(r"</?(\w+)", cell)) <= {"code", "span"}
    plain = html.unescape(re.sub(r"</?(?:code|span)>", "", cell))
    assert plain.replace("`", "") == text.replace("`", "")


def test_code_keeps_its_look_and_formulas_stay_text():
    assert show.cell_html("`a<b`") == "<code>a&lt;b</code>"
    assert "<span>$</span>" in show.cell_html("$x$")


@pytest.mark.parametrize(
    "value, text",
    [
        (True, "True"),
        (1234567, "1,234,567"),
        (0.1 + 0.2, "0.3"),
        (np.int64(5), "5"),
        (np.float32(0.5), "0.5"),
        (None, "–"),
        ("a|b", "a|b"),
        (float("nan"), "nan"),
    ],
)
def test_values_in_a_table(value, text):
    assert show.format_cell(value) == text


def test_rows_of_a_table_may_be_none_or_lack_a_value(shown, capsys):
    show.show_table([])
    assert "without rows" in capsys.readouterr().out
    show.show_table([{"a": 1, "b": 2}, {"a": 3}])
    assert read(shown).cells == ["1", "2", "3", ""]


def test_numbers_stand_to_the_right_unless_told(shown):
    show.show_table([{"name": "x", "count": 1}])
    assert re.findall(r"<td style=.text-align:(\w+)", shown[-1]["text/html"]) == [
        "left",
        "right",
    ]
    show.show_table([{"name": "x", "count": 1}], align="cl")
    assert re.findall(r"<td style=.text-align:(\w+)", shown[-1]["text/html"]) == [
        "center",
        "left",
    ]


def test_a_figure_has_a_text_for_those_who_cannot_see_it(shown):
    figure, _ = plt.subplots()
    show.show_figure(figure, "a line that rises")
    assert shown[-1]["text/plain"] == "[figure: a line that rises]"
    picture = shown[-1]["text/html"]
    assert picture.startswith(
        '<img alt="a line that rises" src="data:image/webp;base64,'
    )
    assert not plt.fignum_exists(figure.number)


def test_a_picture_takes_half_the_bytes_and_keeps_every_pixel(shown):
    figure, (left, right) = plt.subplots(1, 2)
    left.imshow(np.add.outer(np.arange(60), np.arange(60)), cmap="viridis")
    right.plot([0, 1], [1, 0], color=show.COLOURS[1])
    whole = io.BytesIO()
    figure.savefig(
        whole, format="png", dpi=110, bbox_inches="tight", facecolor="white"
    )
    show.show_figure(figure, "a heat map and a line")
    (content,) = re.findall(r'base64,([^"]+)"', shown[-1]["text/html"])
    small = base64.b64decode(content)
    assert len(small) < 0.7 * len(whole.getvalue())
    one = plt.imread(io.BytesIO(whole.getvalue()), format="png")
    two = plt.imread(io.BytesIO(small), format="webp") / 255
    assert np.abs(one[..., :3] - two[..., :3]).max() < 0.002


def test_progress_moves_on_one_line_and_leaves_nothing(monkeypatch, capsys):
    monkeypatch.delenv("TQDM_DISABLE", raising=False)

    def slowly():
        for number in range(3):
            time.sleep(0.6)
            yield number

    assert list(show.progress(slowly(), "work")) == [0, 1, 2]
    line = capsys.readouterr().err
    assert "work" in line and "\n" not in line
    assert line.endswith("\r") and not line.split("\r")[-2].strip()
    monkeypatch.setenv("TQDM_DISABLE", "1")
    assert list(show.progress(slowly())) == [0, 1, 2]
    assert capsys.readouterr().err == ""


def test_progress_of_short_work_is_not_shown(monkeypatch, capsys):
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    assert sum(show.progress([1, 2, 3])) == 6
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("headless", [False, True])
def test_a_trainer_shows_its_step_and_loss_and_leaves_nothing(
    monkeypatch, capsys, headless
):
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    if headless:
        monkeypatch.setenv("TQDM_DISABLE", "1")
    state = SimpleNamespace(max_steps=4, global_step=0, is_world_process_zero=True)
    callback = TrainerProgress()
    callback.on_train_begin(None, state, None)
    for step in range(1, 5):
        state.global_step = step
        callback.on_log(None, state, None, logs={"loss": "0.25", "epoch": 1})
        callback.bar.mininterval = 0
        callback.on_step_end(None, state, None)
    shown = capsys.readouterr().err
    callback.on_train_end(None, state, None)
    end = capsys.readouterr().err
    assert ("4/4" in shown and "loss 0.250" in shown) == (not headless)
    assert "\n" not in shown + end
    assert not end.strip()


def test_a_decorated_function_is_shown_with_its_own_place(shown):
    @torch.no_grad()
    def decorated():
        return "seen"

    show.show_source(decorated)
    text = shown[0].data
    assert 'return "seen"' in text
    assert text.startswith("`tests/test_show.py`")
