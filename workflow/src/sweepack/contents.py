"""What a sweep's tables show, as a digest, and the stamp that tells of which contents the tables on disk are.

Standard library only: the plan compares the two, and so knows whether the tables are current without opening them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from sweepack.files import write_atomic
from sweepack.manifest import Manifest
from sweepack.records import Assessment

LAYOUT = 2
"""Raised when the tables come to show the same contents otherwise, so that those on disk are written anew."""


def contents(manifest: Manifest, states: Mapping[str, Assessment]) -> str:
    """The digest (64 hexadecimal digits) of what ``manifest``'s tables show while its cells stand as in ``states``.

    The order of cells and parameters counts, as it does in the tables. Raises KeyError for a cell without a state.
    """
    cells = []
    for cell in manifest.cells:
        seen = states[cell.id]
        ending = (seen.record.attempt, seen.record.ended) if seen.record else None
        cells.append((cell.id, cell.slug, cell.params, seen.state, ending, seen.rejected, seen.trouble))
    shown = (LAYOUT, manifest.sweep, manifest.task, manifest.axes, manifest.objective, cells)
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()


def read_stamp(directory: Path) -> str | None:
    """The digest of what the tables in ``directory`` (``results/<sweep>``) show; None when that is not known."""
    try:
        return _stamp(directory).read_text()
    except (OSError, ValueError):
        return None


def write_stamp(directory: Path, digest: str) -> None:
    """Say that the tables in ``directory``, all of them whole, show the contents of this digest."""
    write_atomic(_stamp(directory), digest)


def remove_stamp(directory: Path) -> None:
    """Say that the tables in ``directory`` are about to change."""
    _stamp(directory).unlink(missing_ok=True)


def _stamp(directory: Path) -> Path:
    return directory / "table.stamp"
