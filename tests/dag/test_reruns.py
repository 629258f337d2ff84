"""Which jobs an edit reruns: read from dry runs after a sweep has been finished."""

from __future__ import annotations

import re
import shutil

import pytest
from conftest import make_sandbox

TASK = "def train(cell, *, lr: float, width: int = 64, name: str = 'a'):\n    return {'score': lr * width}\n"


def config(**sweep):
    base = {"name": "test", "task": "task.py:train", "axes": {"lr": [0.1, 0.2], "width": [32, 64]}}
    return {"sweep": {**base, **sweep}, "resources": [{"gpu": 0.25}], "report": True}


@pytest.fixture(scope="module")
def finished_project(tmp_path_factory):
    """A project whose sweep is finished, made once."""
    made = make_sandbox(tmp_path_factory.mktemp("finished"))
    made.write("task.py", TASK)
    made.config(**config())
    made.snakemake()
    return made.root


@pytest.fixture
def finished(sandbox, finished_project):
    shutil.copytree(finished_project, sandbox.root, dirs_exist_ok=True, symlinks=True)
    return sandbox


def planned(sandbox, *arguments):
    """The jobs of a dry run: rule names, and for cells the parameters."""
    output = sandbox.snakemake("-n", "--quiet", "host", *arguments, profile=None)
    jobs = re.findall(r"^(?:local)?rule (\w+):", output, re.MULTILINE)
    return sorted(job for job in jobs if job not in ("all", "outdate")), output


EDITS = {
    "nothing": (config(), []),
    "values reordered": (config(axes={"width": [64, 32], "lr": ["2e-1", 1e-1]}), ["report", "table"]),
    "a value added": (config(axes={"lr": [0.1, 0.2, 0.3], "width": [32, 64]}), ["cell", "cell", "report", "table"]),
    "a value removed": (config(axes={"lr": [0.1], "width": [32, 64]}), ["report", "table"]),
    "a fixed value made of an axis": (config(axes={"lr": [0.1, 0.2]}, params={"width": 32}), ["report", "table"]),
    "a default stated": (config(params={"name": "a"}), []),
    "a default made an axis": (
        config(axes={"lr": [0.1, 0.2], "width": [32, 64], "name": ["a", "b"]}),
        ["cell"] * 4 + ["report", "table"],
    ),
    "an included cell that is there already": (
        config(axes={"lr": [0.1], "width": [32, 64]}, include=[{"lr": 0.2, "width": 32}]),
        ["report", "table"],
    ),
    "on_error": ({**config(), "on_error": "nan"}, []),
    "resources": ({**config(), "resources": [{"gpu": 1, "cpus": 2, "mem": "1GB", "runtime": "1h"}]}, []),
    "placement": ({**config(), "placement": "round_robin", "jobs_per_gpu": 2}, []),
    "the objective": ({**config(), "objective": {"metric": "score", "mode": "min"}}, ["report", "table"]),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_of_the_config_runs_only_what_it_must(finished, edit):
    changed, jobs = EDITS[edit]
    finished.config(**changed)
    assert planned(finished)[0] == jobs


def test_an_edit_of_the_task_runs_nothing_and_a_prepare_added_to_it_neither(finished):
    finished.write("task.py", TASK + "\ndef prepare():\n    pass\n")
    assert planned(finished)[0] == []
    finished.config(**config(axes={"lr": [0.1, 0.2, 0.3], "width": [32, 64]}))
    assert planned(finished)[0] == ["cell", "cell", "prepare", "report", "table"]


def test_a_changed_default_of_the_task_makes_new_cells(finished):
    finished.write("task.py", TASK.replace("'a'", "'z'"))
    assert planned(finished)[0] == ["cell"] * 4 + ["report", "table"]


@pytest.mark.parametrize("gone", ["table.csv", "report.html"])
def test_a_deleted_table_or_report_is_made_again_from_what_there_is(finished, gone):
    (finished.root / "results/test" / gone).unlink()
    assert set(planned(finished)[0]) <= {"table", "report"} and planned(finished)[0]


def test_overrides_on_the_command_line_count_like_edits(finished):
    assert planned(finished, "--config", "lr=2e-1")[0] == ["report", "table"]
    assert planned(finished, "--config", "set={axes.width: [64, 128]}")[0] == ["cell", "cell", "report", "table"]


def test_another_config_file_replaces_the_default(finished):
    finished.write("other.yaml", "sweep: {name: other, task: 'task.py:train', params: {lr: 1e-1}}")
    jobs, output = planned(finished, "--configfile", "other.yaml")
    assert jobs == ["cell", "report", "table"] and "results/other" in output


def test_the_profile_stays_in_force_beside_config(finished):
    output = finished.snakemake("-n", "--config", "on_error=nan", profile="local")
    assert "Using profiles" in output and "profiles/local" in output and "4 finished, 0 to run" in output
