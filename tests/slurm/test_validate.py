"""`snakemake validate_cluster`: it passes on a good cluster, and names what is wrong with a bad one."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path

import pytest
from conftest import Sandbox

from .cluster_tools import Cluster
from .sweeps import FAST, make_project

WIDE = "cell on 2 nodes × 2 GPUs"
TITLES = ["requests", "packed sweep", WIDE, "wrong task count", "locks", "requeue", "metrics", "table"]


def verdicts(output: str) -> dict[str, str]:
    """Title → PASS, FAIL or SKIP."""
    return {title: verdict for verdict, title in re.findall(r"^(PASS|FAIL|SKIP)  ([^:]+):", output, re.MULTILINE)}


def failure(output: str, title: str) -> str:
    """All that is said of the failure of ``title``."""
    (found,) = re.findall(rf"^FAIL  {re.escape(title)}: .*(?:\n {{8}}.*)*", output, re.MULTILINE)
    return str(found)


def validate(sandbox: Sandbox, status: int, **environment: str) -> str:
    return sandbox.snakemake("validate_cluster", *FAST, profile="slurm", status=status, **environment)


def jobs_of(cluster: Cluster, sandbox: Sandbox) -> list[dict[str, str]]:
    return [row for row in cluster.jobs() if row["folder"].startswith(str(sandbox.root))]


def test_a_good_cluster_passes_and_the_sweep_is_left_alone(project: Sandbox, empty_cluster: Cluster) -> None:
    make_project(project, 2, slurm={"account": "ml"})
    output = validate(project, 0)
    print(output)
    assert verdicts(output) == dict.fromkeys(TITLES, "PASS")
    assert "up to 4 at once" in output
    assert "srun started 3, but 2 nodes × 2 GPUs make tasks 4" in output
    assert "8 passed, 0 failed" in output
    assert {row["account"] for row in jobs_of(empty_cluster, project)} == {"ml"}
    assert not (project.root / "results/test").exists()


def test_an_srun_that_starts_a_task_too_few(project: Sandbox, empty_cluster: Cluster) -> None:
    make_project(project, 2, slurm={})
    shim = project.write("bin/srun", f'#!/bin/bash\nexec {shutil.which("srun")} "${{@/#--ntasks=4/--ntasks=3}}"\n')
    shim.chmod(0o755)
    output = validate(project, 1, PATH=f"{shim.parent}:{project.environment['PATH']}")
    assert verdicts(output) == {**dict.fromkeys(TITLES, "PASS"), WIDE: "FAIL"}, output
    told = failure(output, WIDE)
    assert "srun started 3, but 2 nodes × 2 GPUs make tasks 4" in told
    assert "change: what decides how many tasks srun starts" in told and "/log.txt" in told


@pytest.mark.thorough
@pytest.mark.parametrize(
    "slurm, title, words",
    [
        ({"account": "other"}, "requests", ["slurm.account", "Invalid account", "change: "]),
        (
            {"setup": "module load nothing/1.0"},
            "packed sweep",
            ["FAILED", "module: command not found", "`slurm.setup`"],
        ),
        ({"setup": "export SWEEPACK_DEVICES=cpu"}, "packed sweep", ["saw 0 devices instead of one", "`slurm.setup`"]),
        ({"setup": "export SLURM_GPU_BIND=single:1"}, WIDE, ["sees 1 devices", "SLURM_GPU_BIND"]),
    ],
)
def test_a_bad_setting_is_named(
    project: Sandbox, empty_cluster: Cluster, slurm: dict[str, str], title: str, words: list[str]
) -> None:
    make_project(project, 2, slurm=slurm)
    output = validate(project, 1)
    told = failure(output, title)
    assert all(word in told for word in words), output
    assert "Traceback" not in output


@pytest.mark.thorough
def test_a_full_cluster_is_waited_for_not_without_end(project: Sandbox, empty_cluster: Cluster) -> None:
    make_project(project, 2, slurm={})
    full = empty_cluster.submit("--nodes=2", "--ntasks-per-node=1", "--exclusive", "--mem=0", "--time=5")
    empty_cluster.wait_for_state(full, "RUNNING")
    output = validate(project, 1, SWEEPACK_VALIDATE_MINUTES="0.2")
    told = failure(output, "packed sweep")
    assert "not done within 0.2 min" in told and "is pending" in told and "SWEEPACK_VALIDATE_MINUTES" in told
    empty_cluster.wait_for(
        lambda: {row["state"] for row in jobs_of(empty_cluster, project)} == {"CANCELLED"}, "its jobs to be cancelled"
    )


def test_interrupting_it_cancels_its_jobs(project: Sandbox, empty_cluster: Cluster) -> None:
    make_project(project, 2, slurm={})
    run = project.start("validate_cluster", *FAST, profile="slurm")
    empty_cluster.wait_for(
        lambda: any(row["state"] == "RUNNING" for row in jobs_of(empty_cluster, project)), "a job to run"
    )
    os.killpg(run.pid, signal.SIGINT)
    output, _ = run.communicate(timeout=60)
    assert run.returncode and "stopped by SIGINT; its jobs are cancelled" in output
    ended = {"CANCELLED", "COMPLETED", "FAILED"}
    empty_cluster.wait_for(
        lambda: {row["state"] for row in jobs_of(empty_cluster, project)} <= ended, "its jobs to end"
    )
    assert not Path(project.root / "results/test").exists()


def test_without_a_cluster_it_says_what_is_missing(project: Sandbox, cluster: Cluster) -> None:
    make_project(project, 2, slurm={})
    output = project.snakemake("validate_cluster", profile="local", status=1)
    assert "snakemake validate_cluster --profile profiles/slurm" in output and "Traceback" not in output
