"""A TCP port for each cell whose ranks are to meet on this node."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

from sweepack.files import try_lock

# Below those that the kernel gives to outgoing connections (from 32768 on by default), above the services.
_FIRST, _LAST = 20_000, 32_000


class Port:
    """A port that no other cell of this user takes while this object (or a process that inherited ``fd``) lives.

    The lock keeps our own cells apart, also between the moment when the port is chosen and the one when rank 0 listens
    on it; that nobody else listens is tried. Raises OSError when none is free.
    """

    def __init__(self, near: int) -> None:
        directory = Path(tempfile.gettempdir()) / f"sweepack-ports-{os.getuid()}"
        directory.mkdir(mode=0o700, exist_ok=True)
        span = _LAST - _FIRST
        for step in range(span):
            number = _FIRST + (near + step) % span
            fd = try_lock(directory / str(number))
            if fd is None:
                continue
            if _is_free(number):
                self.number, self.fd = number, fd
                return
            os.close(fd)
        raise OSError(f"no port from {_FIRST} to {_LAST - 1} is free on {os.uname().nodename}")

    def release(self) -> None:
        os.close(self.fd)


def _is_free(number: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", number))
        except OSError:
            return False
    return True
