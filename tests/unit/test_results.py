from __future__ import annotations

import csv
import json
import math
import tempfile
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from made_sweeps import end_cell, make_sweep
from sweepack.comparison import difference
from sweepack.errors import UserError
from sweepack.manifest import Manifest
from sweepack.records import State
from sweepack.results import (
    best,
    build_history,
    build_table,
    find_column,
    read_table,
    summary,
    values,
    varying,
    write_tables,
)

GIB = 2**30
ROWS = [
    {"epoch": 0, "step": 10, "metrics": {"loss": 0.5}},
    {"epoch": 1, "step": 20, "metrics": {"loss": 0.25, "note": "late"}},
]


def test_a_row_a_cell_with_its_attempt_parameters_and_metrics(tmp_path):
    manifest = make_sweep(tmp_path / "s", [{"lr": 0.1}, {"lr": 0.2, "seed": 1}], [{"acc": 0.9}, {"acc": 0.8}])
    table = build_table(manifest, tmp_path / "s")
    assert list(table.columns) == [
        *("cell", "name", "status", "attempt", "device", "host", "share", "batch"),
        *("memory_cap_gib", "peak_reserved_gib", "peak_rss_gib", "wall_s", "started", "ended"),
        *("gpu_memory_gib", "gpu_util", "gpu_power_w", "failure", "error"),
        *("params.lr", "params.seed", "metrics.acc"),
    ]
    assert table["cell"].tolist() == ["0001", "0002"]
    first = table.iloc[0]
    assert (first["status"], first["attempt"], first["device"], first["share"]) == ("finished", 1, "cpu", 0.25)
    assert first["wall_s"] == 2.5
    assert first["started"] == pd.Timestamp("1970-01-01T00:16:40Z")
    assert table["metrics.acc"].tolist() == [0.9, 0.8]


def test_axes_come_before_the_other_parameters_in_their_order(tmp_path):
    manifest = make_sweep(tmp_path / "s", [{"a": 1, "seed": 0, "lr": 0.1}], [{"acc": 1}], axes=["lr", "seed"])
    table = build_table(manifest, tmp_path / "s")
    assert list(table.columns[19:]) == ["params.lr", "params.seed", "params.a", "metrics.acc"]


def test_only_finished_cells_have_metrics(tmp_path):
    directory = tmp_path / "s"
    manifest = make_sweep(directory, [{"a": number} for number in range(4)], [{"acc": 0.5}])
    end_cell(directory, "0002", State.FAILED, metrics={"acc": 0.7}, error="ValueError: no")
    end_cell(directory, "0003", State.INTERRUPTED, metrics={"acc": 0.7}, error="stopped by SIGTERM")
    table = build_table(manifest, directory)
    assert table["status"].tolist() == ["finished", "failed", "interrupted", "pending"]
    assert table["metrics.acc"].isna().tolist() == [False, True, True, True]
    assert table["error"].tolist()[1:3] == ["ValueError: no", "stopped by SIGTERM"]
    assert summary(table) == "4 cells: 1 finished, 1 failed, 1 interrupted, 1 pending"


def test_a_broken_record_shows_as_pending_and_says_why(tmp_path):
    manifest = make_sweep(tmp_path / "s", [{"a": 1}], [{"acc": 0.5}])
    (tmp_path / "s/cells/0001/result.json").write_text("{")
    table = build_table(manifest, tmp_path / "s")
    assert table["status"].tolist() == ["pending"]
    assert "broken" in table["error"][0]


def test_nested_parameters_become_dotted_names_and_an_empty_mapping_is_a_value(tmp_path):
    manifest = make_sweep(tmp_path / "s", [{"optim": {"lr": 0.1, "extra": {}}}, {"optim": {"lr": 0.2}}])
    table = build_table(manifest, tmp_path / "s")
    assert values(table, "params.optim.lr") == [0.1, 0.2]
    assert values(table, "params.optim.extra") == [{}, None]


@pytest.mark.parametrize(
    ("column", "dtype"),
    [
        ([1, None, 2**63 - 1], "Int64"),
        ([0.1, None, math.inf], "float64"),
        ([1, 0.5], "float64"),
        ([True, None, False], "boolean"),
        (["a, 'b'\n\"c\" {d}/e=é", None, ""], "string"),
        ([[0.9, 0.99], None, []], "list<element: double>[pyarrow]"),
        ([[["a"], []], [[None]]], "list<element: list<element: string>>[pyarrow]"),
        ([None, None], "null[pyarrow]"),
    ],
)
def test_values_of_one_kind_get_its_type_and_survive_the_file(tmp_path, column, dtype):
    table = written(tmp_path / "s", column)
    assert table["params.a"].dtype == dtype
    assert not table.attrs["json"]
    assert values(table, "params.a") == column


