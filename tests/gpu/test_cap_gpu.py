"""The memory cap on a real GPU, by each of the two ways, before any user code; an error of the cell's own when hit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from conftest import Sandbox
from sweepack.devices import load_nvml, visible_pool
from sweepack.memory import cap_by, fraction
from sweepack.sizing.config import Memory

SETTINGS = Memory().model_dump()
# What a task or a program may do before anything of ours has been called.
ALLOCATE = """
import torch
total = torch.cuda.get_device_properties(0).total_memory
limit = cap_by({settings}, 250, total)
fits = torch.empty(int(limit * 0.9), dtype=torch.uint8, device="cuda")
try:
    torch.empty(int(limit * 0.2), dtype=torch.uint8, device="cuda")
    print("not capped")
except torch.OutOfMemoryError:
    print("capped at", limit, "of", total)
"""
TASK = """
import torch
def train(cell, *, part: float):
    total = torch.cuda.get_device_properties(0).total_memory
    held = torch.ones(int(total * part), dtype=torch.uint8, device="cuda")
    return {"size": len(held)}
"""


@pytest.fixture
def device() -> Any:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    found = visible_pool({**os.environ, "SWEEPACK_DEVICES": ""}, load_nvml())[0]
    if found.memory is None:
        pytest.skip("no driver tells the memory of the GPU")
    return found


@pytest.mark.gpu
def test_the_environment_alone_caps_a_program_that_uses_torch(device: Any) -> None:
    from sweepack.allocator import configure

    environment = configure(os.environ, SETTINGS, fraction(250, device.memory, SETTINGS))
    program = "from sweepack.memory import cap_by" + ALLOCATE.format(settings=SETTINGS)
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("capped at"), done.stdout
    _, _, limit, _, total = done.stdout.split()
    assert 0 < int(limit) < int(total) / 4


@pytest.mark.gpu
@pytest.mark.parametrize("start", ["auto", "fresh"])
def test_a_cell_over_its_cap_fails_alone_and_peaks_are_recorded(sandbox: Sandbox, device: Any, start: str) -> None:
    del sandbox.environment["SWEEPACK_DEVICES"]
    sandbox.environment["CUDA_VISIBLE_DEVICES"] = device.entry
    sandbox.write("task.py", TASK)
    sandbox.config(
        sweep={"name": "test", "task": "task.py:train", "axes": {"part": [0.01, 0.02, 0.3]}},
        resources=[{"gpu": 0.25}],
        start=start,
        on_error="nan",
    )
    sandbox.snakemake("--cores", "3")
    cells = {record["params"]["part"]: record for record in sandbox.cells().values()}
    assert {part: record["status"] for part, record in cells.items()} == {
        0.01: "finished",
        0.02: "finished",
        0.3: "failed",
    }
    for part, record in cells.items():
        found = record["memory"]
        assert found["cap"] == cap_by(SETTINGS, 250, found["total"])
        facts = json.loads((record["dir"] / "provenance.json").read_text())
        assert facts["memory_cap"] == found["cap"]
        if part < 0.3:
            assert part * found["total"] <= found["reserved"] < found["cap"]
