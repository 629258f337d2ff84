"""MPS on a real GPU: two cells are clients of one server, within their limit of memory."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Sandbox
from sweepack.devices import load_nvml, visible_pool
from sweepack.errors import UserError
from sweepack.mps.daemon import require_usable

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


@pytest.fixture
def gpu(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    monkeypatch.delenv("SWEEPACK_DEVICES", raising=False)
    pool = visible_pool(os.environ, load_nvml())
    try:
        require_usable(pool, os.environ)
    except UserError as error:
        pytest.skip(str(error.value))
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    folder = tempfile.mkdtemp(prefix="mps-")
    sandbox.environment |= {"CUDA_VISIBLE_DEVICES": pool[0].entry, "SWEEPACK_LEASES": folder}
    del sandbox.environment["SWEEPACK_DEVICES"]
    yield sandbox
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.gpu
@pytest.mark.parametrize("start", ["auto", "fresh"])
def test_two_cells_are_clients_of_one_server(gpu: Sandbox, start: str) -> None:
    torch = pytest.importorskip("torch")
    gpu.write("task.py", TASK)
    gpu.config(
        sweep={"name": "test", "task": "task.py:train", "axes": {"x": [0, 1]}},
        resources=[{"gpu": 0.5}],
        mps=True,
        start=start,
    )
    gpu.snakemake("--cores", "2")
    for record in gpu.cells().values():
        facts = json.loads((record["dir"] / "provenance.json").read_text())
        assert facts["mps"]["client"] is True
        assert record["metrics"]["total"] == 10
        # The limit must not change what the cap on torch's memory is reckoned from.
        assert record["metrics"]["memory"] == torch.cuda.get_device_properties(0).total_memory
    (server_log,) = Path(gpu.environment["SWEEPACK_LEASES"]).glob("mps/*/log*/server.log")
    assert server_log.stat().st_size
