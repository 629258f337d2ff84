"""What `snakemake validate_cluster` hands on: the user's settings, without those that are a sweep's own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from sweepack.errors import UserError, Verbatim
from sweepack.slurm.config import Request, Slurm

TARGET = "validate_cluster"
# No sweep can have this name.
FOLDER = "_validate_cluster"
# How cells are gathered, for how long, and what becomes of older jobs: the sweeps that are tried have their own.
_OWN = ("mode", "pack", "shards_per_gpu", "time", "live")


def arguments(slurm: Slurm, site: Request | None, results: Path, snakefile: Path, options: Sequence[str]) -> list[str]:
    """Those of scripts/validate.py; ``site`` is what the profile asks for, ``options`` are its other ones.

    ``results`` is the absolute folder of all results. Raises UserError when this call of Snakemake does not run on
    Slurm.
    """
    if site is None:
        raise UserError(
            f"snakemake {TARGET}",
            Verbatim("no profile that runs on Slurm"),
            "a cluster to try",
            f"add the profile: `snakemake {TARGET} --profile profiles/slurm` (or your site's copy of it)",
        )
    asked = slurm.over(site)
    settings = slurm.model_dump(mode="json", exclude_unset=True, exclude=set(_OWN))
    return [
        *("--folder", str(results / FOLDER), "--snakefile", str(snakefile)),
        *("--slurm", json.dumps(settings), "--setup", json.dumps(asked.setup or [])),
        *(["--partition", asked.partition] if asked.partition else []),
        *("--", "--executor", "sweepack-slurm", "--jobs", "1", "--retries", "0"),
        *options,
    ]
