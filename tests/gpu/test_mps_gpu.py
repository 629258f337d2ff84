"""MPS on a real GPU: cells are clients of one server, within their limit of memory, and get more done than without."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Sandbox

TASK = """
import time
from pathlib import Path
import torch

def train(cell, *, x: int):
    total = torch.ones(10, device="cuda").sum().item()
    Path(f"started-{x}").touch()
    end = time.monotonic() + 120
    while len(list(Path().glob("started-*"))) < 2 and time.monotonic() < end:
        time.sleep(0.02)
    return {"total": total, "memory": torch.cuda.get_device_properties(0).total_memory}
"""
TINY = """
import time
from pathlib import Path
import torch
from torch import nn

STEPS = 2000

def train(cell, *, x: int, count: int):
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).cuda()
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    data, labels = torch.randn(256, 64, device="cuda"), torch.randint(10, (256,), device="cuda")

    def run(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(data), labels).backward()
            optimizer.step()
        torch.cuda.synchronize()

    run(50)
    sweep = cell.dir.parent.parent
    (sweep / f"started-{x}").touch()
    end = time.monotonic() + 100
    while len(list(sweep.glob("started-*"))) < count:
        assert time.monotonic() < end, "the others did not start"
        time.sleep(0.002)
    begun = time.perf_counter()
    run(STEPS)
    return {"rate": STEPS / (time.perf_counter() - begun)}
"""


@pytest.mark.gpu
@pytest.mark.parametrize("start", ["auto", "fresh"])
def test_two_cells_are_clients_of_one_server(mps_gpu: Sandbox, start: str) -> None:
    torch = pytest.importorskip("torch")
    mps_gpu.write("task.py", TASK)
    mps_gpu.config(
        sweep={"name": "test", "task": "task.py:train", "axes": {"x": [0, 1]}},
        resources=[{"gpu": 0.5}],
        mps=True,
        start=start,
    )
    mps_gpu.snakemake("--cores", "2")
    for record in mps_gpu.cells().values():
        facts = json.loads((record["dir"] / "provenance.json").read_text())
        assert facts["mps"]["client"] is True
        assert record["metrics"]["total"] == 10
        # The limit must not change what the cap on torch's memory is reckoned from.
        assert record["metrics"]["memory"] == torch.cuda.get_device_properties(0).total_memory
    (server_log,) = Path(mps_gpu.environment["SWEEPACK_LEASES"]).glob("mps/*/log*/server.log")
    assert server_log.stat().st_size


@pytest.mark.gpu
@pytest.mark.parametrize("count", [4, 8])
def test_tiny_cells_get_more_done_under_mps(mps_gpu: Sandbox, measured: Callable[..., None], count: int) -> None:
    if (os.cpu_count() or 1) < count:
        pytest.skip(f"{count} cells at once take {count} CPUs")
    mps_gpu.write("task.py", TINY)
    rates = {}
    for mps in (False, True):
        name = f"mps-{mps}".lower()
        mps_gpu.config(
            sweep={
                "name": name,
                "task": "task.py:train",
                "params": {"count": count},
                "axes": {"x": {"range": count}},
            },
            resources=[{"gpu": 1 / count}],
            mps=mps,
            cells_per_job=count,
        )
        mps_gpu.snakemake("--cores", str(count))
        rates[mps] = sum(record["metrics"]["rate"] for record in mps_gpu.cells(name).values())
    gain = rates[True] / rates[False]
    measured(steps_a_second=f"{rates[True]:.0f}", without=f"{rates[False]:.0f}", gain=f"{gain:.2f} times")
    assert gain > 1
