"""The warm host: cells start in milliseconds, with the same numbers, and nothing of one reaches the next."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest
from sweepack.leases import LeasePool
from sweepack.sockets import SocketAddress
from test_lightning import lightning
from traces import hosts

TASK = """
import os, signal, sys, time, threading
from pathlib import Path
IMPORTED = os.getpid()
STATE = []
def train(cell, *, x: int, how: str = ""):
    STATE.append(x)
    os.environ["LEFT_BY"] = str(x)
    if x == 1:
        if how == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if how == "vanish":
            os._exit(7)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "close":
            os.close(1), os.close(2)
        if how == "children":
            if os.fork() == 0:
                time.sleep(1000)
        if how == "chdir":
            os.chdir("/")
    while how == "wait" and not Path("go").exists():
        Path(f"started-{x}").touch()
        time.sleep(0.02)
    return {
        "state": STATE, "left": os.environ.get("LEFT_BY"), "forked": os.getpid() != IMPORTED, "host": IMPORTED,
        "threads": os.environ["OMP_NUM_THREADS"], "group": os.getpgid(0) == os.getpid(), "cwd": os.getcwd(),
        "visible": os.environ["CUDA_VISIBLE_DEVICES"], "umask": os.umask(0o22),
        "open": sorted(os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if int(fd) > 2),
    }
