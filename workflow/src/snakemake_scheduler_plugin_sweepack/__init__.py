"""Snakemake's scheduler for cells: a job starts only when some device has room for it.

Snakemake's own schedulers see one sum of shares. Three cells of 0.6 pass a sum of 2.0, but two devices hold two of
them: the third would wait for its lease and meanwhile hold CPU cores that a cell of 0.4 could use. Here a cell is
admitted only if it can be placed, so cores are held by work and a waiting cell never stands in the way of one that
fits. The lease that the cell then takes remains the authority: other runs on this node compete for the same devices.
"""

from __future__ import annotations

import logging
import os
import time
from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from snakemake.settings.enums import Quietness
from snakemake_interface_scheduler_plugins.base import SchedulerBase
from sweepack.devices import load_nvml, visible_pool
from sweepack.errors import UserError
from sweepack.leases import LeasePool, best_fit, free_beside, lease_directory

STARVE_AFTER = 30.0


@dataclass(order=True)
class Request:
    """What a job needs, in the order of the queue: higher priority first, then the order of the sweep."""

    rank: tuple[int, int]
    job: Any = field(compare=False)
    needs: dict[str, int] = field(compare=False)
    share: int = field(compare=False, default=0)
    cell: str = field(compare=False, default="")
    devices: int = field(compare=False, default=0)
    pinned: int = field(compare=False, default=-1)
    passed: float = field(compare=False, default=0.0)


class Scheduler(SchedulerBase):
    """Admits jobs in the order of the sweep, each as soon as CPU cores, memory and one device have room for it."""

    def __post_init__(self) -> None:
        self._queue: list[Request] = []
        self._known: dict[Any, Request] = {}
        self._running: dict[Any, Request] = {}
        self._cores: int | None = None
        self._pool: LeasePool | None = None
        self.logger.addFilter(_as_progress)

    def select_jobs(
        self,
        selectable_jobs: Sequence[Any],
        remaining_jobs: Sequence[Any],
        available_resources: Mapping[str, int | str],
        input_sizes: dict[Any, int],
    ) -> Sequence[Any] | None:
        """The jobs to start now; None (Snakemake's greedy scheduler takes over) when the devices cannot be read."""
        available = {name: int(value) for name, value in available_resources.items() if isinstance(value, int)}
        selectable = set(selectable_jobs)
        self._forget_finished(selectable, available.get("_cores", 0))
        self._enqueue(selectable)
        try:
            selected = self._select(selectable, available)
        except UserError as error:
            self.logger.error(str(error))
            return None
        for request in selected:
            self._running[request.job] = request
            del self._known[request.job]
        chosen = {id(request) for request in selected}
        self._queue = [request for request in self._queue if id(request) not in chosen]
        return [request.job for request in selected]

    def _forget_finished(self, selectable: set[Any], cores_left: int) -> None:
        if self._cores is None:
            self._cores = cores_left
        # A job that is selectable again has failed and is to be retried.
        self._running = {
            job: request
            for job, request in self._running.items()
            if job not in selectable and not self.dag.finished(job)
        }
        # Snakemake does not say which jobs failed for good, only how many cores are in use.
        surplus = sum(request.needs.get("_cores", 0) for request in self._running.values())
        surplus -= self._cores - cores_left
        if surplus > 0:
            leased = self._leased() if any(request.share for request in self._running.values()) else set()
            for job, request in list(self._running.items()):
                if surplus > 0 and request.cell not in leased:
                    surplus -= request.needs.get("_cores", 0)
                    del self._running[job]

    def _enqueue(self, selectable: set[Any]) -> None:
        for job in selectable - self._known.keys():
            resources = job.scheduler_resources
            needs = {name: value for name, value in resources.items() if isinstance(value, int)}
            request = Request((-job.priority, needs.get("cell_index", -1)), job, needs)
            if "gpu_milli" in needs:
                request.share = needs["gpu_milli"]
                request.cell = str(Path(str(next(iter(job.output)))).parent.absolute())  # the lease's label
                request.devices = needs.get("pool_devices", 0)
                request.pinned = needs["cell_index"] if needs.get("round_robin") else -1
            self._known[job] = request
            insort(self._queue, request)

    def _select(self, selectable: set[Any], available: dict[str, int]) -> list[Request]:
        candidates = [request for request in self._queue if request.job in selectable]
        selected: list[Request] = []
        free: dict[str, int] | None = None
        reserved: set[str] = set()
        too_large: set[tuple[Any, ...]] = set()
        blocked: Request | None = None
        for request in candidates:
            shape = (request.share, request.pinned, tuple(request.needs.get(name, 0) for name in available))
            if shape in too_large:
                continue
            if any(request.needs.get(name, 0) > left for name, left in available.items()):
                too_large.add(shape)
                continue
            if request.share:
                free = self._free() if free is None else free
                places = _reach(request, free)
                place = best_fit(places, request.share, banned=reserved)
                if place is None:
                    too_large.add(shape)
                    blocked = blocked or request
                    if self._starves(request) and not reserved:
                        reserved.add(max(places, key=places.__getitem__))
                    continue
                free[place[0]] -= request.share
            for name in available:
                available[name] -= request.needs.get(name, 0)
            selected.append(request)
        if blocked and not selected and self._must_wait():
            selected.append(blocked)
        return selected

    def _starves(self, request: Request) -> bool:
        request.passed = request.passed or time.monotonic()
        return time.monotonic() - request.passed > STARVE_AFTER

    def _must_wait(self) -> bool:
        """Whether a cell should queue for its lease although nothing has room: others hold the devices.

        Snakemake asks again only when a job of this run ends, so one cell does the waiting for the others.
        """
        if not self._running:
            return True
        ours = {request.cell for request in self._running.values() if request.share}
        leased = self._leased()
        return ours <= leased and bool(leased - ours)

    def _leases(self) -> LeasePool:
        if self._pool is None:
            devices = visible_pool(os.environ, load_nvml())
            self._pool = LeasePool(lease_directory(), [device.key for device in devices])
        return self._pool

    def _leased(self) -> set[str]:
        return {holder.label for holder in self._leases().holders() if not holder.waiting}

    def _free(self) -> dict[str, int]:
        """Thousandths free on each device, less what cells take that were started but hold no lease yet."""
        pool = self._leases()
        holders = pool.holders()
        free = free_beside(holders, pool.devices)
        leased = {holder.label for holder in holders if not holder.waiting}
        for request in self._running.values():
            if request.share and request.cell not in leased:
                place = best_fit(_reach(request, free), request.share)
                if place:
                    free[place[0]] -= request.share
        return free


def _as_progress(record: logging.LogRecord) -> bool:
    """Let `quiet: progress` cover the two lines that Snakemake prints about every round of scheduling."""
    if record.levelno == logging.INFO and str(record.msg).startswith(("Select jobs to execute", "Execute ")):
        record.quietness = Quietness.PROGRESS
    return True


def _reach(request: Request, free: dict[str, int]) -> dict[str, int]:
    """The devices that the request may use: the first ones, or the one that is its turn."""
    keys = list(free)[: request.devices or None]
    if request.pinned >= 0:
        keys = [keys[request.pinned % len(keys)]]
    return {key: free[key] for key in keys}
