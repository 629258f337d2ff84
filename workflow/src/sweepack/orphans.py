"""What a cell leaves running, also in sessions of its own: adopted when its parent ends, and killed.

Spared is what serves other cells too, whoever started it: the keeper of an MPS daemon.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36
_KEEPER = b"sweepack.mps.keeper"
# Children that were started on purpose. Cells may be started and end in several threads at once.
_known: set[int] = set()
_lock = threading.Lock()


def adopt() -> None:
    """From now on be the parent of every descendant whose own parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def spawn(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a child that ``kill_strays`` spares until it is told to ``forget`` it."""
    with _lock:
        child = subprocess.Popen(command, **options)
        _known.add(child.pid)
    return child


def forget(child: int) -> None:
    """The child has ended."""
    with _lock:
        _known.discard(child)


def kill_strays(spared: Iterable[int] = ()) -> None:
    """Kill the children that are neither known nor ``spared``, then those that their end leaves, until none is left."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    with _lock, contextlib.suppress(FileNotFoundError):  # a kernel without CONFIG_PROC_CHILDREN
        while left := [
            pid
            for pid in map(int, children.read_text().split())
            if pid not in spared and pid not in _known and not _is_keeper(pid)
        ]:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)


def _is_keeper(pid: int) -> bool:
    try:
        return _KEEPER in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
