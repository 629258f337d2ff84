"""What the tests of leases share."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from sweepack.leases import LeasePool


def until(condition: Callable[[], object]) -> None:
    """Wait for what another process or thread brings about."""
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("never came true")


def waiting(pool: LeasePool) -> list[str]:
    """The labels of the requests in the queue."""
    return [holder.label for holder in pool.holders() if holder.waiting]


def leftovers(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()} - {"mutex"}
