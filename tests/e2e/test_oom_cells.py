"""Cells that run out of memory: what is said of them, what becomes of their neighbours, and the larger share."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest

FAKE = Path(__file__).parents[1] / "fakes" / "simulated_gpu"

TASK = """
import os
import signal
import time
from pathlib import Path

import torch

GIB = 2**30

def train(cell, *, x: int, need: dict, cached: bool = False, until: str = "fell"):
    with open("trained.txt", "a") as file:
        file.write(f"{x}@{cell.share:g}\\n")
    if cell.share > 0.3 and Path("dying").exists():
        Path("dying").unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    kept = [torch.cuda.allocate(GIB)]
    Path(f"holds-{x}").touch()
    # Until the one that needs more has met its end.
    end = time.monotonic() + 60
    while need and str(x) not in need and not Path(until).exists() and time.monotonic() < end:
        time.sleep(0.02)
    while need and str(x) in need and len(list(Path().glob("holds-*"))) < 3 and time.monotonic() < end:
        time.sleep(0.02)
    try:
        for _ in range(need.get(str(x), 2) - 1):
            kept.append(torch.cuda.allocate(GIB))
    except torch.OutOfMemoryError:
        Path("fell").touch()
        if cached:
            # As Lightning does before it lets the error out.
            kept.clear()
            torch.cuda.empty_cache()
        raise
    return {"score": torch.manual_seed(x).initial_seed() / 7}
"""


WIDE = """
import time
import torch

def train(cell):
    if cell.rank == 1:
        torch.cuda.allocate(100 * 2**30)
    time.sleep(60)
    return {}
