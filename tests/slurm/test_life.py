"""What clusters do to jobs: nothing is lost, nothing is trained twice, nothing is waited for without end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Sandbox, make_sandbox

from .cluster_tools import Cluster
from .sweeps import FAST, attempts, make_project, packs, seen, table

ONCE = (*FAST, "--retries", "0")


def run_of(sandbox: Sandbox, *arguments: str) -> subprocess.Popen[str]:
    return sandbox.start(*(arguments or ONCE), profile="slurm")


def end_of(run: subprocess.Popen[str], status: int | None = None, limit: float = 120) -> str:
    output, _ = run.communicate(timeout=limit)
    assert status is None or run.returncode == status, output
    return output


def jobs_of(cluster: Cluster, sandbox: Sandbox) -> list[str]:
    """The ids of the sandbox's jobs, in the order of submission."""
    return [row["id"] for row in cluster.jobs() if row["folder"] == str(sandbox.root)][::-1]


def wait_for_start(cluster: Cluster, sandbox: Sandbox, jobs: int, cells: int) -> list[str]:
    """Wait until so many jobs run and so many cells in them; the jobs."""

    def running() -> list[str]:
        found = [job for job in jobs_of(cluster, sandbox) if cluster.state(job) == "RUNNING"]
        return found if len(found) >= jobs else []

    found = cluster.wait_for(running, f"{jobs} jobs to run")
    cluster.wait_for(
        lambda: sum(record["status"] == "running" for record in sandbox.cells().values()) >= cells,
        f"{cells} cells to run",
    )
    return found


@pytest.fixture
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    """Where the undisturbed run takes place, on this machine."""
    yield make_sandbox(tmp_path_factory.mktemp("undisturbed"))


def cells_of(sandbox: Sandbox, pack: str) -> set[int]:
    records = sandbox.cells()
    return {records[cell]["params"]["n"] for cell in packs(sandbox)[pack]}


def pack_of(cluster: Cluster, job: str) -> str:
    comment = next(row["comment"] for row in cluster.jobs() if row["id"] == job)
    return Path(comment.removeprefix("sweepack ")).stem


def test_a_bad_night(project: Sandbox, reference: Sandbox, empty_cluster: Cluster) -> None:
    """A cell fails, one is killed, a pack is requeued, one is preempted, one cancelled, one loses its node."""
    sizes = {"slurm": {"pack": {"count": 6}}, "params": {"seconds": 12.0, "epochs": 24}}
    make_project(reference, 24, **sizes | {"params": {"seconds": 0.0, "epochs": 24}})
    reference.snakemake()

    make_project(project, 24, **sizes)
    project.write("trouble-0", "fail")
    project.write("trouble-1", "kill")
    run = run_of(project)
    jobs = wait_for_start(empty_cluster, project, 6, 20)
    by_node = {job: empty_cluster.node_of(job) for job in jobs}
    on_n2 = [job for job in jobs if by_node[job] == "n2"]
    requeued, cancelled = [job for job in jobs if by_node[job] == "n1"][:2]
    empty_cluster.requeue(requeued)
    empty_cluster.cancel(cancelled)
    empty_cluster.kill_node("n2")
    urgent = empty_cluster.submit(
        "--partition=hi", "--nodelist=n1", "--nodes=1", "--gres=gpu:4", "--time=1", command="sleep 5"
    )
    empty_cluster.wait_for_state(urgent, "RUNNING", "COMPLETED", seconds=60)
    empty_cluster.start_node("n2")
    end_of(run, 1, limit=240)
    assert on_n2

    before = attempts(project)
    finished = {record["params"]["n"] for record in project.cells().values() if record["status"] == "finished"}
    for name in project.root.glob("trouble-*"):
        name.unlink()
    project.snakemake(*ONCE, profile="slurm")
    after = attempts(project)
    assert {n for n in after if after[n] == before[n]} == finished
    assert untimed(project) == untimed(reference)
    for record in project.cells().values():
        rows = (record["dir"] / "history.jsonl").read_text().splitlines()
        assert len(rows) == 24  # each epoch once, whatever happened


def untimed(sandbox: Sandbox) -> list[dict[str, str]]:
    """The table without what differs between cells that take their time and the same ones without."""
    rows = [{k: v for k, v in row.items() if k not in ("cell", "params.seconds")} for row in table(sandbox)]
    return sorted(rows, key=lambda row: int(row["params.n"]))


