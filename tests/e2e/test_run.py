"""A sweep runs end to end: plan, cells, table; and a second call has nothing to do."""

from __future__ import annotations

import json

import pandas as pd

TASK = """
def train(cell, *, x: float, kind: str = "a", seed: int = 0):
    with open("trained.txt", "a") as file:
        file.write(cell.id + "\\n")
    cell.log({"loss": x}, epoch=0, step=1)
    cell.log({"loss": x / 2}, epoch=1, step=2)
    return {"score": x * 2, "seed": cell.seed}
"""


def simple(sandbox, **more):
    sandbox.write("task.py", TASK)
    sweep = {"name": "test", "task": "task.py:train", "axes": {"x": [1, 2.5], "seed": [0, 1]}}
    sandbox.config(sweep=sweep, resources=[{"gpu": 0.25}], **more)


def test_a_sweep_gives_one_table_and_a_second_call_does_nothing(sandbox):
    simple(sandbox, objective={"metric": "score", "mode": "max"}, report=True)
    output = sandbox.snakemake()
    assert "4 = 2 x × 2 seed" in output and "0 finished, 4 to run" in output
    table = pd.read_parquet(sandbox.root / "results/test/table.parquet")
    assert sorted(table["metrics.score"]) == [2.0, 2.0, 5.0, 5.0]
    assert list(table["status"]) == ["finished"] * 4
    assert list(table["params.x"]) == [1.0, 1.0, 2.5, 2.5] and list(table["params.seed"]) == [0, 1, 0, 1]
    history = pd.read_csv(sandbox.root / "results/test/history.csv")
    assert len(history) == 8
    assert (sandbox.root / "results/test/report.html").stat().st_size > 1000
    before = {
        cell: record["dir"].joinpath("result.json").stat().st_mtime_ns for cell, record in sandbox.cells().items()
    }

    again = sandbox.snakemake()
    assert "4 finished, 0 to run" in again and "Nothing to be done" in again
    after = {cell: record["dir"].joinpath("result.json").stat().st_mtime_ns for cell, record in sandbox.cells().items()}
    assert before == after and len(sandbox.trained()) == 4


def test_a_dry_run_shows_the_plan_and_writes_nothing_into_the_results(sandbox):
    simple(sandbox)
    output = sandbox.snakemake("-n", profile=None)
    assert "4 cells of 0.25 device, 1 CPU thread" in output and "results/test" in output
    assert not (sandbox.root / "results").exists() and not sandbox.trained()


def test_the_plan_stays_out_of_the_dag_on_standard_output(sandbox, tmp_path):
    simple(sandbox)
    process = sandbox.start("--dag", profile=None)
    output, _ = process.communicate()
    assert process.returncode == 0
    assert "digraph" in output
    # Standard error is merged here: the plan comes before, never inside.
    assert "sweepack: test" in output.split("digraph")[0]


def test_ids_have_a_meaning_on_disk(sandbox):
    simple(sandbox)
    sandbox.snakemake()
    results = sandbox.root / "results/test"
    lines = [line.split("\t") for line in (results / "cells.tsv").read_text().splitlines()]
    assert lines[0][:4] == ["cell", "index", "name", "share"]
    listed = {line[0]: dict(zip(lines[0], line, strict=True)) for line in lines[1:]}
    cells = sandbox.cells()
    assert listed.keys() == cells.keys()
    for identity, record in cells.items():
        assert json.loads(listed[identity]["x"]) == record["params"]["x"]
        link = results / "by-name" / f"x={record['params']['x']},seed={record['params']['seed']}"
        assert link.resolve().name == identity


