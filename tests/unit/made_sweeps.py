"""Sweeps on disk, as a run leaves them, for the tests of what reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sweepack.manifest import Manifest, ManifestCell, cell_files
from sweepack.records import Record, State

ACC = {"metric": "acc", "mode": "max"}


def make_sweep(
    directory: Path,
    params: Sequence[Mapping[str, Any]],
    metrics: Sequence[Mapping[str, Any] | None] = (),
    *,
    axes: Sequence[str] | None = None,
    objective: dict[str, str] | None = None,
    history: Sequence[Mapping[str, Any]] = (),
    **facts: Any,
) -> Manifest:
    """A sweep with one cell per entry of ``params``: finished with its ``metrics``, pending where these are None."""
    directory.mkdir(parents=True)
    cells = [
        ManifestCell(f"{number:04x}", f"cell-{number}", dict(values)) for number, values in enumerate(params, start=1)
    ]
    for cell, values in zip(cells, metrics, strict=False):
        if values is not None:
            end_cell(directory, cell.id, metrics=dict(values), history=history, **facts)
    names = dict.fromkeys(name for values in params for name in values)
    manifest = Manifest(directory.name, "tasks/toy.py:train", list(axes or names), objective, cells)
    manifest.write(directory)
    return manifest


def end_cell(
    directory: Path,
    cell: str,
    status: State = State.FINISHED,
    history: Sequence[Mapping[str, Any]] = (),
    **facts: Any,
) -> None:
    """Let the cell's latest attempt have ended so."""
    files = cell_files(directory, cell)
    files.directory.mkdir(parents=True, exist_ok=True)
    known = {"attempt": 1, "started": 1000.0, "ended": 1002.5, "device": "cpu", "host": "n1", "share": 250}
    record = Record(cell, status, **{**known, **facts})
    files.status.write_text(record.to_json())
    if status in (State.FINISHED, State.FAILED):
        files.result.write_text(record.to_json())
    if history:
        files.history.write_text("".join(json.dumps(row) + "\n" for row in history))
