"""Writes that survive a kill, and locks that die with their holder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from pathlib import Path


def write_atomic(path: Path, content: str | bytes, *, durable: bool = True) -> None:
    """Replace ``path`` by ``content`` in one step: a reader sees the old file or the new one, whole.

    The temporary file stands beside the target (a rename across file systems would be a copy). Where it is ``durable``
    it is synced before the rename, so that a crash of the machine leaves no empty file either.
    """
    data = content.encode() if isinstance(content, str) else content
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(fd, "wb") as stream:
            os.fchmod(fd, 0o644)
            stream.write(data)
            if durable:
                stream.flush()
                os.fsync(fd)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def try_lock(path: Path) -> int | None:
    """Take the exclusive kernel lock on ``path`` (made if missing); its descriptor, or None if it is held.

    The lock ends when the last process that inherited the descriptor ends, however it ends.
    """
    fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    # Somebody who only looks (``is_locked``) holds it for some microseconds.
    for pause in (0.001, 0.004, 0.016, None):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        if pause:
            time.sleep(pause)
    os.close(fd)
    return None


def is_locked(path: Path) -> bool:
    """Whether some process holds the lock on ``path``; False when there is no such file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
