"""One sweep that is tried on the cluster: its configuration, the Snakemake that runs it, and its end."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sweepack.errors import UserError
from sweepack.records import CellFiles, Record, assess, read_history
from sweepack.slurm.cluster import ENDED, SlurmError, SlurmJob, cancel, jobs_by_id
from sweepack.slurm.plan import live_jobs
from sweepack.validation.notes import read_notes

TASK = "sweepack.validation.task:train"
_PR_SET_PDEATHSIG = 1
_END_SECONDS = 120.0


@dataclass(frozen=True)
class TriedCell:
    """A cell as it is on disk: its record (None: it never started), the epochs of its history, its ranks' notes."""

    files: CellFiles
    record: Record | None
    finished: bool
    epochs: list[int]
    notes: list[list[dict[str, Any]]]


@dataclass
class Trial:
    """The sweep ``name`` in the folder ``root``; ``cells`` of them, each of ``epochs`` epochs.

    ``resources`` is its entry of that name, ``slurm`` what is taken over from the user's configuration, ``seconds`` the
    pause after an epoch.
    """

    root: Path
    name: str
    resources: dict[str, Any]
    slurm: dict[str, Any]
    cells: int
    epochs: int
    seconds: float
    begun: float = 0.0
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def directory(self) -> Path:
        return self.root / "results" / self.name

    @property
    def log(self) -> Path:
        """All that its Snakemake has said."""
        return self.root / f"{self.name}.log"

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def start(self, snakemake: Sequence[str]) -> None:
        """Write the configuration and start Snakemake; ``snakemake`` is its command without that."""
        parameters = {"epochs": self.epochs, "seconds": self.seconds}
        config = {
            "sweep": {"name": self.name, "task": TASK, "params": parameters, "axes": {"n": list(range(self.cells))}},
            "resources": [{"cpus": 1, "runtime": 5, **self.resources}],
            "slurm": self.slurm,
            "report": False,
        }
        file = self.root / f"{self.name}.yaml"
        file.write_text(json.dumps(config, indent=2) + "\n")  # JSON is YAML
        self.begun = time.monotonic()
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*snakemake, "--configfile", str(file)],
                cwd=self.root,
                # All that a profile says has been handed on already.
                env={name: value for name, value in os.environ.items() if name != "SNAKEMAKE_PROFILE"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C must not reach it, which would take minutes to act upon it.
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    @property
    def status(self) -> int | None:
        """The exit status of its Snakemake; None while it runs, or has not been started."""
        return self._process.poll() if self._process else None

    def jobs(self) -> list[SlurmJob]:
        """Its jobs in the queue; none when Slurm does not answer."""
        with contextlib.suppress(SlurmError):
            return list(live_jobs(self.directory).values())
        return []

    def stop(self) -> None:
        """End Snakemake at once, then its jobs. Raises SlurmError when they could not be cancelled."""
        if self._process and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        cancel(job.id for job in live_jobs(self.directory).values())

    def tried(self) -> list[TriedCell]:
        """Its cells, as many as there are."""
        found = []
        for folder in sorted((self.directory / "cells").glob("*")):
            files = CellFiles(folder)
            standing = assess(folder, folder.name)
            epochs = [row["epoch"] for row in read_history(files)]
            finished = standing.state == "finished" and standing.handed_over
            found.append(TriedCell(files, standing.record, finished, epochs, read_notes(folder)))
        return found


def cancel_left(root: Path, say: Callable[[str], None]) -> None:
    """Cancel what an earlier call has left in the queue, and wait until it has ended. Raises UserError."""
    end = time.monotonic() + _END_SECONDS
    try:
        ids = [job.id for job in live_jobs(root).values()]
        cancel(ids)
        while left := [job.id for job in jobs_by_id(ids).values() if job.state not in ENDED]:
            if time.monotonic() > end:
                raise SlurmError(f"jobs {', '.join(left)} have not ended within {_END_SECONDS:.0f} s of scancel")
            say(f"waiting for the end of jobs that an earlier call has left: {', '.join(left)}")
            time.sleep(2)
    except SlurmError as error:
        raise UserError(
            "validate_cluster", str(error), "a cluster that answers and ends jobs", "try again when it does"
        ) from None


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
