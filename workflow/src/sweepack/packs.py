"""Packs: jobs that run several cells side by side, where a job a cell would be too dear.

A pack is formed when the plan is made, from cells that have no result yet, and named by what it holds, so that the same
plan names it alike. What is in it is written down once, when the run starts, and read by its job.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from sweepack.errors import UserError
from sweepack.files import write_atomic
from sweepack.leases import WHOLE
from sweepack.records import Assessment

# From so many small cells on, what Snakemake and a client cost for each of them is worth saving.
MANY = 256
# One pack holds them all: between two packs devices would idle until the last cell of the first has ended.
LARGEST = 10_000


@dataclass(frozen=True)
class Pack:
    """The ids of the cells that one job runs, in the order of the sweep."""

    name: str
    cells: tuple[str, ...]

    def write(self, sweep: Path) -> None:
        """Write it down in the folder of its sweep."""
        path = pack_file(sweep, self.name, "json")
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, json.dumps({"cells": self.cells}) + "\n")

    @classmethod
    def read(cls, sweep: Path, name: str) -> Pack:
        """The pack of that name; raises UserError when there is none."""
        path = pack_file(sweep, name, "json")
        try:
            return cls(name, tuple(json.loads(path.read_bytes())["cells"]))
        except (OSError, ValueError, KeyError, TypeError):
            raise UserError(
                "--pack", name, f"the name of a pack: {path} cannot be read", "run `snakemake` again"
            ) from None


def pack_file(sweep: Path, name: str, kind: str) -> Path:
    """The pack's file of a ``kind``: ``json`` (its cells), ``log`` or ``done``."""
    return sweep / "packs" / f"{name}.{kind}"


def cells_per_job(setting: str | int, shares: Iterable[int]) -> int:
    """How many cells a job runs, 1 meaning no packs. ``shares`` are those of the cells to run, in thousandths."""
    if isinstance(setting, int):
        return setting
    return LARGEST if sum(share < WHOLE for share in shares) >= MANY else 1


def form(cells: Sequence[str], states: Mapping[str, Assessment], size: int) -> list[Pack]:
    """Packs of ``size`` of the ``cells``, in their order; the last may be smaller."""
    remaining = iter(cells)
    packs = []
    while members := tuple(islice(remaining, size)):
        packs.append(Pack(name_of(members, states), members))
    return packs


def name_of(cells: Sequence[str], states: Mapping[str, Assessment]) -> str:
    """The name of a pack of ``cells`` that stand as in ``states``."""
    # With the attempts so far: a cell that is to run once more must not be taken for the one that a pack has done.
    standing = [(cell, states[cell].rejected, _attempts(states[cell])) for cell in cells]
    return hashlib.sha256(json.dumps(standing).encode()).hexdigest()[:12]


def _attempts(found: Assessment) -> int:
    return found.record.attempt if found.record else 0
