"""Whether a cell that failed under MPS did so by itself, or was struck by the fault of another on the same server.

A fatal GPU fault of one client reaches all clients of the server. NVIDIA's driver reports it to each of them "without
indicating which client generated the error"; ``server.log`` then has the line ``Server is handling a fatal GPU error``
and one ``status of client {pid, …} is INACTIVE`` for each client that was struck. On GPUs before Volta the server ends
instead, which ``control.log`` says.

So what can be told is this: a cell that was the only client when the fault came has made it, and has failed. One of
several may be guilty or not. It counts as interrupted, and is run once more outside MPS, where the guilty one faults
alone, which is a failure, and the others finish. A cell that failed though no fault was logged while it ran has failed
by itself; so has one that was no client, except that a program's process is not known to us and counts as one.
An error that says that the MPS server or its daemon is gone, and a daemon that ended, count as a fault of another.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sweepack.files import is_locked
from sweepack.mps.control import Place
from sweepack.mps.keeper import ENDED
from sweepack.records import Record, State

# How the error of a cell that was struck begins, by which a later attempt knows.
FLAG = "struck by a fault under MPS"
# Errors 805 to 807 and 810 of CUDA, as it words them.
_SERVER_GONE = re.compile(
    r"MPS client failed to connect|between the MPS server and the MPS client|MPS server is not ready|"
    r"MPS client has been terminated"
)
_FAULT = re.compile(rf"fatal GPU error|Server encountered a fatal exception|{ENDED}")
_STRUCK = re.compile(r"client \{(?:PID: )?(\d+)[^}]*\} is INACTIVE")


def log_sizes(place: Place) -> dict[str, int]:
    """How long the daemon's logs are by now, in bytes: what comes later is about cells that start now."""
    return {str(path): _size(path) for path in (place.log / "server.log", place.log / "control.log", place.output)}


def excuse(record: Record, told: Mapping[str, Any] | None, pid: int | None) -> Record:
    """``record``, of a cell that has failed: as interrupted if the fault may have been another's.

    ``told`` is ``Job.mps``, ``pid`` the process that used the GPU, None if that is not known.
    """
    if told is None or record.status is not State.FAILED:
        return record
    reason = _reason(told, pid, record.error or "")
    if reason is None:
        return record
    error = f"{FLAG}: {reason}; its own error: {record.error}"
    return replace(record, status=State.INTERRUPTED, error=error)


def was_struck(record: Record | None) -> bool:
    """Whether the latest attempt ended by a fault that may have been another's, and the next is to run outside MPS."""
    return record is not None and record.status is State.INTERRUPTED and (record.error or "").startswith(FLAG)


def _reason(told: Mapping[str, Any], pid: int | None, error: str) -> str | None:
    place = Place(Path(told["folder"]))
    logged = "\n".join(_since(Path(path), size) for path, size in told["logs"].items())
    if _FAULT.search(logged):
        struck = {int(found) for found in _STRUCK.findall(logged)}
        if not struck:
            return "the MPS server ended"
        alone = len(struck) == 1
        if alone or (pid is not None and pid not in struck):
            return None
        return f"the server of {len(struck)} cells on the device handled a fatal GPU error"
    if _SERVER_GONE.search(error):
        return "the MPS server went away or refused the cell"
    if not is_locked(place.keeper):
        return "the MPS daemon was killed"
    return None


def _since(path: Path, size: int) -> str:
    """What has been written to the log since it was of ``size``; all of it if it has been begun anew."""
    try:
        content = path.read_bytes()
    except OSError:
        return ""
    return content[size if size <= len(content) else 0 :].decode(errors="replace")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
