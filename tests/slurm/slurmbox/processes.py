"""Commands with an end, and daemons by pid files: started when missing, never mistaken, stopped for certain."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# In the environment of every daemon: whose it is.
STATE_VARIABLE = "SWEEPACK_SLURM_STATE"
COMMAND_SECONDS = 20.0
LOG_LINES = 12


class ClusterError(Exception):
    """Something to tell the person at the terminal, in whole: the command ends with it."""


def run(command: Sequence[str], environment: dict[str, str], seconds: float = COMMAND_SECONDS) -> str:
    """What the command printed; ClusterError if it fails or takes longer than ``seconds``."""
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        raise ClusterError(f"`{' '.join(command)}` did not end within {seconds:g} s") from None
    if done.returncode:
        raise ClusterError(f"`{' '.join(command)}` failed ({done.returncode}): {done.stdout.strip()}")
    return done.stdout


def succeeds(command: Sequence[str], environment: dict[str, str]) -> bool:
    """Whether the command ends well; it has ten seconds."""
    try:
        run(command, environment, seconds=10)
    except ClusterError:
        return False
    return True


def wait_until(holds: Callable[[], object], what: str, seconds: float, logs: Sequence[Path] = ()) -> None:
    """Wait until ``holds()``; ClusterError with the ends of ``logs`` if it does not within ``seconds``."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            raise ClusterError(f"waited {seconds:g} s in vain for {what}{ends_of(logs)}")
        time.sleep(0.05)


def ends_of(logs: Sequence[Path]) -> str:
    """The last lines of each log that has any."""
    text = ""
    for log in logs:
        lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:] if log.exists() else []
        if lines:
            text += "".join(f"\n  {line}" for line in [f"the end of {log}:", *lines])
    return text


@contextlib.contextmanager
def locked(path: Path, seconds: float) -> Iterator[None]:
    """Hold the kernel lock on ``path``: one command changes the cluster at a time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as stream:
        wait_until(lambda: _try_lock(stream.fileno()), f"another `cluster` command, which holds {path}", seconds)
        yield


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@dataclass(frozen=True)
class Daemon:
    """One daemon of the cluster: what starts it, and how to tell that it works."""

    name: str
    program: str  # as the kernel names its process
    command: tuple[str, ...]
    environment: dict[str, str]
    folder: Path  # of the state
    answers: Callable[[], bool]
    stays: bool = False  # it does not detach itself

    @property
    def pid_file(self) -> Path:
        return self.folder / "run" / f"{self.name}.pid"

    @property
    def logs(self) -> list[Path]:
        return [self.folder / "log" / f"{self.name}.{ending}" for ending in ("out", "log")]

    def pid(self) -> int | None:
        """Its process, or None. The pid in its file may be another process's by now, after a reboot say."""
        try:
            pid = int(self.pid_file.read_text())
            program = Path(f"/proc/{pid}/comm").read_text().strip()
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except (OSError, ValueError):
            return None
        is_ours = program == self.program and f"{STATE_VARIABLE}={self.folder}".encode() in environment
        return pid if is_ours else None

    def ensure(self, seconds: float = 30) -> bool:
        """Start it unless it runs, and wait until it answers; whether it was started."""
        start = self.pid() is None
        if start:
            self.pid_file.unlink(missing_ok=True)
            self._launch()
        wait_until(self.answers, f"{self.name} to answer", seconds, self.logs)
        return start

    def _launch(self) -> None:
        with self.logs[0].open("wb") as output:
            process = subprocess.Popen(
                self.command,
                env=self.environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        if self.stays:
            return
        try:
            status = process.wait(timeout=COMMAND_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            raise ClusterError(f"{self.name} did not go to the background{ends_of(self.logs)}") from None
        if status:
            raise ClusterError(f"{self.name} does not start ({status}){ends_of(self.logs)}")

    def stop(self, seconds: float = 15) -> None:
        """SIGTERM, and SIGKILL for a daemon that is still there after ``seconds``."""
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            pid = self.pid()
            if pid is None:
                break
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal_number)
            with contextlib.suppress(ClusterError):
                wait_until(lambda pid=pid: not is_alive(pid), f"the end of {self.name}", seconds)
        self.pid_file.unlink(missing_ok=True)


def is_alive(pid: int) -> bool:
    """Whether the process is there and not a zombie, which only waits for its parent to look."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"
