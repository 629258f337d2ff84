"""Many jobs: no more in the queue than asked for, and what Slurm does not take for now is not lost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conftest import Sandbox

from .cluster_tools import Cluster
from .sweeps import FAST, attempts, make_project, table

# Calls of sbatch, counted without those that only ask. One is refused for now; one is taken, but the answer is lost.
SBATCH = """#!/bin/sh
case "$*" in *--test-only*) exec /usr/bin/sbatch "$@";; esac
squeue --noheader --format=%i | wc -l >> {root}/before
case $(wc -l < {root}/before) in
15|16) echo 'sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying.' >&2; exit 1;;
20) /usr/bin/sbatch "$@" > /dev/null
    echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1;;
esac
exec /usr/bin/sbatch "$@"
"""
SQUEUE = """#!/bin/sh
for argument; do case $argument in --jobs=*) echo "${{argument#--jobs=}}" >> {root}/looks;; esac; done
exec /usr/bin/squeue "$@"
"""
LIMIT = 3


def shimmed(project: Sandbox, **programs: str) -> str:
    """The path with ``programs`` first."""
    for name, text in programs.items():
        project.write(f"bin/{name}", text.format(root=project.root)).chmod(0o755)
    return f"{project.root}/bin:{project.environment['PATH']}"


def test_the_queue_is_not_crowded_and_what_is_refused_for_now_is_offered_again(
    project: Sandbox, empty_cluster: Cluster
) -> None:
    make_project(project, 24, slurm={"mode": "exclusive"}, params={"seconds": 1.0})
    path = shimmed(project, sbatch=SBATCH, squeue=SQUEUE)
    output = project.snakemake(*FAST, "--jobs", "12", "--retries", "0", profile="slurm", PATH=path)
    assert "temporarily unable to accept job" in output and "asking again" in output

    before = [int(line) for line in (project.root / "before").read_text().split()]
    assert max(before) == 11
    looks = [line.count(",") + 1 for line in (project.root / "looks").read_text().split()]
    assert max(looks) > 6  # a call for all jobs, not one for each
    assert set(attempts(project).values()) == {1} and len(table(project)) == 24
    # The one whose answer was lost was not submitted twice.
    assert len({row["id"] for row in empty_cluster.jobs() if row["folder"] == str(project.root)}) == 24


@pytest.fixture
def limited(empty_cluster: Cluster) -> Iterator[Cluster]:
    """A cluster that takes no more than ``LIMIT`` jobs of this user."""
    empty_cluster.call("sacctmgr", "-i", "modify", "user", "root", "set", f"MaxSubmitJobs={LIMIT}")
    yield empty_cluster
    empty_cluster.call("sacctmgr", "-i", "modify", "user", "root", "set", "MaxSubmitJobs=-1")


def test_a_limit_on_submitted_jobs_is_waited_for(project: Sandbox, limited: Cluster) -> None:
    make_project(project, 8, slurm={"mode": "exclusive"})
    others = [limited.submit("--hold") for _ in range(LIMIT)]
    project.snakemake("-n", *FAST, profile="slurm")  # what is in the queue says nothing about the plan
    output = project.snakemake(*FAST, "--sweepack-slurm-silence-minutes", "0.05", profile="slurm", status=1)
    assert output.count("Slurm takes no more jobs for now, for 0.05 min now (AssocMaxSubmitJobLimit") == 1
    assert not attempts(project) or set(attempts(project).values()) == {0}

    limited.cancel(*others)
    limited.wait_for_state(others, "CANCELLED")
    # With jobs of this run in the queue there is room again when one ends, however short patience is.
    output = project.snakemake(*FAST, "--sweepack-slurm-silence-minutes", "0.05", "--retries", "0", profile="slurm")
    assert f"set `jobs` of the profile to {LIMIT} or less" in output
    assert set(attempts(project).values()) == {1} and len(table(project)) == 8
