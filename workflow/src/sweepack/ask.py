"""Ask a warm host to do what a script does, in little more than the time that a bare interpreter takes to come up.

This is what Snakemake runs for each cell, under `python -I -S`. It imports nothing but what is built in or there
anyway: `socket`, `signal` and `json` alone would cost more than all it does. The host does what is to be done
(`forked`), in a process of its own that has imported everything; here signals are passed on and the end is waited for.
"""

import _signal
import _socket
import os
import sys

from sweepack.sockets import SocketAddress, require_same_user

LAUNCH = b"!"
HOST_DIED = -256
_SIGNALS = (_signal.SIGTERM, _signal.SIGINT, _signal.SIGHUP)


def ask_first(script: str, if_host_dies: tuple[str, ...] = ()) -> int:
    """Let a host do what the file ``script`` does, called with ``--host SOCKET`` and arguments; its exit status.

    A signal is negative. Where no host would, or it has died with what it ran, this process becomes ``script`` with the
    same arguments; after a death ``if_host_dies`` are added.
    """
    _, _, path, *arguments = sys.argv
    name = os.path.basename(script).removesuffix(".py")
    status = ask(path, [name, *arguments])
    if status is None or status == HOST_DIED:
        more = if_host_dies if status == HOST_DIED else ()
        os.execv(sys.executable, [sys.executable, os.path.abspath(script), *arguments, *more])
    return status


def end_like(status: int) -> None:
    """End with that exit status, or by the same signal."""
    if status < 0:
        if -status in _SIGNALS:
            _signal.signal(-status, _signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


def ask(path: str, arguments: list[str]) -> int | None:
    """Let the host whose socket is at ``path`` do what the script does that ``arguments`` name first, without ``.py``.

    Its exit status, a signal negative.

    None: no host is there that would, and nothing was started. ``HOST_DIED``: it has died, and what it ran with it.
    """
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    early: list[int] = []
    started = False

    def forward(signum: int, _: object) -> None:
        if started:
            _send_signal(connection, signum)
        else:
            early.append(signum)

    before = [_signal.signal(signum, forward) for signum in _SIGNALS]
    try:
        with SocketAddress(path) as address:
            connection.connect(address)
        require_same_user(connection)
        connection.sendall(LAUNCH)
        connection.settimeout(30)
        if connection.recv(1) == b"!":
            _send_request(connection, arguments)
            connection.settimeout(None)
            started = bool(read_line(connection))
    except OSError:
        pass
    if not started:
        for signum, handler in zip(_SIGNALS, before):
            _signal.signal(signum, handler)
        for signum in early:
            os.kill(os.getpid(), signum)
        return None
    for signum in early:
        _send_signal(connection, signum)
    end = read_line(connection)
    return int(end[end.index(b":") + 1 : -2]) if end else HOST_DIED


def _send_request(connection: _socket.socket, arguments: list[str]) -> None:
    umask = os.umask(0o022)
    os.umask(umask)
    own = [str(os.getppid()), str(umask), os.getcwd(), str(len(arguments)), *arguments]
    variables = [name + b"=" + value for name, value in os.environb.items()]
    send_request(connection, b"\0".join([*map(os.fsencode, own), *variables]), (1, 2))


def send_request(connection: _socket.socket, content: bytes, descriptors: tuple[int, ...]) -> None:
    """Send ``content`` and ``descriptors`` as a host receives them; raises OSError."""
    rights = b"".join(descriptor.to_bytes(4, sys.byteorder) for descriptor in descriptors)
    ancillary = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)]
    connection.sendmsg([len(content).to_bytes(4, "big")], ancillary)
    connection.sendall(content)


def _send_signal(connection: _socket.socket, signum: int) -> None:
    try:
        connection.sendall(bytes([signum]))
    except OSError:
        pass


def read_line(connection: _socket.socket) -> bytes:
    """What the host says next, nothing when it is gone. Byte by byte: what follows belongs to the next answer."""
    line = b""
    while not line.endswith(b"\n"):
        try:
            part = connection.recv(1)
        except OSError:
            part = b""
        if not part:
            return b""
        line += part
    return line
