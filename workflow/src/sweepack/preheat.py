"""Start the warm hosts before they are needed: one for the cells, one for the table and the report.

The import of the task, in the first of them, is the check that the task can be imported.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sweepack.devices import Device
from sweepack.environment import cell_environment
from sweepack.hosts import Starting, host_socket, start_host
from sweepack.importing import check_import, import_stamp, is_remembered, require_imported
from sweepack.plan import CACHE, Plan
from sweepack.task import Signature, Task

# The memory allocator of pyarrow starts a thread when it is loaded: what has one must not be forked.
_NO_THREAD = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}


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
        _preheat_results(plan, root, environ)
        starting = _start(plan, root, pool, environ, stamp)
        word, words = starting.wait(plan.config.import_timeout) if starting else ("", "")
        if word == "failed":
            require_imported(plan.task.reference, json.loads(words))
        if word in ("ready", "unsafe"):
            return
    # What ends the process, or takes too long, is told best by the check that does nothing else.
    check_import(plan.task, root, root / CACHE, plan.config.import_timeout)


def preheat(plan: Plan, root: Path, pool: Sequence[Device], environ: Mapping[str, str]) -> None:
    """Start the hosts while Snakemake gets ready: the first cells wait for theirs, we don't."""
    if plan.pending:
        _preheat_results(plan, root, environ)
        if starting := _start(plan, root, pool, environ, None):
            starting.leave()


def cell_host(plan: Plan, root: Path, environ: Mapping[str, str], threads: int) -> Path | None:
    """Where the host listens that would serve cells with so many ``threads``; None when they have none."""
    if plan.config.start == "fresh" or plan.task.is_command:
        return None
    with contextlib.suppress(OSError):  # a full disk: the cells will tell
        environment = cell_environment(environ, visible="", threads=threads, memory=plan.config.memory.model_dump())
        return host_socket(environment, plan.task.to_json(root))
    return None


def results_host(plan: Plan, root: Path, environ: Mapping[str, str]) -> Path | None:
    """Where the host listens, if one runs, that would make the table and the report; None when there is to be none.

    Only a short run finds it at its end: it does not stay for long with nothing to do.
    """
    if plan.config.start == "fresh" or plan.slurm:
        return None
    with contextlib.suppress(OSError):  # as above
        return host_socket(_results_environment(environ), _results_task(plan, root))
    return None


def _preheat_results(plan: Plan, root: Path, environ: Mapping[str, str]) -> None:
    """Let it import, while the task is imported or the first cells run, what takes longer than making the table."""
    path = results_host(plan, root, environ)
    with contextlib.suppress(OSError):
        if path and (
            starting := start_host(path, _results_environment(environ), _results_task(plan, root), os.getpid())
        ):
            starting.leave()


def _results_task(plan: Plan, root: Path) -> dict[str, Any]:
    """Our own functions in the form of a task: whatever has imported it has all that the scripts need."""
    name, function = ("report", "write_report") if plan.config.report else ("results", "write_tables")
    module = f"{__package__}.{name}"
    file = Path(__file__).with_name(f"{name}.py")
    return Task(f"{module}:{function}", Signature({}, open=True), file, module, function).to_json(root)


def _results_environment(environ: Mapping[str, str]) -> dict[str, str]:
    return cell_environment(environ, visible="", threads=1) | _NO_THREAD


def _start(
    plan: Plan, root: Path, pool: Sequence[Device], environ: Mapping[str, str], stamp: Path | None
) -> Starting | None:
    threads = plan.pending[0].resources.cpus
    path = cell_host(plan, root, environ, threads)
    if path is None:
        return None
    with contextlib.suppress(OSError):
        # A device like a cell's: a module that looks for a GPU when it is imported must not be told that there is none.
        environment = cell_environment(
            environ, visible=pool[0].entry, threads=threads, memory=plan.config.memory.model_dump()
        )
        return start_host(path, environment, plan.task.to_json(root), driver=os.getpid(), stamp=stamp)
    return None
