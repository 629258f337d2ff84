"""Meters for tasks in a folder of a test's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sweepack.devices import Device
from sweepack.sizing.meter import Meter
from sweepack.task import load_task

CPU = Device("", "cpu", "cpu", "cpu")
SETTINGS = {"reserve": 300, "overhead": 600, "limit_main": True}
REPOSITORY = Path(__file__).parent.parent.parent
# More than any trial here takes, on a busy machine too.
PATIENCE = 300.0


def meter(
    root: Path, reference: str = "task.py:train", device: Device | None = CPU, timeout: float = PATIENCE, **changed: Any
) -> Meter:
    """A meter for the task ``reference`` of the project in ``root``, with its scratch beside it."""
    given = {"params": {}, "seed": 0, "share": 1000, "threads": 1, "mem_mb": 0, "memory": SETTINGS, **changed}
    scratch = scratch_of(root)
    scratch.mkdir(exist_ok=True)
    task = load_task(reference, root).to_json(root)
    return Meter(
        task,
        given.pop("params"),
        given.pop("seed"),
        device=device,
        root=root,
        timeout=timeout,
        scratch=scratch,
        **given,
    )


def scratch_of(root: Path) -> Path:
    return root.with_name(f"{root.name}-scratch")
