"""MPS inside an allocation: a pack's cells are clients of a daemon that lives in the job."""

from __future__ import annotations

import os
import sys

from conftest import REPOSITORY, Sandbox
from mps_tools import FAKES

from .cluster_tools import Cluster
from .sweeps import FAST

# The nodes' GPUs are made up, so it takes a program: a function would need a torch that sees them.
PROGRAM = """
import json, os, sys, time
from fake_cuda import Gpu

gpu = Gpu()
time.sleep(0.5)
limit = os.environ["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"]
json.dump({"by_daemon": int(gpu.daemon is not None), "limit": limit}, open(sys.argv[1], "w"))
"""
# Takes the place of NVML's module on the nodes, which have no driver to tell a UUID.
NVML = """
from fake_nvml import FakeNvml, Gpu

_nvml = FakeNvml(*(Gpu(f"GPU-{number}") for number in range(8)))

def nvmlInit():
    pass

def __getattr__(name):
    return getattr(_nvml, name)
"""


def make(project: Sandbox, setup: str, **slurm: str) -> None:
    project.write("program.py", PROGRAM)
    project.write("nvml/pynvml.py", NVML)
    project.config(
        sweep={
            "name": "test",
            "task": {"command": [sys.executable, "program.py", "{metrics}"]},
            "axes": {"n": {"range": 4}},
        },
        resources=[{"gpu": 0.5, "runtime": 5}],
        slurm={"grace": 10, "setup": setup, **slurm},
        mps=True,
    )
    places = [project.root / "nvml", REPOSITORY / "tests/unit", FAKES, *filter(None, [os.environ.get("PYTHONPATH")])]
    project.environment["PYTHONPATH"] = os.pathsep.join(map(str, places))


def test_the_cells_of_a_pack_share_a_daemon(project: Sandbox, empty_cluster: Cluster) -> None:
    make(project, f"export PATH={FAKES}:$PATH")
    assert "mps      one daemon a device, for 4 cells that share one" in project.snakemake("-n", *FAST, profile="slurm")
    project.snakemake(*FAST, profile="slurm")
    # Half of 141 GiB less a reserve of 300 MB, in MiB.
    expected = {"by_daemon": 1, "limit": f"0={(141 * 2**30 - 300 * 10**6) // 2 // 2**20}M"}
    assert [record["metrics"] for record in project.cells().values()] == [expected] * 4


def test_a_node_without_mps_says_so(project: Sandbox, empty_cluster: Cluster) -> None:
    make(project, "")
    project.snakemake(*FAST, profile="slurm", status=1)
    logs = "".join(path.read_text() for path in project.root.glob("results/test/packs/slurm-*.log"))
    assert "no nvidia-cuda-mps-control on the PATH of n" in logs
    make(project, "", mode="exclusive")
    assert "a daemon ends with its job" in project.snakemake("-n", *FAST, profile="slurm", status=1)
