"""Draws which lesson comes before which: a box for each lesson, right of all that it needs.

An arrow that skips columns passes each of them on a lane between the boxes, and all arrows of one
lesson share that lane. The order within the columns is what the arrows' ends pull it to, and the
one with the fewest crossings is kept, so that the same lessons always give the same drawing.
"""

from __future__ import annotations

import html
import re
import textwrap
from itertools import combinations, pairwise
from statistics import fmean
from typing import Any

from utils.errors import CourseError

# What each lesson needs, by number, in reading order.
Needs = dict[str, list[str]]
# A lesson, and one that needs it.
Arrow = tuple[str, str]
# A column and a lesson: its box, or in a later column the lane of its arrows.
Place = tuple[int, str]

BOX_WIDTH = 82
LINE = 14
LINES = 4
BOX_HEIGHT = LINES * LINE + 10
LANE_HEIGHT = 4
GAP = 13
STEP = BOX_HEIGHT + GAP
COLUMN_STEP = 106
MARGIN = 12
# How far apart arrows end at one box.
TIPS = 10
LETTERS = 11
SWEEPS = 40
DARK = "#555"
PALE = "#949494"
BOX_STYLE = 'fill="#e8f2f9" stroke="#0072B2" stroke-width="1.5"'
FONT = "system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"
TITLE = "Which lesson comes before which"
LEGEND = "Read from left to right. A pale arrow says only what dark ones imply."


def needs_of(lessons: list[dict[str, Any]]) -> Needs:
    """What each lesson needs; one that cannot be read at the moment is in no box and no arrow."""
    numbers = {lesson["number"] for lesson in lessons}
    needs: Needs = {}
    for lesson in lessons:
        before = []
        for name in lesson["after_lessons"]:
            number = name[:2]
            if number in numbers:
                before.append(number)
        needs[lesson["number"]] = before
    return needs


def ranks(needs: Needs) -> dict[str, int]:
    """The column of each lesson: one right of the last that it needs.

    >>> ranks({"00": [], "01": ["00"], "02": ["00", "01"], "03": []})
    {'00': 0, '01': 1, '02': 2, '03': 0}
    """
    found: dict[str, int] = {}
    for number, before in needs.items():
        column = 0
        for name in before:
            if name not in found:
                what = f"lesson {number} needs lesson {name}, which does not come before it"
                raise CourseError(what, fix="mend what its header says it needs")
            column = max(column, found[name] + 1)
        found[number] = column
    return found


def implied(needs: Needs) -> set[Arrow]:
    """The arrows that a longer way implies.

    >>> implied({"00": [], "01": ["00"], "02": ["00", "01"]})
    {('00', '02')}
    """
    found = set()
    behind: dict[str, set[str]] = {}
    for number, before in needs.items():
        farther: set[str] = set()
        for name in before:
            farther |= behind[name]
        for name in before:
            if name in farther:
                found.add((name, number))
        behind[number] = farther.union(before)
    return found


def arrows_of(needs: Needs) -> list[Arrow]:
    """All arrows, in reading order of the lessons to which they lead."""
    arrows = []
    for number, before in needs.items():
        for name in before:
            arrows.append((name, number))
    return arrows


def spread(wanted: list[float], sizes: list[int]) -> list[float]:
    """Heights as near as can be to those wanted, in this order and with room for each size.

    >>> spread([50, 50], [20, 40]) == [50 - 15 - GAP / 2, 50 + 15 + GAP / 2]
    True
    """
    offset = 0.0
    offsets = [offset]
    for above, below in pairwise(sizes):
        offset += above / 2
        offset += GAP
        offset += below / 2
        offsets.append(offset)
    groups: list[list[float]] = []
    for height, offset in zip(wanted, offsets):
        wish = height - offset
        groups.append([wish])
        while len(groups) > 1:
            if fmean(groups[-2]) <= fmean(groups[-1]):
                break
            last = groups.pop()
            groups[-1] += last
    heights: list[float] = []
    for group in groups:
        middle = fmean(group)
        for _ in group:
            row = len(heights)
            heights.append(middle + offsets[row])
    return heights


