"""Cells on several nodes and devices: real srun ranks, in a sweep with packed cells."""

from __future__ import annotations

import json
import shutil

import pandas as pd
import pytest
from conftest import REPOSITORY
from ddp_tasks import NET, history, samples

from .sweeps import FAST

ONE_TRY = (*FAST, "--retries", "0")


def wide(project, *entries, axes=None, params=None, **more):
    project.write("task.py", NET)
    project.config(
        sweep={"name": "test", "task": "task.py:train", "axes": axes or {"n": [0]}, "params": params or {}},
        resources=[{"runtime": 5, **entry} for entry in entries],
        slurm={"grace": 10},
        **more,
    )


def cells_by_n(project):
    return {cell["params"]["n"]: cell for cell in project.cells().values()}


def epochs(cell):
    return [epoch for epoch, _ in history(cell)]


def test_cells_on_nodes_and_packed_ones_make_one_table(project, empty_cluster):
    wide(
        project,
        {"match": {"n": 0}, "nodes": 2, "gpus_per_node": 2},
        {"match": {"n": 1}, "nodes": 2, "gpus_per_node": 1},
        {"match": {"n": 2}, "gpus_per_node": 4},
        {"match": {"n": [3, 4]}, "gpus_per_node": 2},
        {"gpu": 0.25},
        axes={"n": list(range(8))},
    )
    plan = project.snakemake("-n", profile="slurm")
    assert "1 pack of 3 cells on a GPU, 1 cell on 2 nodes × 2 GPUs" in plan
    assert "1 × sbatch --nodes=2 --ntasks-per-node=2 --gpus-per-node=2 --cpus-per-task=1" in plan
    project.snakemake(*ONE_TRY, profile="slurm")
    cells = cells_by_n(project)
    sizes = {0: 4, 1: 2, 2: 4, 3: 2, 4: 2, 5: 1, 6: 1, 7: 1}
    for n, size in sizes.items():
        assert samples(cells[n], size) == [list(range(64))] * 4, "each sample once an epoch"
        assert epochs(cells[n]) == [0, 1, 2, 3]
        assert len(list(cells[n]["dir"].glob("result.json*"))) == 1
        assert cells[n]["metrics"]["world"] == size
    assert cells[0]["host"] == "n1,n2" and cells[2]["host"] in ("n1", "n2")
    met = [json.loads((cells[n]["dir"] / "provenance.json").read_text())["rendezvous"] for n in range(5)]
    by_node = {(cells[n]["host"].split(",")[0], met[n].rpartition(":")[2]) for n in range(5)}
    assert len(by_node) == 5, "each cell has a port of its own on its node"
    table = pd.read_csv(project.root / "results/test/table.csv")
    assert len(table) == 8 and table["metrics.loss"].notna().all()


def wait_until_nothing_runs(cluster):
    cluster.wait_for(lambda: all(job["state"] not in ("RUNNING", "COMPLETING") for job in cluster.jobs()), "the end")


def srun_that(project, script):
    """Put a program before srun that does something else; only ranks are started with ``--kill-on-bad-exit``."""
    real = shutil.which("srun")
    wrapper = project.write(
        "bin/srun",
        f'#!/bin/bash\nreal={real}\ncase "$*" in *--kill-on-bad-exit*) ;; *) exec $real "$@";; esac\n{script}\n',
    )
    wrapper.chmod(0o755)
    return {"PATH": f"{wrapper.parent}:{project.environment['PATH']}"}


