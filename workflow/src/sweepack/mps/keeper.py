"""The keeper of one device's MPS daemon: its parent, which ends it when its last user has gone, however that went.

Users are known by a kernel lock that each cell and its launcher hold, so nobody has to say goodbye. The daemon dies
with its keeper. Nothing else may: a keeper outlives whoever started it, and serves all cells on the device.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from sweepack import orphans
from sweepack.files import try_lock
from sweepack.job import STOP_SIGNALS
from sweepack.mps.control import PROGRAM, NoAnswer, Place, ask, find_program, servers

# Within which a new daemon must answer. It needs no GPU for that: its server comes with the first client.
START_SECONDS = 30.0
QUIT_SECONDS = 10.0
_TICK_SECONDS = 0.2
# So often nobody must be seen to use it: another cell may be about to start, and a server takes its time to.
_IDLE_TICKS = 5
READY = "ready"
ENDED = "sweepack: the daemon ended while cells used it"


def main(arguments: Sequence[str]) -> int:
    """Keep a daemon for the folder ``arguments[0]``; to the descriptor ``arguments[1]`` goes ``READY`` or the reason.

    The device is in CUDA_VISIBLE_DEVICES.
    """
    place, answer = Place(Path(arguments[0])), int(arguments[1])
    # Slurm signals every process of a job, and cells need the daemon to the end.
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    lock = try_lock(place.keeper)
    if lock is None:
        return _tell(answer, "another keeper came first")
    orphans.adopt()
    _end_stale(place)
    shutil.rmtree(place.pipe, ignore_errors=True)
    # The log stays while anybody uses the place: from it cells learn what became of an earlier daemon.
    for folder in (place.pipe, place.log, place.nobody):
        folder.mkdir(mode=0o700, exist_ok=True)
    with place.output.open("ab") as output:
        try:
            daemon = orphans.spawn(
                [find_program() or PROGRAM, "-f"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=_die_with_parent,
            )
        except OSError as error:
            return _tell(answer, f"{PROGRAM}: {error.strerror}")
    trouble = _wait_for_answer(place, daemon)
    if trouble is None:
        _tell(answer, READY)
        _serve(place, daemon)
    _stop(place, daemon)
    # In this order: whoever finds no user's lock in the way must not find the keeper's.
    os.close(lock)
    return 0 if trouble is None else _tell(answer, trouble)


def _tell(answer: int, text: str) -> int:
    with contextlib.suppress(OSError):  # who asked may have gone
        os.write(answer, text.encode())
    os.close(answer)
    return 1


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _end_stale(place: Place) -> None:
    """End a daemon that has lost its keeper."""
    with contextlib.suppress(OSError, ValueError):
        pid = int((place.pipe / f"{PROGRAM}.pid").read_text())
        if PROGRAM.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)


def _wait_for_answer(place: Place, daemon: subprocess.Popen[bytes]) -> str | None:
    """None as soon as the daemon answers, else why it does not."""
    end = time.monotonic() + START_SECONDS
    while True:
        try:
            servers(place, max(0.1, end - time.monotonic()))
            return None
        except NoAnswer as error:
            if daemon.poll() is not None:
                said = place.output.read_text(errors="replace").strip().splitlines()[-5:]
                return "\n".join([f"{PROGRAM} -f ended with exit status {daemon.returncode}", *said])
            if time.monotonic() > end:
                return str(error)
        time.sleep(0.02)


def _serve(place: Place, daemon: subprocess.Popen[bytes]) -> None:
    """Return when nobody uses the daemon any more, nobody else being let in from then on, or when it has ended."""
    users = os.open(place.users, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    idle = 0
    while daemon.poll() is None:
        try:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            idle = 0
        else:
            idle += 1
            if idle > _IDLE_TICKS:
                shutil.rmtree(place.old_log, ignore_errors=True)
                place.log.rename(place.old_log)
                return
            fcntl.flock(users, fcntl.LOCK_UN)
        time.sleep(_TICK_SECONDS)
    with place.output.open("a") as output:
        output.write(f"{ENDED}, with exit status {daemon.returncode}\n")


def _stop(place: Place, daemon: subprocess.Popen[bytes]) -> None:
    """End the daemon and whatever it has started."""
    if daemon.poll() is None:
        with contextlib.suppress(NoAnswer, subprocess.TimeoutExpired):
            ask(place, "quit", QUIT_SECONDS)
            daemon.wait(QUIT_SECONDS)
        daemon.kill()
        daemon.wait()
    orphans.forget(daemon.pid)
    orphans.kill_strays()
    shutil.rmtree(place.pipe, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