class Layout:
    """The places of a drawing: their columns, their heights, and the lines between them."""

    def __init__(self, needs: Needs) -> None:
        self.rank = ranks(needs)
        self.columns: list[list[Place]] = []
        self.lefts: dict[Place, list[Place]] = {}
        self.rights: dict[Place, list[Place]] = {}
        self.height: dict[Place, float] = {}
        for _ in range(max(self.rank.values()) + 1):
            self.columns.append([])
        for number in needs:
            self.add(self.box(number))
        for before, after in arrows_of(needs):
            self.join(before, after)

    def box(self, number: str) -> Place:
        """The place of a lesson's box."""
        return self.rank[number], number

    def add(self, place: Place) -> None:
        """Put a place at the foot of its column, unless it stands there."""
        if place in self.height:
            return
        column = self.columns[place[0]]
        self.height[place] = STEP * len(column)
        self.lefts[place] = []
        self.rights[place] = []
        column.append(place)

    def join(self, before: str, after: str) -> None:
        """Lead a line from a lesson to one that needs it, on lanes where it passes a column."""
        place = self.box(before)
        first = self.rank[before]
        last = self.rank[after]
        for column in range(first + 1, last):
            lane = (column, before)
            self.add(lane)
            self.link(place, lane)
            place = lane
        end = self.box(after)
        self.link(place, end)

    def link(self, left: Place, right: Place) -> None:
        """Draw a line between two places, once."""
        after = self.rights[left]
        before = self.lefts[right]
        if right not in after:
            after.append(right)
            before.append(left)

    def size(self, place: Place) -> int:
        """How much height a place takes: a box, or a lane."""
        if place == self.box(place[1]):
            return BOX_HEIGHT
        return LANE_HEIGHT

    def crossings(self) -> int:
        """How many lines cross between the columns."""
        count = 0
        for column in self.columns:
            for one, other in combinations(column, 2):
                count += self.crossings_behind(one, other)
        return count

    def crossings_behind(self, one: Place, other: Place) -> int:
        """How many lines cross that leave two places of a column."""
        count = 0
        above = self.height[one] < self.height[other]
        for end in self.rights[one]:
            height = self.height[end]
            for other_end in self.rights[other]:
                if end == other_end:
                    continue
                still_above = height < self.height[other_end]
                if still_above != above:
                    count += 1
        return count

    def wish(self, place: Place, ends: list[Place]) -> float:
        """The height to which the ends of its lines pull a place; its own if it has none."""
        heights = []
        for end in ends:
            heights.append(self.height[end])
        if not heights:
            return self.height[place]
        return fmean(heights)

    def settle(self, places: list[Place], wishes: dict[Place, float]) -> None:
        """Give the places of a column the heights they wish, as near as their order allows."""
        wanted = []
        sizes = []
        for place in places:
            wish = wishes[place]
            size = self.size(place)
            wanted.append(wish)
            sizes.append(size)
        heights = spread(wanted, sizes)
        self.height.update(zip(places, heights))

    def sort(self, column: int, lines: dict[Place, list[Place]]) -> None:
        """Order a column by what pulls it from one side."""
        places = self.columns[column]
        wishes = {}
        for place in places:
            ends = lines[place]
            wishes[place] = self.wish(place, ends)
        places = sorted(places, key=lambda place: (wishes[place], place))
        self.columns[column] = places
        self.settle(places, wishes)

    def straighten(self, column: int) -> None:
        """Move the places of a column to where both sides pull them, and keep their order."""
        places = self.columns[column]
        wishes = {}
        for place in places:
            ends = [*self.lefts[place]]
            ends += self.rights[place]
            wish = self.wish(place, ends)
            wishes[place] = wish
        self.settle(places, wishes)

    def arrange(self) -> None:
        """Find the order with the fewest crossings, then straighten the lines in it."""
        forward = list(range(len(self.columns)))
        backward = forward[::-1]
        fewest = self.crossings()
        best = self.columns[:]
        for _ in range(SWEEPS):
            for order, lines in ((forward, self.lefts), (backward, self.rights)):
                for column in order:
                    self.sort(column, lines)
                count = self.crossings()
                if count < fewest:
                    fewest = count
                    best = self.columns[:]
        self.columns = best
        for _ in range(SWEEPS):
            for column in forward:
                self.straighten(column)

    def move_to_margin(self) -> int:
        """Shift all to whole pixels below the margin; the lowest edge."""
        tops = []
        for place, height in self.height.items():
            half = self.size(place) // 2
            tops.append(height - half)
        highest = min(tops)
        lowest = 0
        for place, height in self.height.items():
            height -= highest
            height = MARGIN + round(height)
            self.height[place] = height
            half = self.size(place) // 2
            lowest = max(lowest, height + half)
        return lowest

    def route(self, before: str, after: str) -> str:
        """The way of an arrow: a curve between two columns, a straight line past one."""
        first = self.rank[before]
        last = self.rank[after]
        height = self.height[first, before]
        parts = [f"M{right_of(first)} {height}"]
        for column in range(first + 1, last):
            lane = self.height[column, before]
            parts.append(curve(column, height, lane))
            parts.append(f"H{right_of(column)}")
            height = lane
        tip = self.tip(before, after)
        parts.append(curve(last, height, tip))
        return " ".join(parts)

    def tip(self, before: str, after: str) -> int:
        """Where an arrow ends at a box: the arrows end in the order in which they come."""
        place = self.box(after)
        ends = self.lefts[place]
        ends = sorted(ends, key=self.height.__getitem__)
        names = [name for _, name in ends]
        row = names.index(before)
        lowest = len(ends) - 1
        height = self.height[place]
        height -= TIPS * lowest / 2
        height += TIPS * row
        return round(height)


def left_of(column: int) -> int:
    """Where a column begins."""
    return MARGIN + column * COLUMN_STEP


def right_of(column: int) -> int:
    """Where a column ends."""
    return left_of(column) + BOX_WIDTH


