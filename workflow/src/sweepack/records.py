"""What a cell's directory holds, and the one function that decides whether the cell is finished.

Standard library only: the plan reads ten thousand of these, and a finished cell is handed over in milliseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from sweepack.files import is_locked, write_atomic


class State(StrEnum):
    """Where a cell stands. Only ``FINISHED`` is never run again."""

    PENDING = "pending"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    LOST = "lost"


@dataclass(frozen=True)
class CellFiles:
    """The files of one cell. Only ``result`` is known to Snakemake, which therefore never deletes the others."""

    directory: Path

    @property
    def meaning(self) -> Path:
        """What the id stands for: task, parameters, seed."""
        return self.directory / "cell.json"

    @property
    def result(self) -> Path:
        """The declared output: a copy of ``status`` written last, once the cell has ended for good."""
        return self.directory / "result.json"

    @property
    def status(self) -> Path:
        """The durable record of the latest attempt."""
        return self.directory / "status.json"

    @property
    def history(self) -> Path:
        """One JSON object a line: ``{"epoch": 0, "step": 10, "metrics": {...}}``."""
        return self.directory / "history.jsonl"

    @property
    def provenance(self) -> Path:
        return self.directory / "provenance.json"

    @property
    def usage(self) -> Path:
        """What NVML saw of the latest attempt, of one on a GPU (``usage``)."""
        return self.directory / "usage.json"

    @property
    def log(self) -> Path:
        return self.directory / "log.txt"

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    @property
    def attempts(self) -> Path:
        """Archived attempts, one folder each."""
        return self.directory / "attempts"

    @property
    def lock(self) -> Path:
        """Held by the processes of the running attempt."""
        return self.directory / "lock"


@dataclass(frozen=True)
class Record:
    """The durable status of a cell: which attempt, how it ended, with which metrics.

    ``started`` and ``ended`` are Unix times in seconds, ``share`` is in thousandths of a device, ``rejected``
    counts the results of this cell that a plan has refused (accepted failures and broken files), ``world_size`` is the
    number of ranks of a cell on several devices. ``batch`` is what ``cell.batch`` was. ``memory`` is in bytes:
    ``total`` of the device, ``cap``, and the peaks ``reserved`` and ``allocated`` (torch's allocator) and ``rss`` (main
    memory).
    ``failure`` tells kinds of failure apart: ``oom_cap``, ``oom_neighbour``, ``device_lost``. ``outgrown`` is the
    largest share whose GPU memory was too small for the cell with this batch, in any attempt so far.
    """

    cell: str
    status: State
    attempt: int
    rejected: int = 0
    started: float | None = None
    ended: float | None = None
    host: str | None = None
    device: str | None = None
    share: int | None = None
    threads: int | None = None
    metrics: dict[str, Any] | None = None
    error: str | None = None
    world_size: int | None = None
    batch: int | None = None
    memory: dict[str, int | None] | None = None
    failure: str | None = None
    outgrown: int | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Record:
        """The record in ``text``; raises ValueError when it is not one."""
        data = json.loads(text)
        names = {field.name for field in fields(cls)}
        if not isinstance(data, dict) or not {"cell", "status", "attempt"} <= data.keys() <= names:
            raise ValueError("not a status record")
        metrics, times = data.get("metrics"), (data.get("started"), data.get("ended"))
        if not (isinstance(metrics, dict | None) and isinstance(data["attempt"], int)):
            raise ValueError("metrics that are no mapping, or an attempt that is no number")
        if not all(isinstance(time, int | float | None) for time in times):
            raise ValueError("times that are no numbers")
        memory = data.get("memory") or {}
        if not (isinstance(memory, dict) and all(isinstance(size, int | None) for size in memory.values())):
            raise ValueError("memory that is no mapping to numbers of bytes")
        return cls(**{**data, "status": State(data["status"])})


@dataclass(frozen=True)
class Assessment:
    """What a cell's directory says: its state, the record behind it and whether ``result.json`` is in place.

    ``refused`` says that a ``result.json`` is there which must not count, ``rejected`` how many there were so far, this
    one included. ``trouble`` tells a person why something on disk was refused.
    """

    state: State
    record: Record | None
    handed_over: bool
    rejected: int
    refused: bool = False
    trouble: str | None = None


NEVER_RUN = Assessment(State.PENDING, None, False, 0)
"""How a cell stands that has no folder yet."""


def assess(directory: Path, cell: str) -> Assessment:
    """Decide where ``cell`` stands. The plan, the jobs and the table all ask here and nowhere else.

    A cell is finished when its durable status says so under its own id and ``result.json`` is either the very same
    record or missing (Snakemake deletes outputs; it is then handed over again).
    """
    files = CellFiles(directory)
    # The result first: it is written last, so a cell that ends just now is seen unfinished at worst, never as broken.
    result = _read(files.result)
    status = _read(files.status)
    record: Record | None = None
    trouble: str | None = None
    if status is not None:
        try:
            found = Record.from_json(status)
            if found.cell == cell:
                record = found
            else:
                trouble = f"status.json belongs to cell {found.cell}"
        except (ValueError, TypeError):
            trouble = "status.json is broken"
    intact = result is not None and result == status
    if record is not None and record.status is State.FINISHED and (intact or result is None):
        return Assessment(State.FINISHED, record, result is not None, record.rejected)

    state = record.status if record is not None else State.PENDING
    if state is State.RUNNING and not is_locked(files.lock):
        state = State.LOST
    broken = trouble is None and result is not None and not intact
    if state is not State.RUNNING and (state is State.FINISHED or broken):
        state, trouble = State.PENDING, "result.json is broken"
    refused = result is not None
    rejected = (record.rejected if record else 0) + refused
    return Assessment(state, record, False, rejected, refused, trouble)


def hand_over(files: CellFiles) -> None:
    """Write ``result.json`` from the durable status."""
    write_atomic(files.result, files.status.read_bytes())


def archive_attempt(files: CellFiles) -> Path | None:
    """Move what the latest attempt left into ``attempts/<n>``, so that the cell starts from nothing.

    The record keeps its attempt count. Returns the archive, or None when there was nothing to move.
    """
    status = _read(files.status)
    try:
        record = Record.from_json(status or b"")
    except (ValueError, TypeError):
        record = None
    moved = [files.result, files.history, files.provenance, files.usage, files.log, files.checkpoints]
    moved = [path for path in moved if path.exists()]
    if not moved and (status is None or (record is not None and record.status is State.PENDING)):
        return None
    number = record.attempt if record else 0
    while (target := files.attempts / str(number)).exists():
        number += 1
    target.mkdir(parents=True)
    if status is not None:
        write_atomic(target / files.status.name, status)
    # Before anything is moved: a kill half-way must not leave a cell that says it is finished.
    if record is not None:
        write_atomic(files.status, Record(record.cell, State.PENDING, record.attempt, record.rejected).to_json())
    elif status is not None:
        files.status.unlink()
    for path in moved:
        path.rename(target / path.name)
    return target


def read_history(files: CellFiles) -> list[dict[str, Any]]:
    """The rows of a cell's history, oldest first; a last line cut short by a kill is left out."""
    return list(_history_rows(files.history))


def _history_rows(path: Path) -> Iterator[dict[str, Any]]:
    for line in (_read(path) or b"").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            return
        if not isinstance(row, Mapping):
            return
        yield dict(row)


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
