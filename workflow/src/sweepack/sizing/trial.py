"""The process behind a ``Meter``: it has imported the task, and forks a child from itself for each batch size.

The child is what a cell would be: the same environment, cap, limits and seeds, in a folder of its own that is removed.
It ends as soon as it has made enough optimiser steps, on the spot: nothing that the task, or Lightning, does at the end
of a training is done. Where forking is unsafe each batch gets a fresh process, started by one that imports nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from sweepack import main_memory, memory, oom, orphans, run
from sweepack.files import write_atomic
from sweepack.forked import shed
from sweepack.importing import import_task, try_import
from sweepack.job import Job
from sweepack.records import CellFiles, Record, State
from sweepack.sizing.steps import FULL, Steps

MAIN_MEMORY = "peak resident memory (VmHWM)"
CUDA_MEMORY = "torch.cuda.max_memory_reserved"
_TICK_SECONDS = 0.02
_PR_SET_PDEATHSIG = 1
_MODULE = "sweepack.sizing.trial"
_RESET_PEAK = "5"
_OUT_OF_MEMORY = (
    "DefaultCPUAllocator",
    "out of memory",
    "std::bad_alloc",
    "Cannot allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
)


@dataclass(frozen=True)
class Trial:
    """One batch size to be tried: as a cell would be run by ``job``, with the ``meaning`` of a ``cell.json``."""

    job: dict[str, Any]
    meaning: dict[str, Any]
    estimate: bool

    @property
    def folder(self) -> Path:
        return Path(self.job["directory"]).parent

    @property
    def report(self) -> Path:
        return self.folder / "report.json"

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"


def is_out_of_memory(text: str) -> bool:
    """Whether the words of an error, or of a log, say that memory has run out."""
    return any(words in text for words in _OUT_OF_MEMORY)


def attempt(trial: Trial) -> NoReturn:
    """In a process of its own: run the task, write down what it took, and end."""
    found: dict[str, Any] = {"outcome": "failed", "peak": None, "allocated": None, "source": None, "error": None}

    def leave(**more: Any) -> NoReturn:
        held.release()
        write_atomic(trial.report, json.dumps({**found, "rows": steps.rows, **more}))
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(0)

    def enough() -> NoReturn:
        """What was asked for has been done, somewhere deep in the task, which may be left as it stands."""
        try:
            numbers = _estimated(tracker) if tracker else _measured(job.kind)
        except BaseException as error:
            leave(**_failure(error, trial))
        leave(outcome="measured", **numbers)

    process = os.getpid()
    job, files = Job(**trial.job), CellFiles(Path(trial.job["directory"]))
    held = memory.Held(job)
    tracker: Any = None
    steps = Steps(enough, begin=(lambda arguments: tracker.begin(arguments)) if trial.estimate else None)
    try:
        import_task(trial.meaning["task"], Path.cwd())
        with contextlib.ExitStack() as stack:
            if trial.estimate:
                from sweepack.sizing.estimate import estimating

                tracker = stack.enter_context(estimating())
            else:
                _reset_peak()
            run.run_task(job, files, trial.meaning, Record(trial.meaning["id"], State.RUNNING, attempt=1), held)
            if os.getpid() != process:
                os._exit(0)
            prefix = "no estimate: " if trial.estimate else ""
            if steps.made:
                made = f"made only {steps.made} optimiser step{'s' * (steps.made > 1)}"
                leave(error=f"{prefix}the task {made}; each optimiser must make {FULL}")
            if trial.estimate:
                leave(error=f"{prefix}the task has made no step of an optimiser of torch")
            numbers = _measured(job.kind)
            leave(outcome="measured", **{**numbers, "source": f"{numbers['source']}, whole run"})
    except BaseException as error:
        if os.getpid() != process:
            os._exit(1)
        held.release()
        traceback.print_exception(error)
        leave(**_failure(error, trial))


def _estimated(tracker: Any) -> dict[str, Any]:
    from sweepack.sizing.estimate import SOURCE

    return {"peak": tracker.peak, "allocated": tracker.peak, "source": SOURCE}


def _measured(kind: str) -> dict[str, Any]:
    torch = sys.modules.get("torch")
    if kind == "cuda" and torch is not None and torch.cuda.is_available():
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # an error that is still on its way comes now
        reserved, allocated = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
        return {"peak": reserved, "allocated": allocated, "source": CUDA_MEMORY}
    peak = main_memory.peak()
    if peak is None:
        raise RuntimeError("the system does not tell how much memory a process has had")
    return {"peak": peak, "source": MAIN_MEMORY}


def _reset_peak() -> None:
    """Forget the memory that the import took for a while."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)


