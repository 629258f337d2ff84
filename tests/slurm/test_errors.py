"""What cannot work on the cluster is told before anything runs, in Slurm's words where it is Slurm that refuses."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import Sandbox

from .cluster_tools import Cluster
from .sweeps import FAST, make_project


@pytest.mark.parametrize(
    "slurm, words",
    [
        ({"partition": "gpuu"}, ["error in slurm.partition", "'gpuu'", "did you mean `gpu`?"]),
        ({"account": "other"}, ["error in slurm.account", "Slurm says: Invalid account"]),
        ({"constraint": "h900"}, ["error in slurm.constraint", "Slurm says: Invalid feature"]),
        ({"reservation": "noon"}, ["error in slurm.reservation", "Slurm says"]),
        ({"gpu_model": "h900"}, ["gpu_model", "h900"]),
        ({"pack": {"gpus": 5}}, ["error in slurm.pack.gpus", "at most 4", "a pack runs on one node"]),
        ({"extra": "--time=3"}, ["error in slurm.extra", "resources[].runtime"]),
        ({"partition": "short", "mode": "exclusive"}, ["error in resources[0].runtime", "partition short allows 5"]),
    ],
)
def test_the_plan_refuses(project: Sandbox, cluster: Cluster, slurm: dict[str, Any], words: list[str]) -> None:
    make_project(project, 4, slurm=slurm)
    for command in (("-n", *FAST), FAST):
        output = project.snakemake(*command, profile="slurm", status=1)
        assert "Traceback" not in output
        for word in words:
            assert word in output, output
    assert not (project.root / "results/test/packs").exists()


def test_without_slurm_the_error_says_so(project: Sandbox, tmp_path: Path) -> None:
    make_project(project, 4, slurm={})
    programs = tmp_path / "bin"
    programs.mkdir()
    for program in ("bash", "sh", "which", "env"):
        (programs / program).symlink_to(shutil.which(program) or program)
    path = project.environment["PATH"].split(":")[0]
    output = project.snakemake("-n", profile="slurm", status=1, PATH=f"{path}:{programs}")
    assert "sbatch is not on the path" in output and "profiles/local" in output


def sbatch_says(project: Sandbox, words: str) -> str:
    """The path with an sbatch first that takes the plan and then refuses each job, as when things change in between."""
    shim = project.write(
        "bin/sbatch",
        '#!/bin/sh\ncase "$*" in *--test-only*) exec /usr/bin/sbatch "$@";; esac\n'
        f"echo offered >> {project.root}/offers; echo 'sbatch: error: {words}' >&2; exit 1\n",
    )
    shim.chmod(0o755)
    return f"{shim.parent}:{project.environment['PATH']}"


def test_a_refusal_at_submission_is_told_and_ends_the_run(project: Sandbox, cluster: Cluster) -> None:
    make_project(project, 4, slurm={})
    path = sbatch_says(project, "Batch job submission failed: Invalid qos specification")
    output = project.snakemake(*FAST, "--retries", "1", profile="slurm", status=1, PATH=path)
    assert "Slurm refused the job: Batch job submission failed: Invalid qos specification" in output
    assert "Change `slurm.qos`" in output
    assert "Traceback" not in output


def test_a_controller_that_takes_no_job_for_too_long_ends_the_run(project: Sandbox, cluster: Cluster) -> None:
    make_project(project, 3, slurm={"mode": "exclusive"})
    path = sbatch_says(project, "Batch job submission failed: Unable to contact slurm controller (connect failure)")
    silence = ("--sweepack-slurm-silence-minutes", "0.02")
    output = project.snakemake(*FAST, *silence, profile="slurm", status=1, PATH=path)
    assert "Unable to contact slurm controller" in output and "run the same command later" in output
    assert "Traceback" not in output
    # Patience is the run's, not each job's: the other two jobs and the retries are not offered as well.
    assert (project.root / "offers").read_text().count("offered") <= 3