def test_the_time_limit_saves_what_there_is_and_the_retry_goes_on(project: Sandbox, empty_cluster: Cluster) -> None:
    # A minute is the least that Slurm takes: told to stop 50 s before its end, cells of 20 s need several jobs.
    make_project(
        project,
        4,
        runtime=None,
        slurm={"time": 1, "grace": 50, "pack": {"count": 1}},
        params={"seconds": 25.0, "epochs": 50},
    )
    project.snakemake(*FAST, "--retries", "4", profile="slurm")
    assert len(jobs_of(empty_cluster, project)) >= 2
    assert all(count >= 2 for count in attempts(project).values())
    for record in project.cells().values():
        assert len((record["dir"] / "history.jsonl").read_text().splitlines()) == 50


@pytest.mark.parametrize("live", ["adopt", "cancel"])
def test_jobs_that_a_killed_snakemake_left(project: Sandbox, empty_cluster: Cluster, live: str) -> None:
    make_project(project, 8, slurm={"pack": {"count": 2}, "live": live}, params={"seconds": 12.0, "epochs": 12})
    run = run_of(project)
    jobs = wait_for_start(empty_cluster, project, 2, 8)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    project.snakemake("--unlock", profile="slurm")

    plan = project.snakemake("-n", *ONCE, profile="slurm")
    assert "jobs of an earlier run" in plan and all(job in plan for job in jobs)
    output = end_of(run_of(project), 0)
    assert len(table(project)) == 8
    if live == "adopt":
        assert "adopted Slurm job" in output
        assert jobs_of(empty_cluster, project) == jobs
        assert set(attempts(project).values()) == {1}
    else:
        assert [empty_cluster.state(job) for job in jobs] == ["CANCELLED", "CANCELLED"]
        assert set(attempts(project).values()) == {2}
    assert all(row["times"] == 1 for row in seen(project))
    for record in project.cells().values():
        assert len((record["dir"] / "history.jsonl").read_text().splitlines()) == 12


def wait_until_adopted(cluster: Cluster, sandbox: Sandbox, jobs: list[str]) -> None:
    logs = sandbox.root / ".snakemake" / "log"
    cluster.wait_for(
        lambda: all(any(f"adopted Slurm job {job}" in log.read_text() for log in logs.glob("*.log")) for job in jobs),
        "the jobs to be adopted",
    )


def test_an_adopted_job_that_fails_is_submitted_again_as_the_configuration_asks(
    project: Sandbox, empty_cluster: Cluster
) -> None:
    asked = {"partition": "short", "account": "ml", "cpus": 3, "pack": {"count": 2}}
    make_project(project, 4, runtime=None, slurm=asked, params={"seconds": 8.0, "epochs": 16})
    run = run_of(project)
    jobs = wait_for_start(empty_cluster, project, 2, 4)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    project.snakemake("--unlock", profile="slurm")

    run = run_of(project, *FAST, "--retries", "1")
    wait_until_adopted(empty_cluster, project, jobs)
    ended, kept = jobs
    empty_cluster.cancel(ended, signal="KILL")
    output = end_of(run, 0)
    assert f"Slurm job {ended}: " in output
    (new,) = set(jobs_of(empty_cluster, project)) - set(jobs)
    rows = {row["id"]: row for row in empty_cluster.jobs()}
    for column in ("name", "partition", "account", "gres", "cpus", "memory", "limit", "comment"):
        assert rows[new][column] == rows[ended][column], column
    assert (rows[new]["partition"], rows[new]["account"], rows[new]["cpus"]) == ("short", "ml", "3")
    assert len(table(project)) == 4
    assert sorted(attempts(project).values()) == [1, 1, 2, 2]
    assert {n for n, count in attempts(project).items() if count == 1} == cells_of(
        project, pack_of(empty_cluster, kept)
    )


