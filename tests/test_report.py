"""What a run leaves behind: outputs kept whole, costs with the machine that made them."""
import json

import nbformat
import pytest
from conftest import PARAMETERS, lesson_cell

from course import report as record

pytestmark = pytest.mark.slow


def test_outputs_are_kept_without_the_run_s_own_cells(course):
    path = course.add("00_a.ipynb", PARAMETERS, "1 + 1", "print('a')\nprint('b', flush=True)\nprint('c')")
    done = course.run("run")
    assert done.returncode == 0, done.all
    record.keep_outputs(course.build / "run/smoke/00_a.ipynb", path)
    kept = nbformat.read(path, 4)
    assert [c.execution_count for c in kept.cells] == [1, 2, 3]
    assert kept.cells[1].outputs[0]["execution_count"] == 2
    assert [o.text for o in kept.cells[2].outputs] == ["a\nb\nc\n"]
    assert "papermill" not in path.read_text() and 'PROFILE = \\"auto\\"' in path.read_text()


def test_a_stream_cut_in_pieces_is_one(tmp_path):
    cell = nbformat.v4.new_code_cell("x")
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "a.ipynb")
    cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=t) for t in ("a", "b")]
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "ran.ipynb")
    record.keep_outputs(tmp_path / "ran.ipynb", tmp_path / "a.ipynb")
    assert [o.text for o in nbformat.read(tmp_path / "a.ipynb", 4).cells[0].outputs] == ["ab"]


def test_keep_writes_costs_with_machine_commit_and_command(course):
    course.add("00_a.ipynb", PARAMETERS, lesson_cell("00"),
               'with lesson.publish("thing") as folder:\n    (folder / "a").write_bytes(bytes(1000))')
    assert course.run("keep").returncode == 2  # nothing ran yet
    course.run("run")
    (course.root / "results").mkdir()
    done = course.run("keep")
    assert done.returncode == 0, done.all
    cost = json.loads((course.root / "results/smoke.json").read_text())["notebooks"]["00"]
    assert cost["disk_bytes"] == 1000 and cost["seconds"] > 0 and cost["peak_bytes"] > 1e6
    assert cost["command"] == "make run PROFILE=smoke ONLY=00"
    assert {"processor", "torch", "python"} <= set(cost["facts"]) and cost["commit"]


@pytest.mark.parametrize("seconds, said", [(0.4, "10 s"), (90, "90 s"), (91, "2 min")])
def test_costs_are_rounded_up(seconds, said):
    from course.generate import say_seconds

    assert say_seconds(seconds) == said
