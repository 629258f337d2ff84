"""Leases: where a share is placed, whose turn it is, and how a wait ends."""

from __future__ import annotations

import os
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lease_tools import leftovers, until, waiting
from sweepack import leases
from sweepack.errors import UserError
from sweepack.leases import (
    WHOLE,
    Lease,
    LeaseAbandoned,
    LeasePool,
    LeaseTimeout,
    best_fit,
    lease_directory,
)

Ask = Callable[..., Future[Lease]]


@pytest.fixture
def ask() -> Iterator[Ask]:
    """Ask for a lease in another thread and come back once the request stands in the queue."""
    with ThreadPoolExecutor() as threads:

        def ask(pool: LeasePool, milli: int, label: str, **options: Any) -> Future[Lease]:
            future = threads.submit(pool.acquire, milli, label=label, timeout=60, **options)
            until(lambda: future.done() or label in waiting(pool))
            return future

        yield ask


# Placement


@pytest.mark.parametrize(
    ("free", "milli", "count", "banned", "place"),
    [
        ({"a": 1000, "b": 700, "c": 300}, 400, 1, (), ("b",)),
        ({"a": 700, "b": 700}, 700, 1, (), ("a",)),
        ({"a": 1000, "b": 700, "c": 300}, 400, 1, ("b",), ("a",)),
        ({"a": 1000, "b": 700, "c": 300}, 300, 2, (), ("c", "b")),
        ({"a": 1000, "b": 700, "c": 300}, 400, 3, (), None),
        ({"a": 399}, 400, 1, (), None),
    ],
)
def test_best_fit_picks_the_fullest_device_with_room(free, milli, count, banned, place):
    assert best_fit(free, milli, count, banned) == place


@given(
    free=st.dictionaries(st.sampled_from("abcdef"), st.integers(0, WHOLE)),
    milli=st.integers(1, WHOLE),
    count=st.integers(1, 4),
    banned=st.sets(st.sampled_from("abcdef")),
)
def test_best_fit_leaves_no_fuller_device_that_has_room(free, milli, count, banned):
    usable = [device for device in free if device not in banned and free[device] >= milli]
    place = best_fit(free, milli, count, banned)
    if place is None:
        assert len(usable) < count
    else:
        assert len(set(place)) == count and set(place) <= set(usable)
        order = list(free)
        for left in set(usable) - set(place):
            assert all((free[taken], order.index(taken)) < (free[left], order.index(left)) for taken in place)


def test_a_share_goes_to_the_fuller_device_and_comes_back(tmp_path):
    pool = LeasePool(tmp_path, ["a", "b"])
    with pool.acquire(300, label="first", device="b"), pool.acquire(500, label="second") as lease:
        assert lease.devices == ("b",)
        assert pool.free() == {"a": 1000, "b": 200}
    assert pool.free() == {"a": 1000, "b": 1000}
    assert leftovers(tmp_path) == set()


def test_of_three_shares_of_0_6_on_two_devices_the_third_waits(tmp_path, ask):
    pool = LeasePool(tmp_path, ["a", "b"])
    first, second = (pool.acquire(600, label=label) for label in ("first", "second"))
    assert {*first.devices, *second.devices} == {"a", "b"}
    third = ask(pool, 600, "third")
    assert waiting(pool) == ["third"]
    second.release()
    assert third.result().devices == ("b",)
    assert waiting(pool) == []


def test_several_devices_are_taken_all_at_once_or_not_at_all(tmp_path, ask):
    pool = LeasePool(tmp_path, ["a", "b", "c"])
    one, other = pool.acquire(500, label="one", device="a"), pool.acquire(500, label="other", device="b")
    both = ask(pool, 600, "both", count=2)
    assert pool.free() == {"a": 500, "b": 500, "c": 1000}
    one.release()
    assert set(both.result().devices) == {"a", "c"}
    other.release()


def test_a_pinned_request_waits_for_its_own_device(tmp_path):
    pool = LeasePool(tmp_path, ["a", "b"])
    with pool.acquire(600, label="first", device="b"), pytest.raises(LeaseTimeout, match=r"0\.6 of b;"):
        pool.acquire(600, label="second", device="b", timeout=0)


