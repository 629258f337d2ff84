"""The lean client of the warm host: what it makes of the host's answers, however they arrive."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest
from sweepack.ask import HOST_DIED, ask


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (b'{"pid": 7}\n{"status": 0}\n', 0),  # a finished cell is handed over so fast that both come at once
        (b'{"pid": 7}\n{"status": -15}\n', -15),
        (b'{"pid": 7}\n', HOST_DIED),
        (b"", None),
    ],
)
def test_the_status_is_the_hosts_last_word(tmp_path: Path, said: bytes, status: int | None) -> None:
    path = tmp_path / "host.sock"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1)
            connection.sendall(b"!")
            connection.recv(4)
            connection.recv(1 << 20)
            connection.sendall(said)

    host = threading.Thread(target=serve)
    host.start()
    assert ask(str(path), ["--cell", "x"]) == status
    host.join()
    listener.close()
