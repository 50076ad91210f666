"""The page for teachers: its plans, and its drawing of which lesson comes before which."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from course import generate, prerequisites
from course.notebooks import read
from utils.errors import ROOT, CourseError

PAGE = (ROOT / "docs/teaching.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
DRAWING = (ROOT / "docs/prerequisites.svg").read_text(encoding="utf-8")
LESSONS = [path.name[:2] for path in generate.select()]
LINK = re.compile(r"\[(\w\w)\]\(\.\./notebooks/\1_\w+\.ipynb\)")
SVG = "{http://www.w3.org/2000/svg}"
PLANS = ["Fourteen weeks", "Two days"]


def section(title):
    """The text below a heading of the page."""
    _, found, rest = PAGE.partition(f"\n## {title}\n")
    assert found, title
    return rest.partition("\n## ")[0]


def rows(text):
    """The rows of a table, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return lines[2:]


def table_of_needs():
    """What each lesson needs, as the table says it."""
    needs = {}
    for row in rows(section("What each lesson takes")):
        cells = row.split(" | ")
        number = re.match(r"\| \[(\w\w) · ", cells[0])[1]
        needs[number] = LINK.findall(cells[2])
    return needs


NEEDS = table_of_needs()
ARROWS = [(before, after) for after in NEEDS for before in NEEDS[after]]


# plans ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("title", PLANS)
def test_a_plan_names_every_lesson_once_or_says_that_it_is_left_out(title):
    plan = section(title)
    taken = LINK.findall("\n".join(rows(plan)))
    _, _, sentence = plan.partition("\nLeft out ")
    left_out = LINK.findall(sentence)
    assert sorted(taken + left_out) == LESSONS
    assert plan.count("](../notebooks/") == len(LESSONS), (
        "a link that is no lesson's"
    )


@pytest.mark.parametrize("title", PLANS)
def test_a_plan_keeps_the_order_of_the_table(title):
    taken = LINK.findall("\n".join(rows(section(title))))
    for before, after in ARROWS:
        if before in taken and after in taken:
            assert taken.index(before) < taken.index(after), (before, after)


def test_a_term_has_fourteen_weeks():
    weeks = [row.split(" | ")[0] for row in rows(section("Fourteen weeks"))]
    assert weeks == [f"| {week}" for week in range(1, 15)]


def test_the_exercises_of_the_plans_exist():
    headings = set()
    for path in generate.select():
        for cell in read(path)["cells"]:
            text = "".join(cell["source"])
            headings.update(re.findall(r"(?m)^### Exercise (\w\w\.\d+)", text))
    text = section("Fourteen weeks") + section("Two days")
    named = set(re.findall(r"\b(\d\d\.\d)\b", text))
    assert len(named) >= 10 and named <= headings


def test_a_plan_says_what_the_cage_cannot_judge():
    (told,) = re.findall(r"the table says `by hand`(.+?)\n\n", PAGE, re.S)
    by_hand = set(re.findall(r"\b\d\d\.\d\b", told))
    assert len(by_hand) == 7
    for row in rows(section("Fourteen weeks")):
        for number, marked in re.findall(r"(\d\d\.\d)([^|.]*?\(by hand\))?", row):
            assert (number in by_hand) == bool(marked), row


# hours ------------------------------------------------------------------------------------------


def test_hours_are_written_without_an_empty_fraction():
    hours = [row.split(" | ")[1] for row in rows(section("What each lesson takes"))]
    assert len(hours) == len(LESSONS)
    assert [text for text in hours if text != f"{float(text):g}"] == []


def test_readme_says_how_long_a_lesson_takes():
    hours = []
    for path in generate.select():
        hours.append(read(path)["metadata"]["course"]["hours"])
    words = {1.5: "one and a half", 4: "four"}
    told = f"for {words[min(hours)]} to {words[max(hours)]} hours"
    assert told in README


# drawing ----------------------------------------------------------------------------------------


def boxes():
    """Each box of the drawing: its left and right edge, its top and its foot."""
    found = {}
    for rect in ElementTree.fromstring(DRAWING).iter(SVG + "rect"):
        if "id" in rect.attrib:
            x, y, width, height = (
                int(rect.get(name)) for name in ("x", "y", "width", "height")
            )
            name = rect.get("id").removeprefix("lesson-")
            assert name not in found
            found[name] = (x, x + width, y, y + height)
    return found


def test_the_drawing_has_a_box_for_every_lesson_and_an_arrow_for_every_need():
    assert sorted(boxes()) == sorted(NEEDS) == LESSONS
    assert len(ARROWS) >= 30
    drawn = []
    for path in ElementTree.fromstring(DRAWING).iter(SVG + "path"):
        if "id" in path.attrib:
            _, before, after = path.get("id").split("-")
            drawn.append((before, after))
            assert path.get("marker-end")
    assert sorted(drawn) == sorted(ARROWS)


def test_an_arrow_leads_from_a_box_to_one_on_its_right():
    places = boxes()
    for before, after in ARROWS:
        way = re.search(f'id="arrow-{before}-{after}" d="([^"]+)"', DRAWING)[1]
        numbers = [int(number) for number in re.findall(r"-?\d+", way)]
        _, start, top, foot = places[before]
        assert numbers[0] == start and top < numbers[1] < foot
        end, _, top, foot = places[after]
        assert numbers[-2] == end and top < numbers[-1] < foot
        assert start < end


def test_no_boxes_overlap_and_no_arrow_runs_through_one():
    places = boxes()
    for name, (left, right, top, foot) in places.items():
        for other, (x, _, other_top, other_foot) in places.items():
            if name != other and x == left:
                assert other_foot < top or foot < other_top, (name, other)
        for way in re.findall(r'id="arrow-\S+ d="([^"]+)"', DRAWING):
            passed = re.findall(rf" {left} (-?\d+) H{right}\b", way)
            assert not any(top <= int(y) <= foot for y in passed), (name, way)


def test_the_drawing_says_what_it_is_and_asks_for_nothing():
    root = ElementTree.fromstring(DRAWING)
    assert root.get("role") == "img" and root[0].tag == SVG + "title"
    assert int(root.get("width")) <= 760
    assert "sans-serif" in root.get("font-family")
    for word in ("<script", "<style", "href", "@font-face"):
        assert word not in DRAWING
    alt = re.search(r"!\[([^\]]+)\]\(prerequisites\.svg\)", PAGE)[1]
    assert sorted(re.findall(r"\b(?:\d\d|A1)\b", alt.partition(": ")[2])) == LESSONS
    assert f"The {len(NEEDS)} lessons" in alt and f"{len(ARROWS)} arrows" in alt


def test_a_need_of_a_later_lesson_is_an_error():
    with pytest.raises(CourseError, match="lesson 03 needs lesson 04"):
        prerequisites.ranks({"03": ["04"], "04": []})
