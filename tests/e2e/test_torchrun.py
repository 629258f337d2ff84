"""Cells whose ranks torchrun starts, on this machine: restarts within an attempt, failures, stops."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from ddp_tasks import history, ranks_of, samples, wide


def by_torchrun(sandbox, trouble, restarts=0):
    wide(
        sandbox,
        {"gpus_per_node": 2, "ddp": {"launcher": "torchrun", "restarts": restarts}},
        params={"trouble": trouble},
        devices="cpu",
    )


@pytest.fixture(autouse=True)
def nothing_left(sandbox, eventually):
    yield
    eventually(lambda: not ranks_of(sandbox), "all ranks and agents to end", 20)


def the_cell(sandbox):
    (cell,) = sandbox.cells().values()
    return cell, (cell["dir"] / "log.txt").read_text()


def test_a_killed_rank_is_started_again_within_the_attempt_and_nothing_is_trained_twice(sandbox):
    by_torchrun(sandbox, "vanish", restarts=1)
    sandbox.snakemake()
    cell, log = the_cell(sandbox)
    assert (cell["status"], cell["attempt"], cell["world_size"]) == ("finished", 1, 2)
    assert "the ranks start again, now 2 of them, since rank 1" in log
    assert [epoch for epoch, _ in history(cell)] == [0, 1, 2, 3]
    assert samples(cell, 2) == [list(range(64))] * 4, "each sample once an epoch"
    assert len(list(cell["dir"].glob("result.json*"))) == 1


@pytest.mark.parametrize(
    ("trouble", "status", "words"),
    [
        ("vanish", "interrupted", "was killed (SIGKILL)"),
        ("exit", "failed", "ended itself with exit status 3"),
        ("fail", "failed", "RuntimeError: as asked"),
    ],
)
def test_without_restarts_the_rank_that_ended_the_cell_is_named(sandbox, trouble, status, words):
    by_torchrun(sandbox, trouble)
    output = sandbox.snakemake(status=1)
    cell, log = the_cell(sandbox)
    assert cell["status"] == status
    assert cell["error"].startswith("rank 1 (") and cell["error"].endswith(words)
    assert cell["error"] in output and cell["error"] in log
    assert not ranks_of(sandbox)


def test_a_failure_that_comes_back_uses_up_the_restarts(sandbox):
    by_torchrun(sandbox, "fail", restarts=1)
    task = sandbox.root / "task.py"
    task.write_text(task.read_text().replace('open("once", "w").close()', "pass"))
    sandbox.snakemake(status=1)
    cell, log = the_cell(sandbox)
    assert cell["status"] == "failed" and cell["error"].endswith("RuntimeError: as asked")
    assert log.count("the ranks start again") == 1


def test_a_stop_is_passed_on_and_the_next_run_goes_on(sandbox, eventually):
    by_torchrun(sandbox, "slow", restarts=3)
    run = sandbox.start()
    eventually((sandbox.root / "begun").exists, "the third epoch")
    os.killpg(run.pid, signal.SIGTERM)
    run.communicate(timeout=60)
    cell, log = the_cell(sandbox)
    assert (cell["status"], cell["error"]) == ("interrupted", "stopped by SIGTERM")
    assert "start again" not in log
    sandbox.snakemake()
    cell, _ = the_cell(sandbox)
    assert (cell["status"], cell["attempt"]) == ("finished", 2)
    assert [epoch for epoch, _ in history(cell)] == [0, 1, 2, 3]


def test_a_killed_launcher_leaves_no_agent_that_would_start_ranks_again(sandbox, eventually):
    by_torchrun(sandbox, "hang", restarts=3)
    run = sandbox.start()
    eventually((sandbox.root / "once").exists, "the last rank to hang")
    parents = {
        pid: int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in ranks_of(sandbox)
    }
    (launcher,) = set(parents.values()) - set(parents)
    os.kill(launcher, signal.SIGKILL)
    run.communicate(timeout=60)
    eventually(lambda: not ranks_of(sandbox), "all that it had started to end", 20)
