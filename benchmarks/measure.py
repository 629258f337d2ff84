"""What a command costs: wall and CPU seconds of it and of all that it starts, daemons included."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_REAP_SECONDS = 30.0
_SAMPLE_SECONDS = 0.1


@dataclass(frozen=True)
class Cost:
    """``wall`` is in seconds from the start of the command to its end, ``cpu`` in seconds of all processes, ``rss`` in
    megabytes at the peak of the command's own process. ``counted`` says what has counted the CPU time. ``status`` is
    the exit status, None after a timeout.
    """

    wall: float
    cpu: float
    rss: float
    counted: str
    status: int | None


def measure(command: Sequence[str], folder: Path, environment: Mapping[str, str], log: Path, limit: float) -> Cost:
    """Run ``command`` in ``folder`` for ``limit`` seconds at most, what it prints going to ``log``.

    The clock stops when the command ends, and whatever it has left running is killed then. The CPU time of that counts
    too: by a control group where one can be made, else by the accounts that processes leave to those who wait for them,
    which misses children whose parents never do.
    """
    # Daemons that detach become our children instead of init's.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with log.open("ab") as sink, _control_group() as group:
        before = _reaped()

        def enter() -> None:
            if group is not None:
                (group / "cgroup.procs").write_text("0")

        start = time.perf_counter()
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
            preexec_fn=enter,
        )
        try:
            ended, peak = _watch(process.pid, limit)
            wall = time.perf_counter() - start
            if not ended:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        finally:
            _end_everything()
        cpu = _reaped() - before if group is None else _charged(group)
    counted = "wait" if group is None else "cgroup"
    return Cost(wall, cpu, peak, counted, process.returncode if ended else None)


def end_on_sigterm() -> None:
    """Let SIGTERM end this process as an error does, so that what it measures is killed and not left running."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def _watch(pid: int, limit: float) -> tuple[bool, float]:
    """Whether the process ends within ``limit`` seconds, and its peak memory so far in megabytes.

    The kernel's own account, ru_maxrss, starts from the memory of the process that called fork: ours.
    """
    descriptor = os.pidfd_open(pid)
    end, peak = time.monotonic() + limit, 0.0
    try:
        while (left := end - time.monotonic()) > 0:
            if select.select([descriptor], [], [], min(left, _SAMPLE_SECONDS))[0]:
                return True, peak
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    peak = int(line.split()[1]) / 1024
        return False, peak
    finally:
        os.close(descriptor)


def _end_everything() -> None:
    """Kill and reap all descendants of this process; raises TimeoutError when some cannot be killed."""
    limit = time.monotonic() + _REAP_SECONDS
    while left := psutil.Process().children(recursive=True):
        if time.monotonic() > limit:
            raise TimeoutError(f"{left} cannot be killed")
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def _reaped() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _charged(group: Path) -> float:
    line = next(line for line in (group / "cpu.stat").read_text().splitlines() if line.startswith("usage_usec"))
    return int(line.split()[1]) / 1e6


@contextlib.contextmanager
def _control_group() -> Iterator[Path | None]:
    """A new control group (version 2) below the one that this process is in, None where none can be made."""
    try:
        mount = next(
            Path(line.split()[4])
            for line in Path("/proc/self/mountinfo").read_text().splitlines()
            if line.partition(" - ")[2].startswith("cgroup2 ")
        )
        own = next(
            line.removeprefix("0::/")
            for line in Path("/proc/self/cgroup").read_text().splitlines()
            if line.startswith("0::/")
        )
        group = mount / own / f"sweepack-bench-{os.getpid()}"
        group.mkdir()
    except (OSError, StopIteration):
        yield None
        return
    try:
        if not os.access(group / "cgroup.procs", os.W_OK) or not (group / "cpu.stat").exists():
            yield None
        else:
            yield group
    finally:
        with contextlib.suppress(OSError):
            group.rmdir()
