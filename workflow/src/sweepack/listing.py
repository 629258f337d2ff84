"""What the ids mean, on disk: the manifest, ``cells.tsv``, ``cell.json`` in each cell, links by readable names."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sweepack.files import write_atomic
from sweepack.leases import WHOLE
from sweepack.manifest import cell_files
from sweepack.plan import Plan
from sweepack.records import CellFiles
from sweepack.sweep import Cell
from sweepack.values import canonical, dotted_items

_LONGEST_NAME = 120


def write_listing(plan: Plan, root: Path) -> None:
    """Write all of it for ``plan``. Called when a run starts, never by a dry run."""
    directory = root / plan.directory
    (directory / "cells").mkdir(parents=True, exist_ok=True)
    task = plan.task.to_json(root)
    made = set(os.listdir(directory / "cells"))  # noqa: PTH208 (names are all that is needed, of 100,000 folders)
    for cell in plan.cells:
        _write_meaning(plan, cell, cell_files(directory, cell.id), task, cell.id in made)
    for pack in plan.packs:
        pack.write(directory)
    plan.manifest().write(directory)
    write_atomic(directory / "cells.tsv", _table(plan))
    _write_links(plan, directory / "by-name")


def _write_meaning(plan: Plan, cell: Cell, files: CellFiles, task: dict[str, Any], made: bool) -> None:
    meaning = {
        "id": cell.id,
        "slug": cell.slug,
        "seed": cell.seed,
        "params": cell.params,
        "task": task,
        "launch": asdict(plan.launch(cell)),
    }
    text = json.dumps(meaning, indent=2) + "\n"
    if made:
        with contextlib.suppress(FileNotFoundError):
            if files.meaning.read_text() == text:
                return
    else:
        files.directory.mkdir(exist_ok=True)
    # Not synced, which would cost a disk access a cell: what a crash empties, the next run writes again.
    write_atomic(files.meaning, text, durable=False)


def _table(plan: Plan) -> str:
    rows = [dict(dotted_items(cell.params)) for cell in plan.cells]
    names = list(dict.fromkeys(name for row in rows for name in row))
    stream = io.StringIO()
    writer = csv.writer(stream, dialect="excel-tab", lineterminator="\n")
    writer.writerow(["cell", "index", "name", "share", *names])
    for cell, row in zip(plan.cells, rows, strict=True):
        # JSON, so that text "1" and number 1 stay apart.
        values = [canonical(row[name]) if name in row else "" for name in names]
        writer.writerow([cell.id, cell.index, cell.slug, plan.share(cell) / WHOLE, *values])
    return stream.getvalue()


def _write_links(plan: Plan, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    wanted: dict[str, str] = {}
    for cell in plan.cells:
        name = re.sub(r"[^\w.,=+@-]", "_", cell.slug)[:_LONGEST_NAME]
        name = name if name not in wanted and name.strip(".") else f"{name},{cell.id}"
        wanted[name] = f"../cells/{cell.id}"
    for link in folder.iterdir():
        if link.is_symlink() and wanted.get(link.name) != str(link.readlink()):
            link.unlink()
    for name, target in wanted.items():
        link = folder / name
        if not link.is_symlink():
            link.symlink_to(target)
