"""The table of a sweep and its history, as the cells' directories stand.

Columns are typed in Arrow, from the values themselves; pandas and CSV are views of it. A column that no type holds
(``[1, "a", null]``, integers beyond 64 bits) is kept as JSON text, marked in the file's schema and in
``DataFrame.attrs["json"]``; ``values`` gives its Python values back.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sweepack.aggregate import Aggregate, Columns, flat, stack, transpose
from sweepack.contents import contents, remove_stamp, write_stamp
from sweepack.errors import UserError, Verbatim, did_you_mean
from sweepack.files import write_atomic
from sweepack.manifest import Manifest, cell_files
from sweepack.records import Assessment, State
from sweepack.usage import USAGE_COLUMNS, usage_columns

TABLE = pa.schema(
    [
        ("cell", pa.string()),
        ("name", pa.string()),
        ("status", pa.string()),
        ("attempt", pa.int64()),
        ("device", pa.string()),
        ("host", pa.string()),
        ("share", pa.float64()),
        ("batch", pa.int64()),
        ("memory_cap_gib", pa.float64()),
        ("peak_reserved_gib", pa.float64()),
        ("peak_rss_gib", pa.float64()),
        ("wall_s", pa.float64()),
        ("started", pa.timestamp("us", "UTC")),
        ("ended", pa.timestamp("us", "UTC")),
        *((name, pa.float64()) for name in USAGE_COLUMNS),
        ("failure", pa.string()),
        ("error", pa.string()),
    ]
)
HISTORY = pa.schema([("cell", pa.string()), ("epoch", pa.int64()), ("step", pa.int64())])
JSON_TEXT = {b"sweepack": b"json"}
ENDED_BADLY = (State.FAILED, State.INTERRUPTED, State.LOST)
REPORTED = (State.FINISHED, State.FAILED, State.RUNNING, State.INTERRUPTED, State.LOST, State.PENDING)


def build_table(manifest: Manifest, directory: Path) -> pd.DataFrame:
    """One row a cell, in index order, from what ``directory`` (``results/<sweep>``) holds now.

    ``share`` is a fraction of a device, ``batch`` what ``cell.batch`` was, ``wall_s`` in seconds, ``started`` and
    ``ended`` in UTC. In GiB are ``memory_cap_gib`` (of torch on a GPU; on a CPU of main memory), ``peak_reserved_gib``
    (the most that torch's allocator had of the GPU), ``peak_rss_gib`` (the most main memory of a process of the cell)
    and ``gpu_memory_gib`` (the most that NVML saw the cell's processes have of the GPU). ``gpu_util`` (percent) and
    ``gpu_power_w`` are NVML's means of the whole device while the cell ran. ``failure`` is the kind of failure, where
    it is a known one, ``error`` its text. Then come ``params.<dotted name>`` (the axes first) and ``metrics.<name>``
    (of finished cells only). Integers are Int64, floats float64 (a missing one is NaN), the others boolean, string or
    Arrow lists.
    """
    return table_of(Aggregate(manifest, directory))


def table_of(aggregate: Aggregate) -> pd.DataFrame:
    """The table of cells that have been read already."""
    return _to_pandas(_table(aggregate))


def build_history(manifest: Manifest, directory: Path) -> pd.DataFrame:
    """``cell``, ``epoch``, ``step`` and ``metrics.<name>`` of every row that the cells have logged, typed alike."""
    return history_of(Aggregate(manifest, directory))


def history_of(aggregate: Aggregate) -> pd.DataFrame:
    """The history of cells that have been read already."""
    return _to_pandas(_history(aggregate))


def write_tables(manifest: Manifest, directory: Path, *, partial: bool = False) -> Aggregate:
    """Write ``table`` and ``history`` (``.parquet`` and ``.csv``) and ``failures.csv`` into ``directory``.

    Returns what they show.

    Each file is replaced in one step, ``table.stamp`` last. Failures are the cells that failed, were interrupted or
    were lost. Raises UserError when a cell has neither finished nor failed, unless ``partial`` allows for holes.
    """
    remove_stamp(directory)
    aggregate = Aggregate(manifest, directory)
    table = _table(aggregate)
    states = zip(table["name"].to_pylist(), table["status"].to_pylist(), strict=True)
    missing = [f"{name} is {state}" for name, state in states if state not in (State.FINISHED, State.FAILED)]
    if missing and not partial:
        raise UserError(
            f"the cells of {manifest.sweep}",
            Verbatim(f"{len(missing)} of {len(table)} have not ended: {missing[0]}" + ", …" * (len(missing) > 1)),
            "cells that have all finished or failed",
            "run the sweep again, or ask for the table as it stands with --partial",
        )
    history = _history(aggregate)
    bad = table.filter(pc.is_in(table["status"], pa.array(ENDED_BADLY, pa.string())))
    failures = bad.select(["cell", "name", "status", "attempt", "error"]).append_column(
        "log", pa.array([str(cell_files(directory, cell).log) for cell in bad["cell"].to_pylist()], pa.string())
    )
    write_atomic(directory / "failures.csv", _csv(failures))
    write_atomic(directory / "history.csv", _csv(history))
    write_atomic(directory / "history.parquet", _parquet(history))
    write_atomic(directory / "table.csv", _csv(table))
    write_atomic(directory / "table.parquet", _parquet(table))
    aggregate.save()
    write_stamp(directory, contents(manifest, aggregate.states))
    return aggregate


def read_table(directory: Path) -> pd.DataFrame:
    """The table in ``directory``, typed as ``build_table`` gave it; raises UserError when there is none."""
    path = directory / "table.parquet"
    try:
        return _to_pandas(pq.read_table(path))
    except FileNotFoundError:
        raise UserError(
            str(path),
            Verbatim("no such file"),
            "the table that a finished sweep writes",
            f"run the sweep, or `python scripts/table.py --sweep-dir {directory} --partial`",
        ) from None


def values(table: pd.DataFrame, column: str) -> list[Any]:
    """The column as plain Python values: JSON text read back, what is missing (and NaN) as None."""
    present = [None if _is_missing(value) else value for value in table[column].tolist()]
    if column in table.attrs.get("json", ()):
        return [None if value is None else json.loads(value) for value in present]
    return present


def parameters(table: pd.DataFrame) -> list[str]:
    """The ``params.`` columns."""
    return [name for name in table.columns if name.startswith("params.")]


def varying(table: pd.DataFrame) -> list[str]:
    """The ``params.`` columns with more than one value, null being one."""
    return [name for name in parameters(table) if len(set(_keys(table, [name]))) > 1]


def numeric_metrics(table: pd.DataFrame) -> list[str]:
    """The ``metrics.`` columns that hold numbers."""
    metrics = (name for name in table.columns if name.startswith("metrics."))
    return [name for name in metrics if table[name].dtype in ("float64", "Int64")]


def find_column(key: str, name: str, known: Sequence[str]) -> str:
    """The one of ``known`` that ``name`` means, in full or by its end; raises UserError in the name of ``key``."""
    ends = [column for column in known if column.endswith(f".{name}")]
    exact = [column for column in (name, f"metrics.{name}", f"params.{name}") if column in known]
    if exact or len(ends) == 1:
        return (exact or ends)[0]
    short = [column.removeprefix("metrics.").removeprefix("params.") for column in known]
    raise UserError(key, name, "the name of one of the table's columns", did_you_mean(name, short))


def summary(table: pd.DataFrame) -> str:
    """``24 cells: 22 finished, 1 failed, 1 pending``."""
    counts = Counter(table["status"].tolist())
    parts = [f"{counts[state]} {state}" for state in REPORTED if counts[state]]
    return f"{len(table)} cell{'s' * (len(table) != 1)}: {', '.join(parts) or 'none'}"


def best(table: pd.DataFrame, metric: str, mode: str, over: str | None = None, top: int = 5) -> pd.DataFrame:
    """The ``top`` finished cells by ``metric`` (``mode``: max or min), the best first; NaN is never among them.

    With ``over`` (a parameter such as ``seed``) a row is a group of cells alike in every other parameter: the
    parameters that vary, then ``mean``, sample ``std`` and ``n``, the number of values that went in.
    Raises UserError for a metric, mode or parameter that there is not.
    """
    if mode not in ("max", "min"):
        raise UserError("--mode", mode, "max or min", "type `--mode max` when more is better, else `--mode min`")
    column = find_column("--metric", metric, numeric_metrics(table))
    ascending = mode == "min"
    scored = table[table[column].notna()]
    if over is None:
        ranked = scored.sort_values(column, ascending=ascending, kind="stable")
        return ranked.head(top).reset_index(drop=True)
    over = find_column("--over", over, parameters(table))
    others = [name for name in varying(table) if name != over]
    group = pd.Series(_keys(scored, others), scored.index, dtype="str")
    scores = scored[column].astype("float64").groupby(group, sort=False).agg(["mean", "std", "count"])
    firsts = scored.loc[~group.duplicated(), others].reset_index(drop=True)
    for name, score in zip(("mean", "std", "n"), ("mean", "std", "count"), strict=True):
        firsts[name] = scores[score].to_numpy()
    ranked = firsts.sort_values("mean", ascending=ascending, kind="stable")
    return ranked.head(top).reset_index(drop=True)


def _table(aggregate: Aggregate) -> pa.Table:
    rows: list[dict[str, Any]] = []
    for cell in aggregate.manifest.cells:
        seen = aggregate.states[cell.id]
        row = {"cell": cell.id, "name": cell.slug, "status": str(seen.state), "error": seen.trouble}
        rows.append(
            row
            | _attempt(seen)
            | usage_columns(aggregate.usage(cell.id))
            | flat("params.", cell.params)
            | metrics_of(seen)
        )
    return _typed(TABLE, transpose(rows, TABLE.names), [f"params.{axis}" for axis in aggregate.manifest.axes])


def _attempt(seen: Assessment) -> dict[str, Any]:
    record = seen.record
    if record is None:
        return {}
    started, ended = record.started, record.ended
    memory = record.memory or {}
    return {
        "attempt": record.attempt,
        "device": record.device,
        "host": record.host,
        "share": None if record.share is None else record.share / 1000,
        "batch": record.batch,
        "memory_cap_gib": _gib(memory.get("cap")),
        "peak_reserved_gib": _gib(memory.get("reserved")),
        "peak_rss_gib": _gib(memory.get("rss")),
        "wall_s": None if started is None or ended is None else ended - started,
        "started": None if started is None else round(started * 1e6),
        "ended": None if ended is None else round(ended * 1e6),
        "failure": record.failure,
        "error": seen.trouble or (record.error and _encodable(record.error)),
    }


def _gib(size: int | None) -> float | None:
    return None if size is None else size / 2**30


def metrics_of(seen: Assessment) -> dict[str, Any]:
    """The metrics of a finished cell, by their dotted names."""
    if seen.state is not State.FINISHED or seen.record is None:
        return {}
    return flat("metrics.", seen.record.metrics or {})


def _history(aggregate: Aggregate) -> pa.Table:
    logged = ((cell.id, aggregate.history(cell.id)) for cell in aggregate.manifest.cells)
    parts = ({"cell": [cell] * len(columns["epoch"]), **columns} for cell, columns in logged)
    return _typed(HISTORY, {name: [] for name in HISTORY.names} | stack(parts))


def _typed(fixed: pa.Schema, columns: Columns, axes: Sequence[str] = ()) -> pa.Table:
    """``fixed``, then the parameters (``axes`` first), then the metrics, the latter two typed by their values."""
    found = [name for name in columns if name not in fixed.names]
    found.sort(key=lambda name: axes.index(name) if name in axes else len(axes))
    fields = list(fixed)
    arrays = [pa.array(columns[field.name], field.type) for field in fields]
    for name in sorted(found, key=lambda name: name.startswith("metrics.")):
        column = columns[name]
        kind = _kind(column)
        if kind is None:
            column = [None if value is None else as_json(value) for value in column]
        fields.append(pa.field(name, kind or pa.string(), metadata=None if kind else JSON_TEXT))
        arrays.append(pa.array(column, fields[-1].type))
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def _kind(column: Iterable[Any]) -> pa.DataType | None:
    """The Arrow type that holds every value exactly, or None when only JSON text does."""
    present = [value for value in column if value is not None]
    kinds = set(map(type, present))
    if not kinds:
        return pa.null()
    if kinds == {bool}:
        return pa.bool_()
    if kinds == {int} and -(2**63) <= min(present) <= max(present) < 2**63:
        return pa.int64()
    integers = (value for value in present if type(value) is int)
    if kinds == {float} or (kinds == {int, float} and all(abs(value) <= 2**53 for value in integers)):
        return pa.float64()
    if kinds == {str} and all(_encodable(value) == value for value in present):
        return pa.string()
    if kinds == {list} and (inner := _kind(chain.from_iterable(present))):
        return pa.list_(pa.field("element", inner))
    return None


def _to_pandas(table: pa.Table) -> pd.DataFrame:
    frame = table.to_pandas(types_mapper=_pandas_type, ignore_metadata=True)
    frame.attrs["json"] = [
        field.name for field in table.schema if field.metadata and JSON_TEXT.items() <= field.metadata.items()
    ]
    return frame


def _pandas_type(kind: pa.DataType) -> Any:
    if pa.types.is_nested(kind) or pa.types.is_null(kind):
        return pd.ArrowDtype(kind)
    return {pa.int64(): pd.Int64Dtype(), pa.bool_(): pd.BooleanDtype(), pa.string(): pd.StringDtype()}.get(kind)


def _parquet(table: pa.Table) -> bytes:
    # pandas' own metadata lets a bare `pandas.read_parquet` find Int64 and boolean too; it can't name list types.
    frame = _to_pandas(table)
    lists = {name: object for name, kind in frame.dtypes.items() if isinstance(kind, pd.ArrowDtype)}
    metadata = pa.Schema.from_pandas(frame.astype(lists), preserve_index=False).metadata
    sink = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata(metadata), sink)
    return bytes(sink.getvalue())


def _csv(table: pa.Table) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(table.column_names)
    writer.writerows(zip(*map(_csv_values, table.columns), strict=True))
    return stream.getvalue()


def _csv_values(column: pa.ChunkedArray) -> list[Any]:
    if column.null_count == 0 and pa.types.is_primitive(column.type) and not pa.types.is_temporal(column.type):
        return column.to_numpy().tolist()  # a tenth of what to_pylist takes
    values = column.to_pylist()
    if pa.types.is_timestamp(column.type):
        return [value and value.isoformat(timespec="microseconds") for value in values]
    if pa.types.is_list(column.type):
        return [None if value is None else as_json(value) for value in values]
    return values


def _keys(table: pd.DataFrame, columns: Sequence[str]) -> list[str]:
    """The values of each row in ``columns`` as one text that can be compared and hashed."""
    rows = zip(*(values(table, name) for name in columns), strict=True) if columns else [()] * len(table)
    return [json.dumps(row) for row in rows]


def _is_missing(value: Any) -> bool:
    return value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value))


def as_json(value: Any) -> str:
    """``value`` as JSON text that any file takes."""
    return _encodable(json.dumps(value, ensure_ascii=False))


def _encodable(text: str) -> str:
    """``text`` with lone surrogates escaped, as bytes that were no UTF-8 leave them."""
    return text.encode("utf-8", "backslashreplace").decode()