def test_when_slurm_is_silent_for_too_long_the_run_ends_and_its_jobs_go_on(
    project: Sandbox, empty_cluster: Cluster
) -> None:
    make_project(project, 4, slurm={"pack": {"count": 2}})
    project.write(
        "task.py",
        "import os, time\n"
        "def train(cell, *, n: int):\n"
        "    end = time.monotonic() + 100\n"
        "    while not os.path.exists('go') and time.monotonic() < end:\n"
        "        time.sleep(0.1)\n"
        "    return {'total': n}\n",
    )
    run = run_of(project, *ONCE, "--sweepack-slurm-silence-minutes", "0.05")
    jobs = wait_for_start(empty_cluster, project, 2, 4)
    empty_cluster.stop_controller()
    try:
        output = end_of(run, 1)
    finally:
        empty_cluster.start_controller()
    assert "Slurm does not answer" in output and "waiting for it, up to 0.05 min" in output
    assert "Slurm has not answered for" in output and "they are adopted" in output
    assert "Traceback" not in output
    assert [empty_cluster.state(job) for job in jobs] == ["RUNNING", "RUNNING"]

    run = run_of(project)
    wait_until_adopted(empty_cluster, project, jobs)
    project.write("go", "")
    end_of(run, 0)
    assert jobs_of(empty_cluster, project) == jobs
    assert set(attempts(project).values()) == {1} and len(table(project)) == 4


def test_preempted_by_cancelling_is_an_end(project: Sandbox, empty_cluster: Cluster) -> None:
    make_project(
        project, 4, slurm={"partition": "cancl", "pack": {"count": 1}}, params={"seconds": 90.0, "epochs": 180}
    )
    run = run_of(project)
    (job,) = wait_for_start(empty_cluster, project, 1, 4)
    node = empty_cluster.node_of(job)
    empty_cluster.submit(
        "--partition=hi", f"--nodelist={node}", "--nodes=1", "--gres=gpu:4", "--time=1", command="sleep 1"
    )
    empty_cluster.wait_for_state(job, "PREEMPTED", seconds=60)
    output = end_of(run, 1)
    assert "PREEMPTED" in output
    assert {record["status"] for record in project.cells().values()} == {"interrupted"}


def test_the_grace_of_a_preemption_is_used(project: Sandbox, empty_cluster: Cluster) -> None:
    """A cell that saves for longer than Slurm's kill wait (5 s), but not than the partition's grace time (15 s)."""
    make_project(project, 1, slurm={"partition": "canclg", "pack": {"count": 1}})
    project.write(
        "task.py",
        "import time\n"
        "def train(cell, *, n: int):\n"
        "    try:\n"
        "        time.sleep(120)\n"
        "    finally:\n"
        "        time.sleep(8)\n"
        "        cell.save({'saved': True})\n",
    )
    run = run_of(project)
    (job,) = wait_for_start(empty_cluster, project, 1, 1)
    node = empty_cluster.node_of(job)
    empty_cluster.submit(
        "--partition=hi", f"--nodelist={node}", "--nodes=1", "--gres=gpu:4", "--time=1", command="sleep 1"
    )
    end_of(run, 1)
    (record,) = project.cells().values()
    assert record["status"] == "interrupted" and record["error"] == "stopped by SIGTERM"
    assert list((record["dir"] / "checkpoints").iterdir())


def test_the_controller_is_restarted(project: Sandbox, empty_cluster: Cluster) -> None:
    make_project(project, 8, slurm={"pack": {"count": 2}}, params={"seconds": 6.0})
    run = run_of(project)
    wait_for_start(empty_cluster, project, 2, 8)
    empty_cluster.restart_controller()
    end_of(run, 0)
    assert set(attempts(project).values()) == {1}


def test_interrupting_snakemake_cancels_its_jobs(project: Sandbox, empty_cluster: Cluster) -> None:
    make_project(project, 4, slurm={"pack": {"count": 1}}, params={"seconds": 30.0, "epochs": 60})
    run = run_of(project)
    jobs = wait_for_start(empty_cluster, project, 1, 4)
    with contextlib.suppress(ProcessLookupError):
        os.kill(run.pid, signal.SIGINT)
    end_of(run)
    empty_cluster.wait_for_state(jobs, "CANCELLED")
    empty_cluster.wait_for(
        lambda: {record["status"] for record in project.cells().values()} == {"interrupted"}, "the cells' records"
    )


def test_a_held_job_does_not_hold_the_run(project: Sandbox, empty_cluster: Cluster) -> None:
    make_project(project, 2, slurm={"pack": {"count": 1}}, params={"seconds": 30.0})
    run = run_of(project)
    (job,) = wait_for_start(empty_cluster, project, 1, 2)
    empty_cluster.call("scontrol", "requeuehold", "State=SpecialExit", job)
    output = end_of(run, 1)
    assert "would wait for ever" in output
    assert empty_cluster.state(job) == "CANCELLED"
