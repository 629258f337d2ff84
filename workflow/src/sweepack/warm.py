"""The warm host: a process that has imported a task and forks a cell from itself in milliseconds.

It runs no torch operation, holds one thread and never touches CUDA: a child forked from anything else hangs or
computes nonsense, so the host refuses to serve then, and cells start fresh. It ends when it is idle or when the runs
that used it have ended.
"""

from __future__ import annotations

import array
import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from sweepack import run
from sweepack.importing import import_task, imported_files
from sweepack.job import Job
from sweepack.sockets import require_same_user, socket_address

IDLE_SECONDS = 60.0
_TICK_SECONDS = 1.0


def unsafe(module: ModuleType) -> str | None:
    """Why no cell may be forked from this process, in which ``module`` has been imported; None when all is well."""
    if getattr(module, "START", None) == "fresh":
        return "the task's module says START = 'fresh'"
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        return f"importing the task has started {threads - 1} thread(s)"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "importing the task has initialised CUDA"
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(descriptor.readlink()).startswith("/dev/nvidia"):
                return "importing the task has opened a GPU"
    return None


@dataclass
class Request:
    """A cell that a client wants: its job, environment and folder, and the descriptors that came along."""

    job: Job
    environment: dict[str, str]
    folder: str
    umask: int
    driver: int
    descriptors: list[int] = field(default_factory=list)


class Host:
    """Serves the requests that come in on ``listener``."""

    def __init__(self, listener: socket.socket, sources: Mapping[str, tuple[int, int]]) -> None:
        self._listener = listener
        self._sources = sources
        self._cells: dict[int, socket.socket] = {}
        self._drivers: set[int] = set()
        self._served = False
        self._selector = selectors.DefaultSelector()
        self._last = time.monotonic()

    def serve(self) -> None:
        """Fork a cell for every request, report each one's end, and return when nobody needs the host any more."""
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(self._listener, selectors.EVENT_READ, "listener")
        self._selector.register(reader, selectors.EVENT_READ, "signal")
        while self._needed():
            for key, _ in self._selector.select(_TICK_SECONDS):
                self._last = time.monotonic()
                if key.data == "listener":
                    self._accept()
                elif key.data == "signal":
                    with contextlib.suppress(BlockingIOError):
                        os.read(reader, 4096)
                else:
                    self._hear(key.data)
            self._reap()

    def _needed(self) -> bool:
        if self._cells:
            return True
        self._drivers = {driver for driver in self._drivers if Path(f"/proc/{driver}").exists()}
        deserted = self._served and not self._drivers
        return not deserted and not self._stale() and time.monotonic() - self._last < IDLE_SECONDS

    def _stale(self) -> bool:
        """Whether somebody has edited the code since it was imported."""
        return any(_stamp(path) != stamp for path, stamp in self._sources.items())

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        try:
            connection.settimeout(10)
            require_same_user(connection)
            connection.recv(1)
            if self._stale():
                connection.sendall(b"-")
                connection.close()
                return
            connection.sendall(b"!")
            request = _receive(connection)
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(f"request refused: {error}", file=sys.stderr, flush=True)
            connection.close()
            return
        self._served = True
        self._drivers.add(request.driver)
        host = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become(request, connection, host)
        _close(request)
        _send(connection, {"pid": pid})
        self._cells[pid] = connection
        self._selector.register(connection, selectors.EVENT_READ, pid)

    def _become(self, request: Request, connection: socket.socket, host: int) -> NoReturn:
        """In the child: shed all that is the host's, take on what a fresh process would have, run the cell."""
        code = 1
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            run.die_with(host)
            log, terminal, *kept = request.descriptors
            null = os.open(os.devnull, os.O_RDONLY)
            for source, target in ((null, 0), (log, 1), (log, 2)):
                os.dup2(source, target)
            keep = {0, 1, 2, terminal, *kept}
            for descriptor in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
                if descriptor not in keep:
                    with contextlib.suppress(OSError):
                        os.close(descriptor)
            os.environ.clear()
            os.environ.update(request.environment)
            os.chdir(request.folder)
            os.umask(request.umask)
            code = run.main(replace(request.job, terminal=terminal, kept_open=tuple(kept)))
        except BaseException:
            traceback.print_exc()
        finally:
            run.leave(code)

    def _hear(self, pid: int) -> None:
        """A signal for the cell, one byte each; or the end of its client, which is the end of the cell."""
        try:
            signals = self._cells[pid].recv(64)
        except OSError:
            signals = b""
        for signum in signals or [signal.SIGKILL]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)
        if not signals:
            with contextlib.suppress(KeyError):
                self._selector.unregister(self._cells[pid])

    def _reap(self) -> None:
        while self._cells:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            # What the cell has started must not outlive it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            connection = self._cells.pop(pid, None)
            if connection is not None:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(connection)
                with contextlib.suppress(OSError):
                    _send(connection, {"status": os.waitstatus_to_exitcode(status)})
                connection.close()


def _close(request: Request) -> None:
    """Drop this process's copies: a lease is free when the last of them is closed."""
    for descriptor in request.descriptors:
        os.close(descriptor)


def _send(connection: socket.socket, answer: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(answer).encode() + b"\n")


def _receive(connection: socket.socket) -> Request:
    descriptors = array.array("i")
    head, ancillary, *_ = connection.recvmsg(4, socket.CMSG_SPACE(16 * descriptors.itemsize))
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    if len(head) < 4:
        raise ValueError("the client has gone")
    (length,) = struct.unpack("!I", head)
    content = b""
    while len(content) < length:
        part = connection.recv(length - len(content))
        if not part:
            raise ValueError("the request ended early")
        content += part
    data = json.loads(content)
    return Request(**{**data, "job": Job(**data["job"])}, descriptors=list(descriptors))


def _stamp(path: str) -> tuple[int, int]:
    try:
        found = Path(path).stat()
    except OSError:
        return (0, 0)
    return found.st_mtime_ns, found.st_size


def _own_sources(root: Path) -> dict[str, tuple[int, int]]:
    """The project's files that have been imported, as they were."""
    return {file: _stamp(file) for file in imported_files(root)}


def _main(socket_path: str, root: str, task: str, ready: int) -> int:
    def answer(text: str) -> None:
        os.write(ready, text.encode())
        os.close(ready)

    try:
        module, _ = import_task(json.loads(task), Path(root))
        if "pytorch_lightning" in sys.modules:
            import sweepack.lightning  # noqa: F401
    except BaseException as error:
        answer(f"refused the import of the task raised {type(error).__name__}")
        return 1
    reason = unsafe(module)
    if reason is not None:
        answer(f"unsafe {reason}")
        return 1
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    path = Path(socket_path)
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    with socket_address(fresh) as address:
        listener.bind(address)
    fresh.chmod(0o600)
    listener.listen(512)
    # The socket has its name only once somebody listens.
    fresh.replace(path)
    identity = path.stat().st_ino
    answer("ready")
    Host(listener, _own_sources(Path(root))).serve()
    with contextlib.suppress(OSError):
        if path.stat().st_ino == identity:
            path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
