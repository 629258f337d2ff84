"""The warm hosts of this node, as seen from outside: which one would serve a cell, reaching it, starting it.

Standard library only: this runs for every cell.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sweepack import allocator, orphans
from sweepack.files import try_lock
from sweepack.leases import lease_directory
from sweepack.sockets import SocketAddress, require_same_user

# What a client says first: that it has a cell, or that it only wants to know whether it would be served.
CELL, PING = b"?", b"."
# What a process reads only when it starts, or when it loads its libraries.
_AT_START = (
    *("OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "BLIS_", "VECLIB_", "NUMEXPR_", "MALLOC_", "PYTHON", "LD_", "PATH"),
    *("PYTORCH_", "TORCH_", "CUBLAS_", "CUDA_", "NCCL_", "HOME", "LANG", "LC_", "VIRTUAL_ENV"),
)
# Of these, what is read only when the GPU is first used, which a host never does.
_FOR_THE_GPU = ("CUDA_VISIBLE_DEVICES", "CUDA_MPS_")


def host_socket(environment: Mapping[str, str], task: Mapping[str, Any]) -> Path:
    """Where the host listens that serves cells of ``task`` with this ``environment``, started from this folder."""
    folder = lease_directory() / "warm"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder / f"{_key(environment, task)}.sock"


def refusal_file(path: Path) -> Path:
    """Where a host leaves word why none can be had for the socket at ``path``."""
    return path.with_suffix(".refused")


def log_file(path: Path) -> Path:
    """What the host of the socket at ``path``, and the import of its task, have printed."""
    return path.with_suffix(".log")


def reach(path: Path, purpose: bytes) -> socket.socket | None:
    """A connection to the host at ``path``, which has agreed to serve ``purpose``; None if there is none that does."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        with SocketAddress(path) as address:
            connection.connect(address)
        require_same_user(connection)
        connection.sendall(purpose)
        connection.settimeout(30)
        if connection.recv(1) == b"!":
            connection.settimeout(None)
            return connection
    except OSError:
        pass
    connection.close()
    return None


def answers(path: Path) -> bool:
    """Whether a host at ``path`` would serve a cell now."""
    connection = reach(path, PING)
    if connection is not None:
        connection.close()
    return connection is not None


class Starting:
    """A host that is importing its task."""

    def __init__(self, process: int, reader: int) -> None:
        self._process = process
        self._reader = reader

    def wait(self, limit: float) -> tuple[str, str]:
        """Its answer within ``limit`` seconds, a word and an explanation.

        ``ready``; ``unsafe`` and why; ``failed`` and the outcome of the import; nothing if it died; ``late``, and it
        is ended.
        """
        with selectors.DefaultSelector() as selector, os.fdopen(self._reader) as stream:
            selector.register(stream, selectors.EVENT_READ)
            answer = stream.read() if selector.select(limit) else "late"
        if answer == "late":
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process, signal.SIGKILL)
        word, _, words = answer.partition(" ")
        return word, words

    def leave(self) -> None:
        """Do not wait for it."""
        os.close(self._reader)


def start_host(
    path: Path, environment: Mapping[str, str], task: Mapping[str, Any], driver: int, stamp: Path | None = None
) -> Starting | None:
    """Start a host for the socket at ``path``; None when there is one, or another process is starting it.

    It serves until process ``driver`` and those of later clients have ended. ``stamp``: where it notes a good import.
    """
    lock = try_lock(path.with_suffix(".lock"))
    if lock is None:
        return None
    reader, writer = os.pipe()
    try:
        if answers(path):
            os.close(reader)
            return None
        request = {
            "socket": str(path),
            "root": str(Path.cwd()),
            "task": dict(task),
            "driver": driver,
            "stamp": str(stamp) if stamp else None,
            "answer": writer,
            "lock": lock,
        }
        with log_file(path).open("ab") as log:
            host = orphans.spawn(
                [sys.executable, "-P", "-m", "sweepack.warm", json.dumps(request)],
                # The first cell's cap is not that of the others.
                env=dict(allocator.without_cap(environment)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(writer, lock),
                start_new_session=True,
            )
        return Starting(host.pid, reader)
    finally:
        # The host keeps its own copies until it serves: so long nobody else starts one.
        os.close(writer)
        os.close(lock)


def _key(environment: Mapping[str, str], task: Mapping[str, Any]) -> str:
    """What cells must have in common to be forked from one process."""
    try:
        source = Path(task["file"]).read_bytes()
    except OSError:
        source = b""
    parts = [
        os.environ.get("SLURM_JOB_ID", ""),
        Path("/proc/self/cgroup").read_text(),
        sys.executable,
        str(Path.cwd()),
        json.dumps(task, sort_keys=True),
        hashlib.sha256(source).hexdigest(),
        *sorted(
            f"{name}={value}"
            for name, value in allocator.without_cap(environment).items()
            if name.startswith(_AT_START) and not name.startswith(_FOR_THE_GPU)
        ),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