"""


def tiny(sandbox, count=4, how="", task=TASK, **more):
    sandbox.write("task.py", task)
    sandbox.config(
        sweep={"name": "test", "task": "task.py:train", "params": {"how": how}, "axes": {"x": {"range": count}}},
        resources=[{"gpu": 0.25}],
        **more,
    )


def metrics(sandbox):
    return {record["params"]["x"]: record["metrics"] for record in sandbox.cells().values() if record["metrics"]}


def test_cells_are_forked_from_one_host_and_know_nothing_of_each_other(sandbox, eventually):
    tiny(sandbox, count=6)
    sandbox.snakemake()
    found = metrics(sandbox)
    assert len({cell["host"] for cell in found.values()}) == 1
    for x, cell in found.items():
        assert cell["state"] == [x] and cell["left"] == str(x) and cell["forked"] and cell["group"]
        assert cell["threads"] == "1" and cell["visible"] == "" and cell["umask"] == 0o22
        assert not [name for name in cell["open"] if "socket" in name]
    eventually(lambda: not hosts(sandbox), "the host to end with its last driver", 30)


def test_warm_and_fresh_give_the_same_table(sandbox):
    lightning(sandbox, "warm", lr=[0.01, 0.1])
    sandbox.snakemake("--cores", "2")
    lightning(sandbox, "fresh", lr=[0.01, 0.1])
    sandbox.snakemake("--cores", "2", "--config", "start=fresh")
    assert "are equal bit for bit" in sandbox.sweepack("diff", "--exact", "warm", "fresh")


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (TASK + "\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n", "started 1 thread"),
        (TASK + "\nSTART = 'fresh'\n", "START = 'fresh'"),
    ],
)
def test_where_forking_is_unsafe_cells_start_fresh_and_say_why(sandbox, task, words):
    tiny(sandbox, task=task, count=2)
    sandbox.snakemake()
    for record in sandbox.cells().values():
        assert not record["metrics"]["forked"] and words in (record["dir"] / "log.txt").read_text()
    assert not hosts(sandbox)


def test_edited_code_means_another_host(sandbox):
    sandbox.write("helper.py", "VALUE = 1\n")
    task = "import helper\ndef train(cell, *, x: int, how: str = ''):\n    return {'value': helper.VALUE}\n"
    tiny(sandbox, task=task, count=1)
    sandbox.snakemake()
    sandbox.write("helper.py", "VALUE = 22\n")
    tiny(sandbox, task=task, count=2)
    sandbox.snakemake()
    assert {x: cell["value"] for x, cell in metrics(sandbox).items()} == {0: 1, 1: 22}


@pytest.mark.parametrize(
    ("how", "state"),
    [
        ("segfault", "failed"),
        ("vanish", "failed"),
        ("kill", "interrupted"),
        ("close", "finished"),
        ("chdir", "finished"),
    ],
)
def test_a_cell_that_goes_down_takes_nobody_with_it(sandbox, how, state):
    tiny(sandbox, how=how)
    sandbox.snakemake(status=0 if state == "finished" else 1)
    states = {record["params"]["x"]: record["status"] for record in sandbox.cells().values()}
    assert states == {0: "finished", 1: state, 2: "finished", 3: "finished"}
    assert not LeasePool(sandbox.root.parent / "leases", ["cpu"]).holders()


def test_children_of_a_cell_die_with_it(sandbox):
    tiny(sandbox, how="children", count=2)
    sandbox.snakemake()
    left = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cwd").readlink() == sandbox.root:
                left.append(int(process.name))
    assert set(left) <= {*hosts(sandbox), *hosts(sandbox, results=True)}


def test_a_killed_host_takes_its_cells_with_it_and_the_next_run_goes_on(sandbox, eventually):
    tiny(sandbox, how="wait", count=4)
    driver = sandbox.start("--cores", "4")
    eventually(lambda: all((sandbox.root / f"started-{x}").exists() for x in range(4)), "four cells")
    (host,) = hosts(sandbox)
    os.kill(host, signal.SIGKILL)
    output, _ = driver.communicate(timeout=300)
    assert driver.returncode == 1, output
    assert not LeasePool(sandbox.root.parent / "leases", ["cpu"]).holders()
    (sandbox.root / "go").touch()
    assert "4 interrupted before" in sandbox.snakemake()
    assert {record["attempt"] for record in sandbox.cells().values()} == {2}


def test_a_killed_client_ends_its_cell_and_no_other(sandbox, eventually):
    tiny(sandbox, how="wait", count=2)
    driver = sandbox.start("--cores", "2")
    eventually(lambda: all((sandbox.root / f"started-{x}").exists() for x in range(2)), "two cells")
    victim = next(record for record in sandbox.cells().values() if record["params"]["x"] == 1)
    os.kill(json.loads((victim["dir"] / "lock").read_text())["pid"], signal.SIGKILL)
    time.sleep(0.5)
    (sandbox.root / "go").touch()
    driver.communicate(timeout=300)
    states = {record["params"]["x"]: record["status"] for record in sandbox.cells().values()}
    assert states == {0: "finished", 1: "running"} and driver.returncode == 1


@pytest.mark.parametrize("words", [b"", b"?"])
def test_a_client_that_vanishes_while_it_asks_harms_nobody(sandbox, eventually, words):
    tiny(sandbox, how="wait", count=2)
    driver = sandbox.start("--cores", "2")
    eventually(lambda: all((sandbox.root / f"started-{x}").exists() for x in range(2)), "two cells")
    (path,) = hosts(sandbox).values()
    with socket.socket(socket.AF_UNIX) as client, SocketAddress(path) as address:
        client.connect(address)
        client.sendall(words)
        if words:
            assert client.recv(1) == b"!"
    time.sleep(0.5)
    (sandbox.root / "go").touch()
    output, _ = driver.communicate(timeout=300)
    assert driver.returncode == 0, output


def test_without_its_socket_a_host_is_replaced(sandbox, eventually):
    tiny(sandbox, count=1)
    sandbox.snakemake()
    for path in (sandbox.root.parent / "leases/warm").glob("*.sock"):
        path.unlink()
    tiny(sandbox, count=3)
    sandbox.snakemake()
    assert len(metrics(sandbox)) == 3


def test_a_long_path_is_no_trouble_for_the_socket(sandbox):
    folder = sandbox.root.parent / ("long" * 30)
    tiny(sandbox, count=2)
    sandbox.snakemake(SWEEPACK_LEASES=str(folder))
    assert all(cell["forked"] for cell in metrics(sandbox).values())
