"""Sizes on a real GPU: what is estimated without one is what it takes, and a measured share fits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Sandbox
from sweepack.devices import Device
from sweepack.loading import load_config
from sweepack.sizing.config import Memory

GIB = 2**30
TASK = """
import time
from pathlib import Path
import torch
from torch import nn

def net(kind):
    if kind == "mlp":
        return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(4096, 4096), nn.ReLU())])
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True), 4)

def train(cell, *, kind: str = "mlp", seed: int = 0):
    model = net(kind).to(cell.device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, foreach=True)
    batch = cell.batch or 64
    shape = (batch, 4096) if kind == "mlp" else (batch, 128, 512)
    for _ in range(6):
        data = torch.randn(shape, device=cell.device)
        loss = nn.functional.mse_loss(model(data), data)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {"loss": loss.item()}
"""


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "batch"), [("mlp", 1024), ("transformer", 64)])
def test_the_estimate_is_what_a_step_takes(
    gpu: Sandbox, device: Device, measured: Callable[..., None], tmp_path: Path, kind: str, batch: int
) -> None:
    meter = pytest.importorskip("sweepack.sizing.meter")
    gpu.write("task.py", TASK)
    gpu.config(sweep={"name": "test", "task": "task.py:train"})
    _, task = load_config(gpu.root / "config/config.yaml", [], [], gpu.root)
    peaks = {}
    for where in (None, device):
        with meter.Meter(
            task.to_json(gpu.root),
            {"kind": kind, "seed": 0},
            0,
            device=where,
            share=1000,
            threads=1,
            mem_mb=0,
            memory=Memory().model_dump(),
            root=gpu.root,
            timeout=100.0,
            scratch=tmp_path,
        ) as opened:
            found = opened.measure(batch)
        assert found.outcome == "measured", found
        peaks[where] = found
    estimated, real = peaks[None].peak, peaks[device]
    allocated = real.allocated or real.peak
    measured(
        estimate=f"{estimated / GIB:.3f} GiB",
        allocated=f"{allocated / GIB:.3f} GiB",
        reserved=f"{real.peak / GIB:.3f} GiB",
        ratio=round(estimated / allocated, 3),
    )
    assert 0.85 < estimated / allocated < 1.1


@pytest.mark.gpu
def test_a_share_that_was_measured_fits(gpu: Sandbox, measured: Callable[..., None]) -> None:
    pytest.importorskip("sweepack.sizing.probe")
    gpu.write("task.py", TASK)
    gpu.config(
        sweep={"name": "test", "task": "task.py:train", "axes": {"seed": {"range": 4}}},
        resources=[{"gpu": "auto", "batch": 256}],
        sizing={"unpinned": "probe"},
    )
    gpu.snakemake("--cores", "4", status=None)  # it measures, and stops
    gpu.snakemake("--cores", "4")
    records = list(gpu.cells().values())
    assert [record["status"] for record in records] == ["finished"] * 4
    share = records[0]["share"]
    peak = max(record["memory"]["reserved"] for record in records)
    limits = [record["memory"]["cap"] for record in records if record["memory"]["cap"]]
    measured(share=share / 1000, peak=f"{peak / GIB:.2f} GiB", cap=f"{min(limits) / GIB:.2f} GiB" if limits else "none")
    assert share < 1000 and peak <= min(limits)
