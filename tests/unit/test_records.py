"""The one function that decides whether a cell is finished, and what it makes of every kind of debris."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
from sweepack.files import is_locked, try_lock, write_atomic
from sweepack.records import CellFiles, Record, State, archive_attempt, assess, hand_over, read_history

DONE = Record("c1", State.FINISHED, attempt=2, rejected=1, started=1.0, ended=2.0, metrics={"x": 1})


@pytest.fixture
def files(tmp_path):
    return CellFiles(tmp_path)


def put(files, record, result=None):
    files.status.write_text(record.to_json())
    if result is not None:
        files.result.write_text(result)


def test_nothing_there_is_pending(files):
    found = assess(files.directory, "c1")
    assert (found.state, found.record, found.handed_over, found.rejected) == (State.PENDING, None, False, 0)


def test_finished_with_its_result_and_without(files):
    put(files, DONE)
    assert (assess(files.directory, "c1").state, assess(files.directory, "c1").handed_over) == (State.FINISHED, False)
    hand_over(files)
    found = assess(files.directory, "c1")
    assert found.handed_over and found.record == DONE and found.rejected == 1


@pytest.mark.parametrize("result", ["", "{", json.dumps({"cell": "c1", "status": "finished"}), DONE.to_json()[:-3]])
def test_a_broken_result_is_not_finished_and_counts_as_rejected(files, result):
    put(files, DONE, result)
    found = assess(files.directory, "c1")
    assert found.state is State.PENDING and "broken" in found.trouble and found.rejected == 2


@pytest.mark.parametrize(
    "status",
    [
        "",
        "[]",
        "{}",
        '{"cell": "c1"}',
        DONE.to_json().replace("finished", "done"),
        DONE.to_json().replace("1.0", '"x"'),
    ],
)
def test_a_broken_status_is_pending_and_says_so(files, status):
    files.status.write_text(status)
    found = assess(files.directory, "c1")
    assert found.state is State.PENDING and "status.json is broken" in found.trouble


def test_a_result_without_a_status_is_rejected(files):
    files.result.write_text(DONE.to_json())
    found = assess(files.directory, "c1")
    assert found.state is State.PENDING and found.rejected == 1 and found.trouble


def test_the_record_of_another_cell_does_not_count(files):
    put(files, DONE, DONE.to_json())
    found = assess(files.directory, "c2")
    assert found.state is State.PENDING and "belongs to cell c1" in found.trouble


def test_an_accepted_failure_is_not_finished_and_raises_the_count(files):
    failed = replace(DONE, status=State.FAILED, metrics=None)
    put(files, failed, failed.to_json())
    found = assess(files.directory, "c1")
    assert (found.state, found.rejected, found.trouble) == (State.FAILED, 2, None)


def test_running_is_running_as_long_as_somebody_holds_the_lock(files):
    put(files, replace(DONE, status=State.RUNNING))
    assert assess(files.directory, "c1").state is State.LOST
    lock = try_lock(files.lock)
    assert assess(files.directory, "c1").state is State.RUNNING
    os.close(lock)
    assert assess(files.directory, "c1").state is State.LOST


def test_archiving_keeps_everything_and_the_count_of_attempts(files):
    put(files, DONE, DONE.to_json())
    files.history.write_text('{"epoch": 0}\n')
    files.checkpoints.mkdir()
    (files.checkpoints / "last.ckpt").touch()
    archive = archive_attempt(files)
    assert {path.name for path in archive.iterdir()} == {"status.json", "result.json", "history.jsonl", "checkpoints"}
    assert Record.from_json((archive / "status.json").read_bytes()) == DONE
    found = assess(files.directory, "c1")
    assert found.state is State.PENDING and found.record.attempt == 2 and found.rejected == 1 and not found.trouble
    assert archive_attempt(files) is None, "there is nothing left to archive"
    put(files, DONE)
    assert archive_attempt(files).name == "3", "an archive is never overwritten"


def test_archiving_nothing_does_nothing(files):
    assert archive_attempt(files) is None


def test_history_ends_at_a_line_that_was_cut_short(files):
    files.history.write_text('{"epoch": 0}\n{"epoch": 1}\n{"epo')
    assert read_history(files) == [{"epoch": 0}, {"epoch": 1}]


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    target = tmp_path / "file"
    write_atomic(target, "old")

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(target, "new")
    assert target.read_text() == "old" and [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_lock_has_one_holder_and_looking_does_not_take_it(tmp_path):
    path = tmp_path / "lock"
    assert not is_locked(path)
    lock = try_lock(path)
    assert try_lock(path) is None and is_locked(path)
    os.close(lock)
    assert not is_locked(path)
    again = try_lock(path)
    assert again is not None
    os.close(again)
