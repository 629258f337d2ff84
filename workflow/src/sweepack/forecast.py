"""How many cells will run at once, and for how long at most: the schedule, played through before it happens."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from sweepack.leases import WHOLE, best_fit


@dataclass(frozen=True)
class Demand:
    """What one cell asks for: thousandths of a device, threads, minutes (if known), and its device if that is fixed."""

    share: int
    cpus: int
    minutes: int | None = None
    device: int | None = None


@dataclass(frozen=True)
class Forecast:
    """``at_once`` is the largest number of cells side by side, ``minutes`` the time if every cell takes its own."""

    at_once: int
    minutes: int | None


def forecast(demands: Sequence[Demand], devices: int, cores: int | None = None) -> Forecast:
    """Start the cells in order, each as soon as one of ``devices`` and ``cores`` (None: no limit) have room for it."""
    free = {str(device): WHOLE for device in range(devices)}
    left = cores if cores is not None else sum(demand.cpus for demand in demands)
    queues: dict[Demand, deque[int]] = defaultdict(deque)
    for order, demand in enumerate(demands):
        queues[demand].append(order)
    timed = all(demand.minutes is not None for demand in demands)
    running: list[tuple[int, int, Demand, str]] = []
    ticket, now, most = itertools.count(), 0, 0
    while queues:
        # Cells that ask for the same are tried once: if the first does not fit, none does.
        for demand in sorted(queues, key=lambda demand: queues[demand][0]):
            threads = min(demand.cpus, cores) if cores is not None else demand.cpus
            keys = free if demand.device is None else {(key := str(demand.device % devices)): free[key]}
            while queues[demand] and threads <= left and (place := best_fit(keys, demand.share)):
                queues[demand].popleft()
                free[place[0]] -= demand.share
                keys = {key: free[key] for key in keys}
                left -= threads
                heapq.heappush(running, (now + (demand.minutes or 0), next(ticket), demand, place[0]))
        most = max(most, len(running))
        if not timed:
            return Forecast(most, None)
        queues = defaultdict(deque, {demand: queue for demand, queue in queues.items() if queue})
        now = running[0][0]
        while running and running[0][0] == now:
            _, _, demand, device = heapq.heappop(running)
            free[device] += demand.share
            left += min(demand.cpus, cores) if cores is not None else demand.cpus
    return Forecast(most, max([now, *(end for end, *_ in running)]))
