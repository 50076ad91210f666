"""Questions about tables: no leak between splits, true answers, and a judge that holds."""

import re

import pytest

from stages.questions import (
    LABELS,
    NOUNS,
    NUMBERS,
    Question,
    Schema,
    answer,
    is_right,
    questions,
)

FILMS = Schema("films", "title", "genre", "year", "price")


@pytest.mark.parametrize("words", [NOUNS, LABELS, NUMBERS])
def test_test_tables_share_no_word_with_the_training_tables(words):
    every = " ".join(words.values()).split()
    assert len(set(every)) == len(every)


@pytest.mark.parametrize("taught", [True, False])
@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_the_query_of_each_question_is_right_and_returns_something(split, taught):
    for question in questions(split, 100, 3, 1, taught):
        assert is_right(question, question.sql), question
        assert answer(question.schema, question.sql) is not None


def test_no_word_of_another_split_can_be_invented_in_training():
    invented = re.compile("([bdfgklmnprstvz][aeiou])+")
    for words in (NOUNS, LABELS, NUMBERS):
        held_out = f"{words['valid']} {words['test']}".split()
        assert not [word for word in held_out if invented.fullmatch(word)]


def test_no_keyword_of_sql_is_the_name_of_a_table_or_column():
    every = [
        part[split].split() for part in (NOUNS, LABELS, NUMBERS) for split in part
    ]
    for word in sum(every, []):
        schema = Schema(word, "name", "genre", "year", "price")
        assert answer(schema, f"SELECT COUNT(*) FROM {word}") == [(40,)]
        schema = Schema("films", "name", word, "one", "other")
        assert answer(schema, f"SELECT COUNT(*), {word} FROM films GROUP BY {word}")


def test_the_same_seed_gives_the_same_questions_and_none_twice():
    one, again = (questions("train", 50, 4, seed=5) for _ in range(2))
    assert one == again
    assert len({(str(q.schema), q.text) for q in one}) == 200
    assert one != questions("train", 50, 4, seed=6)


def test_another_wording_of_the_query_is_right_and_another_meaning_is_not():
    sql = "SELECT title FROM films WHERE year > 50"
    question = Question(FILMS, "list", "Which films have a year above 50?", sql)
    assert is_right(question, "select title from films where 50 < year")
    assert is_right(question, sql + " ORDER BY title DESC;")
    assert not is_right(question, "SELECT title FROM films WHERE year >= 50")
    assert not is_right(question, "SELECT title FROM films WHERE price > 50")
    assert not is_right(question, "SELECT title, year FROM films WHERE year > 50")
    assert not is_right(question, "")


def test_right_by_luck_on_one_filling_is_wrong_on_several():
    true = "SELECT COUNT(*) FROM films WHERE genre = 'jade'"
    question = Question(FILMS, "count", "How many films have the genre jade?", true)
    seen = [answer(FILMS, true, seed)[0][0] for seed in range(3)]
    lucky = f"SELECT {seen[0]} FROM films LIMIT 1"
    assert answer(FILMS, lucky) == answer(FILMS, true)
    assert len(set(seen)) > 1
    assert not is_right(question, lucky)


HOSTILE = [
    "DROP TABLE films",
    "DELETE FROM films",
    "UPDATE films SET year = 0",
    "INSERT INTO films VALUES ('a', 'b', 1, 2)",
    "ATTACH DATABASE 'stolen.db' AS other",
    "PRAGMA database_list",
    "VACUUM INTO 'copy.db'",
    "SELECT load_extension('x')",
    "SELECT zeroblob(1000000000)",
    "SELECT randomblob(1000000000)",
    "SELECT group_concat(title) FROM films",
    "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x+1 FROM c) SELECT x FROM c",
    "SELECT COUNT(*) FROM films a, films b, films c, films d, films e, films f",
    "SELECT 1; DROP TABLE films",
    "SELECT title FROM films WHERE " + "(" * 3_000,
    "SELECT '\0'",
    "SELECT '\ud800'",
    "SELECT title FROM films -- " + "x" * 10_000,
]


@pytest.mark.parametrize("sql", HOSTILE)
def test_what_is_more_than_reading_is_refused_and_leaves_nothing(
    sql, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert answer(FILMS, sql) is None
    assert answer(FILMS, "SELECT COUNT(*) FROM films") == [(40,)]
    assert not list(tmp_path.iterdir())


def test_other_wordings_are_never_taught():
    def openings(taught):
        return {q.text.split()[0] for q in questions("train", 200, 3, 1, taught)}

    assert not openings(True) & {"Where", "Among", "Taking", "Name"}
    assert openings(False) > {"Where", "Among", "Taking", "Name", "For"}


def test_a_query_is_stopped_by_its_steps():
    few = "SELECT COUNT(*) FROM films a, films b"
    many = few + ", films c, films d"
    assert answer(FILMS, few) == [(1_600,)]
    assert answer(FILMS, many) is None
