"""The jobs that measure what the plan does not know yet: which there are, and what each is told."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from sweepack.config import Config
from sweepack.sizing.pins import FOLDER
from sweepack.sizing.request import Request, Wanted
from sweepack.sizing.sizes import Group, Sizes
from sweepack.sweep import Cell
from sweepack.task import Task

PROBE = "probe"


def probe_jobs(sizes: Sizes, sweep: Path, on_slurm: bool) -> dict[str, list[Group]]:
    """What is to be measured, by the name of the job that does it: one, on Slurm one for each kind of request.

    ``sweep`` is the sweep's folder. A name is new after each job that ended well, so that what was taken away since is
    measured again.
    """
    kinds: dict[str, list[Group]] = {}
    for group in sizes.unpinned:
        request = group.resources.slurm if on_slurm else None
        kinds.setdefault(request.model_dump_json() if request else "", []).append(group)
    done = sorted(path.name for path in (sweep / FOLDER).glob("*.done"))
    named = {}
    for kind, groups in kinds.items():
        content = [kind, done, [[group.profile.key, *group.missing] for group in groups]]
        named[hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]] = groups
    return named


def cells_of(jobs: dict[str, list[Group]]) -> dict[str, list[Cell]]:
    """A cell of each profile, by the name of the job that measures it."""
    return {name: [group.to_run[0] for group in groups] for name, groups in jobs.items()}


def write_requests(jobs: dict[str, list[Group]], config: Config, task: Task, root: Path, sweep: Path) -> None:
    """Write down what each of the ``jobs`` is to measure. Called when a run starts, never by a dry run."""
    for name, groups in jobs.items():
        request_of(groups, config, task, root).write(sweep, name)


def request_of(groups: Sequence[Group], config: Config, task: Task, root: Path) -> Request:
    """What it takes to measure the ``groups``."""
    return Request(
        task=task.to_json(root),
        code=task.digest(),
        sizing=config.sizing.model_dump(),
        memory=config.memory.model_dump(),
        devices=config.devices or 0,
        profiles=[_wanted(group) for group in groups],
        lease_timeout=config.lease_timeout,
    )


def _wanted(group: Group) -> Wanted:
    cells = group.to_run or group.cells
    return Wanted(group.profile, cells[0].id, cells[0].seed, cells[0].params, len(cells), group.name)
