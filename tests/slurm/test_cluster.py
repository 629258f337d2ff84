"""The test cluster is a Slurm cluster: it places, shares, preempts, survives, refuses."""

from __future__ import annotations

import shlex
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .cluster_tools import Cluster, pids, run_cluster
from .testbed.state import LINK, State

SEEN = "hostname; echo $CUDA_VISIBLE_DEVICES; sleep 600"
WHOLE_CLUSTER = ("--nodes=2", "--gres=gpu:4")
ONE_NODE = ("--nodes=1", "--gres=gpu:4")


def what_it_sees(cluster: Cluster, output: Path) -> tuple[str, str]:
    """Host name and CUDA_VISIBLE_DEVICES that a job running SEEN has written to ``output``."""

    def lines() -> list[str]:
        text = output.read_text() if output.exists() else ""
        return text.split("\n")[:2] if text.count("\n") > 1 else []

    host, devices = cluster.wait_for(lines, f"what the job writes to {output}")
    return host, devices


@pytest.mark.parametrize("request_", ["--gpus=1", "--gres=gpu:1", "--gres=gpu:fake:1", "--gres=shard:10"])
def test_a_job_sees_one_device_and_its_own_host_name(empty_cluster: Cluster, tmp_path: Path, request_: str) -> None:
    job = empty_cluster.submit(request_, command=SEEN, output=tmp_path / "out")
    host, devices = what_it_sees(empty_cluster, tmp_path / "out")
    assert host == empty_cluster.node_of(job) and host in empty_cluster.nodes
    assert devices in ("0", "1", "2", "3")


def test_eight_gpus_run_eight_jobs_and_the_ninth_waits(empty_cluster: Cluster, tmp_path: Path) -> None:
    outputs = [tmp_path / str(number) for number in range(8)]
    jobs = [empty_cluster.submit("--gpus=1", command=SEEN, output=output) for output in outputs]
    empty_cluster.wait_for_state(jobs, "RUNNING")
    ninth = empty_cluster.submit("--gpus=1")
    empty_cluster.wait_for(lambda: reason(empty_cluster, ninth) == "Resources", "the ninth job to wait for a GPU")
    assert len({what_it_sees(empty_cluster, output) for output in outputs}) == 8
    empty_cluster.cancel(jobs[0])
    empty_cluster.wait_for_state(ninth, "RUNNING")


def reason(cluster: Cluster, job: str) -> str:
    return next(row["reason"] for row in cluster.jobs() if row["id"] == job)


def test_partition_hi_preempts_gpu_by_requeue(empty_cluster: Cluster) -> None:
    low = empty_cluster.submit(*WHOLE_CLUSTER)
    empty_cluster.wait_for_state(low, "RUNNING")
    high = empty_cluster.submit("--partition=hi", "--gpus=1")
    empty_cluster.wait_for_state(high, "RUNNING")
    empty_cluster.wait_for_state(low, "PENDING")
    empty_cluster.cancel(high)
    empty_cluster.wait_for_state(low, "RUNNING", seconds=90)
    assert empty_cluster.accounted(low)[0] in ("PREEMPTED", "REQUEUED")


@pytest.mark.parametrize(("partition", "has_time_to_save"), [("cancl", False), ("canclg", True)])
def test_jobs_of_the_cancelled_partitions_end_preempted(
    empty_cluster: Cluster, tmp_path: Path, partition: str, has_time_to_save: bool
) -> None:
    """A step hears SIGTERM at the start of the grace time (the batch shell does not), 15 seconds before the end."""
    trap = f"trap 'sleep 9; touch {tmp_path}/saved; sleep 600' TERM"
    # A step that hears SIGTERM in its first tenth of a second may be ended without a word, as completed.
    saving = f"{trap}; sleep 1; touch {tmp_path}/ready; sleep 600 & wait"
    step = f"srun bash -c {shlex.quote(saving)}"
    low = empty_cluster.submit(f"--partition={partition}", "--nodelist=n1", "--gres=gpu:4", command=step)
    empty_cluster.wait_for((tmp_path / "ready").exists, "the job to be ready for SIGTERM")
    high = empty_cluster.submit("--partition=hi", "--nodelist=n1", "--gpus=1")
    empty_cluster.wait_for_state(high, "RUNNING")
    empty_cluster.wait_for_state(low, "PREEMPTED")
    assert (tmp_path / "saved").exists() == has_time_to_save


def test_jobs_survive_a_restart_of_the_controller(empty_cluster: Cluster) -> None:
    running = empty_cluster.submit(*WHOLE_CLUSTER)
    empty_cluster.wait_for_state(running, "RUNNING")
    waiting = empty_cluster.submit("--gpus=1")
    before = pids()["slurmctld"]
    empty_cluster.restart_controller()
    assert pids()["slurmctld"] != before
    assert (empty_cluster.state(running), empty_cluster.state(waiting)) == ("RUNNING", "PENDING")
    # What the controller says of busy nodes would else be what it knew before.
    assert "SlurmdStartTime=None" not in empty_cluster.call("scontrol", "show", "nodes")
    empty_cluster.cancel(running)
    empty_cluster.wait_for_state(waiting, "RUNNING")