"""


@pytest.fixture
def gpu(sandbox, tmp_path):
    """The sandbox with one simulated GPU of 16 GiB, of which four cells get about 3.4 GiB each."""
    del sandbox.environment["SWEEPACK_DEVICES"]
    paths = [str(FAKE), os.environ.get("PYTHONPATH")]
    sandbox.environment |= {
        "CUDA_VISIBLE_DEVICES": "0",
        "SIMULATED_GPU": str(tmp_path / "card"),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    return sandbox


def sweep(sandbox, need, *, resources=None, cached=False, until="fell", **config):
    sandbox.write("task.py", TASK)
    sandbox.config(
        sweep={
            "name": "test",
            "task": "task.py:train",
            "params": {"need": {str(x): size for x, size in need.items()}, "cached": cached, "until": until},
            "axes": {"x": {"range": 3}},
        },
        resources=resources or [{"gpu": 0.25}],
        **config,
    )


def by_x(sandbox):
    return {record["params"]["x"]: record for record in sandbox.cells().values()}


@pytest.mark.parametrize("settings", [{"cells_per_job": 1}, {"cells_per_job": 3}, {"start": "fresh"}])
def test_one_that_needs_more_fails_with_the_words_and_its_neighbours_finish(gpu, settings):
    sweep(gpu, {0: 6}, cached=True, **settings)
    output = gpu.snakemake("--cores", "3", status=1)
    records = by_x(gpu)
    assert [records[x]["status"] for x in range(3)] == ["failed", "finished", "finished"]
    assert [records[x]["failure"] for x in range(3)] == ["oom_cap", None, None]
    first, *rest = records[0]["error"].splitlines()
    assert first.startswith("oom_cap: asked for 1.00 GiB beside 3.00 GiB reserved, but the cell's cap is 3.")
    assert "(0.25 of Simulated 16 GB)" in first and "`gpu: 0.5`" in first and "fragments" not in first
    assert rest[0].startswith("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB.")
    assert first in output and first in (records[0]["dir"] / "log.txt").read_text()
    assert Counter(gpu.trained()) == {"0@0.25": 1, "1@0.25": 1, "2@0.25": 1}


@pytest.mark.parametrize("settings", [{"cells_per_job": 1}, {"cells_per_job": 3}, {"start": "fresh"}])
def test_it_goes_on_with_the_next_larger_share_and_its_neighbours_are_untouched(gpu, settings):
    sweep(gpu, {0: 6}, retry={"oom": "next_share"}, **settings)
    output = gpu.snakemake("--cores", "3")
    records = by_x(gpu)
    assert {record["status"] for record in records.values()} == {"finished"}
    assert [(records[x]["attempt"], records[x]["share"]) for x in range(3)] == [(2, 500), (1, 250), (1, 250)]
    assert records[0]["failure"] is None and records[0]["metrics"] == {"score": 0.0}
    told = f"cell {records[0]['cell']} (x=0) runs again with 0.5 of a device: the memory of 0.25 of a device was too"
    assert told in output and told in (records[0]["dir"] / "log.txt").read_text()
    assert Counter(gpu.trained()) == {"0@0.25": 1, "0@0.5": 1, "1@0.25": 1, "2@0.25": 1}
    table = pd.read_csv(gpu.root / "results/test/table.csv").set_index("params.x")
    assert list(table["share"]) == [0.5, 0.25, 0.25]
    assert "Nothing to be done" in gpu.snakemake("--cores", "3")


@pytest.mark.parametrize("size", [1, 3])
def test_a_failure_is_accepted_only_when_there_is_no_larger_share(gpu, size):
    sweep(gpu, {0: 100}, retry={"oom": "next_share"}, on_error="nan", cells_per_job=size)
    gpu.snakemake("--cores", "3")
    assert Counter(gpu.trained()) == {f"{x}@{s:g}": 1 for x, s in [(0, 0.25), (0, 0.5), (0, 1), (1, 0.25), (2, 0.25)]}
    record = by_x(gpu)[0]
    assert (record["status"], record["failure"], record["share"], record["attempt"]) == ("failed", "oom_cap", 1000, 3)
    assert "there is no more than 15." in record["error"]
    table = pd.read_csv(gpu.root / "results/test/table.csv").set_index("params.x")
    assert list(table["status"]) == ["failed", "finished", "finished"]
    # The next run, which tries it again, begins where this one has ended.
    gpu.snakemake("--cores", "3")
    assert Counter(gpu.trained())["0@1"] == 2 and Counter(gpu.trained())["0@0.25"] == 1


@pytest.mark.parametrize("size", [1, 3])
def test_one_that_waits_for_its_larger_share_can_be_stopped_and_goes_on_with_it(gpu, eventually, size):
    sweep(gpu, {0: 10}, until="go", retry={"oom": "next_share"}, cells_per_job=size, on_error="nan")
    run = gpu.start("--cores", "3")
    # Its neighbours hold half of the device: one half is there at once, the whole of it is not.
    eventually(lambda: gpu.trained().count("0@0.5") == 1 and outgrown(gpu) == 500, "the second attempt to end")
    os.killpg(run.pid, signal.SIGINT)
    run.communicate(timeout=60)
    records = by_x(gpu)
    assert [records[x]["status"] for x in range(3)] == ["failed", "interrupted", "interrupted"]
    # What a larger share may mend is no result yet.
    assert not (records[0]["dir"] / "result.json").exists()
    (gpu.root / "go").touch()
    gpu.snakemake("--cores", "3")
    assert Counter(gpu.trained()) == {"0@0.25": 1, "0@0.5": 1, "0@1": 1, "1@0.25": 2, "2@0.25": 2}
    assert by_x(gpu)[0]["attempt"] == 3


def test_one_that_is_killed_with_its_larger_share_goes_on_with_that(gpu):
    sweep(gpu, {0: 6}, retry={"oom": "next_share"})
    (gpu.root / "dying").touch()
    gpu.snakemake("--cores", "3", status=1)
    record = by_x(gpu)[0]
    assert (record["status"], record["attempt"], record["share"]) == ("interrupted", 2, 500)
    gpu.snakemake("--cores", "3")
    assert Counter(gpu.trained()) == {"0@0.25": 1, "0@0.5": 2, "1@0.25": 1, "2@0.25": 1}


def test_main_memory_at_its_limit_is_told_and_not_tried_with_a_larger_share(sandbox):
    sandbox.write("task.py", "def train(cell):\n    return {'size': len(bytearray(3 * 10**9))}\n")
    sandbox.config(
        sweep={"name": "test", "task": "task.py:train"},
        resources=[{"gpu": 0.25, "mem": "1G"}],
        retry={"oom": "next_share"},
    )
    output = sandbox.snakemake(status=1)
    (record,) = sandbox.cells().values()
    assert (record["status"], record["failure"], record["attempt"]) == ("failed", "oom_cap", 1)
    assert "raise `mem` under `resources`" in output and "MemoryError" in record["error"]


def outgrown(sandbox):
    return by_x(sandbox)[0].get("outgrown")


def test_a_rank_of_a_wide_cell_tells_the_kind(gpu):
    gpu.write("task.py", WIDE)
    gpu.config(
        sweep={"name": "test", "task": "task.py:train"},
        resources=[{"gpus_per_node": 2}],
        retry={"oom": "next_share"},
        on_error="nan",
    )
    gpu.snakemake("--cores", "2", CUDA_VISIBLE_DEVICES="0,1")
    (record,) = gpu.cells().values()
    assert (record["status"], record["failure"], record["attempt"]) == ("failed", "oom_cap", 1)
    assert record["error"].startswith("rank 1 (") and "oom_cap: asked for 100.00 GiB" in record["error"]


def test_another_run_goes_on_with_the_larger_share_and_another_batch_starts_again(gpu):
    sweep(gpu, {0: 6})
    gpu.snakemake("--cores", "3", status=1)
    sweep(gpu, {0: 6}, retry={"oom": "next_share"}, resources=[{"gpu": 0.25, "batch": 8}])
    gpu.snakemake("--cores", "3")
    assert Counter(gpu.trained())["0@0.25"] == 2 and by_x(gpu)[0]["share"] == 500
    again = by_x(gpu)[0]["cell"]
    gpu.sweepack("rerun", again, "--no-run")
    sweep(gpu, {0: 6}, retry={"oom": "next_share"}, resources=[{"gpu": 0.25}])
    (gpu.root / "fell").unlink()
    gpu.snakemake("--cores", "3", "--config", "retry={}", status=1)
    gpu.snakemake("--cores", "3")
    assert Counter(gpu.trained())["0@0.25"] == 3 and Counter(gpu.trained())["0@0.5"] == 2


def test_what_another_process_holds_leaves_the_cell_pending(gpu, tmp_path):
    sweep(gpu, {}, on_error="nan", retry={"oom": "next_share"})
    card = tmp_path / "card"
    card.mkdir()
    # Somebody who keeps to no share.
    (card / str(os.getpid())).write_text(str(15 * 2**30))
    gpu.snakemake("--cores", "3", status=1)
    for record in by_x(gpu).values():
        assert (record["status"], record["failure"], record["share"]) == ("interrupted", "oom_neighbour", 250)
        assert "below the cell's cap of 3." in record["error"] and "NVML" in record["error"]
        assert not (record["dir"] / "result.json").exists()
    assert not (gpu.root / "results/test/table.csv").exists() or "failed" not in gpu.sweepack("show")
    (card / str(os.getpid())).unlink()
    gpu.snakemake("--cores", "3")
    assert {record["status"] for record in by_x(gpu).values()} == {"finished"}
    assert json.loads((by_x(gpu)[0]["dir"] / "result.json").read_text())["share"] == 250
