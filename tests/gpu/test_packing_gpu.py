"""Cells that share a real GPU: one that goes over its cap harms no other, numbers stay, and nothing is left behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Sandbox
from mps_tools import daemons
from sweepack.devices import Device, load_nvml, processes_on
from sweepack.errors import UserError
from sweepack.mps.daemon import require_usable

from .conftest import processes_of

TASK = """
import time
from pathlib import Path
import torch
from torch import nn

def wait_for(count, pattern):
    end = time.monotonic() + 100
    while len(list(Path().glob(pattern))) < count:
        assert time.monotonic() < end, f"waited in vain for {pattern}"
        time.sleep(0.01)

def steps(cell, count):
    torch.manual_seed(cell.seed)
    net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).cuda()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    data = torch.randn(512, 256, device="cuda")
    for step in range(count):
        loss = nn.functional.mse_loss(net(data), data)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            cell.log({"loss": loss}, step=step)
    return {"loss": loss.item(), "weights": sum(p.double().sum().item() for p in net.parameters())}

def train(cell, *, seed: int, how: str = ""):
    torch.zeros(1, device="cuda")
    if how == "alone":
        return steps(cell, 200)
    Path(f"started-{how}-{seed}").touch()
    if how == "wait":
        time.sleep(1000)
    wait_for(4 if how == "packed" else 2, f"started-{how}-*")
    if how == "greedy" and seed == 0:
        try:
            kept = [torch.empty(2**28, dtype=torch.uint8, device="cuda") for _ in range(4096)]
        except torch.OutOfMemoryError:
            Path("failed").touch()
            raise
    if how == "greedy":
        wait_for(1, "failed")
    return steps(cell, 200)
"""


def sweep(gpu: Sandbox, count: int, how: str, share: float, **settings: object) -> None:
    gpu.write("task.py", TASK)
    axes = {"seed": {"range": count}}
    gpu.config(
        sweep={"name": how, "task": "task.py:train", "params": {"how": how}, "axes": axes},
        resources=[{"gpu": share}],
        **settings,
    )


def by_seed(gpu: Sandbox, how: str) -> dict[int, dict]:
    return {record["params"]["seed"]: record for record in gpu.cells(how).values()}


@pytest.mark.gpu
def test_one_that_goes_over_its_cap_fails_alone_and_is_told_why(gpu: Sandbox, measured: Callable[..., None]) -> None:
    sweep(gpu, 2, "greedy", 0.5, cells_per_job=2)
    gpu.snakemake("--cores", "2", status=1)
    found = by_seed(gpu, "greedy")
    greedy, neighbour = found[0], found[1]
    measured(cap=f"{greedy['memory']['cap'] / 2**30:.2f} GiB", told=greedy["failure"], neighbour=neighbour["status"])
    assert (greedy["status"], greedy["failure"]) == ("failed", "oom_cap")
    assert neighbour["status"] == "finished"


@pytest.mark.gpu
def test_packed_cells_have_the_numbers_of_those_that_run_alone_bit_for_bit(
    gpu: Sandbox, measured: Callable[..., None]
) -> None:
    sweep(gpu, 4, "packed", 0.25, cells_per_job=4)
    gpu.snakemake("--cores", "4")
    packed = by_seed(gpu, "packed")
    sweep(gpu, 4, "alone", 1)
    gpu.snakemake("--cores", "4")
    alone = by_seed(gpu, "alone")
    equal = sum(packed[seed]["metrics"] == alone[seed]["metrics"] for seed in packed)
    measured(equal=f"{equal} of 4 cells", loss=packed[0]["metrics"]["loss"])
    assert equal == 4
    for seed, record in packed.items():
        history = (record["dir"] / "history.jsonl").read_text()
        assert history and history == (alone[seed]["dir"] / "history.jsonl").read_text()


@pytest.mark.gpu
def test_nothing_is_left_of_a_run_that_was_killed(
    gpu: Sandbox, device: Device, eventually: Callable[..., None], measured: Callable[..., None]
) -> None:
    mps = True
    try:
        require_usable([device], os.environ)
    except UserError:
        mps = False
    sweep(gpu, 2, "wait", 0.5, cells_per_job=2, mps=mps)
    run = gpu.start("--cores", "2")
    eventually(lambda: len(list(gpu.root.glob("started-wait-*"))) == 2, "both cells", 100)
    leases, before = Path(gpu.environment["SWEEPACK_LEASES"]), processes_of(gpu)
    assert len(daemons(leases)) == mps and len(before) > 2
    os.killpg(run.pid, signal.SIGKILL)
    run.communicate()
    eventually(lambda: not processes_of(gpu), "the end of the cells", 60)
    eventually(lambda: not daemons(leases), "the end of the daemon", 60)
    assert f"{device.label}: 1 free" in gpu.sweepack("leases")
    nvml = load_nvml()
    assert nvml is not None
    left = processes_on(nvml, nvml.nvmlDeviceGetHandleByUUID(device.entry)).keys() & set(before)
    measured(processes_before=len(before), left=len(left), MPS="on" if mps else "off")
    assert not left
