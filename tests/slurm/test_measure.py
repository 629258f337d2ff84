"""Sizes measured in a job, on the device that Slurm gives; pins that a plan on the login node reads."""

from __future__ import annotations

import json
import os
from pathlib import Path

from conftest import Sandbox

from .cluster_tools import Cluster
from .sweeps import FAST

SIMULATED = Path(__file__).parents[1] / "fakes" / "simulated_gpu"

# A sample takes 10 MiB of the device, beside 512 MiB; the optimiser's step is real.
TASK = """
import os
import torch

def train(cell, *, n: int = 0):
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    kept = torch.cuda.allocate(512 * 2**20)
    for _ in range(3):
        batch = torch.cuda.allocate(cell.batch * 10 * 2**20)
        weight.sum().backward()
        optimizer.step()
    with open(cell.dir / "host.txt", "w") as file:
        file.write(os.uname().nodename)
    return {"batch": cell.batch, "peak": torch.cuda.max_memory_reserved()}
"""


def make(project: Sandbox) -> None:
    project.write("task.py", TASK)
    project.config(
        sweep={"name": "test", "task": "task.py:train", "axes": {"n": [0, 1]}},
        resources=[{"gpu": 0.25, "batch": "auto", "runtime": 5}],
        sizing={"ignore": ["n"]},
        slurm={"grace": 10},
    )


def test_a_sweep_is_measured_in_a_job_and_the_next_plan_goes_by_it(project: Sandbox, empty_cluster: Cluster) -> None:
    paths = [str(SIMULATED), *filter(None, [os.environ.get("PYTHONPATH")])]
    project.environment |= {"SIMULATED_GPU": str(project.root / "card"), "PYTHONPATH": os.pathsep.join(paths)}
    make(project)
    plan = project.snakemake("-n", *FAST, profile="slurm", status=1)
    assert "2 cells: not measured on a GPU yet" in plan and "snakemake probe --profile profiles/slurm" in plan
    asked = project.snakemake("-n", "probe", *FAST, profile="slurm")
    assert "1 to measure on a GPU" in asked and "--gpus=1" in asked

    output = project.snakemake("probe", *FAST, profile="slurm")
    [pin] = [json.loads(path.read_text()) for path in (project.root / "results/test/pins").glob("*.json")]
    assert pin["device"] == "Simulated 16 GB" and pin["total"] == 16 * 2**30
    assert 512 * 2**20 + pin["largest"] * 10 * 2**20 <= pin["peak"] <= pin["cap"] < 4 * 2**30
    assert pin["limited_by"] == "memory" and pin["batch"] == int(0.8 * pin["largest"])
    assert f"batch {pin['batch']}" in output and project.cells() == {}

    plan = project.snakemake("-n", *FAST, profile="slurm")
    assert f"2 cells: batch {pin['batch']}, largest {pin['largest']} (limited by memory)" in plan
    project.snakemake(*FAST, profile="slurm")
    records = list(project.cells().values())
    assert [record["metrics"]["batch"] for record in records] == [pin["batch"]] * 2
    assert all(record["metrics"]["peak"] <= pin["peak"] for record in records)
    hosts = [path.read_text() for path in (project.root / "results/test/cells").glob("*/host.txt")]
    assert len(hosts) == 2 and set(hosts) <= {"n1", "n2"}


def test_a_device_whose_memory_nobody_tells_is_not_measured(project: Sandbox, empty_cluster: Cluster) -> None:
    # The nodes' GPUs are made up: neither NVML nor torch knows them.
    make(project)
    output = project.snakemake("probe", *FAST, "--retries", "0", profile="slurm", status=1)
    logs = "".join(path.read_text() for path in project.root.glob("results/test/**/slurm-*.log"))
    assert "a GPU whose memory NVML or torch can tell" in logs, output
    assert not list((project.root / "results/test/pins").glob("*.json"))
