"""Elastic cells: one of two nodes is lost, and the cell goes on with the other in the same job."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from ddp_tasks import NET, history, samples

from .sweeps import FAST

ONCE = (*FAST, "--retries", "0")


def elastic(project, task=NET, restarts=3):
    project.write("task.py", task)
    project.config(
        sweep={"name": "test", "task": "task.py:train", "axes": {"n": [0]}, "params": {"trouble": "wait"}},
        resources=[{"runtime": 5, "nodes": "1:2", "gpus_per_node": 1, "ddp": {"restarts": restarts}}],
        slurm={"grace": 10},
    )


def run_and_lose_a_node(project, cluster, status=0):
    """Start the cell on two nodes and, in its third epoch, kill what runs on the second one."""
    run = project.start(*ONCE, profile="slurm")
    waiting = [project.root / f"waiting-{rank}" for rank in (0, 1)]
    cluster.wait_for(lambda: all(path.exists() for path in waiting), "both ranks to be in the third epoch", 90)
    (cell,) = project.cells().values()
    assert cell["world_size"] == 2 and cell["host"] == "n1,n2"
    os.kill(agent_on_node(project, 1), signal.SIGKILL)
    project.write("go-on", "")
    output, _ = run.communicate(timeout=150)
    assert run.returncode == status, output


def agent_on_node(project, node):
    """The process id of torchrun's agent on a node of the job."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command, environment = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes().split(b"\0")
            here = (entry / "cwd").resolve() == project.root.resolve()
        except OSError:
            continue
        is_agent = command.split(b"\0")[-2:-1] == [b"sweepack.ddp.agent"] and not command.startswith(b"srun")
        if is_agent and here and b"SLURM_NODEID=%d" % node in environment:
            return int(entry.name)
    raise AssertionError(f"no agent on node {node}")


def test_one_of_two_nodes_is_lost_and_the_cell_goes_on_with_the_other(project, empty_cluster):
    elastic(project)
    plan = project.snakemake("-n", profile="slurm")
    assert "1 cell on 1 to 2 nodes × 1 GPU" in plan and "sbatch --nodes=1-2 --gpus-per-node=1" in plan
    run_and_lose_a_node(project, empty_cluster)
    (cell,) = project.cells().values()
    log = (cell["dir"] / "log.txt").read_text()
    assert (cell["status"], cell["attempt"], cell["world_size"]) == ("finished", 1, 1)
    assert len([job for job in empty_cluster.jobs() if job["folder"] == str(project.root)]) == 1
    assert "the ranks start again, now 1 of them" in log
    assert "resumed on 1 ranks from a checkpoint of 2" in log
    assert [epoch for epoch, _ in history(cell)] == [0, 1, 2, 3]
    alone = (cell["dir"] / "seen-0.jsonl").read_text().splitlines()
    together = (cell["dir"] / "seen-1.jsonl").read_text().splitlines()
    (cell["dir"] / "seen-0.jsonl").write_text("\n".join(alone[:2]))
    assert len(together) == 2 and samples(cell, 2) == [list(range(64))] * 2
    (cell["dir"] / "seen-0.jsonl").write_text("\n".join(alone[2:]))
    assert samples(cell, 1) == [list(range(64))] * 2, "after the loss one rank sees them all"


def test_another_global_batch_after_the_loss_is_refused(project, empty_cluster):
    elastic(project, NET.replace("cell.per_rank(batch)", "batch"), restarts=1)
    run_and_lose_a_node(project, empty_cluster, status=1)
    (cell,) = project.cells().values()
    assert cell["status"] == "failed" and cell["world_size"] == 1
    assert "made by 2 ranks with a global batch of 32, now 1 ranks have 16" in cell["error"]
    assert "divide the batch by `cell.per_rank(batch)`" in cell["error"]


def test_it_starts_with_the_nodes_that_are_free(project, empty_cluster):
    other = empty_cluster.submit("--nodelist=n2", "--nodes=1", "--gres=gpu:4")
    empty_cluster.wait_for_state(other, "RUNNING")
    elastic(project)
    project.write("go-on", "")
    project.snakemake(*ONCE, profile="slurm")
    (cell,) = project.cells().values()
    assert (cell["status"], cell["world_size"], cell["host"]) == ("finished", 1, "n1")
