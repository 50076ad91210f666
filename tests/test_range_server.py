"""Files over http, by ranges of bytes."""

import time
from pathlib import Path

import datasets
import fsspec
import pytest
from datasets import Dataset, load_dataset

from stages.range_server import RangeServer

COUNT = 300


@pytest.fixture
def folder(tmp_path):
    rows = Dataset.from_dict(
        {"text": [f"row {i}" for i in range(COUNT)], "row": range(COUNT)}
    )
    rows.to_parquet(str(tmp_path / "rows.parquet"), batch_size=100)
    return tmp_path


def test_a_stream_gives_the_rows_of_the_file(folder):
    datasets.disable_progress_bars()
    with RangeServer(folder) as server:
        rows = load_dataset(
            "parquet",
            data_files=server.url + "/rows.parquet",
            split="train",
            streaming=True,
        )
        assert [row["row"] for row in rows] == list(range(COUNT))
        assert sum(server.sent) > 0


def test_a_range_is_what_was_asked_for(folder):
    data = (folder / "rows.parquet").read_bytes()
    with RangeServer(folder) as server:
        files = fsspec.filesystem("http")
        url = server.url + "/rows.parquet"
        assert files.size(url) == len(data)
        assert files.cat_file(url, 3, 10) == data[3:10]
        assert files.cat_file(url, len(data) - 4, len(data)) == b"PAR1"


@pytest.fixture
def bytes_read(monkeypatch):
    """How many bytes each `read` of a file opened from here on returned."""
    counts = []
    open_file = Path.open

    def open_counted(path, *mode, **options):
        file = open_file(path, *mode, **options)
        read = file.read

        def read_counted(*size):
            data = read(*size)
            counts.append(len(data))
            return data

        file.read = read_counted
        return file

    monkeypatch.setattr(Path, "open", open_counted)
    return counts


def test_a_server_reads_no_more_of_a_file_than_it_sends(folder, bytes_read):
    with RangeServer(folder) as server:
        files = fsspec.filesystem("http")
        url = server.url + "/rows.parquet"
        size = files.size(url)
        assert bytes_read == []
        files.open(url, cache_type="none")._fetch_range(size - 6, size - 1)
        assert bytes_read == [5]


def test_every_answer_is_late(folder):
    with RangeServer(folder, delay=0.05) as server:
        start = time.perf_counter()
        fsspec.filesystem("http").size(server.url + "/rows.parquet")
        assert time.perf_counter() - start >= 0.05


def test_a_name_does_not_lead_out_of_the_folder(folder, tmp_path):
    (tmp_path.parent / "secret.txt").write_text("secret")
    with RangeServer(folder) as server, pytest.raises(FileNotFoundError):
        fsspec.filesystem("http").size(server.url + "/../secret.txt")
