"""The schedule, played through before it happens: how many cells run at once, for how long, and in which order best."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sweepack.admission import Ask, Queue
from sweepack.leases import WHOLE

_PLAYS = 12
_REHEARSED = 200  # cells; with more of them the last ones matter less, and a play costs more
_GOOD = 1.01  # of the least time that is possible at all


@dataclass(frozen=True)
class Demand:
    """What one cell asks for: thousandths of a device, threads, minutes (if known), its device if that is fixed.

    ``count`` is how many devices it takes at once.
    """

    share: int
    cpus: int
    minutes: int | None = None
    device: int | None = None
    count: int = 1


@dataclass(frozen=True)
class Forecast:
    """``at_once`` is the largest number of cells side by side, ``minutes`` the time if every cell takes its own."""

    at_once: int
    minutes: int | None


def forecast(demands: Sequence[Demand], devices: int, cores: int | None = None) -> Forecast:
    """Play through what the scheduler does with ``demands`` on ``devices`` and ``cores`` (None: no limit)."""
    pool = [str(device) for device in range(devices)]
    available = {} if cores is None else {"cores": cores}
    asks = [
        Ask(
            demand.share,
            {"cores": demand.cpus if cores is None else min(demand.cpus, cores)},
            () if demand.device is None else (pool[demand.device % devices],),
            demand.minutes,
            index,
            count=demand.count,
        )
        for index, demand in enumerate(demands)
    ]
    if any(ask.minutes is None for ask in asks):
        queue = _queue(asks)
        return Forecast(len(queue.admit(dict.fromkeys(pool, WHOLE), available, 0.0).started), None)
    at_once, ends = play(rehearsed(asks, pool, available), pool, available)
    return Forecast(at_once, int(max(ends, default=0)))


def play(asks: Sequence[Ask], devices: Sequence[str], available: Mapping[str, int]) -> tuple[int, list[float]]:
    """How many ``asks`` run at once at most, and the minute at which each ends. All must fit and give ``minutes``."""
    queue = _queue(asks)
    free, left = dict.fromkeys(devices, WHOLE), dict(available)
    ends = [0.0] * len(asks)
    running: list[tuple[float, int, tuple[str, ...]]] = []
    now, at_once = 0.0, 0
    while queue or running:
        for position, place in queue.admit(free, left, now * 60).started:
            ends[position] = now + (asks[position].minutes or 0.0)
            heapq.heappush(running, (ends[position], position, place))
        at_once = max(at_once, len(running))
        now = running[0][0]
        while running and running[0][0] == now:
            _, position, place = heapq.heappop(running)
            for device in place:
                free[device] += asks[position].share
            for name in left:
                left[name] += asks[position].needs.get(name, 0)
    return at_once, ends


def rehearsed(asks: Sequence[Ask], devices: Sequence[str], available: Mapping[str, int]) -> list[Ask]:
    """``asks`` with the urgency that lets the whole end soonest, as far as a few plays show.

    The cell that ends last goes first in the next play ("squeaky wheel", Joslin and Clements 1999), until the time is
    close to the least possible. Many cells, or such without ``minutes`` or that do not fit, are given back as they are.
    """
    best = tried = list(asks)
    kinds = {(ask.minutes, ask.shape) for ask in best}
    feasible = all(ask.needs.get(name, 0) <= left for ask in best for name, left in available.items())
    if not feasible or not 1 < len(kinds) <= len(best) <= _REHEARSED or any(minutes is None for minutes, _ in kinds):
        return best
    least = _least_minutes(best, devices, available)
    soonest = float("inf")
    for turn in range(_PLAYS):
        _, ends = play(tried, devices, available)
        if max(ends) < soonest:
            soonest, best = max(ends), tried
        if soonest <= _GOOD * least:
            break
        last = ends.index(max(ends))
        tried = [replace(ask, urgency=turn + 1) if position == last else ask for position, ask in enumerate(tried)]
    return best


def _queue(asks: Sequence[Ask]) -> Queue[int]:
    queue: Queue[int] = Queue()
    for position, ask in enumerate(asks):
        queue.add(position, ask)
    return queue


def _least_minutes(asks: Sequence[Ask], devices: Sequence[str], available: Mapping[str, int]) -> float:
    """No schedule is shorter: the longest cell, and the work over what there is to do it."""
    times = [(ask, ask.minutes or 0.0) for ask in asks]
    work = [sum(ask.share * ask.count * minutes for ask, minutes in times) / (WHOLE * len(devices))]
    for name, amount in available.items():
        work.append(sum(ask.needs.get(name, 0) * minutes for ask, minutes in times) / max(amount, 1))
    return max(*work, *(minutes for _, minutes in times))
