"""Start the warm host before the first cell needs it, and let its import be the check that the task can be imported."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from sweepack.devices import Device
from sweepack.environment import cell_environment
from sweepack.hosts import Starting, host_socket, start_host
from sweepack.importing import check_import, import_stamp, is_remembered, require_imported
from sweepack.plan import CACHE, Plan


def check_task(plan: Plan, root: Path, pool: Sequence[Device], environ: Mapping[str, str], running: bool) -> None:
    """Import the task once in another process, when there are cells to run; if ``running``, in one that serves them.

    Raises UserError when the import fails or takes longer than ``import_timeout``.
    """
    if not plan.pending or plan.task.is_command:
        return
    stamp = import_stamp(plan.task, root / CACHE)
    if is_remembered(stamp):
        return
    if running:
        starting = _start(plan, root, pool, environ, stamp)
        word, words = starting.wait(plan.config.import_timeout) if starting else ("", "")
        if word == "failed":
            require_imported(plan.task, json.loads(words))
        if word in ("ready", "unsafe"):
            return
    # What ends the process, or takes too long, is told best by the check that does nothing else.
    check_import(plan.task, root, root / CACHE, plan.config.import_timeout)


def preheat(plan: Plan, root: Path, pool: Sequence[Device], environ: Mapping[str, str]) -> None:
    """Start the host for the first cells while Snakemake gets ready; they wait for it, we don't."""
    if plan.pending and (starting := _start(plan, root, pool, environ, None)):
        starting.leave()


def cell_host(plan: Plan, root: Path, environ: Mapping[str, str], threads: int) -> Path | None:
    """Where the host listens that would serve cells with so many ``threads``; None when they have none."""
    if plan.config.start == "fresh" or plan.task.is_command:
        return None
    with contextlib.suppress(OSError):  # a full disk: the cells will tell
        environment = cell_environment(environ, visible="", threads=threads)
        return host_socket(environment, plan.task.to_json(root))
    return None


def _start(
    plan: Plan, root: Path, pool: Sequence[Device], environ: Mapping[str, str], stamp: Path | None
) -> Starting | None:
    threads = plan.pending[0].resources.cpus
    path = cell_host(plan, root, environ, threads)
    if path is None:
        return None
    with contextlib.suppress(OSError):
        # A device like a cell's: a module that looks for a GPU when it is imported must not be told that there is none.
        environment = cell_environment(environ, visible=pool[0].entry, threads=threads)
        return start_host(path, environment, plan.task.to_json(root), driver=os.getpid(), stamp=stamp)
    return None
