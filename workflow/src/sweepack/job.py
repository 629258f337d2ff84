"""What a cell is started with, and what passes between the process that watches it and the one that runs it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from dataclasses import dataclass, field
from typing import Any

from sweepack.records import CellFiles, Record, State

# By which a cell is told to stop, whoever tells it.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class Launch:
    """How a cell is to be started, as the latest plan had it; part of ``cell.json``.

    ``share`` is in thousandths of a device, ``mem_mb`` in megabytes (0: not stated), ``minutes`` the expected time
    (None: not stated), ``index`` the cell's place in the sweep. ``devices``: only the first so many (0: all).
    ``round_robin``: on device ``index`` modulo the devices. ``start``: ``auto`` (from the warm host) or ``fresh``.
    ``timeout``: minutes to wait for the share. ``rejected``: how many results of the cell were refused so far.
    ``mps``: how it uses MPS, if it shares its device (``mps.config.Mps``; None: not).
    ``batch``: what ``cell.batch`` is. ``memory``: the settings of the cap (``sizing.config.Memory``). ``retry_oom``: a
    cell that runs out of its share's memory is run again with the next larger share.
    ``layout``: as `sweepack.ddp.layout.Layout` has it, None for a cell on one device.
    """

    share: int
    threads: int
    mem_mb: int
    minutes: int | None
    index: int
    devices: int
    round_robin: bool
    start: str
    timeout: int
    rejected: int
    mps: dict[str, Any] | None = None
    layout: dict[str, Any] | None = None
    batch: int | None = None
    memory: dict[str, Any] = field(default_factory=dict)
    retry_oom: bool = False


@dataclass(frozen=True)
class Job:
    """What the process of a cell is told.

    ``directory`` is the cell's, absolute; ``device`` is the label for people, ``kind`` is ``cuda``, ``cpu`` or ``sim``,
    ``checked`` says that the driver knows the device, ``share`` is in thousandths, ``accept`` says whether a failure of
    the task is to be accepted as the cell's result, ``kept_open`` are the descriptors of lease and lock, and
    ``terminal`` is the one to report to. ``mps``: what a cell under MPS is told about it (``mps.daemon.Membership``).
    ``batch``, ``memory``, ``mem_mb`` and ``retry_oom`` are as in ``Launch``. ``device_memory`` is the device's in
    bytes, as the driver tells it (None: it doesn't).
    """

    directory: str
    device: str
    kind: str
    checked: bool
    share: int
    threads: int
    rejected: int
    accept: bool
    kept_open: tuple[int, ...]
    terminal: int
    mps: dict[str, Any] | None = None
    batch: int | None = None
    memory: dict[str, Any] = field(default_factory=dict)
    mem_mb: int = 0
    device_memory: int | None = None
    retry_oom: bool = False

    def to_json(self) -> str:
        return json.dumps(self.__dict__)

    @classmethod
    def from_json(cls, text: str) -> Job:
        return cls(**json.loads(text))


def report(record: Record, slug: str, files: CellFiles, terminal: int) -> None:
    """One line about the cell for whoever watches the run."""
    seconds = (record.ended or 0.0) - (record.started or 0.0)
    line = f"cell {record.cell} ({slug}) {record.status} after {seconds:.1f} s on {record.device}"
    if record.metrics:
        numbers = {name: value for name, value in record.metrics.items() if isinstance(value, int | float)}
        shown = [f"{n}={v:.4g}" if isinstance(v, float) else f"{n}={v}"[:40] for n, v in numbers.items()]
        line += ": " + " ".join(shown[:4]) if shown else ""
    if record.status is not State.FINISHED and record.error:
        line += f": {record.error.splitlines()[0]}\n  log: {files.log}"
    with contextlib.suppress(OSError):
        os.write(terminal, f"{line}\n".encode())
