"""A cell's memory: the cap that keeps it inside its share, in force before its task runs, and what it took in the end.

Standard library at import: launchers reckon with it too.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import Any

from sweepack import allocator, main_memory
from sweepack.devices import main_memory as installed
from sweepack.job import Job
from sweepack.leases import WHOLE

GIB = 2**30
MB = 10**6
# What torch rounds a fraction to is far below; anything above is another cap.
_TOLERANCE = 1e-6
WHOLE_DEVICE = "the whole device is the cell's"


def cap(share: int, total: int, reserve: int, overhead: int) -> int:
    """Bytes that torch may reserve for a cell with ``share`` thousandths of a device of ``total`` bytes.

    With N = 1000 / share cells on the device, each gets (total - reserve - N * overhead) / N, all in bytes. Raises
    ValueError when nothing is left: a share so small holds not even the cell's CUDA context.
    """
    bytes_left = (total - reserve) * share // WHOLE - overhead
    if bytes_left <= 0:
        least = least_share(total, reserve, overhead)
        needs = (
            f"is below the {least / WHOLE:g} that CUDA needs" if least else "holds no cell: it is less than CUDA needs"
        )
        raise ValueError(
            f"a share of {share / WHOLE:g} of {total / GIB:.1f} GiB {needs} (`memory.reserve`, `.overhead`)"
        )
    return bytes_left


def cap_by(settings: Mapping[str, Any], share: int, total: int) -> int:
    """The ``cap`` that ``settings`` (``sizing.config.Memory``, in megabytes) lead to."""
    return cap(share, total, settings["reserve"] * MB, settings["overhead"] * MB)


def least_share(total: int, reserve: int, overhead: int) -> int | None:
    """The smallest share, in thousandths, that has a cap on a device of ``total`` bytes; None when there is none."""
    room = total - reserve
    least = -(-WHOLE * (overhead + 1) // room) if room > 0 else WHOLE + 1
    return least if least <= WHOLE else None


def fraction(share: int, total: int | None, settings: Mapping[str, Any]) -> float | None:
    """The part of a device that the allocator's option allows; None for a whole device, or one of unknown size.

    Raises ValueError as ``cap`` does.
    """
    return None if share >= WHOLE or total is None else cap_by(settings, share, total) / total


class Held:
    """What holds the process of the cell of ``job``: ``cap`` in bytes, of a device (or main memory) of ``total`` bytes.

    ``reason`` says why there is no cap, where there is none. ``device`` is the index of its GPU as the process sees it.
    """

    def __init__(self, job: Job, device: int = 0) -> None:
        self.cap: int | None = None
        self.reason: str | None = None
        self._job = job
        self._device = device
        self.total = job.device_memory if job.kind == "cuda" else installed() * MB

    def take(self, *, program: bool, on_gpu: bool) -> None:
        """Put the cap in force, or say why there is none; before any user code, and before anything uses CUDA.

        ``program``: the task is one, which this process starts; ``on_gpu``: torch works on the cell's GPU here. Of main
        memory it is only settled what the cap will be (``take_main``). Raises as ``_take_gpu`` does.
        """
        job = self._job
        if job.kind != "cuda":
            self.reason = main_memory.obstacle(job.mem_mb, job.memory)
            self.cap = None if self.reason else job.mem_mb * MB
        elif on_gpu:
            self._take_gpu()
        elif not program:
            self.reason = "torch sees no GPU"
        elif job.share >= WHOLE:
            self.reason = WHOLE_DEVICE
        elif self.total is None:
            self.reason = "the size of the device is not known, so it could not be told to the program"
        elif not allocator.knows_fraction():
            self.reason = "the torch that is installed reads no cap from the environment, as 2.10 and later do"
        else:
            self.cap = cap_by(job.memory, job.share, self.total)

    def facts(self) -> dict[str, Any]:
        """What provenance says of it."""
        return {"memory_cap": self.cap} | ({"memory_cap_reason": self.reason} if self.cap is None else {})

    def _take_gpu(self) -> None:
        """Cap what torch may reserve in this process on its GPU, and see that it is so.

        The option of the allocator in the environment (``allocator``) does the same in a fresh process, and in the
        programs that a cell starts. A process forked from a warm host has got its environment after torch was imported,
        which may have read the option by then: there it is this call that holds.

        Must run before anything has used CUDA: what was allocated by then would not be counted. Raises RuntimeError if
        CUDA is already initialised or the cap is not taken, ValueError if the share is too small.
        """
        import torch

        if torch.cuda.is_initialized():
            raise RuntimeError(
                "CUDA was initialised before the cell's memory cap was in force; look for GPU work in sitecustomize, "
                "in usercustomize or in a .pth file of this environment"
            )
        if self._job.share >= WHOLE:
            self.reason = WHOLE_DEVICE
            return
        self.total = int(torch.cuda.get_device_properties(self._device).total_memory)
        self.cap = cap_by(self._job.memory, self._job.share, self.total)
        asked = self.cap / self.total
        torch.cuda.set_per_process_memory_fraction(asked, self._device)
        # Not in torch before 2.8.
        read = getattr(torch.cuda, "get_per_process_memory_fraction", None)
        taken = asked if read is None else read(self._device)
        if not abs(taken - asked) <= _TOLERANCE:
            raise RuntimeError(
                f"the cell's memory cap is not in force: torch was told to keep to {asked:.6f} of the GPU, and says "
                f"that it keeps to {taken:.6f}"
            )

    def take_main(self) -> None:
        """Have the kernel hold this process, and those that it starts, to the cap on main memory, if there is one.

        Just before the task itself runs: what a task's module imports is there already in a forked process.
        """
        if self._job.kind != "cuda" and self.cap is not None:
            self.reason = main_memory.limit(self.cap)
            self.cap = None if self.reason else self.cap

    def release(self) -> None:
        """Leave room for writing down how the cell has ended."""
        if self._job.kind != "cuda" and self.cap is not None:
            main_memory.lift()

    def read(self) -> dict[str, int | None]:
        """``Record.memory``, the peaks so far. Never raises, and costs next to nothing: it is read of every cell."""
        found: dict[str, int | None] = {"total": self.total, "cap": self.cap, "reserved": None, "allocated": None}
        torch = sys.modules.get("torch")
        # After a fault of the device it is in no state to be asked; torch's own numbers may be.
        with contextlib.suppress(Exception):
            if torch is not None and torch.cuda.is_initialized():
                found["reserved"] = int(torch.cuda.max_memory_reserved(self._device))
                found["allocated"] = int(torch.cuda.max_memory_allocated(self._device))
        return {**found, "rss": main_memory.peak()}


def largest(readings: list[dict[str, int | None]]) -> dict[str, int | None] | None:
    """Of several processes' readings the largest of each number; None of none."""
    names = dict.fromkeys(name for reading in readings for name in reading)
    return {
        name: max((value for reading in readings if (value := reading.get(name)) is not None), default=None)
        for name in names
    } or None
