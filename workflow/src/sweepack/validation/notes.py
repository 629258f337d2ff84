"""What the cells that are tried note down, a file for each rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# Of an epoch, and of a step over all ranks: divided evenly by the ranks of every layout that is tried.
SAMPLES = 32
BATCH = 8


def file_of(cell: Path, rank: int) -> Path:
    """Where the ``rank`` of the cell in the folder ``cell`` notes what it saw."""
    return cell / f"seen-{rank}.jsonl"


def read_notes(cell: Path) -> list[list[dict[str, Any]]]:
    """The notes of each rank of the cell in the folder ``cell``, in the order of the ranks."""
    files = sorted(cell.glob("seen-*.jsonl"), key=lambda path: int(path.stem.partition("-")[2]))
    return [[json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] for path in files]
