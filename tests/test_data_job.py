"""The corpus of many workers is that of one process, to the byte."""

from __future__ import annotations

import random
import sys

import pytest

from stages import corpus, data_job
from stages.sources import blob_id
from utils.errors import ROOT, CourseError


def row(text, package, path, licence="MIT"):
    data = text.encode()
    facts = {"content": text, "path": path, "package": package, "license": licence}
    return facts | {"size": len(data), "hash": blob_id(data), "copies": 1}


@pytest.fixture(scope="module")
def rows():
    """Texts of this checkout in five packages; some come again, exactly, spaced out, or nearly."""
    draw = random.Random(7)
    texts = []
    for folder in ("utils", "stages", "course", "tests"):
        for path in sorted((ROOT / folder).glob("*.py")):
            texts.append((folder, path.name, path.read_text(encoding="utf-8")))
    result = [row(text, folder, f"{folder}/{name}") for folder, name, text in texts]
    for folder, name, text in draw.sample(texts, 20):
        result.append(row(text, "copies", f"again/{name}"))
        spaced = text.replace("\n\n", "\n\n\n")
        result.append(row(spaced, "copies", f"{folder}/spaced/{name}"))
        words = text.split(" ")
        words[draw.randrange(len(words))] = "other"
        near = "ask me@example.org\n" + " ".join(words)
        result.append(row(near, "nearly", f"{folder}/near/{name}"))
        result.append(row(text + "# tail\n", "nearly", f"gpl/{name}", "GPL-3.0"))
    draw.shuffle(result)
    return result


@pytest.fixture(scope="module")
def files(rows, tmp_path_factory):
    """The rows in five files."""
    folder = tmp_path_factory.mktemp("rows")
    for number in range(5):
        part = rows[number * len(rows) // 5 : (number + 1) * len(rows) // 5]
        corpus.write_rows(folder / f"{number:05}.parquet", corpus.CORPUS, part)
    return folder


@pytest.fixture(scope="module")
def alone(rows, tmp_path_factory):
    """What one process makes of the rows: its folder and its report."""
    folder = tmp_path_factory.mktemp("alone")
    copies = ({**one} for one in rows)
    report = corpus.build_from_rows(copies, folder)
    assert {"licence", "exact duplicate", "near duplicate"} <= set(
        report["reasons"]
    )
    assert report["redacted"]
    return folder, report


def tables(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.parquet")}


@pytest.mark.parametrize("order", [1, -1], ids=["in order", "last task first"])
def test_tasks_in_any_order_make_the_corpus_of_one_process(
    files, alone, tmp_path, order
):
    folder = tmp_path / "job"
    folder.mkdir()
    for _, task, tasks in data_job.steps_of(files, tmp_path / "made", folder):
        for rank in range(tasks)[::order]:
            task(None, rank, tasks)
    assert tables(tmp_path / "made") == tables(alone[0])
    assert data_job.read_json(tmp_path / "made" / "report.json") == alone[1]


@pytest.mark.slow
def test_two_workers_make_the_corpus_of_one_process(files, alone, tmp_path):
    report = data_job.run(files, tmp_path / "made", workers=2)
    assert report == alone[1]
    assert tables(tmp_path / "made") == tables(alone[0])
    with pytest.raises(CourseError, match="a corpus here already"):
        data_job.run(files, tmp_path / "made", workers=2)


def test_a_job_does_not_go_on_with_other_rows(files, tmp_path):
    for _ in range(2):
        data_job.check_same_rows(files, tmp_path / "job")
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.parquet").write_bytes(b"x")
    with pytest.raises(CourseError, match="had other rows"):
        data_job.check_same_rows(tmp_path / "rows", tmp_path / "job")


def test_a_folder_without_rows_is_refused(tmp_path):
    with pytest.raises(CourseError, match="no Parquet files"):
        data_job.steps_of(tmp_path, tmp_path / "made", tmp_path / "job")


def test_without_datatrove_the_command_says_what_to_install(
    files, tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, "datatrove.executor", None)
    assert data_job.main([str(files), str(tmp_path / "made")]) == 1
    assert 'pip install -e ".[data]"' in capsys.readouterr().err
