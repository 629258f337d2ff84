"""Packs: one job runs many cells side by side, and each cell is still its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from conftest import REPOSITORY
from sweepack.leases import LeasePool
from test_lightning import lightning
from test_packing import peaks, sleepers
from test_resume import finished, kill, unlock

TASK = """
import os, signal, time
from pathlib import Path
def train(cell, *, x: int, how: str = ""):
    with open("trained.txt", "a") as file:
        file.write(f"{x}\\n")
    if x % 4 == 3 and how != "wait" and how and not Path("mended").exists():
        if how == "raise":
            raise ValueError(f"bad luck with {x}")
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL)
    Path(f"started-{x}").write_text(str(os.getpid()))
    while how == "wait" and not Path("go").exists():
        time.sleep(0.02)
    return {"score": x}
"""


def sweep(sandbox, count=8, how="", **more):
    sandbox.write("task.py", TASK)
    sandbox.config(
        sweep={"name": "test", "task": "task.py:train", "params": {"how": how}, "axes": {"x": {"range": count}}},
        resources=[{"gpu": 0.25}],
        **{"cells_per_job": count, **more},
    )


def packs(sandbox, kind="done"):
    return sorted((sandbox.root / "results/test/packs").glob(f"*.{kind}"))


def launchers(sandbox):
    """The processes that run packs of this sandbox."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (
                b"scripts/pack.py" in (process / "cmdline").read_bytes()
                and (process / "cwd").readlink() == sandbox.root
            ):
                found.append(int(process.name))
    return found


def test_packed_warm_fresh_and_a_job_a_cell_give_the_same_table(sandbox):
    for name, setting in {
        "packed": ["cells_per_job=3"],
        "fresh": ["cells_per_job=2", "start=fresh"],
        "alone": ["cells_per_job=1"],
    }.items():
        lightning(sandbox, name, lr=[0.01, 0.03, 0.1])
        sandbox.snakemake("--cores", "2", "--config", *setting)
    for other in ("fresh", "alone"):
        assert "are equal bit for bit" in sandbox.sweepack("diff", "--exact", "packed", other)


def test_auto_packs_many_small_cells_and_says_so(sandbox):
    def plan(count, share):
        sweep(sandbox, count, cells_per_job="auto")
        config = json.loads((sandbox.root / "config/config.yaml").read_text())
        sandbox.config(**{**config, "resources": [{"gpu": share}]})
        return sandbox.snakemake("-n")

    assert "1 pack of up to 300 cells side by side (`cells_per_job: auto`" in plan(300, 0.5)
    assert "cells_per_job" not in plan(300, 1)
    assert "cells_per_job" not in plan(200, 0.5)
    assert not (sandbox.root / "results").exists()


def test_a_pack_fills_devices_and_cores_and_no_more(sandbox):
    sleepers(
        sandbox,
        [{"match": {"x": [0, 1]}, "gpu": 0.6}, {"gpu": 0.2}],
        {"x": {"range": 10}},
        {"crowd": 6},
        cells_per_job=10,
    )
    sandbox.snakemake("--cores", "6", SWEEPACK_DEVICES="sim:2")
    highest, most = peaks(sandbox.cells().values())
    assert most == 6 and len(highest) == 2 and all(share <= 1000 for share in highest.values())
    log = packs(sandbox, "log")[0].read_text()
    for cell, record in sandbox.cells().items():
        assert f"cell {cell} (x={record['params']['x']}) starts on {record['device']}" in log
        assert f"cell {cell} (x={record['params']['x']}) finished after" in log


