"""Many cells in one GPU allocation, on the real cluster."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from conftest import Sandbox, make_sandbox

from .cluster_tools import Cluster
from .sweeps import FAST, attempts, make_project, packs, seen, table


def test_72_uneven_cells_fill_the_gpus_of_6_packs(project: Sandbox, empty_cluster: Cluster) -> None:
    lengths = [0.5, 2.5, 1.0, 3.5, 1.5, 0.75, 2.0, 3.0]
    make_project(project, 72, axes={"n": list(range(9)), "seconds": lengths}, slurm={"pack": {"count": 6}})
    plan = project.snakemake("-n", *FAST, profile="slurm")
    assert "6 packs of 12 cells, each on a GPU" in plan
    assert "6 × sbatch --ntasks=1 --nodes=1 --gpus=1 --cpus-per-task=4" in plan
    project.snakemake(*FAST, profile="slurm")

    rows = {row["id"]: row for row in seen(project)}
    assert len(rows) == 72
    hosts = set()
    for members in packs(project).values():
        mine = sorted((rows[cell] for cell in members), key=lambda row: row["start"])
        # One host and one device for all: that of the allocation.
        assert len({(row["host"], row["visible"]) for row in mine}) == 1
        assert len(mine[0]["visible"].split(",")) == 1
        hosts.add(mine[0]["host"])
        assert most_at_once(mine) == 4
        # A slot is filled again as its cell ends, not when all four have ended.
        assert mine[4]["start"] < max(row["end"] for row in mine[:4])
    assert hosts == {"n1", "n2"}
    for one, other in itertools.combinations(packs(project).values(), 2):
        if rows[one[0]]["host"] == rows[other[0]]["host"]:
            assert rows[one[0]]["visible"] != rows[other[0]]["visible"]


def alive(rows: list[dict[str, Any]], moment: float) -> int:
    return sum(row["start"] <= moment < row["end"] for row in rows)


def most_at_once(rows: list[dict[str, Any]]) -> int:
    return max(alive(rows, row["start"]) for row in rows)


def test_a_sweep_moves_between_this_machine_and_the_cluster(
    project: Sandbox, empty_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    def other_way() -> Sandbox:
        other = make_sandbox(tmp_path_factory.mktemp("other"))
        del other.environment["SWEEPACK_LEASES"]
        return other

    reference = None
    for first, second in (("local", "slurm"), ("slurm", "local")):
        sandbox = project if first == "local" else other_way()
        for profile, cells in ((first, 6), (second, 12)):
            make_project(sandbox, cells, slurm={"pack": {"count": 2}}, params={"seconds": 0.1})
            sandbox.environment.pop("SWEEPACK_DEVICES", None)
            if profile == "local":
                sandbox.environment["SWEEPACK_DEVICES"] = "cpu"
            sandbox.snakemake(*(FAST if profile == "slurm" else ()), profile=profile)
        assert set(attempts(sandbox).values()) == {1}
        assert len(table(sandbox)) == 12
        reference = reference or table(sandbox)
        assert table(sandbox) == reference


@pytest.mark.parametrize("mode", ["shard", "exclusive"])
def test_other_modes_give_the_same_table(
    project: Sandbox, empty_cluster: Cluster, mode: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    make_project(project, 6, slurm={"mode": mode})
    plan = project.snakemake("-n", *FAST, profile="slurm")
    wanted = "--gres=shard:3" if mode == "shard" else "--gpus=1"
    assert f"6 × sbatch --ntasks=1 --nodes=1 {wanted}" in plan
    project.snakemake(*FAST, profile="slurm")
    assert all(len(row["visible"].split(",")) == 1 and row["host"] in ("n1", "n2") for row in seen(project))
    local = make_sandbox(tmp_path_factory.mktemp("local"))
    make_project(local, 6, slurm={})
    local.snakemake()
    assert table(project) == table(local)


def test_a_pack_of_a_whole_node_uses_all_its_gpus(project: Sandbox, empty_cluster: Cluster) -> None:
    make_project(project, 16, slurm={"pack": {"gpus": 4, "count": 1}}, params={"seconds": 3.0})
    project.snakemake(*FAST, profile="slurm")
    rows = seen(project)
    assert len({row["host"] for row in rows}) == 1
    assert sorted({row["visible"] for row in rows}) == ["0", "1", "2", "3"]
    assert most_at_once(rows) == 16


def test_requests_reach_slurm(project: Sandbox, empty_cluster: Cluster) -> None:
    make_project(
        project,
        4,
        runtime=None,
        slurm={
            "account": "ml",
            "extra": "--nice=7",
            "setup": "export FROM_SETUP=yes",
            "gpu_flag": "gres",
            "requeue": False,
            "pack": {"count": 1},
        },
    )
    run = project.start(*FAST, "--sweepack-slurm-partition", "short", profile="slurm")
    output, _ = run.communicate(timeout=120)
    assert run.returncode == 0, output
    job = max(
        (row for row in empty_cluster.jobs() if row["folder"] == str(project.root)), key=lambda row: int(row["id"])
    )
    assert (job["partition"], job["account"], job["gres"], job["cpus"]) == ("short", "ml", "gres:gpu:1", "4")
    assert job["name"].startswith("test:")
    assert {row["setup"] for row in seen(project)} == {"yes"}
    assert job["comment"].startswith(f"sweepack {project.root}/results/test/packs/")


def test_a_packs_log_says_what_ran_where(project: Sandbox, empty_cluster: Cluster) -> None:
    make_project(project, 3, slurm={})
    project.write("trouble-1", "fail")
    project.snakemake(*FAST, "--retries", "0", profile="slurm", status=1)
    (log,) = (project.root / "results/test/packs").glob("[0-9a-f]*.log")
    text = log.read_text()
    cells = {record["params"]["n"]: cell for cell, record in project.cells().items()}
    assert "Slurm job" in text and "on n" in text
    for cell in cells.values():
        assert f"cell {cell} (n=" in text and "starts on" in text
    assert f"cell {cells[1]} (n=1) failed" in text and "as asked" in text
    assert f"cell {cells[0]} (n=0) finished" in text
    for cell in cells.values():
        assert (project.root / f"results/test/cells/{cell}/log.txt").exists()
