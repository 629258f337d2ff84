"""Out of memory on a real GPU: whose doing it was, by torch's own numbers, and what becomes of the cell."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest
from sweepack.devices import load_nvml, visible_pool

CELL = """
import json, sys
import torch
from sweepack import oom
from sweepack.job import Job
from sweepack.records import Record, State
share, part, cleared = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "cleared"
job = Job("/cells/x", "cuda:0", "cuda", True, share, 1, 0, False, (), 2, memory={"reserve": 300, "overhead": 600})
total = torch.cuda.get_device_properties(0).total_memory
cap = int(total * share / 1000 * 0.9)
torch.cuda.set_per_process_memory_fraction(cap / total)
oom.watch(cap)
kept = []
try:
    while True:
        kept.append(torch.empty(int(cap * part), dtype=torch.uint8, device="cuda"))
        if len(kept) == 4 and part < 0.2:
            break
except RuntimeError as error:
    if cleared:
        kept.clear()
        torch.cuda.empty_cache()
    print(oom.tell(error, Record("x", State.FAILED, 1, error=str(error)), job).to_json())
"""
FOREIGN = """
import sys
import torch
free, _ = torch.cuda.mem_get_info()
kept = torch.empty(free - 600 * 2**20, dtype=torch.uint8, device="cuda")
print("full", flush=True)
sys.stdin.read()
"""
TASK = """
import torch

def train(cell, *, x: int):
    with open("trained.txt", "a") as file:
        file.write(f"{x}@{cell.share:g}\\n")
    total = torch.cuda.get_device_properties(0).total_memory
    kept = torch.ones(int(total * (0.3 if x == 0 else 0.1)) // 4, device="cuda")
    return {"sum": float(kept[:1000].sum())}
"""


@pytest.fixture
def entry():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    return next(device.entry for device in visible_pool(os.environ, load_nvml()) if device.kind == "cuda")


def ended(entry, *arguments):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": entry}
    command = [sys.executable, "-c", CELL, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


@pytest.mark.gpu
@pytest.mark.parametrize("cleared", ["cleared", "kept"])
def test_at_its_cap(entry, cleared):
    told = ended(entry, "250", "0.3", cleared)
    assert '"failure": "oom_cap"' in told and '"outgrown": 250' in told and "beside 0.0 MiB" not in told


@pytest.mark.gpu
def test_on_a_card_that_another_has_filled(entry):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": entry}
    command = [sys.executable, "-c", FOREIGN]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as other:
        assert other.stdout is not None and other.stdout.readline() == "full\n"
        told = ended(entry, "250", "0.15", "kept")
        other.kill()
    assert '"failure": "oom_neighbour"' in told and '"interrupted"' in told


@pytest.mark.gpu
def test_a_cell_that_needs_more_ends_with_more_and_its_neighbours_are_untouched(entry, sandbox):
    del sandbox.environment["SWEEPACK_DEVICES"]
    sandbox.environment["CUDA_VISIBLE_DEVICES"] = entry
    sandbox.write("task.py", TASK)
    sandbox.config(
        sweep={"name": "test", "task": "task.py:train", "axes": {"x": {"range": 3}}},
        resources=[{"gpu": 0.25}],
        retry={"oom": "next_share"},
    )
    sandbox.snakemake("--cores", "3")
    assert Counter(sandbox.trained()) == {"0@0.25": 1, "0@0.5": 1, "1@0.25": 1, "2@0.25": 1}
