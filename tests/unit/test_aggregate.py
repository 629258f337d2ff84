"""Tables that are written again: the finished cells are not read again, and nobody can tell by the tables."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from made_sweeps import end_cell, make_sweep
from sweepack.aggregate import stack
from sweepack.contents import contents, read_stamp
from sweepack.errors import UserError
from sweepack.files import write_atomic
from sweepack.manifest import Manifest, ManifestCell, cell_files
from sweepack.records import Record, State, archive_attempt, assess, hand_over
from sweepack.results import build_history, build_table, read_table, values, write_tables

TABLES = ("table.parquet", "table.csv", "history.parquet", "history.csv", "failures.csv", "table.stamp")
ROWS = [{"epoch": 0, "step": 10, "metrics": {"loss": 0.5}}]
OPENED = """
import sys
from pathlib import Path
opened = set()
sys.addaudithook(lambda event, arguments: opened.add(str(arguments[0])) if event == "open" else None)
from sweepack.manifest import Manifest
from sweepack.results import build_history, build_table, write_tables
directory = Path(sys.argv[1])
for name in sys.argv[2:]:
    opened.clear()
    globals()[name](Manifest.read(directory), directory)
    print(*sorted({Path(path).parent.name for path in opened if "/cells/" in path}))
"""


def opened(directory, *functions):
    """The cells of which each of the functions, called in turn, opens a file."""
    command = [sys.executable, "-c", OPENED, str(directory), *functions]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return [line.split() for line in lines]


def written(directory):
    write_tables(Manifest.read(directory), directory, partial=True)
    return {name: (directory / name).read_bytes() for name in TABLES}


def from_scratch(directory):
    """The tables of the same cells with nothing known of them; what is known stays as it is."""
    cache = directory / ".rows.parquet"
    aside = cache.rename(directory / "aside") if cache.exists() else None
    found = written(directory)
    cache.unlink(missing_ok=True)
    if aside:
        aside.rename(cache)
    return found


def rerun(directory, cell, metrics, rows=(), status=State.FINISHED, **facts):
    """Let the cell run once more, writing what a run writes, in the order in which it does."""
    files = cell_files(directory, cell)
    files.directory.mkdir(parents=True, exist_ok=True)
    archive_attempt(files)
    record = Record(cell, State.RUNNING, attempt=1, started=1000.0, share=500)
    write_atomic(files.status, record.to_json())
    if rows:
        files.history.write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_atomic(files.status, replace(record, status=status, ended=1002.5, metrics=metrics, **facts).to_json())
    if status is State.FINISHED:
        hand_over(files)


@pytest.fixture
def sweep(tmp_path):
    directory = tmp_path / "s"
    metrics = [{"acc": number / 7, "n": number} for number in range(1, 4)]
    manifest = make_sweep(directory, [{"a": number} for number in range(1, 4)], metrics, history=ROWS)
    write_tables(manifest, directory)
    return directory


def test_only_added_and_changed_cells_are_opened(tmp_path):
    directory = tmp_path / "s"
    made = make_sweep(directory, [{"a": number} for number in range(56)], [{"acc": 1.0}] * 50, history=ROWS)
    write_tables(replace(made, cells=made.cells[:50]), directory)
    new = [cell.id for cell in made.cells[50:]]
    for cell in new:
        end_cell(directory, cell, metrics={"acc": 2.0}, history=ROWS)
    rerun(directory, "0007", {"acc": 3.0}, ROWS)
    changed = ["0007", *new]
    views = "build_history", "write_tables", "build_table", "build_history", "write_tables"
    assert opened(directory, *views) == [changed, changed, [], [], []]
    assert len(build_history(made, directory)) == 56


def test_cells_that_have_not_finished_are_always_read(sweep):
    end_cell(sweep, "0002", State.INTERRUPTED, error="stopped by SIGTERM")
    write_tables(Manifest.read(sweep), sweep, partial=True)
    assert opened(sweep, "build_table") == [["0002"]]


def test_what_nvml_saw_is_kept_too_and_looked_for_only_where_there_was_a_gpu(tmp_path):
    directory = tmp_path / "s"
    manifest = make_sweep(directory, [{"a": 1}, {"a": 2}, {"a": 3}], [{"acc": 1.0}] * 3)
    for cell in ("0001", "0002"):
        end_cell(directory, cell, metrics={"acc": 1.0}, device="cuda:0 NVIDIA H200")
    for cell, power in (("0001", 250.0), ("0003", 10.0)):
        saw = {"cell_memory": {"mean": 1, "peak": 2}, "power": {"mean": power}, "utilisation": {"samples": 0}}
        cell_files(directory, cell).usage.write_text(json.dumps(saw))
    write_tables(manifest, directory)
    table = build_table(manifest, directory)
    assert values(table, "gpu_power_w") == [250, None, None]
    assert values(table, "gpu_memory_gib") == [2, None, None] and values(table, "gpu_util") == [None] * 3
    # It is written last of all: a table that was made just before has not seen it.
    assert opened(directory, "write_tables") == [["0002"]]
    cell_files(directory, "0002").usage.write_text('{"power": {"mean": 99.0}}')
    assert opened(directory, "write_tables", "write_tables") == [["0002"], []]
    assert values(read_table(directory), "gpu_power_w") == [250, 99, None]


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from([2**63, 2**53 + 1, -0.0, math.nan, math.inf, "", "a,b", 'é"\n', "\ud800", "null"])
)
kept = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.just("k"), inner), max_leaves=3
)
metrics = st.dictionaries(st.sampled_from(["m", "n", "m.k"]), kept, max_size=2)
index = st.none() | st.integers(0, 3) | st.just("late")
histories = st.lists(st.fixed_dictionaries({"epoch": index, "metrics": metrics}), max_size=3)
kinds = ("add", "remove", "restore", "rerun", "fail", "refuse", "forget", "damage", "unlog", "log", "cut", "rename")
edits = st.tuples(st.sampled_from(kinds), st.integers(0, 9), metrics, histories)


def each_kind(number, logged, rows):
    """Every kind of edit, each of a cell that has finished and is known."""
    return [[(kind, number, logged, rows)] for each in kinds for kind in (each, "rerun")]


@settings(max_examples=15, deadline=None)
@given(st.lists(st.lists(edits, min_size=1, max_size=4), min_size=1, max_size=3))
@example(each_kind(0, {"m": math.nan, "n": 2**63}, [{"epoch": 0, "metrics": {"m": "\ud800"}}]))
@example(each_kind(1, {"m": [], "n": "x"}, [{"epoch": 3, "metrics": {"n": 1}}])[::-1])
def test_whatever_happens_to_the_cells_the_tables_are_those_of_a_first_look(batches):
    with tempfile.TemporaryDirectory() as folder, mock.patch("os.fsync"):
        directory = Path(folder) / "s"
        cells = make_sweep(directory, [{"a": 1}] * 3, [{"m": 1, "m.k": True, "l": [0.5]}] * 3, history=ROWS).cells
        removed = []
        for batch in [[], *batches]:
            for edit in batch:
                apply(edit, directory, cells, removed)
            Manifest("s", "toy.py:train", ["a"], None, cells).write(directory)
            assert written(directory) == from_scratch(directory)


def apply(edit, directory, cells, removed):
    kind, number, logged, rows = edit
    if kind == "add":
        count = len(cells) + len(removed) + 1
        cells.append(ManifestCell(f"{count:04x}", f"cell-{count}", {"a": logged.get("m", count)}))
        rerun(directory, cells[-1].id, logged, rows)
    elif kind == "restore" and removed:
        cells.insert(0, removed.pop())
    if not cells:
        return
    cell = cells[number % len(cells)]
    files = cell_files(directory, cell.id)
    if kind == "remove":
        cells.remove(cell)
        removed.append(cell)
    elif kind == "rename":
        cells[cells.index(cell)] = replace(cell, slug="renamed", params={"a": logged.get("n")})
    elif kind == "rerun":
        rerun(directory, cell.id, logged, rows)
    elif kind == "fail":
        rerun(directory, cell.id, logged, rows, State.FAILED, error="ValueError: no")
    elif kind == "refuse":
        write_atomic(files.result, "{}")
    elif kind == "forget":
        files.result.unlink(missing_ok=True)
    elif kind == "damage":
        write_atomic(files.status, "{")
    elif kind == "unlog":
        files.history.unlink(missing_ok=True)
    elif kind in ("log", "cut"):
        with files.history.open("a") as stream:
            stream.write("".join(json.dumps(row) + "\n" for row in rows) if kind == "log" else '{"epo')


def test_a_rerun_of_the_same_size_and_time_is_seen(sweep):
    files = cell_files(sweep, "0002")
    text = files.status.read_text().replace('"n": 2', '"n": 7')
    for path in (files.status, files.result):
        before = path.stat()
        write_atomic(path, text)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert path.stat().st_size == before.st_size
    assert values(build_table(Manifest.read(sweep), sweep), "metrics.n") == [1, 7, 3]


def test_a_copied_sweep_is_read_anew_where_it_differs(sweep):
    copy = shutil.copytree(sweep, sweep.with_name("copy"))
    rerun(copy, "0001", {"acc": 1 / 7, "n": 9})
    assert values(build_table(Manifest.read(copy), copy), "metrics.n") == [9, 2, 3]


def older(path):
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({"sweepack": "0"}), path)


def foreign(path):
    shutil.copy(path.with_name("table.parquet"), path)


def directory_instead(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "harm",
    [
        Path.unlink,
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-20]),
        lambda path: path.write_text("PAR1 or so"),
        lambda path: path.write_bytes(path.read_bytes().replace(b"stamp", b"\xe5tamp")),
        older,
        foreign,
    ],
)
def test_a_cache_that_is_missing_damaged_or_of_another_kind_is_made_anew_in_silence(sweep, harm, capfd):
    names = (*TABLES, ".rows.parquet")
    before = {name: (sweep / name).read_bytes() for name in names}
    harm(sweep / ".rows.parquet")
    write_tables(Manifest.read(sweep), sweep)
    assert {name: (sweep / name).read_bytes() for name in names} == before
    assert capfd.readouterr() == ("", "")


def test_no_flipped_bit_of_the_cache_gets_into_a_table(sweep):
    cache, manifest = sweep / ".rows.parquet", Manifest.read(sweep)
    whole, history = cache.read_bytes(), build_history(manifest, sweep)
    for position in range(5, len(whole), 61):
        cache.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        pd.testing.assert_frame_equal(build_history(manifest, sweep), history)


def test_the_tables_are_written_though_the_cache_cannot_be(sweep, capsys):
    before = {name: (sweep / name).read_bytes() for name in TABLES}
    directory_instead(sweep / ".rows.parquet")
    assert written(sweep) == before
    assert ".rows.parquet was not written" in capsys.readouterr().err
    assert [path.name for path in sweep.iterdir() if path.name.endswith(".tmp")] == []


def test_looking_writes_nothing(sweep):
    manifest = Manifest.read(sweep)
    rerun(sweep, "0001", {"acc": 0.5}, ROWS)
    before = {path: path.read_bytes() for path in sweep.rglob("*") if path.is_file()}
    assert build_table(manifest, sweep)["metrics.acc"][0] == 0.5
    assert len(build_history(manifest, sweep)) == 3
    assert {path: path.read_bytes() for path in sweep.rglob("*") if path.is_file()} == before


def test_the_stamp_is_the_digest_of_what_the_tables_show_partial_or_not(sweep):
    def current():
        manifest = Manifest.read(sweep)
        return contents(
            manifest,
            {cell.id: assess(cell_files(sweep, cell.id).directory, cell.id) for cell in manifest.cells},
        )

    assert read_stamp(sweep) == current()
    rerun(sweep, "0001", None, status=State.INTERRUPTED)
    assert read_stamp(sweep) != current()
    write_tables(Manifest.read(sweep), sweep, partial=True)
    assert read_stamp(sweep) == current()
    rerun(sweep, "0001", {"acc": 1.0})
    assert read_stamp(sweep) != current()


def test_no_stamp_is_left_beside_tables_that_were_not_written(sweep):
    rerun(sweep, "0001", None, status=State.INTERRUPTED)
    with pytest.raises(UserError, match="cell-1 is interrupted"):
        write_tables(Manifest.read(sweep), sweep)
    assert read_stamp(sweep) is None
    rerun(sweep, "0001", {"acc": 1.0})
    write_tables(Manifest.read(sweep), sweep)
    assert read_stamp(sweep) is not None
    directory_instead(sweep / "table.parquet")
    with pytest.raises(OSError):
        write_tables(Manifest.read(sweep), sweep)
    assert read_stamp(sweep) is None


def test_removed_cells_are_forgotten(sweep):
    manifest = Manifest.read(sweep)
    write_tables(replace(manifest, cells=manifest.cells[1:]), sweep)
    assert pq.read_table(sweep / ".rows.parquet")["cell"].to_pylist() == ["0002", "0003"]
    write_tables(manifest, sweep)
    assert read_table(sweep)["cell"].tolist() == ["0001", "0002", "0003"]


def test_stacked_parts_keep_the_order_of_their_names_and_leave_gaps():
    assert stack([{"a": [1, 2]}, {}, {"b": [3], "a": [None]}, {"b": [4, 5]}]) == {
        "a": [1, 2, None, None, None],
        "b": [None, None, 3, 4, 5],
    }