def test_pools_of_other_devices_share_the_directory_and_see_each_other(tmp_path):
    mine, theirs = LeasePool(tmp_path, ["a", "b"]), LeasePool(tmp_path, ["b", "c"])
    with theirs.acquire(700, label="theirs", device="c"), theirs.acquire(700, label="shared", device="b"):
        assert mine.free() == {"a": 1000, "b": 300}
        assert [(holder.label, holder.devices, holder.milli, holder.pid) for holder in mine.holders()] == [
            ("theirs", ("c",), 700, os.getpid()),
            ("shared", ("b",), 700, os.getpid()),
        ]
        assert mine.acquire(400, label="mine").devices == ("a",)


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        ({"milli": 1001}, "1 to 1000 thousandths"),
        ({"milli": 0}, "1 to 1000 thousandths"),
        ({"milli": 500, "count": 3}, "1 to 2: the request may use a, b"),
        ({"milli": 500, "count": 0}, "1 to 2"),
        ({"milli": 500, "device": "z"}, "a device of this pool: a, b"),
        ({"milli": 500, "device": "a", "count": 2}, "1 to 1: the request may use a"),
    ],
)
def test_a_request_that_can_never_be_met_is_refused_at_once(tmp_path, request_, told):
    with pytest.raises(UserError, match=told) as refusal:
        LeasePool(tmp_path, ["a", "b"]).acquire(**request_, label="huge")
    assert "huge" in refusal.value.key


# Fairness


def test_a_small_request_that_fits_passes_a_big_one_that_does_not(tmp_path, ask):
    pool = LeasePool(tmp_path, ["a"])
    held = pool.acquire(300, label="held")
    big = ask(pool, 1000, "big")
    pool.acquire(500, label="small", timeout=0).release()
    assert not big.done()
    held.release()
    big.result().release()


def test_a_big_request_is_not_starved_by_a_stream_of_small_ones(tmp_path, ask):
    pool = LeasePool(tmp_path, ["a"], starve_after=0.1)
    held = pool.acquire(400, label="small")
    big = ask(pool, 1000, "big")
    for _ in range(2000):  # the device is never empty unless room is kept for the big request
        try:
            following = pool.acquire(400, label="small", timeout=0)
        except LeaseTimeout as refusal:
            assert "came earlier: big" in str(refusal)
            break
        held.release()
        held = following
        time.sleep(0.005)
    else:
        pytest.fail("small requests pass for ever")
    held.release()
    big.result(timeout=60).release()


def test_room_is_kept_for_a_starved_request_on_as_many_devices_as_it_needs_and_no_more(tmp_path, ask):
    pool = LeasePool(tmp_path, ["a", "b", "c"], starve_after=0.0)
    held = {
        device: pool.acquire(milli, label=device, device=device)
        for device, milli in zip("abc", (500, 200, 300), strict=True)
    }
    big = ask(pool, 900, "big", count=2)
    assert pool.acquire(100, label="small", timeout=0).devices == ("a",)
    with pytest.raises(LeaseTimeout):
        pool.acquire(600, label="small", timeout=0)
    held["b"].release()
    held["c"].release()
    assert set(big.result().devices) == {"b", "c"}


def test_a_starved_request_on_one_device_keeps_nothing_on_others(tmp_path, ask):
    pool = LeasePool(tmp_path, ["a", "b"], starve_after=0.0)
    held = [pool.acquire(500, label=device, device=device) for device in "ab"]
    pinned = [ask(pool, 1000, f"pinned {device}", device=device) for device in "ab"]
    for device in "ab":
        with pytest.raises(LeaseTimeout):
            pool.acquire(100, label="small", device=device, timeout=0)
    elsewhere = LeasePool(tmp_path, ["b", "c"])
    assert elsewhere.acquire(100, label="small", timeout=0).devices == ("c",)
    for lease in held:
        lease.release()
    assert [future.result().devices for future in pinned] == [("a",), ("b",)]


@pytest.fixture
def sleeper(
    tmp_path: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[LeasePool, Callable[[], Lease]]]:
    """A request for 0.6 of a free device that stands in the queue but does not look, until it is woken."""
    monkeypatch.setattr(leases, "_SILENCE", 600.0)
    pool = LeasePool(tmp_path, ["a"])
    held = pool.acquire(1000, label="held")
    awake, asleep, looks = threading.Event(), threading.Event(), iter(range(1 << 30))

    def give_up() -> None:
        if next(looks) == 1:
            asleep.set()
            awake.wait(60)

    future = ask(pool, 600, "sleeper", give_up=give_up)
    asleep.wait(60)
    held.release()

    def wake() -> Lease:
        awake.set()
        return future.result(timeout=60)

    yield pool, wake
    awake.set()