def test_a_killed_node_is_noticed_its_job_moves_and_it_comes_back(empty_cluster: Cluster) -> None:
    jobs = [empty_cluster.submit(*ONE_NODE), empty_cluster.submit(*ONE_NODE)]
    empty_cluster.wait_for_state(jobs, "RUNNING")
    first, second = sorted(jobs, key=empty_cluster.node_of)
    empty_cluster.kill_node("n2")
    # Not that sinfo says "down": it may say "mixed*" for minutes, of a node whose jobs have been taken away.
    empty_cluster.wait_for_state(second, "PENDING", seconds=90)
    assert empty_cluster.node_state("n2").endswith("*")
    assert empty_cluster.state(first) == "RUNNING"
    empty_cluster.cancel(first)
    empty_cluster.wait_for_state(second, "RUNNING")
    assert empty_cluster.node_of(second) == "n1"
    empty_cluster.start_node("n2")
    third = empty_cluster.submit(*ONE_NODE)
    empty_cluster.wait_for_state(third, "RUNNING")
    assert empty_cluster.node_of(third) == "n2"
    assert "NODE_FAIL" in empty_cluster.accounted(second)


def test_a_node_that_is_back_before_slurm_notices_takes_new_jobs(empty_cluster: Cluster) -> None:
    job = empty_cluster.submit(*ONE_NODE)
    empty_cluster.wait_for_state(job, "RUNNING")
    node = empty_cluster.node_of(job)
    empty_cluster.kill_node(node)
    empty_cluster.start_node(node)
    empty_cluster.wait_for_state(empty_cluster.submit(f"--nodelist={node}"), "RUNNING")


def test_up_again_changes_nothing_even_if_a_node_is_held_free_for_a_job(empty_cluster: Cluster) -> None:
    empty_cluster.wait_for_state(empty_cluster.submit(*ONE_NODE, "--time=30"), "RUNNING")
    empty_cluster.submit(*WHOLE_CLUSTER)
    free = "n2" if empty_cluster.node_state("n2") == "idle" else "n1"
    empty_cluster.wait_for(lambda: empty_cluster.node_state(free) == "planned", f"{free} to be held free")
    before = pids()
    assert "was up already" in run_cluster("up").stdout
    assert pids() == before


@pytest.mark.parametrize("daemon", ["munged", "mariadbd", "slurmdbd", "slurmctld", "node-n1"])
def test_up_mends_a_crash_although_the_pid_now_belongs_to_another(empty_cluster: Cluster, daemon: str) -> None:
    job = empty_cluster.submit("--gpus=1", "--nodelist=n2")
    empty_cluster.wait_for_state(job, "RUNNING")
    saved = State.from_environment().root / "controller" / "job_state"
    submitted = time.time()
    # What slurmctld has not written yet is lost with it, whole jobs too: so it is with Slurm.
    empty_cluster.wait_for(lambda: saved.stat().st_mtime > submitted, "slurmctld to save its state")
    before = pids()
    subprocess.run(["kill", "-KILL", str(before[daemon])], check=True)
    with subprocess.Popen(["sleep", "600"]) as other:
        try:
            pid_file = State.from_environment().run / f"{daemon}.pid"
            pid_file.write_text(f"{other.pid} {pid_file.read_text().partition(' ')[2]}")
            assert f"started {daemon} " in run_cluster("up").stdout
            assert other.poll() is None, "the process that has the pid now was ended"
        finally:
            other.kill()
    assert {name for name, pid in pids().items() if pid != before.get(name)} == {daemon}
    assert empty_cluster.state(job) == "RUNNING"
    empty_cluster.wait_for_state(empty_cluster.submit("--gpus=1", "--nodelist=n1"), "RUNNING")


def test_jobs_are_charged_to_the_account_ml(empty_cluster: Cluster) -> None:
    accepted = empty_cluster.submit("--account=ml")
    empty_cluster.wait_for_state([accepted, empty_cluster.submit()], "RUNNING")
    assert {row["account"] for row in empty_cluster.jobs() if row["state"] == "RUNNING"} == {"ml"}


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ("--account=other", "Invalid account"),
        ("--partition=nowhere", "invalid partition"),
        ("--gres=gpu:a100:1", "Requested node configuration is not available"),
        ("--gres=gpu:5", "Requested node configuration is not available"),
    ],
)
def test_what_the_cluster_does_not_have_is_refused(empty_cluster: Cluster, request_: str, words: str) -> None:
    assert words in empty_cluster.call("sbatch", request_, "--wrap=true", check=False)


def test_a_second_cluster_is_refused_and_the_first_stays(empty_cluster: Cluster, short_folder: Path) -> None:
    there = LINK.readlink()
    second = short_folder / "second"
    done = run_cluster("up", check=False, SWEEPACK_SLURM_STATE=str(second))
    assert done.returncode == 1
    assert "is not this test cluster's" in done.stderr and "Traceback" not in done.stderr
    assert LINK.readlink() == there and not second.exists()


def test_down_wipe_leaves_a_folder_that_is_not_a_clusters(empty_cluster: Cluster, short_folder: Path) -> None:
    thesis = short_folder / "state" / "thesis.tex"
    thesis.parent.mkdir()
    thesis.write_text("x")
    run_cluster("down", "--wipe", SWEEPACK_SLURM_STATE=str(thesis.parent))
    assert thesis.exists() and LINK.exists()


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A temporary folder whose path is short enough for sockets, which `tmp_path` need not be."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)
