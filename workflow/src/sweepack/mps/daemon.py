"""A cell's use of the MPS daemon of its device: started if there is none, checked, kept while the cell lives.

Standard library only: this runs before a cell.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sweepack import orphans
from sweepack.devices import Device
from sweepack.errors import UserError, Verbatim
from sweepack.files import is_locked
from sweepack.leases import WHOLE, lease_directory
from sweepack.memory import MB
from sweepack.mps.control import PROGRAM, NoAnswer, Place, find_program, in_fault, servers, without_mps
from sweepack.mps.faults import log_sizes
from sweepack.mps.keeper import QUIT_SECONDS, READY, START_SECONDS

# A fault is over when the cells that it has struck have noticed.
RECOVERY_SECONDS = 120.0
# A socket's path has room for 107 bytes; the longest that a daemon makes in its pipe directory takes some 20.
_LONGEST_PIPE = 85
_NAP_SECONDS = 0.05


@dataclass(frozen=True)
class Membership:
    """What a cell gets: the daemon's ``variables`` for its environment, and ``fd``, the user's lock to inherit.

    ``told`` is for the cell itself (``Job.mps``).
    """

    fd: int
    variables: dict[str, str]
    told: dict[str, Any]


def require_usable(devices: Sequence[Device], environ: Mapping[str, str]) -> None:
    """Raise UserError when MPS cannot run on ``devices`` with the program that ``environ`` has."""
    other = next((device for device in devices if device.kind != "cuda"), None)
    unnamed = next((device for device in devices if not device.entry.startswith(("GPU-", "MIG-"))), None)
    if other is not None:
        trouble = f"the device {other.label} is no GPU"
    elif unnamed is not None:
        trouble = f"no driver here tells the UUID of {unnamed.label}, by which its daemon would be started"
    elif find_program(environ) is None:
        trouble = f"there is no {PROGRAM} on the PATH of {os.uname().nodename}"
    else:
        return
    raise _refusal(trouble)


def place_of(device: Device) -> Place:
    """The folder of the daemon of ``device``, made if missing, for this user alone.

    It lies beside the leases, since whoever shares these shares the daemon. Raises UserError when that cannot be.
    """
    place = Place(lease_directory() / "mps" / hashlib.sha256(device.entry.encode()).hexdigest()[:8])
    if len(os.fsencode(place.pipe)) > _LONGEST_PIPE:
        raise UserError(
            "SWEEPACK_LEASES",
            str(lease_directory()),
            f"a shorter path where `mps` is on: {place.pipe} is too long for sockets",
            "set SWEEPACK_LEASES to a folder such as /dev/shm/leases for every run on this node, or unset it",
        )
    place.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return place


@contextlib.contextmanager
def join(device: Device, settings: Mapping[str, Any], share: int, reserve: int) -> Iterator[Membership]:
    """Within the block the daemon of ``device`` serves a cell with ``share`` thousandths of it, and answers.

    ``settings`` are those of ``Mps``, ``reserve`` are the device's megabytes that no cell gets. Raises UserError, with
    the reason, when the daemon does not start or answer.
    """
    place = place_of(device)
    fd = os.open(place.users, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # It is held for long only by a keeper that ends its daemon.
        _wait(lambda: _locked(fd, fcntl.LOCK_SH), 3 * QUIT_SECONDS, "the daemon before has not ended")
        _ensure(place, device)
        _wait(lambda: not in_fault(place), RECOVERY_SECONDS, "the server has not recovered from a cell's fatal fault")
        variables = dict(place.variables)
        limit = pinned_limit(share, device.memory, reserve * MB) if settings["pinned_memory"] else None
        if limit is not None:
            variables["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"0={limit}M"
        if settings["thread_percentage"] is not None:
            variables["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(settings["thread_percentage"])
        told = {"folder": str(place.folder), "logs": log_sizes(place), "variables": variables}
        yield Membership(fd, variables, told)
    except NoAnswer as error:
        raise _refusal(f"{PROGRAM} on {os.uname().nodename} for {device.label}: {error}") from None
    finally:
        os.close(fd)


def apart(device: Device) -> dict[str, str]:
    """The variables of a process that uses ``device`` without any daemon: they name a folder in which there is none."""
    folder = place_of(device).nobody
    folder.mkdir(mode=0o700, exist_ok=True)
    return {"CUDA_MPS_PIPE_DIRECTORY": str(folder)}


def pinned_limit(share: int, total: int | None, reserve: int) -> int | None:
    """MiB of a device of ``total`` bytes that CUDA may give a cell with ``share`` thousandths; None: not known.

    ``reserve`` bytes are left for the device as a whole. With the cells' contexts, so that the cap on torch's
    memory (``memory.cap``) is reached first, with an error that says more.
    """
    return None if total is None else max(1, (total - reserve) * share // WHOLE // 2**20)


def _ensure(place: Place, device: Device) -> None:
    """Have a daemon that answers. The caller holds the users' lock: it will not be ended. Raises NoAnswer."""
    mutex = os.open(place.mutex, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _wait(lambda: _locked(mutex, fcntl.LOCK_EX), 2 * START_SECONDS, "another process is still starting it")
        if not is_locked(place.keeper):
            _start(place, device)
            return
        try:
            servers(place)
        except NoAnswer:
            # It may have died just now; then its keeper goes too.
            _wait(lambda: not is_locked(place.keeper), 2 * QUIT_SECONDS, "it does not answer")
            _start(place, device)
    finally:
        # Closing alone would leave it locked in a child that another thread has just forked.
        fcntl.flock(mutex, fcntl.LOCK_UN)
        os.close(mutex)


def _start(place: Place, device: Device) -> None:
    place.log.mkdir(mode=0o700, exist_ok=True)
    reader, writer = os.pipe()
    environment = {**without_mps(os.environ), **place.variables, "CUDA_VISIBLE_DEVICES": device.entry}
    with os.fdopen(reader) as stream, place.output.open("ab") as output, selectors.DefaultSelector() as selector:
        try:
            keeper = orphans.spawn(
                [sys.executable, "-P", "-m", "sweepack.mps.keeper", str(place.folder), str(writer)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(writer,),
                start_new_session=True,
            )
        finally:
            os.close(writer)
        selector.register(stream, selectors.EVENT_READ)
        answer = stream.read() if selector.select(START_SECONDS + 3 * QUIT_SECONDS) else "it does not start"
    if answer != READY:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(keeper.pid, signal.SIGKILL)
        keeper.wait()
        orphans.forget(keeper.pid)
        raise NoAnswer(answer or f"its keeper ended early; see {place.output}")


def _locked(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait(condition: Callable[[], bool], seconds: float, trouble: str) -> None:
    """Wait until ``condition`` holds; raises NoAnswer with ``trouble`` when it does not within ``seconds``."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise NoAnswer(f"{trouble}, after {seconds:g} s")
        time.sleep(_NAP_SECONDS)


def _refusal(trouble: str) -> UserError:
    return UserError(
        "mps",
        Verbatim(f"on, but {trouble}"),
        f"GPUs with NVIDIA's driver and its {PROGRAM}, which an ordinary user may run",
        "set `mps: false`: the same cells compute the same numbers without it",
    )
