"""The advice at a run's end: right by the cap that a share leads to, and silent where nothing is to be gained."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_sweeps import end_cell, make_sweep
from sweepack import finish
from sweepack.advice import MARGIN, _Group, advise
from sweepack.aggregate import Aggregate
from sweepack.cli import app
from sweepack.leases import WHOLE
from sweepack.manifest import cell_files
from sweepack.memory import GIB, cap
from sweepack.records import State
from typer.testing import CliRunner

TOTAL = round(47.5 * GIB)
SETTINGS = {"reserve": 300, "overhead": 600}
LAUNCH = {
    **{"share": 0, "threads": 1, "mem_mb": 0, "minutes": None, "index": 0, "devices": 0, "round_robin": False},
    **{"start": "auto", "timeout": 1, "rejected": 0},
}


def memory(reserved, total=TOTAL, limit=None, allocated=None):
    sizes = {"reserved": reserved, "allocated": allocated, "cap": limit, "total": total}
    return {"rss": 1, **{name: size and round(size) for name, size in sizes.items()}}


@pytest.fixture
def sweep(tmp_path):
    """Ends the cells of a sweep of twelve, and gives the advice."""
    directory = tmp_path / "s"
    manifest = make_sweep(directory, [{"a": number} for number in range(12)])

    def end(cells, used=None, settings=SETTINGS, **facts):
        known = {"device": "cuda:0 NVIDIA A40", "share": 1000}
        for cell in cells:
            end_cell(directory, f"{cell:04x}", **{**known, **facts})
            files = cell_files(directory, f"{cell:04x}")
            files.meaning.write_text(json.dumps({"launch": {**LAUNCH, "memory": settings}}))
            if used:
                files.usage.write_text(json.dumps(used))

    end.advice = lambda: advise(Aggregate(manifest, directory))
    return end


def test_a_smaller_share_is_advised_with_its_reasons(sweep):
    sweep(range(1, 12), memory=memory(2 * GIB))
    sweep([12], memory=memory(4.6 * GIB))
    assert sweep.advice() == [
        "12 cells of 1 device used at most 11 % of it (5.2 of 47.5 GiB with 0.6 GiB overhead): "
        "`gpu: 0.125` would run 8 at once"
    ]


def test_each_share_and_model_has_its_own(sweep):
    sweep([1, 2], memory=memory(4.6 * GIB), share=500)
    sweep([3], memory=memory(4.6 * GIB, total=24 * GIB), share=500)
    sweep([4], memory=memory(20 * GIB), share=1000)
    assert [re.findall("^[0-9]+|gpu: [0-9.]+", line) for line in sweep.advice()] == [
        ["1", "gpu: 0.5"],
        ["2", "gpu: 0.125"],
        ["1", "gpu: 0.25"],
    ]


def test_cells_near_their_cap_are_told_so(sweep):
    limit = cap(250, TOTAL, 300 * 10**6, 600 * 10**6)
    sweep([1, 2], memory=memory(0.99 * limit, limit=limit, allocated=0.5 * limit), share=250)
    # What the allocator keeps beyond what is used would be given back.
    assert sweep.advice() == []
    sweep([2], memory=memory(0.99 * limit, limit=limit, allocated=0.96 * limit), share=250)
    assert sweep.advice() == ["2 cells of 0.25 device used up to 96 % of their cap (10.8 of 11.2 GiB): little is left"]


@pytest.mark.parametrize(
    "facts",
    [
        {"memory": None},
        {"memory": memory(None)},
        {"memory": memory(GIB, total=None)},
        {"memory": {"rss": GIB}},
        {"memory": memory(GIB), "device": "cpu"},
        {"memory": memory(GIB), "device": "sim:0"},
        {"memory": memory(GIB), "world_size": 4},
        {"memory": memory(GIB), "status": State.FAILED},
        {"memory": memory(4.6 * GIB), "share": 125},  # nothing to gain
        {"memory": memory(40 * GIB)},
    ],
)
def test_nothing_is_said_without_numbers_or_gain(sweep, facts):
    sweep([1, 2, 3], **facts)
    assert sweep.advice() == []


def test_what_nvml_saw_beyond_torchs_count_has_room_as_well(sweep):
    saw = {"cell_memory": {"peak": 20.0}, "utilisation": {"mean": 95.0}}
    sweep([1], memory=memory(4.6 * GIB), used=saw)
    (line,) = sweep.advice()
    assert (
        "42 % of it" in line and "`gpu: 0.5` would run 2 at once, though the device was busy 95 % of the time" in line
    )


def test_the_settings_of_the_cells_count(sweep):
    sweep([1], memory=memory(4.6 * GIB), settings={"reserve": 300, "overhead": 6000})
    assert "`gpu: 0.25` would run 4" in sweep.advice()[0]


def test_it_stands_at_the_end_of_a_run_in_the_report_and_in_show(sweep, tmp_path, capsys):
    sweep(range(1, 13), memory=memory(4.6 * GIB))
    (line,) = sweep.advice()
    assert finish.table(["--sweep-dir", str(tmp_path / "s"), "--partial"]) == 0
    assert capsys.readouterr().out == f"advice: {line}\n"
    assert finish.report(["--sweep-dir", str(tmp_path / "s")]) == 0
    assert f"Advice: {line}" in (tmp_path / "s/report.html").read_text()
    shown = CliRunner().invoke(app, ["show", str(tmp_path / "s")], env={"COLUMNS": "300"})
    assert f"advice: {line}" in shown.output


@settings(max_examples=200)
@given(
    total=st.integers(8, 200),
    peak=st.floats(0.01, 200),
    share=st.integers(21, WHOLE),
    reserve=st.integers(1, 3000),
    overhead=st.integers(1, 3000),
)
def test_the_advised_share_holds_the_peak_and_the_next_smaller_would_not(total, peak, share, reserve, overhead):
    total, peak, reserve, overhead = total * GIB, round(peak * GIB), reserve * 10**6, overhead * 10**6
    group = _Group(share, total, reserve, overhead)
    group.add(memory(peak, total), None, None)
    line = group.advice()
    if line is None:
        return
    advised = round(float(re.search(r"gpu: ([0-9.]+)", line)[1]) * WHOLE)
    count = int(re.search(r"run (\d+) at", line)[1])
    assert advised < share and WHOLE // advised == count > WHOLE // share
    assert cap(advised, total, reserve, overhead) >= MARGIN * peak
    assert count * (cap(advised, total, reserve, overhead) + overhead) + reserve <= total


def test_a_share_that_was_too_small_for_others_is_not_made_smaller(sweep):
    sweep(range(1, 12), memory=memory(2 * GIB), share=250)
    assert "would run" in sweep.advice()[0]
    sweep([12], memory=memory(14 * GIB), share=500, outgrown=250)
    assert sweep.advice() == []
