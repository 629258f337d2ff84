"""The one policy of what starts next: never more than there is, nothing idle that could work, nobody for ever last."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sweepack import admission
from sweepack.admission import Ask, Queue

DEVICES = ("a", "b", "c")

asks = st.lists(
    st.builds(
        Ask,
        share=st.integers(0, 1000),
        needs=st.fixed_dictionaries({"cores": st.integers(0, 6), "other": st.integers(0, 6)}),
        devices=st.sampled_from([(), ("a",), ("b", "c")]),
        minutes=st.none() | st.integers(1, 60),
        index=st.integers(0, 100),
        priority=st.integers(0, 2),
    ),
    max_size=25,
)


def queue_of(*asks, **options):
    queue = Queue(**options)
    for position, ask in enumerate(asks):
        queue.add(position, ask)
    return queue


def order(*asks):
    """The positions of ``asks`` in the order in which they start when there is room for all."""
    roomy = {f"device {number}": 1000 for number in range(len(asks))}
    return [position for position, _ in queue_of(*asks).admit(roomy, {}, 0.0).started]


@given(asks, st.tuples(*[st.integers(0, 1000)] * 3), st.integers(0, 12))
def test_what_starts_fits_and_nothing_that_fits_is_left(asks, room, cores):
    free, left = dict(zip(DEVICES, room, strict=True)), {"cores": cores}
    queue = queue_of(*asks)
    found = queue.admit(free, left, 0.0)
    started = dict(found.started)
    for device, at_first in zip(DEVICES, room, strict=True):
        assert free[device] == at_first - sum(asks[n].share for n, place in started.items() if device in place) >= 0
    assert left["cores"] == cores - sum(asks[n].needs["cores"] for n in started) >= 0
    assert len(queue) + len(started) == len(asks)
    for position, ask in enumerate(asks):
        places = ask.devices or DEVICES
        if position in started:
            assert position not in queue
            assert len(started[position]) == (1 if ask.share else 0) and set(started[position]) <= set(places)
        else:
            has_cores = ask.needs["cores"] <= left["cores"]
            assert not has_cores or (ask.share and all(free[key] < ask.share for key in places))
            assert found.blocked is not None or not has_cores, "somebody is blocked by the devices"


def test_priority_then_no_cells_then_urgency_then_large_long_large_and_the_sweep():
    assert order(
        Ask(300, minutes=5, index=6),
        Ask(300, minutes=5, index=5),
        Ask(400, minutes=5, index=7),
        Ask(300, minutes=9, index=8),
        Ask(300, index=9),
        Ask(501, minutes=1, index=10),
        Ask(10, minutes=1, index=11, urgency=1),
        Ask(),
        Ask(10, minutes=1, index=12, priority=1),
    ) == [8, 7, 6, 5, 4, 3, 2, 1, 0]


def test_the_fullest_device_with_room_is_taken():
    assert queue_of(Ask(300)).admit({"a": 1000, "b": 400, "c": 200}, {}, 0.0).started == [(0, ("b",))]


def test_only_the_devices_that_would_do_are_taken():
    free = {"a": 1000, "b": 300}
    assert queue_of(Ask(500, devices=("b",)), Ask(200, devices=("b",))).admit(free, {}, 0.0).started == [(1, ("b",))]


def test_blocked_is_the_first_that_the_devices_and_not_the_cores_keep_waiting():
    queue = queue_of(Ask(900, {"cores": 5}, index=0), Ask(800, {"cores": 1}, index=1), Ask(700, {"cores": 1}, index=2))
    assert queue.admit({"a": 100}, {"cores": 4}, 0.0).blocked == 1
    assert queue.admit({"a": 1000}, {"cores": 0}, 0.0).blocked is None


def test_several_devices_are_taken_all_at_once_or_not_at_all():
    free = {"a": 1000, "b": 300, "c": 1000}
    assert queue_of(Ask(1000, count=3), Ask(300)).admit(dict(free), {}, 0.0).started == [(1, ("b",))]
    found = queue_of(Ask(300), Ask(1000, count=2)).admit(free, {}, 0.0)
    assert found.started == [(1, ("a", "c")), (0, ("b",))], "those that need most devices go first"
    assert free == {"a": 0, "b": 0, "c": 0}


def test_what_was_taken_out_does_not_start_and_what_was_put_in_again_starts_once_in_its_new_place():
    queue = queue_of(Ask(100, index=0), Ask(100, index=1), Ask(100, index=2))
    queue.discard(1)
    queue.add(0, Ask(100, index=9))
    assert [item for item, _ in queue.admit({"a": 1000}, {}, 0.0).started] == [2, 0]
    assert not queue


def passes(queue, seconds, late, other, left, count=1):
    """How many of 200 others, which end one after another, have passed when each of the late ones starts."""
    free, left = {"a": 1000, "b": 1000}, dict(left)
    for number in range(200):
        queue.add(number, other)
    running = queue.admit(free, left, 0.0).started
    for number in range(count):
        queue.add(f"late {number}", late)
    now, passed, found = 0.0, 0, []
    while len(found) < count:
        now += seconds
        (ended,) = running.pop(0)[1]
        free[ended] += other.share
        for name in left:
            left[name] += other.needs[name]
        for item, device in queue.admit(free, left, now).started:
            if isinstance(item, str):  # and runs to the end
                found.append(passed)
            else:
                passed += 1
                running.append((item, device))
    return found


@pytest.mark.parametrize(
    ("late", "other", "left", "filling"),
    [
        (Ask(1000, urgency=1), Ask(250), {}, 8),
        (Ask(1000, urgency=1, devices=("b",)), Ask(250), {}, 8),
        (Ask(10, {"cores": 4}, urgency=1), Ask(10, {"cores": 1}), {"cores": 6}, 6),
    ],
)
def test_what_does_not_fit_is_passed_for_half_a_minute_and_eight_fillings_and_then_has_room_kept(
    late, other, left, filling
):
    assert 8 * filling <= passes(Queue(), 10.0, late, other, left)[0] <= 9 * filling, "eight fillings are more"
    assert 99 <= passes(Queue(), 0.3, late, other, left)[0] <= 102 + filling, "half a minute is more"
    assert passes(Queue(starve_after=1e9), 1.0, late, other, left)[0] == 200 - filling, "by all others"


def test_when_one_has_started_the_next_of_its_kind_is_passed_anew():
    first, second = passes(Queue(), 10.0, Ask(1000), Ask(250), {}, count=2)
    assert second - first >= 8 * 8


def test_room_is_kept_on_one_device_only():
    queue = queue_of(Ask(1000, index=0), Ask(999, index=1), *[Ask(100)] * 400, starve_after=-1.0)
    for now in range(28):
        queue.admit({"a": 0, "b": 900 * (now % 2), "c": 900 - 900 * (now % 2)}, {}, float(now))
    free = {"a": 500, "b": 400, "c": 300}
    queue.admit(free, {}, 30.0)
    assert free == {"a": 500, "b": 0, "c": 0}


def test_a_round_looks_at_each_kind_of_cell_and_not_at_each_cell(monkeypatch):
    tried = []
    monkeypatch.setattr(admission, "best_fit", lambda free, share, count, banned: tried.append(share))
    queue = queue_of(*[Ask(300 + 300 * (index % 2), {"cores": 1}, index=index) for index in range(2000)])
    queue.admit({"a": 0}, {"cores": 4}, 0.0)
    assert sorted(tried) == [300, 600]
