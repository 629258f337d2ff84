"""The memory cap on a real GPU: however a cell starts, torch reserves no more than its share allows."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from conftest import Sandbox

GIB = 2**30
# The program knows nothing of sweepack: all that caps it is the allocator's option in its environment.
TASK = """
import json, sys
import torch

def fill():
    kept, total = [], torch.cuda.get_device_properties(0).total_memory
    try:
        while True:
            kept.append(torch.empty(total // 100, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        return {"reserved": torch.cuda.max_memory_reserved(), "total": total}

def train(cell):
    return fill()

if __name__ == "__main__":
    json.dump(fill(), open(sys.argv[1], "w"))
"""


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["forked", "fresh", "program"])
def test_a_cell_cannot_reserve_more_than_its_share(gpu: Sandbox, measured: Callable[..., None], way: str) -> None:
    gpu.write("task.py", TASK)
    task = {"command": [sys.executable, "task.py", "{metrics}"]} if way == "program" else "task.py:train"
    gpu.config(
        sweep={"name": "test", "task": task},
        resources=[{"gpu": 0.25}],
        start="fresh" if way == "fresh" else "auto",
    )
    gpu.snakemake("--cores", "1")
    (record,) = gpu.cells().values()
    reserved, total, limit = record["metrics"]["reserved"], record["metrics"]["total"], record["memory"]["cap"]
    measured(cap=f"{limit / GIB:.2f} GiB", reserved=f"{reserved / GIB:.2f} GiB", device=f"{total / GIB:.2f} GiB")
    assert "started fresh" not in (record["dir"] / "log.txt").read_text()
    assert limit - total // 50 < reserved <= limit < total / 4
