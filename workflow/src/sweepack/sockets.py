"""Unix sockets of one user: addresses that are never too long, and a check of who is at the other end.

A bare interpreter imports this for every cell (``ask``): nothing here needs more than what is built in.
"""

import _socket
import os
import sys


class SocketAddress:
    """Within the block, an address for the socket at ``path``. One has room for 107 bytes, which a path may exceed."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._folder, self._name = os.path.split(path)

    def __enter__(self) -> str:
        self._descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return f"/proc/self/fd/{self._descriptor}/{self._name}"

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def require_same_user(connection: _socket.socket) -> None:
    """Raise PermissionError when the process at the other end belongs to another user."""
    credentials = connection.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12)  # pid, uid, gid
    user = int.from_bytes(credentials[4:8], sys.byteorder)
    if user != os.getuid():
        raise PermissionError(f"the socket's other end belongs to user {user}, not to {os.getuid()}")
