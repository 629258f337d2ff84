"""MPS inside an allocation: a pack's cells are clients of a daemon that lives in the job."""

from __future__ import annotations

import json

from conftest import Sandbox
from mps_tools import FAKES

from .cluster_tools import Cluster
from .sweeps import FAST

TASK = """
import time
from fake_cuda import Gpu

def train(cell, *, n: int):
    gpu = Gpu()
    time.sleep(0.5)
    return {"by_daemon": int(gpu.daemon is not None)}
"""


def make(project: Sandbox, setup: str, **slurm: str) -> None:
    project.write("task.py", TASK)
    project.config(
        sweep={"name": "test", "task": "task.py:train", "axes": {"n": {"range": 4}}},
        resources=[{"gpu": 0.5, "runtime": 5}],
        slurm={"grace": 10, "setup": setup, **slurm},
        mps=True,
    )
    project.environment["PYTHONPATH"] = f"{FAKES}:{project.environment.get('PYTHONPATH', '')}"


def test_the_cells_of_a_pack_share_a_daemon(project: Sandbox, empty_cluster: Cluster) -> None:
    # The nodes have no driver that would tell a UUID.
    make(project, f"export PATH={FAKES}:$PATH CUDA_VISIBLE_DEVICES=GPU-of-$SLURM_JOB_ID")
    assert "mps      one daemon a device, for 4 cells that share one" in project.snakemake("-n", *FAST, profile="slurm")
    project.snakemake(*FAST, profile="slurm")
    for record in project.cells().values():
        assert record["metrics"] == {"by_daemon": 1}
        assert json.loads((record["dir"] / "provenance.json").read_text())["mps"]["client"] is True


def test_a_node_without_mps_says_so(project: Sandbox, empty_cluster: Cluster) -> None:
    make(project, "export CUDA_VISIBLE_DEVICES=GPU-of-$SLURM_JOB_ID")
    project.snakemake(*FAST, profile="slurm", status=1)
    logs = "".join(path.read_text() for path in project.root.glob("results/test/packs/slurm-*.log"))
    assert "no nvidia-cuda-mps-control on the PATH of n" in logs
    make(project, "", mode="exclusive")
    assert "a daemon ends with its job" in project.snakemake("-n", *FAST, profile="slurm", status=1)
