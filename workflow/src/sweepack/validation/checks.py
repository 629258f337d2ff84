"""What must hold of the sweeps that were tried, once they have ended: a line for each."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sweepack.ddp.layout import Layout
from sweepack.records import State
from sweepack.validation.causes import Cause, cause_of, stated
from sweepack.validation.notes import SAMPLES
from sweepack.validation.trial import Trial, TriedCell

PASS, FAIL, SKIP = "PASS", "FAIL", "SKIP"
# A wrong number of tasks is noticed before torch is imported.
REFUSAL_SECONDS = 60


@dataclass(frozen=True)
class Line:
    """A verdict on ``title`` for people: ``words``, and of a failure ``change`` and perhaps a ``log``."""

    verdict: str
    title: str
    words: str
    change: str | None = None
    log: Path | None = None

    def __str__(self) -> str:
        text = f"{self.verdict}  {self.title}: {self.words}"
        text += f"\n        change: {self.change}" if self.change else ""
        return text + (f"\n        log:    {self.log}" if self.log else "")


def failed(title: str, cause: Cause) -> Line:
    return Line(FAIL, title, cause.words, cause.change, cause.log)


def packed(title: str, trial: Trial) -> Line:
    """Whether the cells shared a GPU side by side, each seeing that one alone."""
    cells = trial.tried()
    if trial.status != 0 or not _all_finished(trial, cells):
        return failed(title, cause_of(trial))
    seen: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for cell in cells:
        start, end = cell.notes[0][0], cell.notes[0][-1]
        devices = [entry for entry in start["visible"].split(",") if entry]
        if len(devices) != 1:
            words = f"a cell saw {len(devices)} devices instead of one (CUDA_VISIBLE_DEVICES={start['visible']})"
            change = "`slurm.setup` and the nodes' start files, which must not set CUDA_VISIBLE_DEVICES or "
            change += "SWEEPACK_DEVICES; or ask by `slurm.gpu_flag: gres`"
            return Line(FAIL, title, words, change, cell.files.log)
        seen.setdefault((start["host"], start["visible"]), []).append((start["start"], end["end"]))
    at_once = max(_most_at_once(spans) for spans in seen.values())
    if at_once < 2:
        words = f"its {len(cells)} cells of a quarter of a GPU ran one after another"
        change = "`slurm.cpus`, so that a job has CPUs for several cells (and `slurm.mem` for memory)"
        return Line(FAIL, title, words, change, next((trial.directory / "packs").glob("[0-9a-f]*.log"), None))
    hosts = ", ".join(sorted({host for host, _ in seen}))
    on = "a GPU" if cells[0].notes[0][0]["gpu"] else "a device that no driver knows (so on the CPU)"
    return Line(PASS, title, f"{len(cells)} cells, up to {at_once} at once on {on} of {hosts}")


def wide(title: str, trial: Trial, layout: Layout) -> Line:
    """Whether all ranks trained as one, each sample having been seen by one of them in every epoch."""
    cells = trial.tried()
    if trial.status != 0 or not _all_finished(trial, cells):
        return failed(title, cause_of(trial))
    (cell,) = cells
    if len(cell.notes) != layout.world_size:
        words = f"{len(cell.notes)} ranks left notes instead of {layout.world_size}"
        return Line(FAIL, title, words, "where results lie: on a file system that all nodes share", cell.files.log)
    # Of an epoch that was begun again, as after a preemption, the last time counts.
    ranks = [{note["epoch"]: note["samples"] for note in rank if "epoch" in note} for rank in cell.notes]
    for epoch in range(trial.epochs):
        samples = [number for rank in ranks for number in rank.get(epoch, [])]
        if sorted(samples) != list(range(SAMPLES)):
            words = f"in epoch {epoch} the {layout.world_size} ranks saw {len(set(samples))} of {SAMPLES} samples"
            words += f", {len(samples) - len(set(samples))} of them more than once"
            change = "what changes Lightning's samplers: variables of other launchers in `slurm.setup`"
            return Line(FAIL, title, words, change, cell.files.log)
    hosts = sorted({rank[0]["host"] for rank in cell.notes})
    return Line(
        PASS, title, f"{layout.world_size} ranks on {', '.join(hosts)} saw each of {SAMPLES} samples once an epoch"
    )


def metrics(title: str, trials: Sequence[Trial]) -> Line:
    """Whether each cell of the sweeps that finished left one result, and one row of history an epoch."""
    ended = [trial for trial in trials if trial.status == 0]
    if not ended:
        return Line(SKIP, title, "no sweep has finished")
    cells = rows = 0
    for trial in ended:
        for cell in trial.tried():
            results = len(list(cell.files.directory.rglob("result.json")))
            if results != 1 or cell.epochs != list(range(trial.epochs)):
                words = f"a cell of {trial.name} left {results} results and the epochs {cell.epochs}, expected one and "
                words += f"{list(range(trial.epochs))}"
                change = "what else writes to this folder, or where results lie: a file system with atomic renames"
                return Line(FAIL, title, words, change, cell.files.log)
            cells, rows = cells + 1, rows + len(cell.epochs)
    return Line(PASS, title, f"{cells} cells left one result each, and {rows} rows of history, each epoch once")


def table(title: str, trials: Sequence[Trial]) -> Line:
    """Whether the tables of the sweeps that finished have a row for each cell, with all metrics."""
    ended = [trial for trial in trials if trial.status == 0]
    if not ended:
        return Line(SKIP, title, "no sweep has finished")
    for trial in ended:
        with (trial.directory / "table.csv").open(newline="") as stream:
            rows = list(csv.DictReader(stream))
        whole = [row for row in rows if row.get("metrics.loss") and row.get("metrics.world_size")]
        if len(rows) != trial.cells or len(whole) != trial.cells:
            words = f"that of {trial.name} has {len(rows)} rows, {len(whole)} with all metrics, for {trial.cells} cells"
            change = "`--latency-wait` (`latency-wait` in the profile), if files of the nodes are seen late here"
            return Line(FAIL, title, words, change, trial.log)
    return Line(PASS, title, f"{sum(trial.cells for trial in ended)} rows, a cell each, all with their metrics")


def refused(title: str, trial: Trial, layout: Layout) -> Line:
    """Whether a cell whose srun started a task too few failed soon, naming both numbers."""
    cells = trial.tried()
    record = cells[0].record if cells else None
    if record is None or record.status not in (State.FAILED, State.FINISHED):
        return failed(title, cause_of(trial))
    log = cells[0].files.log
    if record.status is State.FINISHED:
        words = f"a cell trained although srun started {layout.world_size - 1} tasks of {layout.world_size}"
        return Line(FAIL, title, words, "what puts another `srun` before that of the PATH", log)
    seconds = (record.ended or 0) - (record.started or 0)
    words = stated(record.error or "")
    named = re.search(rf"started (\d+)\b.*\b{layout.world_size}\b", words)
    if not named or int(named[1]) == layout.world_size:
        return Line(FAIL, title, f"the error does not tell the numbers: {words}", cause_of(trial).change, log)
    if seconds >= REFUSAL_SECONDS:
        change = "how quickly srun starts tasks there, or a slow file system"
        return Line(FAIL, title, f"told only after {seconds:.0f} s: {words}", change, log)
    return Line(PASS, title, f"refused after {seconds:.1f} s: {words}")


def resumed(title: str, trial: Trial, job: str) -> Line:
    """Whether the cells of the requeued ``job`` went on where they were."""
    cells = trial.tried()
    if trial.status != 0 or not _all_finished(trial, cells):
        return failed(title, cause_of(trial))
    begun = []
    for cell in cells:
        attempt = cell.record.attempt if cell.record else 0
        again = [note["epoch"] for note in cell.notes[0] if note["attempt"] == attempt and "epoch" in note]
        if attempt < 2:
            return Line(FAIL, title, f"job {job} was not started again", "`JobRequeue` in slurm.conf", cell.files.log)
        if not again or again[0] == 0:
            change = "where results lie: checkpoints must be seen by all nodes"
            return Line(FAIL, title, f"attempt {attempt} began anew instead of going on", change, cell.files.log)
        if cell.epochs != list(range(trial.epochs)):
            words = f"its history has the epochs {cell.epochs} instead of each of {trial.epochs} once"
            return Line(FAIL, title, words, "what else writes to this folder", cell.files.log)
        begun.append(again[0])
    words = f"job {job} was started again, its cells went on at epoch {min(begun)} of {trial.epochs}, each epoch once"
    return Line(PASS, title, words)


def _all_finished(trial: Trial, cells: Sequence[TriedCell]) -> bool:
    return len(cells) == trial.cells and all(cell.finished and cell.notes for cell in cells)


def _most_at_once(spans: Sequence[tuple[float, float]]) -> int:
    return max(sum(start <= moment < end for start, end in spans) for moment, _ in spans)
