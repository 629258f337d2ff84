"""What differs between two sweeps, as their cells' directories stand."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sweepack.aggregate import flat
from sweepack.manifest import Manifest, ManifestCell, cell_files
from sweepack.records import assess, read_history
from sweepack.results import as_json, metrics_of

ABSENT = object()


def difference(a: Path, b: Path, exact: bool) -> list[str]:
    """What differs between the sweeps in two directories, a line each: ids, parameters, status, metrics, history.

    Attempts, devices and times are left out. ``exact`` compares type for type and bit for bit (NaN equals NaN,
    -0.0 is not 0.0); otherwise numbers agree within a relative 1e-6. Reads the cells themselves, so that it needs
    no table. Raises UserError when a directory holds no sweep.
    """
    left, right = ({cell.id: cell for cell in Manifest.read(directory).cells} for directory in (a, b))
    lines = []
    for cell in sorted(left.keys() | right.keys()):
        if cell in left and cell in right:
            found = [*_differences(_comparable(a, left[cell]), _comparable(b, right[cell]), exact)]
        else:
            found = [f"only in {a if cell in left else b}"]
        lines += [f"{cell} {(left.get(cell) or right[cell]).slug}: {line}" for line in found]
    return lines


def _comparable(directory: Path, cell: ManifestCell) -> dict[str, Any]:
    files = cell_files(directory, cell.id)
    seen = assess(files.directory, cell.id)
    rows = [{key: row.get(key) for key in ("epoch", "step", "metrics")} for row in read_history(files)]
    history = {f"history row {index}": row for index, row in enumerate(rows)}
    return {"status": str(seen.state), **flat("params.", cell.params), **metrics_of(seen), **history}


def _differences(left: dict[str, Any], right: dict[str, Any], exact: bool) -> Iterator[str]:
    """A line for each name that differs; once a status or a row of the history does, what follows is noise."""
    for name in dict.fromkeys((*left, *right)):
        pair = left.get(name, ABSENT), right.get(name, ABSENT)
        if _same(*pair) if exact else _close(*pair):
            continue
        yield f"{name}: " + " | ".join("absent" if side is ABSENT else as_json(side) for side in pair)
        if name == "status" or name.startswith("history"):
            return


def _same(a: Any, b: Any) -> bool:
    # The JSON text of a float is its shortest exact form, so equal text is equal bits and equal types.
    return a is b or (ABSENT not in (a, b) and json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True))


def _close(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_close(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_close, a, b))
    if {type(a), type(b)} in ({float}, {float, int}):
        return math.isclose(a, b, rel_tol=1e-6) or (math.isnan(a) and math.isnan(b))
    return _same(a, b)