@pytest.mark.parametrize(("how", "state"), [("raise", "failed"), ("exit", "failed"), ("kill", "interrupted")])
def test_a_cell_fails_alone_and_the_next_run_packs_only_the_rest(sandbox, how, state):
    sweep(sandbox, how=how)
    output = sandbox.snakemake("--cores", "2", status=1)
    states = {record["params"]["x"]: record["status"] for record in sandbox.cells().values()}
    assert states == {x: state if x in (3, 7) else "finished" for x in range(8)}
    assert "6 of 8 cells have their result" in output
    for cell, record in sandbox.cells().items():
        if record["status"] == state:
            assert f"cell {cell} (x={record['params']['x']}) {state}" in output
    sandbox.write("mended", "")
    assert "1 pack of up to 2 cells" in sandbox.snakemake("--cores", "2")
    assert Counter(sandbox.trained()) == {str(x): 1 + (x in (3, 7)) for x in range(8)}
    assert len((sandbox.root / "results/test/table.csv").read_text().splitlines()) == 9
    assert "Nothing to be done" in sandbox.snakemake("--cores", "2")


def test_a_sweep_may_change_between_packs_and_a_job_a_cell_half_way(sandbox):
    sweep(sandbox, how="raise")
    sandbox.snakemake("--cores", "2", status=1)
    sandbox.write("mended", "")
    sandbox.snakemake("--cores", "2", "--config", "cells_per_job=1")
    for setting in (1, 3, 8, "auto"):
        assert "Nothing to be done" in sandbox.snakemake("--cores", "2", "--config", f"cells_per_job={setting}")
    assert Counter(sandbox.trained()) == {str(x): 1 + (x in (3, 7)) for x in range(8)}


def test_retries_and_accepted_failures_are_each_cells_own(sandbox):
    sweep(sandbox, how="raise", on_error="nan")
    sandbox.snakemake("--cores", "2", "--retries", "1")
    assert Counter(sandbox.trained()) == {str(x): 1 + (x in (3, 7)) for x in range(8)}
    table = (sandbox.root / "results/test/table.csv").read_text()
    assert table.count("failed") == 2 and table.count("finished") == 6
    sandbox.write("mended", "")
    sandbox.snakemake("--cores", "2")
    assert (sandbox.root / "results/test/table.csv").read_text().count("finished") == 8
    assert "Nothing to be done" in sandbox.snakemake("--cores", "2")


def test_rerun_runs_a_cell_of_a_finished_pack_again(sandbox):
    sweep(sandbox)
    sandbox.snakemake("--cores", "2")
    again = next(cell for cell, record in sandbox.cells().items() if record["params"]["x"] == 5)
    for _ in range(2):
        sandbox.sweepack("rerun", again, "--no-run")
        sandbox.snakemake("--cores", "2")
    assert Counter(sandbox.trained())["5"] == 3 and len(sandbox.trained()) == 10
    assert sandbox.cells()[again]["attempt"] == 3


def test_a_deleted_result_is_handed_over_without_training(sandbox):
    sweep(sandbox)
    sandbox.snakemake("--cores", "2")
    lost = next(iter(sandbox.cells().values()))["dir"] / "result.json"
    content = lost.read_bytes()
    lost.unlink()
    sandbox.snakemake("--cores", "2")
    assert lost.read_bytes() == content and len(sandbox.trained()) == 8


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_pack_stops_its_cells_and_starts_no_more(sandbox, eventually, signum):
    sweep(sandbox, how="wait")
    driver = sandbox.start("--cores", "2")
    eventually(lambda: len(list(sandbox.root.glob("started-*"))) == 2, "two cells to run")
    os.killpg(driver.pid, signum)
    driver.wait()
    states = Counter(record["status"] for record in sandbox.cells().values())
    assert states == {"interrupted": 2, "pending": 6}
    sandbox.write("go", "")
    sandbox.snakemake("--cores", "2")
    assert len(finished(sandbox)) == 8 and len(sandbox.trained()) == 10