def test_metrics_and_parameters_keep_their_types(sandbox):
    sandbox.write(
        "task.py",
        """
def train(cell, **params):
    assert params == dict(cell.params)
    return {"kinds": [type(value).__name__ for value in params.values()], "whole": 3, "nothing": None, "name": "ü,'"}
""",
    )
    values = [True, None, 'a "b" c', "x=/{}, $(rm -rf ~); `ls`\n'", [0.9, 0.99], 7, 0.5, {"a": {"b": 1}}]
    names = [f"p{index}" for index in range(len(values))]
    sandbox.config(sweep={"name": "test", "task": "task.py:train", "params": dict(zip(names, values, strict=True))})
    sandbox.snakemake()
    (record,) = sandbox.cells().values()
    assert record["metrics"]["kinds"] == ["bool", "NoneType", "str", "str", "list", "int", "float", "dict"]
    assert [record["params"][name] for name in names] == values
    table = pd.read_parquet(sandbox.root / "results/test/table.parquet")
    assert table["metrics.whole"][0] == 3 and str(table["metrics.whole"].dtype) == "Int64"
    assert table["params.p3"][0] == values[3] and list(table["params.p4"][0]) == [0.9, 0.99]


def test_prepare_runs_once_before_any_cell(sandbox):
    sandbox.write(
        "task.py",
        """
from pathlib import Path
def prepare():
    with open("prepared.txt", "a") as file:
        file.write("once ")
def train(cell, *, x: int):
    return {"prepared": Path("prepared.txt").read_text()}
""",
    )
    config = {"name": "test", "task": "task.py:train"}
    sandbox.config(sweep={**config, "axes": {"x": [1, 2, 3]}})
    sandbox.snakemake()
    sandbox.config(sweep={**config, "axes": {"x": [1, 2, 3, 4]}})
    sandbox.snakemake()
    metrics = [record["metrics"]["prepared"] for record in sandbox.cells().values()]
    assert metrics == ["once "] * 4


def test_a_program_is_a_cell_without_a_shell_in_between(sandbox):
    sandbox.write(
        "program.py",
        """
import json, os, sys
params = json.load(open(sys.argv[1]))
assert os.environ["SWEEPACK_PARAM_TEXT"] == params["text"], os.environ["SWEEPACK_PARAM_TEXT"]
assert json.loads(os.environ["SWEEPACK_PARAM_X"]) == params["x"]
json.dump({"length": len(params["text"]), "x": params["x"]}, open(os.environ["SWEEPACK_METRICS"], "w"))
""",
    )
    text = "a b; touch hacked $(touch hacked) 'quoted' \"twice\" {braces}"
    command = {"command": ["python", "program.py", "{params}"]}
    sandbox.config(sweep={"name": "test", "task": command, "params": {"text": text}, "axes": {"x": [1, 2]}})
    sandbox.snakemake()
    metrics = sorted(record["metrics"]["x"] for record in sandbox.cells().values())
    assert metrics == [1, 2] and not (sandbox.root / "hacked").exists()
    assert {record["metrics"]["length"] for record in sandbox.cells().values()} == {len(text)}


def test_a_cell_sees_one_device_pinned_threads_and_no_foreign_ranks(sandbox):
    sandbox.write(
        "task.py",
        """
import os
NAMES = ["CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "SLURM_PROCID", "RANK", "WORLD_SIZE", "MINE"]
AT_IMPORT = {name: os.environ.get(name) for name in NAMES}
def train(cell, *, x: int):
    return AT_IMPORT
""",
    )
    sandbox.config(
        sweep={"name": "test", "task": "task.py:train", "axes": {"x": [1, 2, 3]}}, resources=[{"gpu": 1, "cpus": 2}]
    )
    inherited = {"SLURM_PROCID": "2", "RANK": "1", "WORLD_SIZE": "4", "MINE": "kept"}
    pool = {"SWEEPACK_DEVICES": "", "CUDA_VISIBLE_DEVICES": " 3, 5"}
    sandbox.snakemake(**inherited, **pool)
    for record in sandbox.cells().values():
        seen = record["metrics"]
        assert seen["CUDA_VISIBLE_DEVICES"] in ("3", "5") and seen["OMP_NUM_THREADS"] == seen["MKL_NUM_THREADS"] == "2"
        assert seen["SLURM_PROCID"] is seen["RANK"] is seen["WORLD_SIZE"] is None and seen["MINE"] == "kept"
