"""The place where the ranks of a cell meet before torch is imported, and where each tells how it ended.

The launcher listens, the ranks connect: a rank that is missing, came twice or disagrees with the layout is named
before anything waits for it, and when a rank's connection breaks the others are ended at once. One JSON object a line
in either direction. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_CONNECT_SECONDS = 3.0
_LONGEST_LINE = 64 * 2**20


@dataclass
class Member:
    """A rank's end of the line, as the launcher has it. ``hello`` is what it said of itself."""

    connection: socket.socket
    hello: dict[str, Any] = field(default_factory=dict)
    end: dict[str, Any] | None = None
    gone: bool = False
    _pending: bytes = b""

    @property
    def rank(self) -> int:
        return int(self.hello["rank"])

    def send(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # it has gone, which is noticed by reading
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]]:
        """What has come; ``gone`` is set when nothing more will."""
        try:
            part = self.connection.recv(2**20)
        except BlockingIOError:
            return []
        except OSError:
            part = b""
        self.gone = not part
        *lines, self._pending = (self._pending + part).split(b"\n")
        if len(self._pending) > _LONGEST_LINE:
            self.gone = True
        messages = [json.loads(line) for line in lines]
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("a message is an object")
        return messages


class Meeting:
    """The launcher's side. ``look`` takes in what has happened; who is in ``members`` said the token."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(16)
        self.members: list[Member] = []
        self._listener = socket.create_server(("", 0), backlog=512)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def look(self, seconds: float) -> list[Member]:
        """Wait at most so long for something to happen; those who said something or have gone."""
        changed = []
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                connection, _address = self._listener.accept()
                connection.settimeout(_CONNECT_SECONDS)
                _keep_alive(connection)
                self._selector.register(connection, selectors.EVENT_READ, Member(connection))
                continue
            member: Member = key.data
            for message in self._understood(member):
                if not member.hello:
                    if message.get("token") != self.token:
                        member.gone = True
                        break
                    member.hello = message
                    self.members.append(member)
                elif "end" in message:
                    member.end = message["end"]
            if member.gone:
                self._selector.unregister(member.connection)
                member.connection.close()
            if member.hello:
                changed.append(member)
        return changed

    def _understood(self, member: Member) -> Sequence[dict[str, Any]]:
        try:
            return member.receive()
        except ValueError:  # a stranger, or a port scanner
            member.gone = True
            return []

    def close(self) -> None:
        """Hang up: whoever is still connected ends itself."""
        for key in list((self._selector.get_map() or {}).values()):
            self._selector.unregister(key.fileobj)
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()


class Line:
    """A rank's side: connected to the launcher at the first of ``addresses`` that answers.

    Raises ConnectionError, naming what was tried, after ``seconds``.
    """

    def __init__(self, addresses: Sequence[str], port: int, seconds: float) -> None:
        end = time.monotonic() + seconds
        troubles: dict[str, str] = {}
        while time.monotonic() < end:
            for address in addresses:
                try:
                    self._socket = socket.create_connection((address, port), timeout=_CONNECT_SECONDS)
                except OSError as error:
                    troubles[address] = str(error)
                    continue
                self._socket.settimeout(None)
                _keep_alive(self._socket)
                self._reader = self._socket.makefile("rb")
                self.address = address
                return
            time.sleep(0.5)
        tried = "; ".join(f"{address}: {trouble}" for address, trouble in troubles.items())
        raise ConnectionError(
            f"{os.uname().nodename} cannot reach the launcher at port {port} within {seconds:.0f} s ({tried})"
        )

    def say(self, **message: Any) -> None:
        """Raises OSError when the launcher has gone."""
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def hear(self, seconds: float | None = None) -> dict[str, Any] | None:
        """What the launcher says next; None when it has hung up. Raises TimeoutError after ``seconds``."""
        self._socket.settimeout(seconds)
        try:
            line = self._reader.readline()
        except TimeoutError:
            raise
        except OSError:
            return None
        finally:
            self._socket.settimeout(None)
        return json.loads(line) if line.endswith(b"\n") else None


def _keep_alive(connection: socket.socket) -> None:
    """Notice within half a minute when the other's machine has gone, which closes no connection."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
