"""Questions about small tables, the SQL that answers each, and a judge that runs it.

A table is a schema and rows drawn by chance. A question is made from a schema by one of a few
forms of query, each with several wordings. Test tables share no noun and no column with the
training tables (but what a row is called), so that whoever answers must read the schema that
stands in front of the question.

An answer is judged by what it returns: it is right if it gives the rows of the true query on
several fillings of the table, since on one filling a wrong query can be right by luck.
"""

from __future__ import annotations

import random
import re
import sqlite3
from dataclasses import dataclass
from functools import lru_cache

NOUNS = {
    "train": "albums apples bikes boats books bottles bridges buses cameras cars cats chairs"
    " clocks coats coins courses desks doctors dogs drivers farms films flights games"
    " gardens guests hats horses hotels houses islands jobs keys lamps lakes letters maps"
    " meals models nurses offices orders parks phones pilots plants players poems prizes"
    " pupils radios rooms routes servers shirts shops songs staff stars",
    "valid": "stations streets tasks teams tests tickets towers towns trains trees trips"
    " users videos wines",
    "test": "actors animals banks beds birds boxes cakes cities clubs devices events fields"
    " fish flowers forests goats journals kitchens machines museums painters planes rivers"
    " schools ships stones stores teachers tools writers",
}
LABELS = {
    "train": "area brand city class client color country county family format genre guild"
    " kind label maker place region shape state style theme type",
    "valid": "level owner port shift status",
    "test": "branch category district host language material medium origin sector source",
}
NUMBERS = {
    "train": "age amount count cost day depth fee floor grade height hours length load"
    " mass month number pages points power price rank rating salary score seats"
    " share size speed sum tax time value volume weight width year",
    "valid": "minutes ratio votes wage watts worth",
    "test": "altitude balance budget capacity distance duration energy income profit stock",
}
VALUES = (
    "amber basic cedar delta early fresh green heavy inner jade local metal north"
)
VALUES += " olive plain quiet rapid south third urban vivid white young"
NAMES = ("name", "title")
SYLLABLES = [first + last for first in "bdfgklmnprstvz" for last in "aeiou"]
ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ}
FUNCTIONS = {"count", "sum", "avg", "min", "max"}


@dataclass(frozen=True)
class Schema:
    """A table's names: what is in it, what each row is called, a label, two numbers."""

    table: str
    name: str
    label: str
    first: str
    second: str

    def __str__(self) -> str:
        return (
            f"{self.table}({self.name}, {self.label}, {self.first}, {self.second})"
        )


@dataclass(frozen=True)
class Question:
    """A question about a table, and the query that answers it."""

    schema: Schema
    form: str
    text: str
    sql: str


# A form is its query, three wordings that are taught, and one that is kept for a test.
FORMS = {
    "list": (
        "SELECT {name} FROM {table} WHERE {number} {sign} {value}",
        "Which {table} have {number} {sign_word} {value}?",
        "List the {name} of all {table} with {number} {sign_word} {value}.",
        "Show {table} whose {number} is {sign_word} {value}.",
        "Name each of the {table} where the {number} is {sign_word} {value}.",
    ),
    "count": (
        "SELECT COUNT(*) FROM {table} WHERE {label} = '{word}'",
        "How many {table} have the {label} {word}?",
        "Count the {table} whose {label} is {word}.",
        "What is the number of {table} with {label} {word}?",
        "{word} is the {label} of how many {table}?",
    ),
    "best": (
        "SELECT {name} FROM {table} ORDER BY {number} {order} LIMIT 1",
        "Which of the {table} has the {order_word} {number}?",
        "Give the {name} with the {order_word} {number} in {table}.",
        "Find the {table} entry of {order_word} {number}.",
        "Where among the {table} is the {number} the {order_word}?",
    ),
    "mean": (
        "SELECT {fold}( {number} ) FROM {table}",
        "What is the {fold_word} {number} of the {table}?",
        "Compute the {fold_word} {number} over all {table}.",
        "Tell me the {fold_word} of {number} in {table}.",
        "Taking all {table} together, what {fold_word} {number} results?",
    ),
    "group": (
        "SELECT {label}, COUNT(*) FROM {table} GROUP BY {label}",
        "How many {table} are there for each {label}?",
        "Count the {table} of every {label}.",
        "Number of {table} per {label}?",
        "For each {label}, say how many {table} it has.",
    ),
    "within": (
        "SELECT {fold}( {number} ) FROM {table} WHERE {label} = '{word}'",
        "What is the {fold_word} {number} of {table} whose {label} is {word}?",
        "For {label} {word}, compute the {fold_word} {number} of the {table}.",
        "Tell me the {fold_word} {number} of {word} {table} by {label}.",
        "Among the {table} with {label} {word}, what is the {fold_word} {number}?",
    ),
}


def questions(
    split: str, tables: int, each: int, seed: int, taught: bool = True
) -> list[Question]:
    """Questions about so many tables of a split, in the wordings that are taught or in others.

    >>> print(questions("test", 1, 1, seed=3)[0].schema)
    tools(name, source, altitude, stock)
    """
    draw = random.Random(f"{split} {seed}")
    schemas: dict[str, Schema] = {}
    while len(schemas) < tables:
        schema = draw_schema(split, draw)
        schemas[str(schema)] = schema
    made: list[Question] = []
    for schema in schemas.values():
        made += about(schema, each, draw, taught)
    return made


