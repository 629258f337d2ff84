"""Which cell starts next, and on which device: one policy for the scheduler, the packs and the forecast.

Cells that need more than half a device go first: they fill the holes of nobody. Then the longest, so that no long cell
is left for the end, then the largest, then in the order of the sweep. What does not fit is passed by what does, but not
for ever. Standard library only.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from sweepack.leases import WHOLE, best_fit

STARVE_AFTER = 30.0  # seconds
_FILLINGS = 8.0  # keeping room leaves it idle, which costs most where cells take longer than STARVE_AFTER

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True)
class Ask:
    """What a cell (or another job: without a ``share``) needs, and what decides its place in the queue.

    ``share`` is in thousandths of a device, any of ``devices`` (keys; empty: every one would do), taken on ``count`` of
    them at once. ``needs`` are
    amounts of what the devices have in common (cores, MB of memory). ``minutes`` is the expected time, None if unknown.
    ``urgency`` puts a cell before others of its ``priority``.
    """

    share: int = 0
    needs: Mapping[str, int] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    minutes: float | None = None
    index: int = -1
    priority: int = 0
    urgency: int = 0
    count: int = 1

    @property
    def rank(self) -> tuple[float, ...]:
        """Its place in the queue, the lowest first. An unknown time may be a long one; what is no cell goes first."""
        minutes = math.inf if self.minutes is None else self.minutes
        large = self.share > WHOLE // 2
        return -self.priority, self.share > 0, -self.urgency, -self.count, -large, -minutes, -self.share, self.index

    @property
    def shape(self) -> Hashable:
        """The same for all that fit in the same places."""
        return self.share, self.count, self.devices, frozenset(self.needs.items())


@dataclass(frozen=True)
class Round(Generic[T]):
    """What starts now, each with its devices (mostly one), and the first for which no device has room."""

    started: list[tuple[T, tuple[str, ...]]]
    blocked: T | None


@dataclass
class _Group(Generic[T]):
    """Those that ask for the same: when the first does not fit, none does.

    ``passed`` is since when that is so: the time, and how often the pool had been filled by then.
    """

    ask: Ask
    line: list[tuple[tuple[float, ...], int, T]] = field(default_factory=list)
    passed: tuple[float, float] | None = None


class Queue(Generic[T]):
    """What waits to start. A round costs by the number of different asks and of starts, not by the length.

    Room is kept for what has been passed for ``starve_after`` seconds, by as much as fills the pool eight times.
    """

    def __init__(self, starve_after: float = STARVE_AFTER) -> None:
        self._starve_after = starve_after
        self._groups: dict[Hashable, _Group[T]] = {}
        self._tickets: dict[T, int] = {}
        self._issued = 0
        self._most: dict[str, int] = {}
        self._filled = 0.0

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, item: object) -> bool:
        return item in self._tickets

    def add(self, item: T, ask: Ask) -> None:
        """Put ``item`` in line; if it is there already, it takes its new place."""
        self._issued += 1
        self._tickets[item] = self._issued
        group = self._groups.get(ask.shape)
        if group is None:
            group = self._groups[ask.shape] = _Group(ask)
        heapq.heappush(group.line, (ask.rank, self._issued, item))

    def discard(self, item: T) -> None:
        """Take ``item`` out, if it is there."""
        self._tickets.pop(item, None)

    def admit(self, free: dict[str, int], available: dict[str, int], now: float) -> Round[T]:
        """Choose what starts at ``now`` (seconds of any clock that only goes forward), and take it out of the queue.

        ``free`` are the thousandths that are free on each device, ``available`` is what there is of the rest; what it
        does not name is not limited. Both are reduced by what starts.
        """
        self._most = {name: max(left, self._most.get(name, 1)) for name, left in available.items()}
        started: list[tuple[T, tuple[str, ...]]] = []
        blocked: T | None = None
        reserved: set[str] = set()
        withheld: Mapping[str, int] = {}
        fronts = [(group.line[0][:2], group) for group in self._groups.values() if self._has_front(group)]
        heapq.heapify(fronts)
        while fronts:
            group = heapq.heappop(fronts)[1]
            ask, item = group.ask, group.line[0][2]
            places = {key: free[key] for key in ask.devices} if ask.devices else free
            place = best_fit(places, ask.share, ask.count, reserved) if ask.share else ()
            limited = {name: n for name, n in ask.needs.items() if n and name in available}
            short = any(available[name] - withheld.get(name, 0) < n for name, n in limited.items())
            if place is not None and not short:
                self._take(ask.share, place, limited, free, available)
                started.append((item, place))
                self.discard(item)
                group.passed = None
                if self._has_front(group):
                    heapq.heappush(fronts, (group.line[0][:2], group))
                continue
            if place is None and not short and blocked is None:
                blocked = item
            if self._starves(group, now):
                # One for all who compete, since the roomiest stays so: more would leave others idle behind the first.
                if place is None and places:
                    reserved.update(sorted(places, key=places.__getitem__, reverse=True)[: ask.count])
                elif place is not None and not withheld:
                    withheld = limited
        self._groups = {shape: group for shape, group in self._groups.items() if group.line}
        return Round(started, blocked)

    def _take(
        self,
        share: int,
        devices: tuple[str, ...],
        needs: dict[str, int],
        free: dict[str, int],
        available: dict[str, int],
    ) -> None:
        parts = [needed / self._most[name] for name, needed in needs.items()]
        for device in devices:
            free[device] -= share
        if devices:
            parts.append(share * len(devices) / (WHOLE * len(free)))
        for name, needed in needs.items():
            available[name] -= needed
        self._filled += max(parts, default=0.0)

    def _starves(self, group: _Group[T], now: float) -> bool:
        group.passed = group.passed or (now, self._filled)
        since, filled = group.passed
        return now - since > self._starve_after and self._filled - filled >= _FILLINGS

    def _has_front(self, group: _Group[T]) -> bool:
        """Drop what is no longer in the queue from the front of the line; whether something is left."""
        while group.line and self._tickets.get(group.line[0][2]) != group.line[0][1]:
            heapq.heappop(group.line)
        return bool(group.line)