@pytest.mark.parametrize(
    "column",
    [
        [1, "a", None],
        [True, 1],
        [2**64, 1],
        [2**53 + 1, 0.5],
        [[1, "a"], [2]],
        [{}, "{}"],
        [[], {}],
        ["\ud800"],
    ],
)
def test_what_no_type_holds_is_json_text_that_gives_the_values_back(tmp_path, column):
    table = written(tmp_path / "s", column)
    assert table.attrs["json"] == ["params.a"]
    assert table["params.a"].dtype == "string"
    assert same(values(table, "params.a"), column)


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=2**53, max_value=2**80)
    | st.floats(allow_nan=False)
    | st.text()
    | st.sampled_from(["", "a b", "'\"", "x=1,y/{z}", "nul\0", "é日本", "null", "1e-3"])
)
parameters = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("kl"), inner, max_size=2)
)


@settings(max_examples=60, deadline=None)
@given(st.lists(parameters, min_size=1, max_size=4))
@example([-0.0, 1])
@example([[1, 0.5], [2**60]])
def test_the_table_survives_its_file_whatever_the_parameters(column):
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "s"
        table = written(directory, column)
        pd.testing.assert_frame_equal(table, build_table(Manifest.read(directory), directory))
        for row, value in enumerate(column):
            assert same(restored(table, row), value)


def written(directory, column):
    manifest = make_sweep(directory, [{"a": value} for value in column])
    write_tables(manifest, directory, partial=True)
    return read_table(directory)


def restored(table, row):
    """The parameter ``a`` of a row, put together from its dotted columns."""
    found = {}
    for column in table.columns:
        if column.split(".")[0] == "params" and (value := values(table, column)[row]) is not None:
            *parents, last = column.split(".")[1:]
            target = found
            for parent in parents:
                target = target.setdefault(parent, {})
            target[last] = value
    return found.get("a")


def same(found, value):
    """Equal type for type, but for an integer that stands among floats and a null inside a mapping, which is absent."""

    def plain(item):
        if isinstance(item, dict):
            kept = {key: plain(inner) for key, inner in item.items()}
            return {key: inner for key, inner in kept.items() if inner is not None} or None
        if isinstance(item, list):
            return ["list", *map(plain, item)]
        if type(item) is float and item.is_integer() and abs(item) <= 2**53:
            item = int(item)
        return item if item is None else f"{type(item).__name__} {json.dumps(item)}"

    return plain(found) == plain(value)


def test_pandas_alone_reads_the_file_with_its_types(tmp_path):
    manifest = make_sweep(tmp_path / "s", [{"n": 2**60 + 1, "b": True, "l": [1, 2]}, {"n": None, "b": None, "l": None}])
    write_tables(manifest, tmp_path / "s", partial=True)
    table = pd.read_parquet(tmp_path / "s/table.parquet")
    assert table["params.n"].tolist() == [2**60 + 1, pd.NA]
    assert table["params.b"].dtype == "boolean"
    assert list(table["params.l"][0]) == [1, 2]


def test_csv_holds_exact_floats_and_lists_as_json(tmp_path):
    params = [{"x": 0.1 + 0.2, "l": [1.5, None], "s": 'a "b",\nc', "n": 2**60 + 1}]
    write_tables(make_sweep(tmp_path / "s", params, [{"loss": math.nan}]), tmp_path / "s")
    (row,) = rows_of(tmp_path / "s/table.csv")
    assert (row["params.x"], row["params.n"]) == ("0.30000000000000004", str(2**60 + 1))
    assert json.loads(row["params.l"]) == [1.5, None]
    assert row["params.s"] == 'a "b",\nc'
    assert (row["metrics.loss"], row["error"]) == ("nan", "")
    assert (row["share"], row["started"]) == ("0.25", "1970-01-01T00:16:40.000000+00:00")


def test_failures_list_what_ended_badly_with_its_log(tmp_path):
    directory = tmp_path / "s"
    manifest = make_sweep(directory, [{"a": 1}, {"a": 2}], [{"acc": 1.0}, {"acc": 1.0}])
    write_tables(manifest, directory)
    assert (directory / "failures.csv").read_text() == "cell,name,status,attempt,error,log\n"
    end_cell(directory, "0002", State.FAILED, attempt=3, error="ValueError: a, b")
    write_tables(manifest, directory)
    (row,) = rows_of(directory / "failures.csv")
    log = str(directory / "cells/0002/log.txt")
    assert list(row.values()) == ["0002", "cell-2", "failed", "3", "ValueError: a, b", log]


