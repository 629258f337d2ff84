"""The memory cap on a real GPU: in force before any user code, and an error of the cell's own when it is hit."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import torch
from sweepack.memory import apply_cap
limit = apply_cap(250)
fits = torch.empty(int(limit * 0.9), dtype=torch.uint8, device="cuda")
try:
    torch.empty(int(limit * 0.2), dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    print("capped at", limit)
"""


@pytest.mark.gpu
def test_a_cell_cannot_reserve_more_than_its_share():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    total = torch.cuda.get_device_properties(0).total_memory
    assert 0 < int(done.stdout.split()[-1]) < total / 4