ARGUMENTS = 'args=(); for a in "$@"; do case $a in {}) ;; *) args+=("$a");; esac; done\n'
AS_RANK = (
    "for ((i=1; i<=$#; i++)); do [[ ${{!i}} == --* ]] || break; done\n"
    'exec $real "${{@:1:i-1}}" bash -c \'{}; exec "$@"\' rank "${{@:i}}"'
)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (
            ARGUMENTS.format("--ntasks*") + 'exec $real --ntasks=3 "${args[@]}"',
            ["srun started 3", "tasks 4", "`nodes` or `gpus_per_node`"],
        ),
        (
            AS_RANK.format("(( SLURM_PROCID == 3 )) && exec sleep 300"),
            ["rank 3", "did not appear within 8 s", "3 of 4"],
        ),
        (
            AS_RANK.format("(( SLURM_PROCID == 3 )) && export SLURM_PROCID=1 SLURM_LOCALID=1"),
            ["rank 1", "started twice"],
        ),
        pytest.param(
            AS_RANK.format("export CUDA_VISIBLE_DEVICES=0"),
            ["sees 1 devices", "`gpus_per_node` is 2"],
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            AS_RANK.format("export WORLD_SIZE=16"),
            ["WORLD_SIZE=16 is left over", "srun says 4"],
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["tasks", "missing", "twice", "devices", "stale"],
)
def test_what_disagrees_with_the_layout_ends_at_once_and_is_named(project, empty_cluster, script, words):
    wide(project, {"nodes": 2, "gpus_per_node": 2, "ddp": {"start_seconds": 8}})
    environment = srun_that(project, script)
    output = project.snakemake(*ONE_TRY, profile="slurm", status=1, **environment)
    (cell,) = project.cells().values()
    log = (cell["dir"] / "log.txt").read_text()
    assert cell["status"] == "failed" and all(word in cell["error"] for word in words), (cell["error"], log, output)
    assert cell["ended"] - cell["started"] < 20
    wait_until_nothing_runs(empty_cluster)


def test_a_killed_rank_ends_the_others_on_all_nodes(project, empty_cluster):
    wide(project, {"nodes": 2, "gpus_per_node": 2}, params={"trouble": "vanish"})
    project.snakemake(*ONE_TRY, profile="slurm", status=1)
    (cell,) = project.cells().values()
    assert cell["status"] == "interrupted" and "rank 3 (n2" in cell["error"], cell["error"]
    assert cell["ended"] - cell["started"] < 60
    wait_until_nothing_runs(empty_cluster)


def test_requeued_and_told_to_stop_in_mid_training_it_ends_as_if_nothing_had_happened(project, empty_cluster):
    import torch

    params = {"dropout": 0.3}
    wide(project, {"nodes": 2, "gpus_per_node": 1}, params={**params, "trouble": "slow"})
    run = project.start(*ONE_TRY, profile="slurm")
    begun = project.root / "begun"
    empty_cluster.wait_for(begun.exists, "the third epoch", 90)
    (job,) = [job["id"] for job in empty_cluster.jobs() if job["state"] == "RUNNING"]
    empty_cluster.requeue(job)
    begun.unlink()
    empty_cluster.wait_for(begun.exists, "the third epoch of the job that was started again", 120)
    # As before a time limit and at the beginning of a preemption's grace time, only the ranks hear it.
    empty_cluster.call("scancel", "--signal=TERM", job)
    output, _ = run.communicate(timeout=90)
    assert run.returncode == 1, output
    (cell,) = project.cells().values()
    assert (cell["status"], cell["attempt"]) == ("interrupted", 2) and "SIGTERM" in cell["error"]
    (project.root / "once").touch()
    project.snakemake(*ONE_TRY, profile="slurm")
    (cell,) = project.cells().values()
    assert (cell["status"], cell["attempt"], epochs(cell)) == ("finished", 3, [0, 1, 2, 3])
    weights, rows = torch.load(cell["dir"] / "weights.pt"), (cell["dir"] / "history.jsonl").read_text()
    project.sweepack("rerun", cell["cell"], "--", "--profile", str(REPOSITORY / "profiles/slurm"), *ONE_TRY)
    assert rows == (cell["dir"] / "history.jsonl").read_text()
    assert all(torch.equal(weights[name], other) for name, other in torch.load(cell["dir"] / "weights.pt").items())


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"nodes": 3, "gpus_per_node": 1}, ["resources[0].nodes", "at most 2", "all that there are"]),
        ({"gpus_per_node": 5}, ["resources[0].gpus_per_node", "at most 4", "what a node has"]),
        ({"gpus_per_node": 2, "slurm": {"extra": "--ntasks=3"}}, ["no `--ntasks`", "resources[].nodes"]),
        ({"gpus_per_node": 4, "cpus": 20}, ["resources[0].cpus", "for each of 4 ranks"]),
    ],
)
def test_a_layout_that_the_cluster_does_not_have_is_refused_in_the_plan(project, empty_cluster, entry, words):
    wide(project, entry)
    output = project.snakemake("-n", profile="slurm", status=1)
    assert all(word in output for word in words), output
