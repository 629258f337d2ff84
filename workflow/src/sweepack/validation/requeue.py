"""Requeue a job in the middle of its cells, as an administrator or a preemption would."""

from __future__ import annotations

from sweepack.files import is_locked
from sweepack.records import State
from sweepack.slurm.cluster import SlurmError, run
from sweepack.validation.trial import Trial

# So many epochs are behind each cell by then.
BEFORE = 3


class Requeue:
    """Looks at ``trial`` until it is time, and requeues its job once.

    ``job`` is that job from then on, ``refusal`` is what Slurm said if it would not. ``locked``: whether the lock that
    a cell held in its job was seen from here (None: not looked at yet).
    """

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self.job: str | None = None
        self.refusal: str | None = None
        self.locked: bool | None = None

    def look(self) -> None:
        """Requeue the job if its cells are far enough."""
        if self.job or self.refusal:
            return
        cells = self._trial.tried()
        if len(cells) < self._trial.cells or any(len(cell.epochs) < BEFORE for cell in cells):
            return
        running = [job for job in self._trial.jobs() if job.state == "RUNNING"]
        if not running:
            return
        records = [cell.record for cell in cells]
        if any(record is None or record.status is not State.RUNNING for record in records):
            return
        self.locked = all(is_locked(cell.files.lock) for cell in cells)
        try:
            run(["scontrol", "requeue", running[0].id])
            self.job = running[0].id
        except SlurmError as error:
            self.refusal = str(error)
