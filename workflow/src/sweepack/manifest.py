"""The list of a sweep's cells as it stands in ``results/<sweep>/sweep.json``, for the jobs and the table.

Standard library only, like everything that a job reads before it starts.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sweepack.errors import UserError, Verbatim
from sweepack.files import write_atomic
from sweepack.records import CellFiles


@dataclass(frozen=True)
class ManifestCell:
    """One cell: its id, the readable name that people see, and its parameters (nested, defaults included)."""

    id: str
    slug: str
    params: dict[str, Any]


@dataclass(frozen=True)
class Manifest:
    """Every cell of a sweep in index order, and what the table and the report need to know beside them.

    ``axes`` are the dotted names of the parameters that vary; ``objective`` is ``{"metric": …, "mode": …}``.
    ``configuration`` are the arguments of ``snakemake`` that chose this configuration.
    """

    sweep: str
    task: str
    axes: list[str]
    objective: dict[str, str] | None
    cells: list[ManifestCell]
    configuration: list[str] = field(default_factory=list)

    def write(self, directory: Path) -> None:
        write_atomic(directory / "sweep.json", json.dumps(asdict(self)) + "\n")

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """The manifest in ``directory`` (``results/<sweep>``); raises UserError when there is none."""
        path = directory / "sweep.json"
        try:
            data = json.loads(path.read_bytes())
            return cls(**{**data, "cells": [ManifestCell(**cell) for cell in data["cells"]]})
        except FileNotFoundError:
            raise UserError(
                "the sweep's directory",
                Verbatim(directory),
                "a folder that holds sweep.json, made when the sweep first runs",
                "run the sweep first (`snakemake --profile profiles/local`), or name another folder",
            ) from None
        except (ValueError, TypeError, KeyError):
            raise UserError(
                str(path), Verbatim("not a manifest"), "the file that a run writes", "delete it and run the sweep again"
            ) from None


def cell_files(directory: Path, cell: str) -> CellFiles:
    """The files of ``cell`` in the sweep's directory ``results/<sweep>``."""
    return CellFiles(directory / "cells" / cell)
