"""A sweep's cells as they stand, without reading again those that had finished when the tables were last written.

What a finished cell's files said is kept in one file, beside the inode, size and times of these files. A cell whose
files have the same ones costs three ``stat`` and no ``open``; every other cell is read. Coarse clocks do no harm, nor
does a cell that ended an instant ago: each status replaces the one before by a rename, so that two in a row never
share an inode, and a history grows.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from sweepack.files import write_atomic
from sweepack.manifest import Manifest, cell_files
from sweepack.records import Assessment, CellFiles, Record, State, assess, read_history
from sweepack.usage import on_gpu, read_usage

Columns = dict[str, list[Any]]
INDEX = ("epoch", "step")
# The number is to be raised when the same text would mean something else.
CACHE = pa.schema(
    [(name, pa.large_string()) for name in ("cell", "stamp", "record", "history", "usage")], {b"sweepack": b"2"}
)
_ANY = CellFiles(Path())
WATCHED = tuple(path.name for path in (_ANY.status, _ANY.result, _ANY.history))


class Entry(NamedTuple):
    """What the cache keeps of a finished cell: its files' stamp, its ``Record``, history and usage, as JSON text."""

    stamp: str
    record: str
    history: str
    usage: str


class Aggregate:
    """The cells of ``manifest`` as ``directory`` (``results/<sweep>``) holds them when this is made.

    ``states`` maps every cell's id to what ``assess`` says of it. Nothing is written but by ``save``.
    """

    def __init__(self, manifest: Manifest, directory: Path) -> None:
        self.manifest = manifest
        self.directory = directory
        self.states: dict[str, Assessment] = {}
        self._kept: dict[str, Entry] = {}
        self._stamps: dict[str, str] = {}
        self._histories: dict[str, Columns] = {}
        self._usages: dict[str, dict[str, Any]] = {}
        self._cached = _read_cache(_cache(directory))
        folder = str(cell_files(directory, "").directory)
        for cell in (cell.id for cell in manifest.cells):
            # Before the files are read: what is written to them meanwhile makes the stamp an old one.
            times = [_times(f"{folder}/{cell}/{name}") for name in WATCHED]
            self._stamps[cell] = stamp = repr(times)
            entry = self._cached.get(cell)
            if entry is not None and entry.stamp == stamp:
                record = Record.from_json(entry.record)
                self.states[cell] = Assessment(State.FINISHED, record, times[1] is not None, record.rejected)
                self._kept[cell] = entry
            else:
                self.states[cell] = assess(cell_files(directory, cell).directory, cell)

    def history(self, cell: str) -> Columns:
        """The rows that the cell has logged, as columns of equal length: ``epoch``, ``step``, ``metrics.<name>`` …

        What a row lacks is None, and so is an epoch or a step that is no integer.
        """
        if cell in self._kept:
            columns: Columns = json.loads(self._kept[cell].history)
            return columns
        if cell not in self._histories:
            rows = read_history(cell_files(self.directory, cell))
            self._histories[cell] = transpose(map(_logged, rows), INDEX)
        return self._histories[cell]

    def usage(self, cell: str) -> dict[str, Any]:
        """What NVML saw of the cell's latest attempt (``usage``); {} without a GPU.

        It is written just after the status, once an attempt: what is there stays so, what is missing may come yet.
        """
        record = self.states[cell].record
        if record is None or not on_gpu(record):
            return {}
        if cell in self._kept and self._kept[cell].usage != "{}":
            kept: dict[str, Any] = json.loads(self._kept[cell].usage)
            return kept
        if cell not in self._usages:
            self._usages[cell] = read_usage(cell_files(self.directory, cell))
        return self._usages[cell]

    def save(self) -> None:
        """Keep what was read of the finished cells, for the next time; warns on standard error if that cannot be."""
        entries = {cell: self._entry(cell) for cell, seen in self.states.items() if seen.state is State.FINISHED}
        if entries == self._cached:
            return
        columns = [list(entries), *zip(*entries.values(), strict=True)] if entries else [[]] * len(CACHE)
        table = pa.Table.from_arrays([pa.array(column, pa.large_string()) for column in columns], schema=CACHE)
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd", use_dictionary=False, write_page_checksum=True)
        path = _cache(self.directory)
        try:
            write_atomic(path, bytes(sink.getvalue()))
        except OSError as error:
            print(f"sweepack: {path} was not written ({error}); the next table reads every cell again", file=sys.stderr)

    def _entry(self, cell: str) -> Entry:
        usage = self.usage(cell)
        if cell in self._kept and (not usage or self._kept[cell].usage != "{}"):
            return self._kept[cell]
        record = json.dumps(vars(self.states[cell].record))
        return Entry(self._stamps[cell], record, json.dumps(self.history(cell)), json.dumps(usage))


def flat(prefix: str, mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings as dotted names; an empty one is a value."""
    names: dict[str, Any] = {}
    for key, value in mapping.items():
        if isinstance(value, dict) and value:
            names |= flat(f"{prefix}{key}.", value)
        else:
            names[prefix + key] = value
    return names


def transpose(rows: Iterable[Mapping[str, Any]], first: Iterable[str] = ()) -> Columns:
    """The rows as columns: the names in ``first``, then the others as they come up; None where a row lacks one."""
    rows = list(rows)
    return {name: [row.get(name) for row in rows] for name in dict.fromkeys(chain(first, *rows))}


def stack(parts: Iterable[Columns]) -> Columns:
    """The parts one below the other, names in the order in which they come up; None where a part has no such column."""
    stacked: Columns = {}
    height = 0
    for part in parts:
        for name, column in part.items():
            target = stacked.setdefault(name, [])
            target += [None] * (height - len(target))
            target += column
        height += len(next(iter(part.values()), ()))
    for target in stacked.values():
        target += [None] * (height - len(target))
    return stacked


def _logged(row: Mapping[str, Any]) -> dict[str, Any]:
    metrics = row.get("metrics")
    index = {name: row[name] for name in INDEX if type(row.get(name)) is int}
    return index | flat("metrics.", metrics) if isinstance(metrics, dict) else index


def _times(path: str) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)  # noqa: PTH116 - thirty thousand Paths take longer than the calls
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _cache(directory: Path) -> Path:
    return directory / ".rows.parquet"


def _read_cache(path: Path) -> dict[str, Entry]:
    """What an earlier table has kept; nothing when that is missing, damaged or of another kind."""
    try:
        table = pq.ParquetFile(pa.BufferReader(path.read_bytes()), page_checksum_verification=True).read()
    except (OSError, ValueError, pa.ArrowException):
        return {}
    if not table.schema.equals(CACHE, check_metadata=True):
        return {}
    cells, *columns = (column.to_pylist() for column in table.columns)
    return dict(zip(cells, map(Entry, *columns), strict=True))
