"""The Slurm cluster for tests. Those that use it run one at a time: there is one cluster, and they empty it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_tools import Cluster, run_cluster
from slurmbox import packages
from slurmbox.box import Box
from slurmbox.processes import ClusterError


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One group: with `--dist loadgroup` (pyproject.toml) one worker runs them all."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slurm)
            item.add_marker(pytest.mark.xdist_group("slurm"))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The cluster, up and without jobs. It is taken down at the end unless it was up before."""
    try:
        packages.check()
        Box.here().check_link()
    except ClusterError as error:
        if os.environ.get("SWEEPACK_NEED_SLURM") == "1":
            pytest.fail(str(error))
        pytest.skip(str(error))
    was_up = run_cluster("status", check=False).returncode == 0
    run_cluster("up")
    cluster = Cluster()
    cluster.empty()
    yield cluster
    if not was_up:
        run_cluster("down")


@pytest.fixture
def empty_cluster(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster for one test: no jobs before, none after, both nodes there."""
    cluster.empty()
    yield cluster
    run_cluster("up")
    cluster.empty()
