"""The Slurm cluster for tests. There is one for all workers of pytest, so each test has it alone."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Sandbox

from .cluster_tools import Cluster, run_cluster
from .testbed.daemons import wait_until
from .testbed.packages import check_packages
from .testbed.state import ClusterError, State

# Less than pytest's own limit on a test, so that the message says what was waited for.
TURN_SECONDS = 800
# Beside the tool's own lock: one cluster a machine.
USERS = Path("/run/sweepack-slurm.users")
TURN = Path("/run/sweepack-slurm.turn")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slurm)
        if item.get_closest_marker("thorough") and os.environ.get("SWEEPACK_THOROUGH") != "1":
            item.add_marker(pytest.mark.skip(reason="takes long; set SWEEPACK_THOROUGH=1"))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The cluster, up. The last worker takes it down unless it was up before."""
    try:
        if os.geteuid() != 0:
            raise ClusterError("Slurm's test cluster needs root")
        check_packages()
        State.from_environment().check_link()
    except ClusterError as error:
        if os.environ.get("SWEEPACK_NEED_SLURM") == "1":
            pytest.fail(str(error))
        pytest.skip(str(error))
    with USERS.open("a") as users:
        fcntl.flock(users, fcntl.LOCK_SH)
        with _taken_turn():  # another worker's test may have taken down a part of it
            if run_cluster("status", check=False).returncode:
                # Text in the file: tests brought it up, so tests take it down.
                users.write("up by tests")
                users.flush()
                run_cluster("up")
        yield Cluster()
        _down_if_last(users.fileno())


def _down_if_last(users: int) -> None:
    if _is_taken(users) and os.fstat(users).st_size:
        os.truncate(users, 0)
        run_cluster("down")


def _is_taken(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def _taken_turn() -> Iterator[None]:
    with TURN.open("w") as lock:
        wait_until(lambda: _is_taken(lock.fileno()), "the Slurm test of another worker", TURN_SECONDS)
        yield


@pytest.fixture(autouse=True)
def turn(cluster: Cluster) -> Iterator[None]:
    """A test at a time: they cancel all jobs and kill nodes."""
    with _taken_turn():
        yield
    # Another worker's turn, if one waits: it looks every 50 ms.
    if "PYTEST_XDIST_WORKER" in os.environ:
        time.sleep(0.2)


@pytest.fixture
def empty_cluster(cluster: Cluster, turn: None) -> Iterator[Cluster]:
    """The cluster for one test: whole and without jobs before, none of its jobs after."""
    run_cluster("up")
    cluster.empty()
    yield cluster
    cluster.empty()


@pytest.fixture
def project(sandbox: Sandbox) -> Sandbox:
    """Devices are what Slurm gives, leases each node's own."""
    for name in ("SWEEPACK_DEVICES", "SWEEPACK_LEASES"):
        del sandbox.environment[name]
    return sandbox
