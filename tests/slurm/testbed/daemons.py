"""Programs in the background, known again by pid files that can't be mistaken."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .state import ClusterError


def wait_until(condition: Callable[[], object], what: str, seconds: float) -> None:
    """Raises ClusterError, saying for what it waited, when `condition` does not come true within `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise ClusterError(f"waited {seconds:g} s in vain for {what}")
        time.sleep(0.05)


@dataclass(frozen=True)
class Daemon:
    """A program that runs in the foreground of a session of its own; what it prints goes to `output`."""

    name: str
    command: tuple[str | Path, ...]
    pid_file: Path
    output: Path

    def pid(self) -> int | None:
        """The process if it runs. A pid file from before a crash or a boot counts for nothing, whoever has the pid."""
        try:
            number, birth = self.pid_file.read_text().split(maxsplit=1)
        except (FileNotFoundError, ValueError):
            return None
        return int(number) if _birth(int(number)) == birth else None

    def start(self, environment: Mapping[str, str]) -> None:
        with open(self.output, "ab") as output:
            process = subprocess.Popen(
                self.command,
                env=environment,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        temporary = self.pid_file.with_suffix(".tmp")
        temporary.write_text(f"{process.pid} {_birth(process.pid)}")
        temporary.replace(self.pid_file)

    def wait_until(self, ready: Callable[[], object], what: str, seconds: float) -> None:
        """Wait for what this program does. Raises ClusterError with its last lines if it ended or is late."""

        def ready_or_ended() -> bool:
            return bool(ready()) or self.pid() is None

        try:
            wait_until(ready_or_ended, what, seconds)
        except ClusterError as late:
            raise ClusterError(f"{late}\n{self._last_lines()}") from None
        if self.pid() is None:
            raise ClusterError(f"{self.name} ended instead of starting\n{self._last_lines()}")

    def stop(self, seconds: float) -> None:
        """End it: asked first, killed after `seconds`. Raises ClusterError if it outlives that too."""
        pid = self.pid()
        if pid is not None:
            os.kill(pid, signal.SIGTERM)
            with contextlib.suppress(ClusterError):
                wait_until(lambda: self.pid() is None, self.name, seconds)
            self.kill()
        self.pid_file.unlink(missing_ok=True)

    def kill(self) -> None:
        """SIGKILL it and its process group. Raises ClusterError if it outlives that."""
        pid = self.pid()
        if pid is not None:
            os.killpg(pid, signal.SIGKILL)
            wait_until(lambda: self.pid() is None, f"{self.name} (process {pid}) to end after SIGKILL", 20)
        self.pid_file.unlink(missing_ok=True)

    def _last_lines(self) -> str:
        lines = self.output.read_text(errors="replace").splitlines() if self.output.exists() else []
        return "\n".join([f"the end of {self.output}:", *("  " + line for line in lines[-12:])])


def _birth(pid: int) -> str | None:
    """When the process began: no two have the same pid and birth. None when it has ended, reaped or not."""
    try:
        # The second field is the name, in parentheses, and may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    if fields[0] in "ZX":
        return None
    return f"{fields[19]} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
