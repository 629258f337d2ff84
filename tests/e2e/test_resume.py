"""Kill anything at any time and run the same command again: nothing finished runs twice, nothing is lost."""

from __future__ import annotations

import json
import os
import signal

import pandas as pd

GATED = """
import os, time
from pathlib import Path
def train(cell, *, x: int):
    with open("trained.txt", "a") as file:
        file.write(f"{cell.id}\\n")
    Path(f"started-{x}").touch()
    while x >= 2 and not Path("go").exists():
        time.sleep(0.02)
    return {"score": x}
"""


def gated(sandbox, count=4, **more):
    """Cells of which all but the first two wait for the file `go`."""
    sandbox.write("task.py", GATED)
    sandbox.config(
        sweep={"name": "test", "task": "task.py:train", "axes": {"x": {"range": count}}},
        resources=[{"gpu": 0.25}],
        **more,
    )


def kill(process):
    process.kill()
    process.wait()


def finished(sandbox):
    return [record for record in sandbox.cells().values() if record["status"] == "finished"]


def unlock(sandbox, process):
    """What a user does after a SIGKILL, if Snakemake asks for it."""
    output = sandbox.snakemake(status=None)
    if "--unlock" in output:
        sandbox.snakemake("--unlock")
        output = sandbox.snakemake()
    return output


def test_a_cell_that_finishes_after_its_driver_was_killed_is_handed_over(sandbox, eventually):
    gated(sandbox)
    driver = sandbox.start("--cores", "4")
    eventually(lambda: len(finished(sandbox)) == 2 and (sandbox.root / "started-3").exists(), "all cells to start")
    kill(driver)
    early = {record["cell"]: (record["dir"] / "status.json").stat().st_mtime_ns for record in finished(sandbox)}
    (sandbox.root / "go").touch()
    eventually(lambda: len(finished(sandbox)) == 4, "the cells to outlive their driver and finish")

    unlock(sandbox, driver)
    table = pd.read_parquet(sandbox.root / "results/test/table.parquet")
    assert sorted(table["metrics.score"]) == [0, 1, 2, 3] and set(table["attempt"]) == {1}
    assert sorted(sandbox.trained()) == sorted(sandbox.cells())
    assert all(
        (record["dir"] / "status.json").stat().st_mtime_ns == early.get(cell)
        for cell, record in sandbox.cells().items()
        if cell in early
    )


def test_a_second_run_waits_for_cells_that_still_run_and_trains_none_twice(sandbox, eventually):
    gated(sandbox)
    driver = sandbox.start("--cores", "4")
    eventually(lambda: (sandbox.root / "started-3").exists() and (sandbox.root / "started-2").exists(), "the start")
    kill(driver)
    second = sandbox.start("--cores", "4", "--nolock")
    plan = []
    while "is running already" not in (plan[-1] if plan else ""):
        line = second.stdout.readline()
        assert line, "".join(plan)
        plan.append(line)
    assert "still running from an earlier call" in "".join(plan)
    (sandbox.root / "go").touch()
    output, _ = second.communicate(timeout=300)
    assert second.returncode == 0, output
    assert sorted(sandbox.trained()) == sorted(sandbox.cells())


def test_killed_cells_run_again_and_finished_ones_do_not(sandbox, eventually):
    gated(sandbox)
    driver = sandbox.start("--cores", "4", "--keep-going")
    eventually(lambda: (sandbox.root / "started-3").exists() and (sandbox.root / "started-2").exists(), "the start")
    waiting = [record for record in sandbox.cells().values() if record["status"] == "running"]
    eventually(lambda: len(finished(sandbox)) == 2, "two cells to finish")
    for record in waiting:
        if record["params"]["x"] >= 2:
            os.kill(json.loads((record["dir"] / "lock").read_text())["pid"], signal.SIGKILL)
    output, _ = driver.communicate(timeout=300)
    assert driver.returncode == 1, output
    partial = pd.read_csv(sandbox.root / "results/test/table.csv")
    assert sorted(partial["status"]) == ["finished", "finished", "lost", "lost"]

    (sandbox.root / "go").touch()
    output = sandbox.snakemake()
    assert "2 finished, 2 to run (of these 2 killed before)" in output
    attempts = {record["params"]["x"]: record["attempt"] for record in sandbox.cells().values()}
    assert attempts == {0: 1, 1: 1, 2: 2, 3: 2}


