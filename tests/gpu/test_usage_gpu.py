"""What NVML says of a cell on a real GPU."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from conftest import Sandbox

HELD = 2  # GiB
TASK = f"""
import time
import torch

def train(cell):
    kept = torch.ones({HELD} * 2**28, device="cuda")
    end = time.monotonic() + 4
    while time.monotonic() < end:
        kept.mul_(1.0)
        torch.cuda.synchronize()
    return {{"sum": float(kept[:10].sum())}}
"""


@pytest.mark.gpu
@pytest.mark.parametrize("start", ["auto", "fresh"])
def test_nvml_sees_the_memory_of_a_cell(gpu: Sandbox, measured: Callable[..., None], start: str) -> None:
    gpu.write("task.py", TASK)
    gpu.config(sweep={"name": "test", "task": "task.py:train"}, resources=[{"gpu": 0.5}], start=start)
    gpu.snakemake("--cores", "1")
    (record,) = gpu.cells().values()
    found = json.loads((record["dir"] / "usage.json").read_text())
    cell = found["cell_memory"]
    overhead = f"{cell['peak'] - HELD:.2f} GiB" if cell["samples"] else cell["why"]
    told = {name: found[name].get("mean", found[name].get("why")) for name in ("utilisation", "power")}
    measured(beyond_torch=overhead, device_peak=f"{found['device_memory']['peak']:.2f} GiB", **told)
    assert found["device_memory"]["peak"] >= HELD
    if not cell["samples"] and "container" in cell["why"]:
        pytest.skip(cell["why"])
    assert HELD <= cell["peak"] < HELD + 2
