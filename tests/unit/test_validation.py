"""What `validate_cluster` says of what cells have left: each thing that must hold is missed when it does not."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from sweepack.ddp.layout import Layout
from sweepack.records import CellFiles, Record, State
from sweepack.validation import checks
from sweepack.validation.causes import cause_of
from sweepack.validation.notes import SAMPLES, file_of
from sweepack.validation.trial import Trial

IDS = ("0" * 12, "1" * 12)
TWO = Layout(2, 1, 2)


def ended(folder: Path, program: str = "true", cells: int = 2, epochs: int = 2) -> Trial:
    """A sweep whose Snakemake has ended."""
    trial = Trial(folder, "tried", {}, {}, cells, epochs, 0.0)
    trial.start([program])
    end = time.monotonic() + 30
    while trial.status is None:
        assert time.monotonic() < end
        time.sleep(0.01)
    return trial


def leave(
    trial: Trial,
    identity: str,
    ranks: Sequence[Sequence[dict[str, Any]]],
    epochs: Sequence[int] = (0, 1),
    **record: Any,
) -> CellFiles:
    """What a cell leaves that ended as ``record`` says, finished if it does not."""
    files = CellFiles(trial.directory / "cells" / identity)
    files.directory.mkdir(parents=True)
    kept = Record(identity, **{"status": State.FINISHED, "attempt": 1, "metrics": {"loss": 1.0}, **record}).to_json()
    files.status.write_text(kept)
    if Record.from_json(kept).status is State.FINISHED:
        files.result.write_text(kept)
    files.history.write_text("".join(json.dumps({"epoch": epoch, "metrics": {}}) + "\n" for epoch in epochs))
    for number, notes in enumerate(ranks):
        file_of(files.directory, number).write_text("".join(json.dumps({"attempt": 1, **n}) + "\n" for n in notes))
    return files


def span(start: float, end: float, visible: str = "0", host: str = "n1") -> list[dict[str, Any]]:
    return [{"start": start, "host": host, "visible": visible, "gpu": True}, {"end": end}]


@pytest.mark.parametrize(
    "second, words",
    [
        (span(1, 3), None),
        (span(2, 3), "one after another"),
        (span(1, 3, visible="1"), "one after another"),
        (span(1, 3, host="n2"), "one after another"),
        (span(1, 3, visible="0,1"), "saw 2 devices"),
        (span(1, 3, visible=""), "saw 0 devices"),
    ],
)
def test_packed_cells_share_one_gpu_side_by_side(tmp_path: Path, second: Any, words: str | None) -> None:
    trial = ended(tmp_path)
    leave(trial, IDS[0], [span(0, 2)])
    leave(trial, IDS[1], [second])
    line = checks.packed("packed", trial)
    assert line.verdict == ("FAIL" if words else "PASS"), line
    assert (words or "up to 2 at once on a GPU of n1") in line.words


EVEN, ODD = list(range(0, SAMPLES, 2)), list(range(1, SAMPLES, 2))


@pytest.mark.parametrize(
    "second, words",
    [
        (ODD, None),
        (EVEN, "saw 16 of 32 samples, 16 of them more than once"),
        (ODD[1:], "saw 31 of 32"),
        (None, "1 ranks"),
    ],
)
def test_ranks_see_each_sample_once(tmp_path: Path, second: list[int] | None, words: str | None) -> None:
    trial = ended(tmp_path, cells=1)

    def rank(host: str, last: list[int], first: list[int]) -> list[dict[str, Any]]:
        return [{"start": 0, "host": host}, {"epoch": 0, "samples": first}, {"epoch": 1, "samples": last}]

    leave(trial, IDS[0], [rank("n1", EVEN, EVEN), *([rank("n2", second, ODD)] if second else [])])
    line = checks.wide("wide", trial, TWO)
    assert line.verdict == ("FAIL" if words else "PASS"), line
    assert (words or "2 ranks on n1, n2") in line.words


@pytest.mark.parametrize("epochs, verdict", [((0, 1), "PASS"), ((0, 0, 1), "FAIL"), ((0,), "FAIL")])
def test_each_epoch_is_in_the_history_once(tmp_path: Path, epochs: Sequence[int], verdict: str) -> None:
    trial = ended(tmp_path, cells=1)
    leave(trial, IDS[0], [span(0, 1)], epochs)
    assert checks.metrics("metrics", [trial]).verdict == verdict


@pytest.mark.parametrize(
    "rows, verdict", [(["1,2", "1,2"], "PASS"), (["1,2"], "FAIL"), (["1,2", ",2"], "FAIL"), (["1,2"] * 3, "FAIL")]
)
def test_the_table_has_a_row_a_cell_with_all_metrics(tmp_path: Path, rows: list[str], verdict: str) -> None:
    trial = ended(tmp_path)
    trial.directory.mkdir(parents=True)
    (trial.directory / "table.csv").write_text("\n".join(["metrics.loss,metrics.world_size", *rows, ""]))
    assert checks.table("table", [trial]).verdict == verdict


@pytest.mark.parametrize(
    "record, words",
    [
        ({"error": "rank 0: srun started 1, but 2 nodes × 1 GPU make tasks 2: change `nodes`"}, None),
        ({"status": State.FINISHED}, "trained although srun started 1 tasks of 2"),
        ({"error": "srun started 1, but 2 nodes × 1 GPU make tasks 2", "ended": 190.0}, "told only after 120 s"),
        ({"error": "rank 1 did not appear"}, "does not tell the numbers"),
    ],
)
def test_a_wrong_task_count_is_refused_soon_and_by_name(tmp_path: Path, record: Any, words: str | None) -> None:
    trial = ended(tmp_path, "false", cells=1)
    leave(trial, IDS[0], [], (), **{"status": State.FAILED, "started": 70.0, "ended": 72.0, **record})
    line = checks.refused("refused", trial, TWO)
    assert line.verdict == ("FAIL" if words else "PASS"), line
    assert (words or "refused after 2.0 s") in line.words


@pytest.mark.parametrize(
    "attempt, again, epochs, words",
    [
        (2, [1], (0, 1), None),
        (1, [], (0, 1), "was not started again"),
        (2, [0, 1], (0, 1), "began anew"),
        (2, [1], (0, 1, 1), "instead of each of 2 once"),
    ],
)
def test_a_requeued_job_goes_on(
    tmp_path: Path, attempt: int, again: list[int], epochs: Sequence[int], words: str | None
) -> None:
    trial = ended(tmp_path, cells=1)
    notes = [{"epoch": 0}, *({"attempt": 2, "epoch": epoch} for epoch in again)]
    leave(trial, IDS[0], [notes], epochs, attempt=attempt)
    line = checks.resumed("requeue", trial, "7")
    assert line.verdict == ("FAIL" if words else "PASS"), line
    assert (words or "went on at epoch 1 of 2") in line.words


def slurm_log(text: str) -> Callable[[Trial], None]:
    def write(trial: Trial) -> None:
        (trial.directory / "packs").mkdir(parents=True)
        (trial.directory / "packs/slurm-0-7.log").write_text(text)
        trial.log.write_text("0: Slurm job 7: FAILED\n")

    return write


def killed_cell(trial: Trial) -> None:
    leave(trial, IDS[0], [], (), status=State.INTERRUPTED, error="the process of the cell was killed: SIGKILL")
    trial.log.write_text("0: Slurm job 7: OUT_OF_MEMORY\n")


def refused_plan(trial: Trial) -> None:
    trial.log.write_text(
        "Using profiles\nsweepack: error in slurm.account\n  value:    sbatch --account=x\n"
        "  expected: a job that Slurm takes\n"
        "  fix:      Slurm says: Invalid account.\n            Change `slurm.account`\n"
    )


@pytest.mark.parametrize(
    "leave_it, words, change",
    [
        (
            slurm_log("/bin/bash: line 2: module: command not found\n"),
            "Slurm job 7: FAILED; /bin/bash",
            "`slurm.setup`",
        ),
        (slurm_log("/home/me/.venv/bin/python: No such file or directory\n"), "No such file", "all nodes share"),
        (killed_cell, "killed: SIGKILL (Slurm job 7: OUT_OF_MEMORY)", "`slurm.mem`"),
        (refused_plan, "slurm.account: sbatch --account=x", "Invalid account. Change `slurm.account`"),
    ],
)
def test_the_cause_and_what_to_change_are_told(tmp_path: Path, leave_it: Any, words: str, change: str) -> None:
    trial = ended(tmp_path, "false")
    leave_it(trial)
    cause = cause_of(trial)
    assert words in cause.words and change in cause.change
