"""Who else is on a GPU, as NVML sees it: asked when an allocation has failed, in a moment and without CUDA."""

from __future__ import annotations

import contextlib
import os
import pwd
import queue
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sweepack.devices import load_nvml, processes_on

# NVML answers at once, but for a GPU that is about to be lost.
ANSWER_SECONDS = 5.0
_GIB = 2**30
_LISTED = 8


@dataclass(frozen=True)
class Process:
    """A process on the GPU; ``memory`` in bytes, None where NVML does not tell."""

    pid: int
    name: str
    memory: int | None

    def __str__(self) -> str:
        size = "memory not told" if self.memory is None else f"{self.memory / _GIB:.2f} GiB"
        return f"pid {self.pid} ({self.name}, {size})"


@dataclass(frozen=True)
class Others:
    """What NVML says of a GPU: the ``seen`` processes but this one, ``free`` bytes, or the ``trouble`` in the way.

    ``lost``: the GPU itself is gone. ``foreign``: pids are those of another name space, this process among them.
    """

    seen: Sequence[Process] = ()
    free: int | None = None
    trouble: str | None = None
    lost: bool = False
    foreign: bool = False

    def __str__(self) -> str:
        if not self.seen:
            if self.trouble:
                return f"who has the rest is not known ({self.trouble})"
            return "NVML sees no other process on it (it may be hidden in another container)"
        largest = sorted(self.seen, key=lambda process: -(process.memory or 0))
        rest = f" and {len(largest) - _LISTED} more" if len(largest) > _LISTED else ""
        text = ", ".join(map(str, largest[:_LISTED])) + rest
        notes = ["pids as the host counts them, this cell's among them"] if self.foreign else []
        if any(process.memory is None for process in self.seen):
            notes.append("NVML tells no sizes in containers, on MIG instances or without permission")
        return f"on it are {text}" + (f" ({'; '.join(notes)})" if notes else "")


def others_on(entry: str) -> Others:
    """Who else is on the GPU that CUDA_VISIBLE_DEVICES calls ``entry``. Never raises, and answers within seconds."""
    answers: queue.SimpleQueue[Others] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(_ask(load_nvml(), entry))
        except Exception as error:
            answers.put(Others(trouble=f"NVML: {error}"))

    threading.Thread(target=ask, daemon=True).start()
    try:
        return answers.get(timeout=ANSWER_SECONDS)
    except queue.Empty:
        return Others(trouble=f"NVML did not answer within {ANSWER_SECONDS:g} s")


def _ask(nvml: Any, entry: str) -> Others:
    if nvml is None:
        return Others(trouble="NVML is not there or does not answer")
    if not entry.startswith(("GPU-", "MIG-")):
        # Its order need not be CUDA's.
        return Others(trouble=f"which GPU `{entry}` is for NVML is uncertain")
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(entry)
        free = int(nvml.nvmlDeviceGetMemoryInfo(handle).free)
    except nvml.NVMLError as error:
        lost = type(error).__name__ in ("NVMLError_GpuIsLost", "NVMLError_ResetRequired")
        return Others(trouble=f"NVML: {error}", lost=lost)
    try:
        sizes = processes_on(nvml, handle)
    except nvml.NVMLError as error:
        return Others(free=free, trouble=f"NVML: {error}")
    seen = [Process(pid, _name(nvml, pid), size) for pid, size in sizes.items() if pid != os.getpid()]
    return Others(seen, free, foreign=bool(seen) and len(seen) == len(sizes))


def _name(nvml: Any, pid: int) -> str:
    """What the process is, for people: no arguments, since they can hold secrets."""
    process = Path(f"/proc/{pid}")
    name = ""
    with contextlib.suppress(OSError):
        name = (process / "comm").read_text().strip()
        with contextlib.suppress(KeyError):
            name += f" of {pwd.getpwuid(process.stat().st_uid).pw_name}"
    if not name:
        with contextlib.suppress(nvml.NVMLError, AttributeError):
            name = Path(nvml.nvmlSystemGetProcessName(pid)).name
    cell = _cell(process)
    return f"cell {cell}" if cell else name or "unknown"


def _cell(process: Path) -> str | None:
    """The cell that the process runs, by the lock that it holds; None if it is none, or not this user's."""
    with contextlib.suppress(OSError):
        for descriptor in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                if found := re.search(r"/cells/([0-9a-f]{12})/lock$", str(descriptor.readlink())):
                    return found[1]
    return None