def rows_of(path):
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_a_table_with_holes_is_written_only_when_asked_for(tmp_path):
    manifest = make_sweep(tmp_path / "s", [{"a": 1}, {"a": 2}], [{"acc": 1.0}])
    with pytest.raises(UserError, match="cell-2 is pending"):
        write_tables(manifest, tmp_path / "s")
    assert not (tmp_path / "s/table.parquet").exists()
    with pytest.raises(UserError, match="--partial"):
        read_table(tmp_path / "s")
    write_tables(manifest, tmp_path / "s", partial=True)
    assert read_table(tmp_path / "s")["status"].tolist() == ["finished", "pending"]


def test_history_has_a_typed_row_for_each_that_was_logged(tmp_path):
    directory = tmp_path / "s"
    manifest = make_sweep(directory, [{"a": 1}, {"a": 2}, {"a": 3}], [{}, None, {}], history=ROWS)
    with (directory / "cells/0003/history.jsonl").open("a") as stream:
        stream.write('{"epoch": 2, "met')
    history = build_history(manifest, directory)
    assert history["cell"].tolist() == ["0001", "0001", "0003", "0003"]
    assert history["epoch"].tolist() == [0, 1, 0, 1]
    assert history["step"].dtype == "Int64"
    assert history["metrics.loss"].tolist() == [0.5, 0.25, 0.5, 0.25]
    assert history["metrics.note"].tolist() == [pd.NA, "late", pd.NA, "late"]


def test_history_of_a_sweep_that_logs_nothing_is_empty(tmp_path):
    manifest = make_sweep(tmp_path / "s", [{"a": 1}], [{"acc": 1.0}])
    assert list(build_history(manifest, tmp_path / "s").columns) == ["cell", "epoch", "step"]
    write_tables(manifest, tmp_path / "s")
    assert (tmp_path / "s/history.csv").read_text() == "cell,epoch,step\n"


def pair(tmp_path, *metrics, history=(ROWS, ROWS), params=({"a": 1}, {"a": 1})):
    for side, values_, rows, mapping in zip("AB", metrics, history, params, strict=True):
        make_sweep(tmp_path / side, [mapping], [values_], history=rows)
    return tmp_path / "A", tmp_path / "B"


def test_runs_that_differ_only_in_attempt_device_and_time_are_equal(tmp_path):
    a, b = pair(tmp_path, {"loss": math.nan, "n": [1, 2]}, {"loss": math.nan, "n": [1, 2]})
    facts = {"attempt": 4, "device": "GPU-1", "host": "n2", "share": 1000, "started": 5.0, "ended": 9.0}
    end_cell(b, "0001", metrics={"loss": math.nan, "n": [1, 2]}, **facts)
    assert difference(a, b, exact=True) == []


@pytest.mark.parametrize(
    ("left", "right", "exact", "close"),
    [
        (0.5, 0.5 + 1e-16, False, True),
        (0.5, 0.5 + 1e-9, False, True),
        (0.5, 0.50001, False, False),
        (0.0, -0.0, False, True),
        (1, 1.0, False, True),
        (1, True, False, False),
        (math.nan, 1.0, False, False),
        (math.inf, math.inf, True, True),
        ([0.1, 1.0], [0.1, 1.0 + 1e-12], False, True),
        ("1", 1, False, False),
        (2**60, 2**60 + 1, False, False),
    ],
)
def test_exact_compares_bits_and_types_and_otherwise_numbers_agree_closely(tmp_path, left, right, exact, close):
    a, b = pair(tmp_path, {"m": left}, {"m": right})
    assert (difference(a, b, exact=True) == []) is exact
    assert (difference(a, b, exact=False) == []) is close


@pytest.mark.parametrize(
    ("sides", "line"),
    [
        ({"metrics": ({"m": 1.5}, {"m": 2.5})}, "metrics.m: 1.5 | 2.5"),
        ({"metrics": ({"m": 1.5}, {})}, "metrics.m: 1.5 | absent"),
        ({"params": ({"a": {"b": 1}}, {"a": {"b": 2}})}, "params.a.b: 1 | 2"),
        ({"metrics": ({"m": 1.5}, None)}, 'status: "finished" | "pending"'),
        ({"history": (ROWS, ROWS[:1])}, f"history row 1: {json.dumps(ROWS[1])} | absent"),
    ],
)
def test_each_difference_is_a_line_that_names_the_cell_and_both_values(tmp_path, sides, line):
    a, b = pair(tmp_path, *sides.pop("metrics", ({}, {})), **sides)
    assert difference(a, b, exact=True) == [f"0001 cell-1: {line}"]


