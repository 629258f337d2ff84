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
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NoReturn

from sweepack import orphans, provenance, run, supervise, usage
from sweepack.ask import LAUNCH
from sweepack.devices import close_nvml
from sweepack.files import write_atomic
from sweepack.forked import Surroundings, run_command, shed, take_on
from sweepack.hosts import CELL, host_socket, refusal_file
from sweepack.hugepages import collapse
from sweepack.importing import import_task, imported_files, remember_import, try_import
from sweepack.job import STOP_SIGNALS, Job
from sweepack.sockets import SocketAddress, require_same_user
from sweepack.start import write_holder

IDLE_SECONDS = 60.0
# An import that hangs must not stay for ever; those who wait for the host give up earlier.
IMPORT_SECONDS = 600
_TICK_SECONDS = 1.0
# After so many cells more will come, and it pays to make forking cheaper.
BUSY = 16
# Tells a launching child that its client is gone: it ends its cell, and then itself.
ABANDON = signal.SIGUSR1


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


@dataclass(frozen=True)
class Child:
    """A process forked for ``client``, which gets the signal ``abandon`` when its client is gone."""

    client: socket.socket
    abandon: int


class Host:
    """Serves the requests that come in on ``listener``, as long as ``driver`` or the driver of a cell lives."""

    def __init__(
        self,
        listener: socket.socket,
        path: Path,
        sources: Mapping[str, tuple[int, int]],
        changes: Mapping[str, str | None],
        driver: int,
    ) -> None:
        self._listener = listener
        self._path = path
        self._changes = changes
        self._sources = sources
        self._children: dict[int, Child] = {}
        self._drivers = {driver}
        self._selector = selectors.DefaultSelector()
        self._forks = 0
        self._last = time.monotonic()

    def serve(self) -> None:
        """Fork a cell for every request, report each one's end, and return when nobody needs the host any more."""
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # Slurm signals every process of a job: the host must outlive its cells, and these hear it themselves.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        orphans.adopt()
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
        if self._children:
            return True
        self._drivers = {driver for driver in self._drivers if Path(f"/proc/{driver}").exists()}
        return bool(self._drivers) and not self._stale() and time.monotonic() - self._last < IDLE_SECONDS

    def _stale(self) -> bool:
        """Whether somebody has edited the code since it was imported."""
        return any(_stamp(path) != stamp for path, stamp in self._sources.items())

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        try:
            connection.settimeout(10)
            require_same_user(connection)
            purpose = connection.recv(1)
            stale = self._stale()
            connection.sendall(b"-" if stale else b"!")
            if stale or purpose not in (CELL, LAUNCH):
                connection.close()
                return
            content, descriptors = _receive(connection)
        except (OSError, ValueError) as error:
            print(f"request refused: {error}", file=sys.stderr, flush=True)
            connection.close()
            return
        host = os.getpid()
        pid = os.fork()
        if pid == 0:
            (self._run_cell if purpose == CELL else self._launch)(content, descriptors, host)
        for descriptor in descriptors:
            os.close(descriptor)  # a lease is free when the last copy is closed
        _send(connection, {"pid": pid})
        # The first field in either kind of request.
        self._drivers.add(int(content[: content.index(b"\0")]))
        self._forks += 1
        if self._forks == BUSY:
            collapse()
        self._children[pid] = Child(connection, signal.SIGKILL if purpose == CELL else ABANDON)
        self._selector.register(connection, selectors.EVENT_READ, pid)

    def _run_cell(self, content: bytes, descriptors: list[int], host: int) -> NoReturn:
        """In the child: be the process of a cell that another process has launched and watches."""
        request = json.loads(content[content.index(b"\0") + 1 :])
        log, terminal, *kept = descriptors
        job = replace(Job(**request["job"]), terminal=terminal, kept_open=tuple(kept))
        self._become_cell(job, Surroundings(**request["surroundings"]), log, host)

    def _launch(self, content: bytes, descriptors: list[int], host: int) -> NoReturn:
        """In the child: do what a script does, for a client that is too lean to do it."""
        supervise.fork_here = self._fork_here
        run_command(content, descriptors, host)

    def _fork_here(
        self, job: Job, environment: Mapping[str, str], log: int, task: Mapping[str, Any], relay: supervise.Relay
    ) -> int | None:
        """In a launching child: fork the cell from it, if it has imported what the cell needs; how the cell ended."""
        # A thread that watched an earlier attempt may hang in the driver.
        if host_socket(environment, task) != self._path or threading.active_count() > 1:
            return None
        close_nvml()
        umask = os.umask(0o022)
        os.umask(umask)
        surroundings = Surroundings(dict(environment), str(Path.cwd()), umask)
        launcher = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_cell(job, surroundings, log, launcher)
        # For whoever has to clear up if this process and the host are killed at once.
        write_holder(job.kept_open[1], cell=pid)

        def abandon(signum: int, frame: FrameType | None) -> NoReturn:
            _kill_group(pid)
            os._exit(128 + signal.SIGKILL)

        def send(signum: int) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)

        signal.signal(ABANDON, abandon)
        with relay.to(send), usage.sampled(job, environment, pid):
            _, status = os.waitpid(pid, 0)
        signal.signal(ABANDON, signal.SIG_DFL)
        _kill_group(pid)
        orphans.kill_strays()
        return os.waitstatus_to_exitcode(status)

    def _become_cell(self, job: Job, surroundings: Surroundings, log: int, parent: int) -> NoReturn:
        """In the child: shed all that is its parent's, take on what a fresh process would have, run the cell."""
        code = 1
        try:
            shed(parent, (os.open(os.devnull, os.O_RDONLY), log, log), (job.terminal, *job.kept_open))
            take_on(surroundings)
            # What the import has set would be set in a fresh process too.
            for name, value in self._changes.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
            code = run.main(job)
        except BaseException:
            traceback.print_exc()
        finally:
            run.leave(code)

    def _hear(self, pid: int) -> None:
        """A signal for the child, one byte each; or the end of its client, which is its own end."""
        child = self._children[pid]
        try:
            signals = child.client.recv(64)
        except OSError:
            signals = b""
        for signum in signals or [child.abandon]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)
        if not signals:
            with contextlib.suppress(KeyError):
                self._selector.unregister(child.client)

    def _reap(self) -> None:
        while self._children:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            # What the cell has started must not outlive it.
            _kill_group(pid)
            child = self._children.pop(pid, None)
            orphans.kill_strays(spared=self._children)
            if child is not None:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(child.client)
                _send(child.client, {"status": os.waitstatus_to_exitcode(status)})
                child.client.close()


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _send(connection: socket.socket, answer: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(answer).encode() + b"\n")


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """A request: its content, of which the first field is the driver's pid, and the descriptors that came with it."""
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
    if not content[: content.find(b"\0")].isdigit():
        raise ValueError("the request names no driver")
    return content, list(descriptors)


