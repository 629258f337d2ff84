"""The sweeps that are tried, beside each other as far as the cluster has room, each judged as it ends."""

from __future__ import annotations

import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sweepack.ddp.layout import Layout
from sweepack.launch import watch_driver
from sweepack.slurm.cluster import SlurmError
from sweepack.validation import checks
from sweepack.validation.causes import Cause, cause_of
from sweepack.validation.checks import FAIL, PASS, SKIP, Line
from sweepack.validation.requeue import Requeue
from sweepack.validation.trial import Trial

PATIENCE = "SWEEPACK_VALIDATE_MINUTES"
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_TELL_SECONDS = 30.0
_LOOK_SECONDS = 0.5
_PLAN_SECONDS = 600.0
# Before the other entries of the job's PATH: every srun starts a task too few.
_SRUN = """#!/bin/sh
PATH=${PATH#*:}
export PATH
for word do
  shift
  case $word in --ntasks=*) word=--ntasks=$((${word#--ntasks=} - 1)) ;; esac
  set -- "$@" "$word"
done
exec srun "$@"
"""


class Validation:
    """Runs the sweeps in ``folder`` and prints a line for each thing that must hold, as soon as it is known.

    ``snakemake`` is its command, ``slurm`` what the sweeps take over from the configuration, ``setup`` the shell lines
    that jobs run first, ``layout`` that of a cell on several devices (None: there are none). ``patience`` is how many
    seconds a sweep may take, those in the queue included.
    """

    def __init__(
        self,
        folder: Path,
        snakemake: Sequence[str],
        slurm: dict[str, Any],
        setup: list[str],
        layout: Layout | None,
        patience: float,
    ) -> None:
        self._snakemake = snakemake
        self._patience = patience
        self._driver_gone = watch_driver()
        self._layout = layout
        self._lines: list[Line] = []
        self._told = time.monotonic()
        quarter = {"gpu": 0.25}
        self._packed = Trial(folder, "packed", quarter, slurm, cells=8, epochs=3, seconds=1.0)
        # On a file system that shows new files late, there is time to see that the cells are under way.
        self._requeued = Trial(folder, "requeue", quarter, slurm, cells=2, epochs=120, seconds=1.0)
        self._requeue = Requeue(self._requeued)
        self._judges: dict[str, tuple[Trial, Callable[[], None]]] = {}
        self._judges["packed sweep"] = (self._packed, self._judge_packed)
        self._wide: Trial | None = None
        if layout:
            size = {"nodes": layout.nodes, "gpus_per_node": layout.gpus_per_node}
            broken = {**size, "slurm": {"setup": [*setup, f"export PATH={shlex.quote(str(folder / 'bin'))}:$PATH"]}}
            self._wide = Trial(folder, "wide", size, slurm, cells=1, epochs=3, seconds=0.0)
            self._refused = Trial(folder, "refused", broken, slurm, cells=1, epochs=3, seconds=0.0)
            self._judges[self._wide_title] = (self._wide, self._judge_wide)
            self._judges["wrong task count"] = (self._refused, self._judge_refused)
            shim = folder / "bin" / "srun"
            shim.parent.mkdir()
            shim.write_text(_SRUN)
            shim.chmod(0o755)
        if slurm.get("requeue", True):
            self._judges["requeue"] = (self._requeued, self._judge_requeued)

    @property
    def _wide_title(self) -> str:
        return f"cell on {self._layout}"

    @property
    def _finishing(self) -> list[Trial]:
        return [self._packed, *([self._wide] if self._wide else [])]

    def run(self) -> list[Line]:
        """The lines, which have been printed. Nothing that was started is left, however this ends."""
        try:
            if self._plan():
                self._run()
        finally:
            for signum in ENDING:
                signal.signal(signum, signal.SIG_IGN)
            self._stop_all()
        return self._lines

    def _plan(self) -> bool:
        """Whether the packed sweep, the least of all, could be planned; the task's import is tried by it too."""
        say("validate_cluster: tries small sweeps on the cluster, a few minutes beside the time in the queue")
        self._packed.start([*self._snakemake, "--dry-run"])
        end = time.monotonic() + _PLAN_SECONDS
        while self._packed.status is None:
            if time.monotonic() > end:
                cause = Cause(
                    f"no plan within {_PLAN_SECONDS / 60:.0f} min", "what keeps Slurm from answering, or Python"
                )
                self._tell(checks.failed("requests", cause))
                return False
            self._wait(["the plan, for which Slurm is asked and the task imported"])
        if self._packed.status:
            self._tell(checks.failed("requests", cause_of(self._packed)))
            self._tell(Line(SKIP, "everything else", "needs jobs that Slurm takes"))
            return False
        asks = " ".join(
            line.strip().removeprefix("asks ") for line in self._packed.output.splitlines() if " × sbatch " in line
        )
        self._tell(Line(PASS, "requests", f"Slurm takes {asks.strip()}"))
        return True

    def _run(self) -> None:
        left = dict(self._judges)
        for trial, _ in left.values():
            trial.start(self._snakemake)
        while left:
            self._requeue.look()
            for title, (trial, judge) in list(left.items()):
                if trial.status is not None:
                    judge()
                elif self._requeue.refusal and trial is self._requeued:
                    _stop_trial(trial)
                    judge()
                elif time.monotonic() - trial.begun > self._patience:
                    self._give_up(title, trial)
                else:
                    continue
                del left[title]
            if left:
                self._wait([_waiting(title, trial) for title, (trial, _) in left.items()])
        self._tell(checks.metrics("metrics", self._finishing))
        self._tell(checks.table("table", self._finishing))
        if self._layout is None:
            self._tell(Line(SKIP, "cells on several GPUs", "the partition has one node with one GPU"))
        if "requeue" not in self._judges:
            self._tell(Line(SKIP, "requeue", "`slurm.requeue: false`; a job that ends early goes on in a retry"))

    def _judge_packed(self) -> None:
        self._tell(checks.packed("packed sweep", self._packed))

    def _judge_wide(self) -> None:
        assert self._wide and self._layout
        self._tell(checks.wide(self._wide_title, self._wide, self._layout))

    def _judge_refused(self) -> None:
        assert self._layout
        self._tell(checks.refused("wrong task count", self._refused, self._layout))

    def _judge_requeued(self) -> None:
        if self._requeue.locked is False:
            change = (
                "how the file system is mounted: with locks that all nodes share (Lustre: -o flock; NFS: no local_lock)"
            )
            self._tell(Line(FAIL, "locks", "the lock of a cell that runs in a job is not seen from here", change))
        elif self._requeue.locked:
            self._tell(Line(PASS, "locks", "those that cells hold in jobs are seen from here"))
        if self._requeue.refusal:
            words = f"Slurm says: {self._requeue.refusal}"
            change = (
                "`slurm.requeue: false`, since this site has it off (`JobRequeue` in slurm.conf); retries go on instead"
            )
            self._tell(Line(FAIL, "requeue", words, change))
        elif self._requeue.job:
            self._tell(checks.resumed("requeue", self._requeued, self._requeue.job))
        else:
            self._tell(checks.failed("requeue", cause_of(self._requeued)))

    def _give_up(self, title: str, trial: Trial) -> None:
        words = f"not done within {self._patience / 60:g} min: {_waiting(title, trial)}"
        _stop_trial(trial)
        change = f"`{PATIENCE}=120` in the environment for more time, or a partition with a shorter queue"
        self._tell(Line(FAIL, title, words, change, trial.log))

    def _tell(self, line: Line) -> None:
        self._lines.append(line)
        self._told = time.monotonic()
        say(str(line))

    def _wait(self, for_what: Sequence[str]) -> None:
        if reason := self._driver_gone():
            sys.exit(f"validate_cluster: {reason}")
        if time.monotonic() - self._told > _TELL_SECONDS:
            self._told = time.monotonic()
            say(f"waiting for {'; '.join(for_what)}")
        time.sleep(_LOOK_SECONDS)

    def _stop_all(self) -> None:
        for trial, _ in self._judges.values():
            _stop_trial(trial)


def _stop_trial(trial: Trial) -> None:
    try:
        trial.stop()
    except SlurmError as error:
        say(f"validate_cluster: jobs of {trial.name} may be left in the queue: {error}")


def _waiting(title: str, trial: Trial) -> str:
    """What keeps ``trial``, as the queue has it."""
    jobs = ", ".join(
        f"Slurm job {job.id} is {job.state.lower()}" + (f" ({job.reason})" if job.reason not in ("None", "") else "")
        for job in trial.jobs()
    )
    return f"the {title}: {jobs}" if jobs else f"the {title}"


def say(text: str) -> None:
    print(text, flush=True)