def test_cells_of_one_side_only_are_differences(tmp_path):
    make_sweep(tmp_path / "A", [{"a": 1}, {"a": 2}])
    make_sweep(tmp_path / "B", [{"a": 1}])
    assert difference(tmp_path / "A", tmp_path / "B", exact=False) == [f"0002 cell-2: only in {tmp_path / 'A'}"]


def scored(tmp_path):
    """Two learning rates by two seeds and a list; the last cell of the better rate has diverged."""
    grid = [{"lr": lr, "seed": seed, "betas": [lr, 1.0]} for lr in (0.1, 0.2) for seed in (0, 1, 2)]
    scores = [0.5, 0.7, 0.6, 0.9, 0.8, math.nan]
    return build_table(make_sweep(tmp_path / "s", grid, [{"acc": score} for score in scores]), tmp_path / "s")


def test_best_cells_come_first_and_nan_is_never_among_them(tmp_path):
    table = scored(tmp_path)
    assert best(table, "acc", "max", top=3)["metrics.acc"].tolist() == [0.9, 0.8, 0.7]
    assert best(table, "metrics.acc", "min", top=99)["metrics.acc"].tolist() == [0.5, 0.6, 0.7, 0.8, 0.9]


def test_best_over_a_parameter_gives_mean_deviation_and_count_of_the_others(tmp_path):
    groups = best(scored(tmp_path), "acc", "max", over="seed")
    assert list(groups.columns) == ["params.lr", "params.betas", "mean", "std", "n"]
    assert groups["params.lr"].tolist() == [0.2, 0.1]
    assert groups["mean"].tolist() == pytest.approx([0.85, 0.6])
    assert groups["std"].tolist() == pytest.approx([math.sqrt(0.005), 0.1])
    assert groups["n"].tolist() == [2, 3]


def test_best_over_the_only_parameter_is_one_group(tmp_path):
    manifest = make_sweep(tmp_path / "s", [{"seed": 0}, {"seed": 1}], [{"acc": 1}, {"acc": 2}])
    (group,) = best(build_table(manifest, tmp_path / "s"), "acc", "max", over="seed").to_dict("records")
    assert (group["mean"], group["n"]) == (1.5, 2)


@pytest.mark.parametrize(
    ("arguments", "key", "fix"),
    [
        (("ac", "max"), "--metric", "did you mean `acc`"),
        (("acc", "maximum"), "--mode", "--mode max"),
        (("acc", "max", "sed"), "--over", "did you mean `seed`"),
    ],
)
def test_best_refuses_what_there_is_not(tmp_path, arguments, key, fix):
    with pytest.raises(UserError) as caught:
        best(scored(tmp_path), *arguments)
    assert caught.value.key == key
    assert fix in caught.value.fix


def test_columns_are_found_by_their_end_unless_that_is_ambiguous():
    known = ["cell", "params.a.lr", "params.b.lr", "params.seed", "metrics.seed", "params.x.width"]
    assert find_column("--sort", "width", known) == "params.x.width"
    assert find_column("--sort", "seed", known) == "metrics.seed"
    with pytest.raises(UserError, match=r"a\.lr, b\.lr"):
        find_column("--sort", "lr", known)


def test_parameters_vary_when_they_have_more_than_one_value_null_included(tmp_path):
    params = [{"a": 1, "b": [1], "c": None, "d": 0}, {"a": 1, "b": [2], "c": "x", "d": 0}]
    table = build_table(make_sweep(tmp_path / "s", params), tmp_path / "s")
    assert varying(table) == ["params.b", "params.c"]


def test_memory_and_the_kind_of_failure_have_their_columns_and_old_records_none(tmp_path):
    directory = tmp_path / "s"
    manifest = make_sweep(directory, [{"a": 1}, {"a": 2}, {"a": 3}], [{"acc": 1}, {"acc": 2}])
    memory = {"total": 8 * GIB, "cap": 2 * GIB, "reserved": GIB // 2, "allocated": GIB // 4, "rss": GIB}
    end_cell(directory, "0002", State.FAILED, memory=memory, batch=64, failure="oom_cap", error="OutOfMemoryError")
    end_cell(directory, "0003", metrics={"acc": 3}, memory=dict.fromkeys(memory) | {"rss": 2 * GIB})
    write_tables(manifest, directory)
    for table in (build_table(manifest, directory), read_table(directory)):
        columns = ["batch", "memory_cap_gib", "peak_reserved_gib", "peak_rss_gib", "failure"]
        rows = list(zip(*(values(table, name) for name in columns), strict=True))
        assert rows == [(None,) * 5, (64, 2.0, 0.5, 1.0, "oom_cap"), (None, None, None, 2.0, None)]
