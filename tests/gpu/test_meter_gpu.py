"""Measured on a real card: peaks of torch's allocator, running out of memory at the share's cap, and the estimate."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from sweepack.devices import Device
from sweepack.sizing.trial import CUDA_MEMORY

sys.path.insert(0, str(Path(__file__).parent.parent / "unit"))
from meter_tools import meter

MB = 10**6
TASK = """
import torch
from torch import nn

def train(cell):
    net = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)).to(cell.device)
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.randn(cell.batch, 1024, device=cell.device)).pow(2).mean().backward()
        optimizer.step()
    return {}
"""


@pytest.mark.gpu
def test_a_batch_is_measured_under_the_cap_and_near_its_estimate(tmp_path: Path, device: Device) -> None:
    (tmp_path / "task.py").write_text(TASK)
    total = device.memory
    assert total is not None
    with meter(tmp_path, device=device, share=100) as measuring, meter(tmp_path, device=None) as estimator:
        found = measuring.measure(4096)
        estimated = estimator.measure(4096)
        too_large = measuring.measure(total // 10 // 4096)
        again = measuring.measure(64)
    assert (found.outcome, found.source, found.rows) == ("measured", CUDA_MEMORY, 4096), found
    assert found.peak is not None and found.allocated is not None and estimated.peak is not None
    # Beside tensors, the allocator counts what cuBLAS works in.
    assert estimated.peak * 0.95 < found.allocated < estimated.peak * 1.1 + 64 * MB
    assert found.allocated <= found.peak < total / 10
    assert too_large.outcome == "oom" and too_large.peak is None, too_large
    assert again.outcome == "measured" and again.peak is not None and again.peak < found.peak
