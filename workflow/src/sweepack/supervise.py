"""Watch the process of a cell: pass signals on, clear up behind it, and write down an end that it could not write."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from sweepack import orphans, usage
from sweepack.client import NoHost, run_warm
from sweepack.files import write_atomic
from sweepack.job import STOP_SIGNALS, Job, report
from sweepack.mps.faults import excuse
from sweepack.oom import kernel_kills
from sweepack.records import CellFiles, State, assess

# Signals by which a program ends itself through a fault of its own; others come from outside.
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSYS, signal.SIGTRAP)


# Set in a process that has itself imported a task: forks the cell from it, if that is the cell's; None if it is not.
fork_here: Callable[[Job, Mapping[str, str], int, Mapping[str, Any], Relay], int | None] | None = None


def run_cell(job: Job, environment: Mapping[str, str], log: int, task: dict[str, Any], warm: bool, relay: Relay) -> int:
    """Run ``job`` in a process of its own, its output going to the descriptor ``log``; the exit status of the cell.

    ``warm``: forked from a host that has imported ``task``, if one can be had; the log says so when none can.
    Signals that ``relay`` catches reach the cell.
    """
    before = kernel_kills()
    status = _run_warm(job, environment, log, task, relay) if warm else None
    if status is None:
        status = _run_fresh(job, environment, log, relay)
    files = CellFiles(Path(job.directory))
    return settle(files, status, log, accept=job.accept, terminal=job.terminal, mps=job.mps, kills=before)


class Relay:
    """Catches the signals that are meant for cells and sends them where these run, also those that came before.

    ``caught`` is the last of them. To be made in the main thread; cells may be run in others.
    """

    def __init__(self) -> None:
        self.caught: int | None = None
        self._early: list[int] = []
        self._targets: dict[int, Callable[[int], None]] = {}
        # Reentrant: the handler runs in the main thread, which may be just here.
        self._lock = threading.RLock()
        for signum in STOP_SIGNALS:
            signal.signal(signum, self._catch)

    @contextlib.contextmanager
    def to(self, send: Callable[[int], None]) -> Iterator[None]:
        """Within the block signals are also passed to ``send``, those that came before it at once."""
        with self._lock:
            self._targets[id(send)] = send
            for signum in self._early:
                send(signum)
        try:
            yield
        finally:
            with self._lock:
                del self._targets[id(send)]

    def _catch(self, signum: int, _: FrameType | None) -> None:
        with self._lock:
            self.caught = signum
            self._early.append(signum)
            for send in list(self._targets.values()):
                send(signum)


def _run_warm(job: Job, environment: Mapping[str, str], log: int, task: dict[str, Any], relay: Relay) -> int | None:
    """How a process for ``job`` ended that was forked from one that has imported ``task``; None when there is none."""
    if fork_here and (status := fork_here(job, environment, log, task, relay)) is not None:
        return status
    try:
        return run_warm(job, environment, log, task, relay.to)
    except NoHost as reason:
        os.write(log, f"started fresh: {reason}\n".encode())
        return None


def _run_fresh(job: Job, environment: Mapping[str, str], log: int, relay: Relay) -> int:
    """How a fresh process for ``job`` ended, a signal being negative.

    It leads a session of its own: a signal reaches it once, from here, and what it leaves behind is killed.
    """
    orphans.adopt()
    child = orphans.spawn(
        [sys.executable, "-P", "-m", "sweepack.run", job.to_json(), str(os.getpid())],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=(*job.kept_open, job.terminal),
        start_new_session=True,
    )
    with relay.to(child.send_signal), usage.sampled(job, environment, child.pid):
        status = child.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    orphans.forget(child.pid)
    orphans.kill_strays()
    return status


def settle(
    files: CellFiles,
    status: int,
    log: int,
    *,
    accept: bool,
    terminal: int,
    mps: Mapping[str, Any] | None = None,
    kills: int | None = None,
) -> int:
    """The exit status of a cell whose process ended with ``status`` (negative: a signal), with its record put right.

    A process that crashed, called ``os._exit`` or was killed has written nothing. The first two are failures of the
    task; a kill comes from outside (the kernel's, when memory runs out) and leaves the cell interrupted. ``accept``,
    ``terminal`` and ``mps`` are as in ``Job``. ``kills``: how many processes the kernel had killed here for lack of
    memory when the cell began.
    """
    record = assess(files.directory, files.directory.name).record
    code = 128 - status if status < 0 else status
    if record is None or record.status is not State.RUNNING:
        return code
    killed = status < 0 and -status not in CRASHES
    verb = "was killed" if killed else "crashed"
    what = f"{verb}: {signal.Signals(-status).name}" if status < 0 else f"ended itself with exit status {status}"
    message = f"the process of the cell {what}"
    if status == -signal.SIGKILL and kills is not None and (count := (kernel_kills() or 0) - kills) > 0:
        message += (
            f"; main memory is the likely reason: meanwhile the kernel has killed {count} of this job's processes for "
            "lack of it. Ask for more `mem`, or run fewer cells at once"
        )
    os.write(log, f"{message}\n".encode())
    state = State.INTERRUPTED if killed else State.FAILED
    record = excuse(replace(record, status=state, ended=time.time(), error=message), mps, pid=None)
    write_atomic(files.status, record.to_json())
    accepted = accept and record.status is State.FAILED
    if accepted:
        write_atomic(files.result, record.to_json())
    report(record, json.loads(files.meaning.read_bytes())["slug"], files, terminal)
    return 0 if accepted else code or 1