def curve(column: int, before: float, height: float) -> str:
    """A curve to a column from a height in the one before, level at both ends."""
    end = left_of(column)
    start = right_of(column - 1)
    middle = (start + end) // 2
    control = f"{middle} {before} {middle} {height}"
    return f"C{control} {end} {height}"


def short(title: str) -> list[str]:
    """A title as lines that a box has room for, up to its first comma or colon.

    >>> short("Sharding, and which form to take"), short("The full training loop")
    (['Sharding'], ['The full', 'training', 'loop'])
    """
    name = re.split("[,:]", title)[0]
    lines = textwrap.wrap(name, LETTERS, break_long_words=False)
    return lines[: LINES - 1]


def box(lesson: dict[str, Any], left: int, height: float) -> list[str]:
    """A lesson's box with its number and its short title."""
    number = lesson["number"]
    title = lesson["title"]
    title = title.removeprefix(f"{number} · ")
    lines = short(title)
    top = height - BOX_HEIGHT // 2
    size = f'width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6"'
    parts = [
        f'<rect id="lesson-{number}" x="{left}" y="{top}" {size} {BOX_STYLE}/>',
    ]
    middle = left + BOX_WIDTH // 2
    y = height + 4
    y -= len(lines) * LINE / 2
    parts.append(f'<text x="{middle}" y="{y:g}" font-weight="bold">{number}</text>')
    for line in lines:
        y += LINE
        text = html.escape(line)
        parts.append(f'<text x="{middle}" y="{y:g}">{text}</text>')
    return parts


def arrow(before: str, after: str, way: str, pale: bool) -> str:
    """An arrow from a lesson to one that needs it."""
    colour = DARK
    tip = "dark"
    if pale:
        colour = PALE
        tip = "pale"
    return (
        f'<path id="arrow-{before}-{after}" d="{way}" stroke="{colour}" '
        f'marker-end="url(#{tip})"/>'
    )


def marker(name: str, colour: str) -> str:
    """The tip of an arrow."""
    return (
        f'<marker id="{name}" viewBox="0 0 10 10" refX="10" refY="5" markerWidth="6" '
        f'markerHeight="6" orient="auto"><path d="M0 0 L10 5 L0 10 z" fill="{colour}"/></marker>'
    )


def lines_of(layout: Layout, needs: Needs) -> list[str]:
    """All arrows, the dark ones last, since they share lanes with pale ones."""
    pale = implied(needs)
    lines = []
    for shown_pale in (True, False):
        for ends in arrows_of(needs):
            is_pale = ends in pale
            if is_pale == shown_pale:
                way = layout.route(*ends)
                lines.append(arrow(*ends, way, is_pale))
    return lines


def boxes_of(layout: Layout, lessons: list[dict[str, Any]]) -> list[str]:
    """All boxes."""
    boxes = []
    for lesson in lessons:
        number = lesson["number"]
        place = layout.box(number)
        column, _ = place
        left = left_of(column)
        height = layout.height[place]
        boxes += box(lesson, left, height)
    return boxes


def drawing(lessons: list[dict[str, Any]]) -> str:
    """The whole drawing, as the text of an SVG file."""
    needs = needs_of(lessons)
    layout = Layout(needs)
    layout.arrange()
    bottom = layout.move_to_margin()
    width = right_of(len(layout.columns) - 1) + MARGIN
    height = bottom + 3 * MARGIN
    size = f'width="{width}" height="{height}"'
    legend = f'x="{width // 2}" y="{bottom + 2 * MARGIN}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {size} role="img" '
        f'font-family="{FONT}" font-size="12" fill="#111" text-anchor="middle">',
        f"<title>{TITLE}</title>",
        f"<defs>{marker('dark', DARK)}{marker('pale', PALE)}</defs>",
        f'<rect {size} fill="#fff"/>',
        '<g fill="none" stroke-width="1.5">',
        *lines_of(layout, needs),
        "</g>",
        *boxes_of(layout, lessons),
        f"<text {legend}>{LEGEND}</text>",
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def listed(names: list[str]) -> str:
    """Names as one writes them in a sentence.

    >>> listed(["00", "01", "02"]), listed(["00"])
    ('00, 01 and 02', '00')
    """
    *others, last = names
    if not others:
        return last
    return f"{', '.join(others)} and {last}"


def in_words(lessons: list[dict[str, Any]]) -> str:
    """What the drawing shows, for whoever does not see it."""
    needs = needs_of(lessons)
    layout = Layout(needs)
    columns: list[list[str]] = []
    for _ in layout.columns:
        columns.append([])
    for number, column in layout.rank.items():
        columns[column].append(number)
    first, *others = map(listed, columns)
    count = len(arrows_of(needs))
    return (
        f"The {len(needs)} lessons as boxes in {len(columns)} columns, so that each stands right of "
        f"all that it needs, and {count} arrows that lead to it from these, as the table's column "
        f"“after” names them. The first column needs nothing before it: {first}. "
        f"Then come, from left to right: {'; '.join(others)}."
    )
