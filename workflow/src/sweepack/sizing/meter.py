"""The peak memory of one cell at one batch size: estimated without a GPU, or measured on a device under the cell's cap.

Standard library only: the task runs in other processes (``trial``), which end with this one.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, Popen
from types import TracebackType
from typing import Any, Literal

from sweepack import orphans
from sweepack.devices import Device
from sweepack.environment import cell_environment
from sweepack.errors import UserError, Verbatim
from sweepack.importing import require_imported
from sweepack.job import Job
from sweepack.leases import WHOLE
from sweepack.memory import fraction
from sweepack.sizing.trial import Trial, is_out_of_memory

# What a process has beyond the time of a trial, to end what runs and to answer.
_GRACE_SECONDS = 30.0
_TAIL_BYTES = 8192
_TAIL_LINES = 3


@dataclass(frozen=True)
class Measurement:
    """What is known of ``batch`` (None: the task's own).

    ``peak`` is in bytes, by ``source``, and so is ``allocated`` (what tensors took of it, where that is known).
    ``rows`` is the number of samples in the largest batch that a step really saw: fewer than ``batch`` where the data
    set is smaller or the task does not use ``cell.batch``, None where it is not known. ``error`` says why it
    failed, or what memory ran out for.
    """

    batch: int | None
    outcome: Literal["measured", "oom", "failed"]
    peak: int | None
    source: str
    allocated: int | None
    rows: int | None
    error: str | None
    seconds: float


class Meter:
    """Runs the ``task`` (``Task.to_json()``) with ``params``, a batch at a time; to be used in a ``with`` block.

    ``device``: where (None: nowhere, it is estimated). ``share`` is in thousandths of it and gives the cap (None: no
    cap), ``memory`` has the settings of the cap, ``mem_mb`` limits main memory as a cell's. ``root`` is the project's
    folder, ``timeout`` the seconds that the import and each batch may take. ``scratch`` is a folder where files may be
    kept in the meantime. Raises UserError for a task that cannot be imported, and for a program.
    """

    def __init__(
        self,
        task: Mapping[str, Any],
        params: Mapping[str, Any],
        seed: int,
        *,
        device: Device | None,
        share: int | None,
        threads: int,
        mem_mb: int,
        memory: Mapping[str, Any],
        root: Path,
        timeout: float,
        scratch: Path,
    ) -> None:
        if task["argv"]:
            raise UserError(
                "sweep.task",
                task["reference"],
                "a Python function, since memory is measured inside of the process that trains",
                "give `gpu` and `batch` as numbers",
            )
        self._task = dict(task)
        self._meaning = {"id": "trial", "slug": "trial", "params": dict(params), "seed": seed, "task": self._task}
        self._device = device
        self._share = share
        self._threads = threads
        self._mem_mb = mem_mb
        self._memory = dict(memory)
        self._root = root
        self._timeout = timeout
        self._scratch = scratch
        self._base: Path | None = None
        self._process: Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._serving = False
        self._fresh = False
        self._impossible: str | None = None
        self._count = 0

    def __enter__(self) -> Meter:
        self._base = Path(tempfile.mkdtemp(prefix="meter-", dir=self._scratch)).absolute()
        try:
            self._begin()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def aim(self, params: Mapping[str, Any], seed: int) -> None:
        """Measure another cell from now on, whose device, share and limits are the same; the import is kept."""
        self._meaning |= {"params": dict(params), "seed": seed}

    def measure(self, batch: int | None) -> Measurement:
        """Run the task up to the end of its second optimiser step. What it does wrong is told, not raised."""
        begun = time.monotonic()
        found: dict[str, Any] = {}
        folder = self._folder()
        try:
            if self._impossible is None:
                if self._process is None:
                    self._begin()
                trial = Trial(self._job(folder, batch).__dict__, self._meaning, self._estimate)
                found = self._found(trial, self._ask(trial))
            else:
                found = {"error": self._impossible}
        except UserError as error:
            # The task could be imported before.
            found = {"error": str(error)}
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return Measurement(
            batch,
            found.get("outcome", "failed"),
            found.get("peak"),
            found.get("source") or "",
            found.get("allocated"),
            found.get("rows"),
            found.get("error"),
            time.monotonic() - begun,
        )

    @property
    def _estimate(self) -> bool:
        return self._device is None

    def _folder(self) -> Path:
        assert self._base is not None, "to be used in a `with` block"
        self._count += 1
        folder = self._base / str(self._count)
        (folder / "cell").mkdir(parents=True)
        return folder

    def _job(self, folder: Path, batch: int | None) -> Job:
        device = self._device
        return Job(
            directory=str(folder / "cell"),
            device=device.label if device else "cpu",
            kind=device.kind if device else "cpu",
            checked=bool(device and device.model is not None),
            share=self._share or WHOLE,
            threads=self._threads,
            rejected=0,
            accept=False,
            kept_open=(),
            terminal=2,
            batch=batch,
            memory=self._memory,
            mem_mb=0 if self._estimate else self._mem_mb,
            device_memory=device.memory if device else None,
        )

    def _begin(self) -> None:
        """Start the process that imports the task; raises UserError when it cannot be imported."""
        for fresh in (self._fresh, True):
            self._fresh = fresh
            told = self._start()
            if "unsafe" not in told:
                break
            self._end_process()  # it may hold a GPU
        self._serving = "ready" in told
        if self._serving:
            return
        if "impossible" in told:
            self._impossible = told["impossible"]
            return
        require_imported(self._task["reference"], told.get("failed", {"error": None}))
        assert self._base is not None
        self._end_process()
        how = "the import did not end" if "late" in told else "the import ended the process"
        raise UserError(
            "sweep.task",
            self._task["reference"],
            f"a module that can be imported within {self._timeout:g} s",
            f"{how}\n{_last_words(self._base / 'import.txt')}",
        )

    def _start(self) -> dict[str, Any]:
        """Start a process; its first answer."""
        assert self._base is not None
        ours, theirs = socket.socketpair()
        request = {
            "task": self._task,
            "kind": self._device.kind if self._device else "cpu",
            "estimate": self._estimate,
            "fresh": self._fresh,
            "base": str(self._base),
            "parent": os.getpid(),
            "channel": theirs.fileno(),
        }
        with (self._base / "import.txt").open("wb") as log, theirs:
            self._process = orphans.spawn(
                [sys.executable, "-P", "-m", "sweepack.sizing.trial", json.dumps(request)],
                cwd=self._root,
                env=self._environment(),
                stdin=DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._channel = ours
        return self._hear(self._timeout)

    def _environment(self) -> dict[str, str]:
        device = self._device
        environment = cell_environment(
            os.environ,
            visible=device.entry if device else "",
            threads=self._threads,
            memory=self._memory,
            fraction=self._fraction(device) if device and device.kind == "cuda" else None,
        )
        # What a compiler makes of a model cannot be known without running it.
        return environment | ({"TORCHDYNAMO_DISABLE": "1"} if self._estimate else {})

    def _fraction(self, device: Device) -> float | None:
        try:
            return fraction(self._share or WHOLE, device.memory, self._memory)
        except ValueError as error:
            raise UserError(
                "resources.gpu", Verbatim(error), "a share that holds a cell", "give it more under `resources`"
            ) from None

    def _ask(self, trial: Trial) -> int | str | None:
        """How the process of the trial ended; None if it is not known."""
        assert self._channel is not None
        with contextlib.suppress(OSError):
            self._channel.sendall(json.dumps({"trial": trial.__dict__, "timeout": self._timeout}).encode() + b"\n")
        answer = self._hear(self._timeout + _GRACE_SECONDS)
        if "status" not in answer:
            self._end_process()
        return answer.get("status")

    def _hear(self, limit: float) -> dict[str, Any]:
        """The next answer of the process: nothing if it has ended, ``late`` if it took longer than ``limit``."""
        assert self._channel is not None
        end = time.monotonic() + limit
        content = b""
        try:
            while not content.endswith(b"\n"):
                self._channel.settimeout(max(end - time.monotonic(), 0.001))
                part = self._channel.recv(65536)
                if not part:
                    return {}
                content += part
        except TimeoutError:
            return {"late": True}
        except OSError:
            return {}
        return dict(json.loads(content))

    def _found(self, trial: Trial, status: int | str | None) -> dict[str, Any]:
        """The outcome of a trial, by what its process has written and how it ended."""
        if status == "late":
            return {"error": self._told(f"took longer than {self._timeout:g} s")}
        with contextlib.suppress(OSError, ValueError):
            return dict(json.loads(trial.report.read_bytes()))
        words = _last_words(trial.log)
        if status is None:
            return {"error": self._told("the process that ran the task has ended")}
        assert isinstance(status, int)
        if status == -signal.SIGKILL or is_out_of_memory(words):
            what = "was killed, as the system does when memory runs out" if status < 0 else "ran out of memory"
            return {"outcome": "failed" if self._estimate else "oom", "error": self._told(what, words)}
        how = f"crashed: {signal.Signals(-status).name}" if status < 0 else f"ended itself with exit status {status}"
        return {"error": self._told(f"the process {how}", words)}

    def _told(self, what: str, words: str = "") -> str:
        return ("no estimate: " if self._estimate else "") + what + (f"\n{words}" if words else "")

    def _end_process(self) -> None:
        """End it, and with it what it runs: it sees that nobody is there any more."""
        process, self._process = self._process, None
        serving, self._serving = self._serving, False
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if process is None:
            return
        try:
            process.wait(_GRACE_SECONDS if serving else 0)
        except Exception:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        orphans.forget(process.pid)

    def _close(self) -> None:
        self._end_process()
        if self._base is not None:
            shutil.rmtree(self._base, ignore_errors=True)
            self._base = None


def _last_words(log: Path) -> str:
    """The last lines that were printed."""
    with contextlib.suppress(OSError), log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        lines = [line for line in stream.read().decode(errors="replace").splitlines() if line.strip()]
        return "\n".join(lines[-_TAIL_LINES:])
    return ""
