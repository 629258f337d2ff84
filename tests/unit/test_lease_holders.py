"""Leases end with their last holder, however it ends, and are never given twice."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lease_tools import leftovers, until, waiting
from sweepack.errors import UserError
from sweepack.files import try_lock
from sweepack.leases import WHOLE, LeasePool, LeaseTimeout

STRESS = Path(__file__).with_name("lease_stress.py")
HOLD = """
import subprocess, sys, time
from pathlib import Path
from sweepack.leases import LeasePool
lease = LeasePool(Path(sys.argv[1]), ["a"]).acquire(600, label="victim")
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Start a process that takes 0.6 of device a of ``tmp_path`` and then does what the code given says."""
    started = []

    def start(then: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLD + then, str(tmp_path)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        until(lambda: LeasePool(tmp_path, ["a"]).free() == {"a": 400})
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_share_is_free_when_its_holder_is_killed(tmp_path, holder):
    holder("time.sleep(60)").kill()
    until(lambda: LeasePool(tmp_path, ["a"]).free() == {"a": 1000})
    assert leftovers(tmp_path) == set()


def test_a_waiter_that_is_killed_leaves_the_queue(tmp_path, holder):
    pool = LeasePool(tmp_path, ["a"])
    waiter = holder("LeasePool(Path(sys.argv[1]), ['a']).acquire(600, label='late')")
    until(lambda: waiting(pool) == ["late"])
    waiter.kill()
    until(lambda: pool.holders() == [])


def test_a_program_started_by_exec_holds_the_share(tmp_path, holder):
    process = holder("lease.inheritable(); import os; os.execvp('sh', ['sh', '-c', 'echo started; exec sleep 60'])")
    assert process.stdout.readline() == "started\n"
    pool = LeasePool(tmp_path, ["a"])
    assert pool.free() == {"a": 400}
    process.kill()
    until(lambda: pool.free() == {"a": 1000})


@pytest.mark.parametrize("end", ["time.sleep(60)", "lease.release(); time.sleep(60)"])
def test_a_share_is_kept_while_a_child_that_inherited_it_lives(tmp_path, holder, end):
    start = "child = subprocess.Popen(['sleep', '60'], pass_fds=[lease.fd]); print(child.pid, flush=True);"
    launcher = holder(start + end)
    child = int(launcher.stdout.readline())
    try:
        launcher.kill()
        launcher.wait()
        assert LeasePool(tmp_path, ["a"]).free() == {"a": 400}
    finally:
        os.kill(child, signal.SIGKILL)
    until(lambda: LeasePool(tmp_path, ["a"]).free() == {"a": 1000})


def test_a_forked_child_that_lets_go_takes_nothing_from_its_parent(tmp_path):
    pool = LeasePool(tmp_path, ["a"])
    lease = pool.acquire(600, label="parent")
    child = os.fork()
    if child == 0:
        lease.release()
        os._exit(0)
    os.waitpid(child, 0)
    assert pool.free() == {"a": 400}
    lease.release()
    lease.release()
    assert pool.free() == {"a": 1000}


def test_files_of_the_dead_are_removed_even_when_broken(tmp_path):
    for name in ("1.lease", "2.wait", "3.tmp"):
        (tmp_path / name).write_text('{"label": "cut sh')
    assert LeasePool(tmp_path, ["a"]).holders() == []
    assert leftovers(tmp_path) == set()


@pytest.mark.parametrize("content", ["", "[]", '{"devices": ["b"]}'])
def test_an_unreadable_lease_of_a_live_process_counts_as_every_device_and_is_named(tmp_path, content):
    pool = LeasePool(tmp_path, ["a", "b"])
    fd = try_lock(tmp_path / "1.lease")
    (tmp_path / "1.lease").write_text(content)
    assert pool.free() == {"a": 0, "b": 0}
    with pytest.raises(LeaseTimeout, match=rf"the unreadable file {tmp_path}/1\.lease"):
        pool.acquire(100, label="late", timeout=0)
    os.close(fd)
    pool.acquire(1000, label="late", count=2, timeout=0).release()


def test_a_directory_that_cannot_be_used_is_an_error_with_its_mend(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"gone.*No such file"):
        LeasePool(tmp_path / "gone", ["a"]).acquire(500, label="late")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(UserError, match="No space left") as refusal:
        LeasePool(tmp_path, ["a"]).acquire(500, label="late")
    assert "SWEEPACK_LEASES=" in refusal.value.fix
    assert leftovers(tmp_path) == set()


def test_random_shares_of_processes_that_die_never_exceed_a_device(tmp_path):
    directory, chance = tmp_path / "leases", random.Random(0)
    directory.mkdir()
    traces = [tmp_path / f"{seed}.trace" for seed in range(10)]
    workers = {
        trace: subprocess.Popen([sys.executable, STRESS, directory, trace, str(seed), "50"])
        for seed, trace in enumerate(traces)
    }
    until(lambda: all(trace.exists() for trace in traces))
    killed = {}
    for trace in traces[::4]:
        time.sleep(chance.uniform(0.05, 0.2))
        now = time.monotonic()
        if workers[trace].poll() is None:
            killed[trace] = now
            workers[trace].kill()
    codes = {trace: worker.wait() for trace, worker in workers.items()}
    pool = LeasePool(directory, ["a", "b", "c", "d"])
    until(lambda: pool.free() == dict.fromkeys("abcd", WHOLE))
    assert leftovers(directory) == set()
    assert set(codes.values()) == {0, -signal.SIGKILL}

    held = [interval for trace in traces for interval in intervals(trace, killed.get(trace))]
    for device in pool.devices:
        changes = sorted(
            change
            for start, end, milli, devices in held
            if device in devices
            for change in ((start, milli), (end, -milli))
        )
        level, most, together, most_together = 0, 0, 0, 0
        for _, milli in changes:
            level, together = level + milli, together + (1 if milli > 0 else -1)
            most, most_together = max(most, level), max(most_together, together)
        assert most <= WHOLE
        assert most_together > 1


def intervals(trace: Path, killed: float | None) -> Iterator[tuple[float, float, int, list[str]]]:
    """When a worker surely held which share; a killed one held its last share at least until ``killed``."""
    open_: tuple[float, int, list[str]] | None = None
    for line in trace.read_text().splitlines():
        sign, at, *share = line.split()
        if sign == "+":
            open_ = (float(at), int(share[0]), share[1:])
        elif open_:
            yield open_[0], float(at), *open_[1:]
            open_ = None
    if open_ and killed and killed > open_[0]:
        yield open_[0], killed, *open_[1:]