def _failure(error: BaseException, trial: Trial) -> dict[str, Any]:
    text = "".join(traceback.format_exception_only(error)).strip()
    if isinstance(error, SystemExit):
        text = f"the task called sys.exit({error.code!r}) before it had made {FULL} optimiser steps"
    if trial.estimate:
        from sweepack.sizing.estimate import explain

        return {"error": f"no estimate: {text if isinstance(error, SystemExit) else explain(error)}"}
    record = Record(trial.meaning["id"], State.FAILED, attempt=1, error=text)
    told = oom.tell(error, record, Job(**trial.job))
    if told.failure in (oom.OOM_NEIGHBOUR, oom.DEVICE_LOST):
        return {"error": told.error}  # says nothing about this batch
    own = told.failure is not None or isinstance(error, MemoryError) or is_out_of_memory(text)
    return {"outcome": "oom" if own or type(error).__name__ == "OutOfMemoryError" else "failed", "error": text}


class Server:
    """Runs the trials that come in on ``channel``, one at a time, and clears up when whoever asks has gone."""

    def __init__(self, channel: socket.socket, base: Path, fresh: bool) -> None:
        self._channel = channel
        self._lines = channel.makefile("rw")
        self._base = base
        self._fresh = fresh

    def answer(self, **content: Any) -> None:
        with contextlib.suppress(OSError):
            self._lines.write(json.dumps(content) + "\n")
            self._lines.flush()

    def serve(self) -> None:
        """Until the other end is closed, by its owner or by its owner's end; leaves no process and no file."""
        try:
            while line := self._lines.readline():
                request = json.loads(line)
                status = self._run(Trial(**request["trial"]), request["timeout"])
                if status is None:
                    break
                self.answer(status=status)
        finally:
            shutil.rmtree(self._base, ignore_errors=True)

    def _run(self, trial: Trial, timeout: float) -> int | str | None:
        """How the process ended (negative: by a signal), ``late`` if it had to be ended, None if nobody waits."""
        log = os.open(trial.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        child = self._start(trial, log)
        os.close(log)
        end = time.monotonic() + timeout
        gone = late = False
        while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None and not (gone or late):
            gone = bool(select.select([self._channel], [], [], _TICK_SECONDS)[0])
            late = time.monotonic() > end
        # What it has started must not outlive it.
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
            os.killpg(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        orphans.forget(child)
        orphans.kill_strays()
        return None if gone else "late" if late else os.waitstatus_to_exitcode(status)

    def _start(self, trial: Trial, log: int) -> int:
        server = os.getpid()
        if self._fresh:
            # Kept: one that is forgotten would wait for its process by itself.
            self._popen = orphans.spawn(
                [sys.executable, "-P", "-m", _MODULE, "once", json.dumps(trial.__dict__), str(server)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            return self._popen.pid
        child = os.fork()
        if child == 0:
            try:
                shed(server, (os.open(os.devnull, os.O_RDONLY), log, log), ())
                attempt(trial)
            finally:
                os._exit(1)
        return child


def _prepare(task: dict[str, Any], kind: str, estimate: bool) -> dict[str, Any]:
    """Import what trials need, the task first; what to tell the meter."""
    from sweepack.warm import unsafe

    found = try_import(task, Path.cwd())
    if found["error"]:
        return {"failed": found}
    if (kind == "cuda" or "torch" in sys.modules) and not estimate:
        # The latter comes with the first step of an optimiser, and takes more than a second.
        with contextlib.suppress(ImportError):
            import torch
            import torch._dynamo  # noqa: F401
    if estimate:
        try:
            import sweepack.sizing.estimate
        except ImportError as error:
            return {"impossible": f"no estimate: {error}"}
    if "pytorch_lightning" in sys.modules:
        import sweepack.lightning  # noqa: F401
    module, _ = import_task(task, Path.cwd())
    reason = unsafe(module)
    return {"unsafe": reason} if reason else {"ready": True}


def main(request: dict[str, Any]) -> int:
    channel = socket.socket(fileno=request["channel"])
    channel.set_inheritable(False)
    server = Server(channel, Path(request["base"]), request["fresh"])
    run.die_with(request["parent"])
    if request["fresh"]:
        server.answer(ready=True)
    else:
        told = _prepare(request["task"], request["kind"], request["estimate"])
        server.answer(**told)
        if "ready" not in told:
            return 1
    # From here on the end of the parent is seen on the channel, and there is something to clear up.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)
    server.serve()
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "once":
        run.die_with(int(sys.argv[3]))
        attempt(Trial(**json.loads(sys.argv[2])))
    sys.exit(main(json.loads(sys.argv[1])))
