"""The plan's forecast of the schedule, beside bounds that can be worked out by hand."""

from __future__ import annotations

import runpy
import statistics
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sweepack.admission import Ask
from sweepack.forecast import Demand, forecast, play, rehearsed

ROOT = Path(__file__).parents[2]

demands = st.lists(
    st.builds(Demand, share=st.integers(1, 1000), cpus=st.integers(1, 4), minutes=st.integers(1, 60)),
    min_size=1,
    max_size=30,
)


@pytest.mark.parametrize(
    ("share", "devices", "cores", "at_once"),
    [(150, 8, None, 48), (150, 8, 40, 40), (600, 2, None, 2), (1000, 3, 8, 3), (1, 1, None, 60)],
)
def test_equal_cells(share, devices, cores, at_once):
    found = forecast([Demand(share, 1, 10)] * 60, devices, cores)
    assert found.at_once == at_once and found.minutes == 10 * -(-60 // at_once)


def test_smaller_cells_fill_what_larger_ones_leave():
    cells = [Demand(600, 1), Demand(600, 1), Demand(600, 1), Demand(400, 1), Demand(400, 1)]
    assert forecast(cells, 2).at_once == 4 and forecast(cells, 2).minutes is None


def test_a_fixed_device_is_waited_for():
    assert forecast([Demand(500, 1, 10, device=0)] * 4, 3).minutes == 20
    assert forecast([Demand(500, 1, 10, device=index) for index in range(4)], 3).minutes == 10


def test_a_cell_of_more_threads_than_cores_runs_alone():
    assert forecast([Demand(100, 8, 5)] * 3, 1, 2) == forecast([Demand(1000, 1, 5)] * 3, 1)


@given(demands, st.integers(1, 4), st.integers(1, 16))
def test_the_time_lies_between_the_bounds(cells, devices, cores):
    found = forecast(cells, devices, cores)
    work = max(
        sum(cell.share * cell.minutes for cell in cells) / (1000 * devices),
        sum(min(cell.cpus, cores) * cell.minutes for cell in cells) / cores,
        max(cell.minutes for cell in cells),
    )
    assert work <= found.minutes <= sum(cell.minutes for cell in cells)


def test_a_long_cell_at_the_end_of_the_sweep_is_not_left_for_the_end():
    assert forecast([Demand(500, 1, 10)] * 12 + [Demand(500, 1, 40)], 2).minutes == 40


def test_a_few_cells_are_put_in_a_better_order_than_longest_first():
    cells = [Demand(500, 1, minutes) for minutes in (7, 7, 6, 6, 5, 5, 4, 4, 4)]
    assert forecast(cells, 2).minutes < 15, "where the last of the short ones starts at 11"


@given(demands, st.integers(1, 4))
def test_a_rehearsal_never_makes_it_longer(cells, devices):
    pool, left = [str(device) for device in range(devices)], {"cores": 4}
    asks = [Ask(cell.share, {"cores": cell.cpus}, (), cell.minutes, index) for index, cell in enumerate(cells)]
    before, after = (max(play(given, pool, left)[1]) for given in (asks, rehearsed(asks, pool, left)))
    assert after <= before


@pytest.mark.parametrize(
    "asks", [[Ask(10, minutes=None), Ask(20, minutes=5)], [Ask(10, {"cores": 9}, minutes=5), Ask(20, minutes=9)]]
)
def test_what_cannot_be_rehearsed_keeps_its_order(asks):
    assert rehearsed(asks, ["a"], {"cores": 4}) == asks


def test_all_mixes_end_close_to_the_bound_when_times_are_known():
    ratios = defaultdict(list)
    for record in runpy.run_path(str(ROOT / "benchmarks" / "packing.py"))["measure"]([1, 2], 1, ["sweepack"]):
        ratios[record["mix"]].append(record["minutes"] / record["bound"])
    assert len(ratios) > 10
    assert statistics.mean(statistics.mean(found) for found in ratios.values()) <= 1.05
    assert max(max(found) for found in ratios.values()) <= 1.25
