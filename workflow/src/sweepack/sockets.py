"""Unix sockets of one user: addresses that are never too long, and a check of who is at the other end."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_CREDENTIALS = struct.Struct("3i")


@contextmanager
def socket_address(path: Path) -> Iterator[str]:
    """An address for the socket at ``path``. An address has room for 107 bytes, which a path may exceed."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def require_same_user(connection: socket.socket) -> None:
    """Raise PermissionError when the process at the other end belongs to another user."""
    content = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(content)
    if uid != os.getuid():
        raise PermissionError(f"the socket's other end belongs to user {uid}, not to {os.getuid()}")