@pytest.mark.parametrize("start", ["auto", "fresh"])
def test_a_killed_pack_takes_its_cells_with_it_and_the_next_run_goes_on(sandbox, eventually, start):
    sweep(sandbox, how="wait", start=start)
    driver = sandbox.start("--cores", "3")
    eventually(lambda: len(list(sandbox.root.glob("started-*"))) == 3, "three cells to run")
    launcher = min(launchers(sandbox))
    os.kill(launcher, signal.SIGKILL)
    assert driver.wait() == 1
    assert Counter(record["status"] for record in sandbox.cells().values())["running"] == 3
    eventually(lambda: "holds" not in sandbox.sweepack("leases"), "the shares to be free")
    sandbox.write("go", "")
    output = sandbox.snakemake("--cores", "3")
    assert "3 killed before" in output
    assert len(finished(sandbox)) == 8 and len(sandbox.trained()) == 11


def test_one_killed_cell_of_a_pack_is_the_only_one_to_run_again(sandbox, eventually):
    sweep(sandbox, how="wait")
    driver = sandbox.start("--cores", "4")
    eventually(lambda: len(list(sandbox.root.glob("started-*"))) == 4, "four cells to run")
    eventually(lambda: (sandbox.root / "started-0").read_text(), "the first to say who it is")
    os.kill(int((sandbox.root / "started-0").read_text()), signal.SIGKILL)
    sandbox.write("go", "")
    assert driver.wait() == 1
    states = {record["params"]["x"]: record["status"] for record in sandbox.cells().values()}
    assert states == {x: "interrupted" if x == 0 else "finished" for x in range(8)}


def test_two_runs_at_once_one_packed_one_not_train_no_cell_twice(sandbox, eventually):
    sweep(sandbox, how="wait")
    first = sandbox.start("--cores", "2")
    eventually(lambda: len(list(sandbox.root.glob("started-*"))) == 2, "two cells to run")
    second = sandbox.start("--cores", "2", "--nolock", "--config", "cells_per_job=1")
    third = sandbox.start("--cores", "2", "--nolock", "--config", "cells_per_job=4")
    eventually(lambda: len(list(sandbox.root.glob("started-*"))) >= 3, "the others to run cells too")
    sandbox.write("go", "")
    assert [run.wait() for run in (first, second, third)] == [0, 0, 0]
    assert Counter(sandbox.trained()) == {str(x): 1 for x in range(8)}


def test_a_pack_whose_driver_was_killed_finishes_what_runs_and_starts_no_more(sandbox, eventually):
    sweep(sandbox, how="wait")
    driver = sandbox.start("--cores", "2")
    eventually(lambda: len(list(sandbox.root.glob("started-*"))) == 2, "two cells to run")
    kill(driver)
    sandbox.write("go", "")
    eventually(lambda: not launchers(sandbox), "the launcher to end")
    assert len(finished(sandbox)) == 2
    unlock(sandbox, driver)
    assert len(finished(sandbox)) == 8 and len(sandbox.trained()) == 8


def test_cells_wait_for_shares_that_another_run_holds(sandbox, eventually):
    sweep(sandbox, count=3)
    leases = sandbox.root.parent / "leases"
    leases.mkdir()
    with LeasePool(leases, ["cpu"]).acquire(1000, label="somebody else"):
        run = sandbox.start("--cores", "2")
        eventually(lambda: list(leases.glob("*.wait")), "a cell to wait for its share")
        assert not sandbox.trained()
    output, _ = run.communicate(timeout=300)
    assert run.returncode == 0 and len(finished(sandbox)) == 3 and "somebody else" in output


def test_an_unknown_pack_and_a_wrong_setting_are_refused_in_words(sandbox):
    sweep(sandbox, cells_per_job=0)
    assert "error in cells_per_job" in sandbox.snakemake("-n", status=1)
    command = [sys.executable, REPOSITORY / "scripts/pack.py", "--sweep-dir", "results/test", "--pack", "nosuch"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=sandbox.root, env=sandbox.environment)
    assert done.returncode == 1 and "error in --pack" in done.stderr and "Traceback" not in done.stderr
