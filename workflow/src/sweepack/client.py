"""Ask the warm host for a cell, starting the host if there is none. Standard library only: this runs for every cell."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from sweepack import usage
from sweepack.ask import read_line, send_request
from sweepack.hosts import CELL, host_socket, log_file, reach, refusal_file, start_host
from sweepack.job import Job

START_SECONDS = 180.0


class NoHost(Exception):
    """No warm host can run this cell; the message says why, and the cell starts fresh."""


def run_warm(
    job: Job,
    environment: Mapping[str, str],
    log: int,
    task: dict[str, Any],
    relay: Callable[[Callable[[int], None]], AbstractContextManager[None]],
) -> int:
    """Run ``job`` in a child of the warm host; how it ended, a signal being negative.

    ``relay`` is told where to send the signals that come in for the cell while it runs. Raises NoHost when the cell was
    not started.
    """
    connection = _connect(environment, task)
    with connection:
        answer = _ask(connection, job, environment, log)
        if "pid" not in answer:
            raise NoHost("the warm host ended just then")

        def send(signum: int) -> None:
            with contextlib.suppress(OSError):
                connection.sendall(bytes([signum]))

        with relay(send), usage.sampled(job, environment, answer["pid"]):
            end = _read_answer(connection)
        if "status" not in end:
            # A host that vanishes takes its cells with it, but not what they have started.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(answer["pid"], signal.SIGKILL)
        return int(end.get("status", -signal.SIGKILL))


def _connect(environment: Mapping[str, str], task: dict[str, Any]) -> socket.socket:
    """A connection to a host for ``task``, which has agreed to start a cell's process."""
    path = host_socket(environment, task)
    end = time.monotonic() + START_SECONDS
    while (connection := reach(path, CELL)) is None:
        with contextlib.suppress(FileNotFoundError):
            raise NoHost(refusal_file(path).read_text())
        left = end - time.monotonic()
        starting = start_host(path, environment, task, driver=os.getppid())
        if starting is None:
            if left < 0:
                raise NoHost(f"another process is starting the warm host for over {START_SECONDS:.0f} s")
            time.sleep(0.02)
            continue
        word, _ = starting.wait(max(left, 0.0))
        if word == "failed":
            raise NoHost("the import of the task failed in the warm host")
        if word not in ("ready", "unsafe"):
            raise NoHost(f"the warm host did not come up; see {log_file(path)}")
    return connection


def _ask(connection: socket.socket, job: Job, environment: Mapping[str, str], log: int) -> dict[str, Any]:
    umask = os.umask(0o022)
    os.umask(umask)
    surroundings = {"environment": dict(environment), "folder": str(Path.cwd()), "umask": umask}
    request = json.dumps({"job": job.__dict__, "surroundings": surroundings})
    content = f"{os.getppid()}\0{request}".encode()
    try:
        send_request(connection, content, (log, job.terminal, *job.kept_open))
        return _read_answer(connection)
    except OSError:
        return {}


def _read_answer(connection: socket.socket) -> dict[str, Any]:
    line = read_line(connection)
    return json.loads(line) if line else {}
