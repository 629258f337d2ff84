"""Every script runs by hand and says how."""

from __future__ import annotations

import subprocess
import sys

import pytest
from conftest import REPOSITORY

SCRIPTS = sorted((REPOSITORY / "scripts").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_explains_itself(script):
    done = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, check=True)
    where = "--folder" if script.name == "validate.py" else "--sweep-dir"
    assert where in done.stdout and len(done.stdout) > 200


def test_a_cell_runs_by_hand(sandbox):
    sandbox.write("task.py", "def train(cell, *, x: int):\n    return {'score': x}\n")
    sandbox.config(sweep={"name": "test", "task": "task.py:train", "axes": {"x": [1]}})
    sandbox.snakemake()
    (identity,) = sandbox.cells()
    results = sandbox.root / "results/test"
    (results / "cells" / identity / "result.json").unlink()
    command = [sys.executable, REPOSITORY / "scripts/cell.py", "--sweep-dir", "results/test", "--cell", identity]
    subprocess.run(command, cwd=sandbox.root, env=sandbox.environment, check=True)
    assert (results / "cells" / identity / "result.json").exists() and sandbox.cells()[identity]["attempt"] == 1

    command[-1] = "000000000000"
    done = subprocess.run(command, cwd=sandbox.root, env=sandbox.environment, capture_output=True, text=True)
    assert done.returncode == 1 and "--cell" in done.stderr and "Traceback" not in done.stderr