def test_of_two_requests_that_fit_the_earlier_goes_first_though_the_later_looks_first(sleeper):
    pool, wake = sleeper
    with pytest.raises(LeaseTimeout, match="came earlier: sleeper"):
        pool.acquire(600, label="later", timeout=0)
    with pool.acquire(400, label="fits beside it", timeout=0):
        assert wake().devices == ("a",)


def test_a_stopped_waiter_blocks_nobody(sleeper, monkeypatch):
    pool, _ = sleeper
    monkeypatch.setattr(leases, "_SILENCE", 0.0)
    time.sleep(0.01)
    assert [holder.stalled for holder in pool.holders()] == [True]
    pool.acquire(600, label="later", timeout=0).release()


# Waiting


def test_a_timeout_names_who_holds_the_devices_and_leaves_nothing(tmp_path):
    pool = LeasePool(tmp_path, ["a", "b"])
    with pool.acquire(800, label="cell\none", count=2):
        with pytest.raises(LeaseTimeout) as end:
            pool.acquire(400, label="late", timeout=0.05)
        assert f"late waits for 0.4 of any 1 of a, b; held by cell one (0.8 of a, b, pid {os.getpid()}" in str(
            end.value
        )
        assert waiting(pool) == []


def test_a_wait_is_explained_at_its_start_and_again(tmp_path, monkeypatch):
    pool = LeasePool(tmp_path, ["a"])
    told: list[str] = []
    pool.acquire(1000, label="free", on_wait=told.append).release()
    assert told == []
    held = [pool.acquire(100, label=f"cell {n}") for n in range(10)]
    with pytest.raises(LeaseTimeout):
        pool.acquire(100, label="late", on_wait=told.append, timeout=0.05)
    (only,) = told
    assert "cell 7" in only and "cell 8" not in only and "and 2 more" in only and "\n" not in only
    monkeypatch.setattr(leases, "_REMIND", 0.01)
    with pytest.raises(LeaseAbandoned):
        pool.acquire(100, label="late", on_wait=told.append, give_up=lambda: "enough" if len(told) > 2 else None)
    for lease in held:
        lease.release()


def test_a_wait_ends_with_the_reason_to_give_up(tmp_path):
    pool = LeasePool(tmp_path, ["a"])
    reasons = iter([None, None, "the driver has died"])
    with pool.acquire(500, label="held"), pytest.raises(LeaseAbandoned, match="the driver has died"):
        pool.acquire(600, label="late", give_up=lambda: next(reasons))
    assert leftovers(tmp_path) == set()


def test_no_lease_is_taken_that_nobody_waits_for(tmp_path):
    with pytest.raises(LeaseAbandoned):
        LeasePool(tmp_path, ["a"]).acquire(600, label="late", give_up=lambda: "the driver has died")


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_an_interrupted_wait_leaves_nothing(tmp_path, interruption):
    pool = LeasePool(tmp_path, ["a"])

    def interrupt(_: str) -> None:
        assert waiting(pool) == ["late"]
        raise interruption

    with pool.acquire(500, label="held"), pytest.raises(interruption):
        pool.acquire(600, label="late", on_wait=interrupt)
    assert leftovers(tmp_path) == set()


# The directory


def test_the_lease_directory_is_the_one_given_and_only_its_owner_may_enter(tmp_path):
    directory = lease_directory({"SWEEPACK_LEASES": f"{tmp_path}/deep/er"})
    assert directory == tmp_path / "deep" / "er"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert lease_directory({"SWEEPACK_LEASES": str(directory)}) == directory


@pytest.mark.parametrize("shared_memory", [True, False])
def test_without_one_given_it_is_one_a_user_in_shared_memory_or_else_the_temporary_directory(
    tmp_path, monkeypatch, shared_memory
):
    monkeypatch.setattr(leases, "_SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if shared_memory:
        (tmp_path / "shm").mkdir()
    parent = tmp_path / "shm" if shared_memory else tmp_path
    assert lease_directory({"SWEEPACK_LEASES": ""}) == parent / f"sweepack-{os.getuid()}"


def test_a_lease_directory_that_is_a_link_a_file_or_of_another_user_is_refused(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    (tmp_path / "file").touch()
    for name, trouble in (("link", "a symbolic link"), ("file", "File exists")):
        with pytest.raises(UserError, match=trouble):
            lease_directory({"SWEEPACK_LEASES": str(tmp_path / name)})
    monkeypatch.setattr(os, "getuid", lambda: 123456)
    with pytest.raises(UserError, match=f"belongs to user {(tmp_path / 'mine').stat().st_uid}"):
        lease_directory({"SWEEPACK_LEASES": str(tmp_path / "mine")})
