"""Cells that fail, and input that cannot be used: what the run makes of them and what it says."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pandas as pd
import pytest

TASK = """
import os, sys
from pathlib import Path
def train(cell, *, x: int, how: str = "raise"):
    with open("trained.txt", "a") as file:
        file.write(f"{cell.id}\\n")
    if x == 1 and not Path("mended").exists():
        if how == "raise":
            raise ValueError("no such luck, said 'x' = {1}")
        if how == "exit":
            sys.exit(0)
        if how == "metrics":
            return {"score": object()}
        if how == "nothing":
            return None
        if how == "segfault":
            import ctypes
            ctypes.string_at(0)
        if how == "vanish":
            os._exit(0)
    return {"score": float(x)}
"""


def failing(sandbox, how="raise", **more):
    sandbox.write("task.py", TASK)
    sandbox.config(
        sweep={"name": "test", "task": "task.py:train", "params": {"how": how}, "axes": {"x": [0, 1, 2]}},
        resources=[{"gpu": 0.25}],
        **more,
    )


def table(sandbox):
    return pd.read_parquet(sandbox.root / "results/test/table.parquet").set_index("params.x")


def test_nan_makes_a_row_of_a_failure_and_the_next_run_tries_it_again(sandbox):
    failing(sandbox, on_error="nan")
    sandbox.snakemake()
    rows = table(sandbox)
    assert rows["status"][1] == "failed" and math.isnan(rows["metrics.score"][1]) and rows["metrics.score"][2] == 2.0
    failures = pd.read_csv(sandbox.root / "results/test/failures.csv")
    assert len(failures) == 1 and "no such luck" in failures["error"][0] and "log.txt" in failures["log"][0]

    again = sandbox.snakemake()
    assert "2 finished, 1 to run (of these 1 failed before)" in again
    (sandbox.root / "mended").touch()
    sandbox.snakemake()
    assert table(sandbox)["status"][1] == "finished" and table(sandbox)["attempt"][1] == 3
    assert "Nothing to be done" in sandbox.snakemake()
    assert len(sandbox.trained()) == 5


def test_what_was_refused_is_refused_without_snakemakes_memory_too(sandbox):
    failing(sandbox, on_error="nan")
    sandbox.snakemake()
    shutil.rmtree(sandbox.root / ".snakemake")
    (sandbox.root / "mended").touch()
    sandbox.snakemake()
    assert list(table(sandbox)["status"]) == ["finished"] * 3 and len(sandbox.trained()) == 4
    broken = next(iter(sandbox.cells().values()))["dir"]
    (broken / "result.json").write_text("garbage")
    shutil.rmtree(sandbox.root / ".snakemake")
    assert f"cell {broken.name} runs again: result.json is broken" in sandbox.snakemake()
    assert len(sandbox.trained()) == 5
    assert "Nothing to be done" in sandbox.snakemake()


def test_a_failed_cell_that_is_removed_leaves_the_table(sandbox):
    failing(sandbox)
    sandbox.snakemake(status=1)
    sandbox.snakemake("--config", "set={axes.x: [0, 2]}")
    assert list(table(sandbox)["status"]) == ["finished"] * 2
    assert len(pd.read_csv(sandbox.root / "results/test/failures.csv")) == 0


@pytest.mark.parametrize("end", ["kill -9 $$", "kill -TERM $$", "exit 137"])
def test_a_program_that_is_stopped_from_outside_stays_pending(sandbox, end):
    command = {"command": ["bash", "-c", end]}
    sandbox.config(sweep={"name": "test", "task": command}, on_error="nan")
    sandbox.snakemake(status=1)
    (record,) = sandbox.cells().values()
    assert record["status"] == "interrupted" and not (record["dir"] / "result.json").exists()


def test_a_thread_that_does_not_end_ends_with_the_cell(sandbox):
    sandbox.write(
        "task.py",
        "import threading, time\ndef train(cell):\n"
        "    threading.Thread(target=time.sleep, args=(1000,), name='endless').start()\n    return {'v': 10**400}\n",
    )
    sandbox.config(sweep={"name": "test", "task": "task.py:train"})
    sandbox.snakemake()
    (record,) = sandbox.cells().values()
    assert (
        record["status"] == "finished" and "thread endless is still running" in (record["dir"] / "log.txt").read_text()
    )


def test_a_child_that_the_task_lets_return_does_not_end_the_cell(sandbox):
    task = "import os\ndef train(cell):\n    child = os.fork() == 0\n    return {'child': child}\n"
    sandbox.write("task.py", task)
    sandbox.config(sweep={"name": "test", "task": "task.py:train"})
    assert sandbox.snakemake().count("finished after") == 1
    (record,) = sandbox.cells().values()
    assert record["metrics"] == {"child": False}


def test_raise_fails_the_run_and_leaves_a_partial_table(sandbox):
    failing(sandbox)
    output = sandbox.snakemake(status=1)
    assert "ValueError: no such luck, said 'x' = {1}" in output and "log.txt" in output
    rows = table(sandbox)
    assert rows["status"][1] == "failed" and rows["status"][2] == "finished"
    (sandbox.root / "mended").touch()
    sandbox.snakemake()
    assert list(table(sandbox)["status"]) == ["finished"] * 3 and len(sandbox.trained()) == 4


def test_from_nan_to_raise_an_accepted_failure_is_not_accepted_any_more(sandbox):
    failing(sandbox, on_error="nan")
    sandbox.snakemake()
    failing(sandbox, on_error="raise")
    sandbox.snakemake(status=1)
    failing(sandbox, on_error="nan")
    sandbox.snakemake()
    assert len(sandbox.trained()) == 5 and table(sandbox)["attempt"][1] == 3


def test_only_the_last_attempt_is_accepted(sandbox):
    failing(sandbox, on_error="nan")
    sandbox.snakemake("--retries", "2")
    assert table(sandbox)["attempt"][1] == 3 and len(sandbox.trained()) == 5


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("exit", "sys.exit(0) instead of returning its metrics"),
        ("metrics", "metric `score` is a object"),
        ("nothing", "expected a mapping of metrics"),
        ("segfault", "the process of the cell crashed: SIGSEGV"),
        ("vanish", "the process of the cell ended itself with exit status 0"),
    ],
)
def test_a_task_that_gives_no_metrics_has_failed(sandbox, how, words):
    failing(sandbox, how=how)
    assert words in sandbox.snakemake(status=1)
    assert table(sandbox)["status"][1] == "failed"


def test_a_crash_is_a_failure_that_nan_accepts(sandbox):
    failing(sandbox, how="segfault", on_error="nan")
    sandbox.snakemake()
    assert list(table(sandbox)["status"]) == ["finished", "failed", "finished"]
    assert "SIGSEGV" in table(sandbox)["error"][1]


def test_what_a_cell_leaves_running_ends_with_it(sandbox):
    sandbox.write(
        "task.py",
        """