def test_a_terminated_cell_is_interrupted_and_never_done(sandbox, eventually):
    gated(sandbox, on_error="nan")
    driver = sandbox.start("--cores", "4", "--retries", "0")
    eventually(lambda: (sandbox.root / "started-3").exists() and (sandbox.root / "started-2").exists(), "the start")
    eventually(lambda: len(finished(sandbox)) == 2, "two cells to finish")
    for record in sandbox.cells().values():
        if record["status"] == "running":
            os.kill(json.loads((record["dir"] / "lock").read_text())["pid"], signal.SIGTERM)
    output, _ = driver.communicate(timeout=300)
    assert driver.returncode == 1 and "interrupted after" in output
    states = {record["params"]["x"]: record["status"] for record in sandbox.cells().values()}
    assert states == {0: "finished", 1: "finished", 2: "interrupted", 3: "interrupted"}
    assert not any((r["dir"] / "result.json").exists() for r in sandbox.cells().values() if r["status"] != "finished")
    (sandbox.root / "go").touch()
    sandbox.snakemake()
    assert {record["status"] for record in sandbox.cells().values()} == {"finished"}


def test_ctrl_c_stops_the_cells_and_the_next_run_goes_on(sandbox, eventually):
    gated(sandbox)
    driver = sandbox.start("--cores", "4")
    eventually(lambda: (sandbox.root / "started-3").exists() and (sandbox.root / "started-2").exists(), "the start")
    os.killpg(driver.pid, signal.SIGINT)
    output, _ = driver.communicate(timeout=300)
    assert driver.returncode != 0, output
    eventually(lambda: not [r for r in sandbox.cells().values() if r["status"] == "running"], "the cells to stop")
    (sandbox.root / "go").touch()
    sandbox.snakemake()
    assert {record["status"] for record in sandbox.cells().values()} == {"finished"}


def test_a_deleted_result_is_handed_over_and_a_broken_one_runs_again(sandbox):
    gated(sandbox, count=3)
    (sandbox.root / "go").touch()
    sandbox.snakemake()
    deleted, broken, _ = (record["dir"] for record in sandbox.cells().values())
    (deleted / "result.json").unlink()
    (broken / "result.json").write_text('{"cell": "')
    output = sandbox.snakemake()
    assert f"cell {broken.name} runs again: result.json is broken" in output
    trained = sandbox.trained()
    assert trained.count(deleted.name) == 1 and trained.count(broken.name) == 2 and len(trained) == 4
    assert (deleted / "result.json").read_text() == (deleted / "status.json").read_text()
    assert (broken / "attempts/1/status.json").exists()
    assert "Nothing to be done" in sandbox.snakemake() and len(sandbox.trained()) == 4


def test_rerun_archives_the_attempt_and_runs_the_cell_again(sandbox):
    gated(sandbox, count=3)
    (sandbox.root / "go").touch()
    sandbox.snakemake()
    first = next(iter(sandbox.cells()))
    sandbox.sweepack("rerun", first[:8], "--", "--cores", "1")
    record = sandbox.cells()[first]
    assert record["attempt"] == 2 and sandbox.trained().count(first) == 2 and len(sandbox.trained()) == 4
    assert json.loads((record["dir"] / "attempts/1/status.json").read_text())["attempt"] == 1
    assert "Nothing to be done" in sandbox.snakemake()
    sandbox.sweepack("rerun", first)
    assert sandbox.cells()[first]["attempt"] == 3
    assert "Known" in sandbox.sweepack("rerun", "nonsense", status=1)


def test_two_runs_at_once_execute_no_cell_twice(sandbox, eventually):
    gated(sandbox, count=6)
    runs = [sandbox.start("--cores", "2", "--nolock") for _ in range(2)]
    eventually(lambda: (sandbox.root / "started-2").exists(), "a waiting cell")
    (sandbox.root / "go").touch()
    outputs = [run.communicate(timeout=300)[0] for run in runs]
    assert sorted(sandbox.trained()) == sorted(sandbox.cells()), outputs
    assert len(sandbox.cells()) == 6