def about(
    schema: Schema, many: int, draw: random.Random, taught: bool
) -> list[Question]:
    """So many different questions about one table."""
    made: dict[str, Question] = {}
    while len(made) < many:
        question = one_question(schema, draw, taught)
        made[question.text] = question
    return list(made.values())


def draw_schema(split: str, draw: random.Random) -> Schema:
    """A table of the split's own words; in training half of the words are made up."""

    def word(words: dict[str, str]) -> str:
        if split == "train" and draw.random() < 0.5:
            return "".join(
                draw.choice(SYLLABLES) for _ in range(draw.choice([2, 3]))
            )
        return draw.choice(words[split].split())

    names = [word(NOUNS), word(LABELS), word(NUMBERS), word(NUMBERS)]
    while len(set(names)) < len(names):
        names[-1] = word(NUMBERS)
    return Schema(names[0], draw.choice(NAMES), *names[1:])


def one_question(
    schema: Schema, draw: random.Random, taught: bool = True
) -> Question:
    """A question of some form about a table."""
    form = draw.choice(list(FORMS))
    sign, sign_word = draw.choice([(">", "above"), ("<", "below")])
    order, order_word = draw.choice([("DESC", "highest"), ("ASC", "lowest")])
    folds = [("AVG", "average"), ("SUM", "total"), ("MAX", "largest")]
    fold, fold_word = draw.choice(folds)
    parts = {
        "table": schema.table,
        "name": schema.name,
        "label": schema.label,
        "number": draw.choice([schema.first, schema.second]),
        "word": draw.choice(VALUES.split()),
        "value": draw.randrange(10, 90),
        "sign": sign,
        "sign_word": sign_word,
        "order": order,
        "order_word": order_word,
        "fold": fold,
        "fold_word": fold_word,
    }
    query, *known, other = FORMS[form]
    text = draw.choice(known if taught else [other]).format(**parts)
    return Question(schema, form, text, query.format(**parts))


@lru_cache(maxsize=4_096)
def fill(schema: Schema, seed: int, rows: int = 40) -> sqlite3.Connection:
    """The table in memory, filled by chance and closed to all but reading."""
    draw = random.Random(f"{schema} {seed}")
    columns = f"{schema.name} TEXT, {schema.label} TEXT, {schema.first} INT"
    database = sqlite3.connect(":memory:", check_same_thread=False)
    database.execute(
        f"CREATE TABLE {schema.table} ({columns}, {schema.second} INT)"
    )
    numbers = [
        draw.sample(range(100), rows) for _ in range(2)
    ]  # no two rows are tied
    for number, (first, second) in enumerate(zip(*numbers)):
        row = (f"n{number}", draw.choice(VALUES.split()), first, second)
        database.execute(f"INSERT INTO {schema.table} VALUES (?, ?, ?, ?)", row)
    guard(database)
    return database


def guard(database: sqlite3.Connection) -> None:
    """Let it read and count, and nothing else, for so many steps of its machine."""

    def allow(
        action: int, _: str | None, name: str | None, *more: str | None
    ) -> int:
        reads = action in ALLOWED
        counts = (
            action == sqlite3.SQLITE_FUNCTION and (name or "").lower() in FUNCTIONS
        )
        return sqlite3.SQLITE_OK if reads or counts else sqlite3.SQLITE_DENY

    database.set_authorizer(allow)
    database.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, 2_000)
    # After so many steps the handler is called, and its 1 ends the query.
    database.set_progress_handler(lambda: 1, 200_000)


def answer(schema: Schema, sql: str, seed: int = 0) -> list[tuple] | None:
    """The rows that a query returns, in no order; None if it is refused or fails.

    >>> films = Schema("films", "title", "genre", "year", "price")
    >>> answer(films, "SELECT COUNT(*) FROM films")
    [(40,)]
    >>> answer(films, "DROP TABLE films") is None
    True
    """
    try:
        rows = fill(schema, seed).execute(sql).fetchall()
    except (sqlite3.Error, sqlite3.Warning, ValueError):
        return None
    return sorted(rows, key=repr)


def is_right(question: Question, sql: str, fillings: int = 5) -> bool:
    """Whether a query returns what the true one does, on each of several fillings."""
    for seed in range(fillings):
        rows = answer(question.schema, sql, seed)
        if rows is None or rows != answer(question.schema, question.sql, seed):
            return False
    return True


def nearest(question: Question, known: list[Question], many: int) -> list[Question]:
    """Those that share most words with a question, the most alike last.

    >>> one, *others = questions("train", 50, 2, seed=1)
    >>> nearest(one, [*others, one], 1) == [one]
    True
    """
    words = set(question.text.split())
    return sorted(known, key=lambda q: len(words & set(q.text.split())))[-many:]


def first_query(text: str) -> str:
    """The first query in a talk, or the first line where there is none.

    >>> first_query("Sure! SELECT name FROM films; is the query.")
    'SELECT name FROM films'
    >>> first_query("SELECT title FROM films User: Table films(title) Assistant: SELECT")
    'SELECT title FROM films'
    """
    found = re.search(r"SELECT(?:(?!User:|Assistant:|SELECT)[^;`\n])*", text)
    line = found[0] if found else text.strip().partition("\n")[0]
    return line.strip() or "?"