import subprocess
def train(cell):
    child = subprocess.Popen(["sleep", "1000"])
    return {"pid": child.pid}
""",
    )
    sandbox.config(sweep={"name": "test", "task": "task.py:train"})
    sandbox.snakemake()
    (record,) = sandbox.cells().values()
    status = Path(f"/proc/{record['metrics']['pid']}/stat")
    assert not status.exists() or status.read_text().split()[2] == "Z"


def test_a_failing_prepare_stops_the_run_before_any_cell(sandbox):
    sandbox.write("task.py", "def prepare():\n    raise OSError('no network')\ndef train(cell):\n    return {}\n")
    sandbox.config(sweep={"name": "test", "task": "task.py:train"})
    assert "OSError: no network" in sandbox.snakemake(status=1)
    assert next(iter(sandbox.cells().values()))["status"] == "pending"


BAD = [
    ({"set={axess: {x: [1]}}": None}, ["axess", "sweep.axes"]),
    ({"set={axes.x: []}": None}, ["sweep.axes.x", "at least one value"]),
    ({"set={axes.x: [1, 1.0]}": None}, ["every value once"]),
    ({"set={axes.y: [1]}": None}, ["sweep.axes.y", "a parameter of the task's function", "Known: how, x"]),
    ({"set={task: task.py:trian}": None}, ["sweep.task", "did you mean `train`?"]),
    ({"set={task: tusk.py:train}": None}, ["sweep.task", "did you mean `task.py`?"]),
    ({"set={resources: [{gpu: 0}]}": None}, ["resources[0].gpu", "a number above 0 and up to 1"]),
    ({"set={resources: [{gpu: 1.2}]}": None}, ["resources[0].gpu", "1.2", "a number above 0 and up to 1"]),
    ({"set={resources: [{gpu: 0.3x}]}": None}, ["resources[0].gpu", "'0.3x'"]),
    ({"set={resources: [{gpu: 0.5, nodes: 2}]}": None}, ["resources[0].gpu", "never shares"]),
    ({"set={resources: [{mem: 100TB}]}": None}, ["resources[0].mem", "of this machine"]),
    ({"devices=3": None}, ["devices", "at most 1", "cpu"]),
    ({"confirm_above=2": None}, ["confirm_above", "--config confirm_above=3"]),
    ({"set={x: fast}": None}, ["--config x", "'fast'", "`int`"]),
    ({"set={zip: [{x: [1, 2]}]}": None}, ["sweep.zip[0].x", "sweep.axes"]),
    ({"set={include: [{z: 1}]}": None}, ["sweep.include[0].z"]),
    ({"results=/proc/nowhere": None}, ["error in results", "/proc"]),
    ({"CUDA_VISIBLE_DEVICES": "0,0"}, ["CUDA_VISIBLE_DEVICES", "'0,0'"]),
    ({"SWEEPACK_DEVICES": "sim:0"}, ["SWEEPACK_DEVICES", "sim:0"]),
]


@pytest.mark.parametrize(("change", "words"), BAD, ids=[next(iter(change)) for change, _ in BAD])
def test_bad_input_gives_one_error_and_starts_nothing(sandbox, change, words):
    failing(sandbox)
    overrides = [name for name, value in change.items() if value is None]
    environment = {"SWEEPACK_DEVICES": "", **{name: value for name, value in change.items() if value is not None}}
    arguments = ["--config", *overrides] if overrides else []
    output = sandbox.snakemake(*arguments, status=1, **environment)
    for word in words:
        assert word in output
    assert output.count("sweepack: error in") == 1 and "Traceback" not in output
    assert not (sandbox.root / "results").exists() and not sandbox.trained()


def test_a_task_that_cannot_be_imported_is_refused_with_its_own_words(sandbox):
    failing(sandbox)
    sandbox.write("task.py", "import nosuchmodule\n" + TASK)
    output = sandbox.snakemake("-n", status=1)
    assert "No module named 'nosuchmodule'" in output and "sweep.task" in output
    assert output.count("Traceback") <= 1 and not (sandbox.root / "results").exists()


def test_a_folder_that_cannot_be_written_to_is_refused(sandbox):
    failing(sandbox)
    (sandbox.root / "results").write_text("a file")
    assert "results is a file" in sandbox.snakemake(status=1)


def test_without_the_package_one_line_says_what_to_do(sandbox):
    failing(sandbox)
    hide = """
import sys
sys.path[:] = [folder for folder in sys.path if not folder.endswith("workflow/src")]
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder)]
"""
    sandbox.write("hide/sitecustomize.py", hide)
    for profile in (None, "local"):
        output = sandbox.snakemake("-n", profile=profile, status=1, PYTHONPATH=str(sandbox.root / "hide"))
        lines = [line for line in output.splitlines() if not line.startswith("Using ")]
        assert len(lines) == 1 and "run `make venv`" in lines[0], output


def test_a_lock_that_a_kill_left_is_explained_and_removed_by_one_command(sandbox, eventually):
    failing(sandbox)
    sandbox.write("task.py", "import time\ndef train(cell, **p):\n    time.sleep(8)\n")
    first = sandbox.start("--cores", "1")
    eventually(lambda: (sandbox.root / ".snakemake/locks/0.output.lock").exists(), "the lock")
    first.kill()
    first.wait()
    assert "removed with the --unlock argument" in sandbox.snakemake(status=1)
    sandbox.snakemake("--unlock")
    failing(sandbox, on_error="nan")
    (sandbox.root / "mended").touch()
    sandbox.snakemake()
