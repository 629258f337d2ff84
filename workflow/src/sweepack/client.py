"""Ask the warm host for a cell, starting the host if there is none. Standard library only: this runs for every cell."""

from __future__ import annotations

import array
import contextlib
import hashlib
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sweepack.files import try_lock
from sweepack.job import Job
from sweepack.leases import lease_directory
from sweepack.sockets import require_same_user, socket_address

START_SECONDS = 180.0
# What a process reads only when it starts, or when it loads its libraries.
_AT_START = (
    *("OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "BLIS_", "VECLIB_", "NUMEXPR_", "MALLOC_", "PYTHON", "LD_", "PATH"),
    *("PYTORCH_", "TORCH_", "CUBLAS_", "CUDA_", "NCCL_", "HOME", "LANG", "LC_", "VIRTUAL_ENV"),
)


class NoHost(Exception):
    """No warm host can run this cell; the message says why, and the cell starts fresh."""


def run_warm(
    job: Job,
    environment: Mapping[str, str],
    log: int,
    task: dict[str, Any],
    relay: Callable[[Callable[[int], None]], None],
) -> int:
    """Run ``job`` in a child of the warm host; how it ended, a signal being negative.

    ``relay`` is told where to send the signals that come in for the cell. Raises NoHost when the cell was not started.
    """
    connection = _connect(environment, task)
    with connection:
        answer = _ask(connection, job, environment, log)
        if "pid" not in answer:
            raise NoHost("the warm host ended just then")

        def send(signum: int) -> None:
            with contextlib.suppress(OSError):
                connection.sendall(bytes([signum]))

        relay(send)
        # A host that vanishes takes its cells with it.
        return int(_read_answer(connection).get("status", -signal.SIGKILL))


def _connect(environment: Mapping[str, str], task: dict[str, Any]) -> socket.socket:
    """A connection to a host for ``task``, which has agreed to start a cell's process."""
    folder = lease_directory() / "warm"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{_key(environment, task)}.sock"
    refusal = path.with_suffix(".refused")
    if (connection := _try(path)) is not None:
        return connection
    with _starting(path.with_suffix(".lock")):
        if (connection := _try(path)) is not None:
            return connection
        if refusal.exists():
            raise NoHost(refusal.read_text())
        _start(path, environment, task, refusal)
        if (connection := _try(path)) is not None:
            return connection
    raise NoHost(f"the warm host could not be started; see {path.with_suffix('.log')}")


def _try(path: Path) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX)
    try:
        with socket_address(path) as address:
            connection.connect(address)
        require_same_user(connection)
        connection.sendall(b"?")
        connection.settimeout(30)
        if connection.recv(1) == b"!":
            connection.settimeout(None)
            return connection
    except OSError:
        pass
    connection.close()
    return None


@contextlib.contextmanager
def _starting(path: Path) -> Iterator[None]:
    """Be the one client that starts the host, while the others wait for it; their wait ends with the start."""
    end = time.monotonic() + START_SECONDS
    while (lock := try_lock(path)) is None:
        if time.monotonic() > end:
            raise NoHost(f"another cell is starting the warm host for over {START_SECONDS:.0f} s")
        time.sleep(0.02)
    try:
        yield
    finally:
        os.close(lock)


def _start(path: Path, environment: Mapping[str, str], task: dict[str, Any], refusal: Path) -> None:
    """Start the host and wait until it listens; raises NoHost when it says why it cannot, or says nothing in time."""
    command = [sys.executable, "-P", "-m", "sweepack.warm"]
    reader, writer = os.pipe()
    try:
        with path.with_suffix(".log").open("ab") as log:
            subprocess.Popen(
                [*command, str(path), str(Path.cwd()), json.dumps(task), str(writer)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(writer,),
                start_new_session=True,
            )
    finally:
        os.close(writer)
    with selectors.DefaultSelector() as selector, os.fdopen(reader) as stream:
        selector.register(reader, selectors.EVENT_READ)
        answer = stream.read() if selector.select(START_SECONDS) else "late"
    word, _, reason = answer.partition(" ")
    if word == "unsafe":
        refusal.write_text(reason)
    if word != "ready":
        raise NoHost(reason or f"the warm host did not come up; see {path.with_suffix('.log')}")


def _key(environment: Mapping[str, str], task: dict[str, Any]) -> str:
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
            for name, value in environment.items()
            if name.startswith(_AT_START) and name != "CUDA_VISIBLE_DEVICES"
        ),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _ask(connection: socket.socket, job: Job, environment: Mapping[str, str], log: int) -> dict[str, Any]:
    umask = os.umask(0o022)
    os.umask(umask)
    request = {
        "job": job.__dict__,
        "environment": dict(environment),
        "folder": str(Path.cwd()),
        "umask": umask,
        "driver": os.getppid(),
    }
    content = json.dumps(request).encode()
    descriptors = array.array("i", [log, job.terminal, *job.kept_open])
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors.tobytes())]
    try:
        connection.sendmsg([struct.pack("!I", len(content))], rights)
        connection.sendall(content)
        return _read_answer(connection)
    except OSError:
        return {}


def _read_answer(connection: socket.socket) -> dict[str, Any]:
    """One line of JSON, read byte by byte: what follows belongs to the next answer."""
    line = b""
    while not line.endswith(b"\n"):
        try:
            part = connection.recv(1)
        except OSError:
            part = b""
        if not part:
            return {}
        line += part
    answer: dict[str, Any] = json.loads(line)
    return answer