def _stamp(path: str) -> tuple[int, int]:
    try:
        found = Path(path).stat()
    except OSError:
        return (0, 0)
    return found.st_mtime_ns, found.st_size


def _own_sources(root: Path) -> dict[str, tuple[int, int]]:
    """The project's files that have been imported, as they were."""
    return {file: _stamp(file) for file in imported_files(root)}


def _main(request: dict[str, Any]) -> int:
    lock = request["lock"]
    os.set_inheritable(lock, False)

    def answer(text: str) -> None:
        with contextlib.suppress(OSError):  # nobody may be waiting for it
            os.write(request["answer"], text.encode())
        os.close(request["answer"])
        os.close(lock)

    root, path = Path(request["root"]), Path(request["socket"])
    before = dict(os.environ)
    signal.alarm(IMPORT_SECONDS)
    found = try_import(request["task"], root)
    signal.alarm(0)
    if found["error"]:
        answer(f"failed {json.dumps(found)}")
        return 1
    if request["stamp"]:
        remember_import(Path(request["stamp"]), found)
    if os.environ.get("CUDA_VISIBLE_DEVICES"):
        # Each cell asks it for the GPU and for a cap on its memory, whether the task knows torch or not.
        with contextlib.suppress(ImportError):
            import torch  # noqa: F401
    if "pytorch_lightning" in sys.modules:
        import sweepack.lightning  # noqa: F401
    module, _ = import_task(request["task"], root)
    reason = unsafe(module)
    if reason is not None:
        write_atomic(refusal_file(path), reason)
        answer(f"unsafe {reason}")
        return 1
    provenance.machine()
    run.spare_libraries()
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    with SocketAddress(fresh) as address:
        listener.bind(address)
    fresh.chmod(0o600)
    listener.listen(512)
    # The socket has its name only once somebody listens.
    fresh.replace(path)
    identity = path.stat().st_ino
    answer("ready")
    changes = {n: os.environ.get(n) for n in before.keys() | os.environ.keys() if os.environ.get(n) != before.get(n)}
    Host(listener, path, _own_sources(root), changes, request["driver"]).serve()
    with contextlib.suppress(OSError):
        if path.stat().st_ino == identity:
            path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(_main(json.loads(sys.argv[1])))
