"""Snakemake's scheduler for cells: a job starts only when some device has room for it.

Snakemake's own schedulers see one sum of shares. Three cells of 0.6 pass a sum of 2.0, but two devices hold two of
them: the third would wait for its lease and meanwhile hold CPU cores that a cell of 0.4 could use. Here a cell is
admitted only if it can be placed, so cores are held by work and a waiting cell never stands in the way of one that
fits. The lease that the cell then takes remains the authority: other runs on this node compete for the same devices.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from snakemake.settings.enums import Quietness
from snakemake_interface_scheduler_plugins.base import SchedulerBase
from sweepack.admission import Ask, Queue
from sweepack.ddp.layout import Layout
from sweepack.devices import Device, load_nvml, visible_pool
from sweepack.errors import UserError
from sweepack.forecast import rehearsed
from sweepack.leases import WHOLE, LeasePool, best_fit, free_beside, lease_directory
from sweepack.start import read_cell


class Scheduler(SchedulerBase):
    """Admits jobs as ``sweepack.admission`` says, each as soon as CPU cores, memory and one device have room for it."""

    def __post_init__(self) -> None:
        self._queue: Queue[Any] = Queue()
        self._waiting: dict[Any, Ask] = {}
        self._running: dict[Any, Ask] = {}
        self._cores: int | None = None
        self._devices: list[Device] = []
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
        available = {name: value for name, value in available_resources.items() if isinstance(value, int)}
        selectable = selectable_jobs if isinstance(selectable_jobs, set) else set(selectable_jobs)
        try:
            self._forget_finished(selectable, available.get("_cores", 0))
            self._enqueue(selectable, available)
            selected = self._select(available)
        except UserError as error:
            self.logger.error(str(error))
            return None
        for job in selected:
            self._running[job] = self._waiting.pop(job)
        return selected

    def _forget_finished(self, selectable: set[Any], cores_left: int) -> None:
        if self._cores is None:
            self._cores = cores_left
        # A job that is selectable again has failed and is to be retried.
        self._running = {
            job: ask for job, ask in self._running.items() if job not in selectable and not self.dag.finished(job)
        }
        # Snakemake does not say which jobs failed for good, only how many cores are in use.
        surplus = sum(ask.needs.get("_cores", 0) for ask in self._running.values())
        surplus -= self._cores - cores_left
        if surplus > 0:
            leased = self._leased() if any(ask.share for ask in self._running.values()) else set()
            for job, ask in list(self._running.items()):
                if surplus > 0 and _label(job) not in leased:
                    surplus -= ask.needs.get("_cores", 0)
                    del self._running[job]

    def _enqueue(self, selectable: set[Any], available: Mapping[str, int]) -> None:
        asks = {job: self._ask(job, available) for job in selectable.difference(self._waiting)}
        cells = [job for job, ask in asks.items() if ask.share]
        if cells and not self._running:
            devices = self._leases().devices
            asks.update(zip(cells, rehearsed([asks[job] for job in cells], devices, available), strict=True))
        for job, ask in asks.items():
            self._waiting[job] = ask
            self._queue.add(job, ask)
        if len(self._waiting) > len(selectable):  # Snakemake may offer a part of what it offered before
            for job in self._waiting.keys() - selectable:
                del self._waiting[job]
                self._queue.discard(job)

    def _ask(self, job: Any, available: Mapping[str, int]) -> Ask:
        resources = job.scheduler_resources
        needs = {name: resources[name] for name in available.keys() & resources.keys()}
        share = min(resources.get("gpu_milli", 0), WHOLE)
        if not share:
            return Ask(needs=needs, priority=job.priority)
        self._leases()
        directory = Path(_label(job))
        try:
            cell = read_cell(directory.parent.parent, directory.name)
        except UserError:  # the cell itself will tell
            return Ask(share, needs, priority=job.priority)
        reach = cell.reach(self._devices)
        keys = tuple(device.key for device in reach) if len(reach) < len(self._devices) else ()
        count = 1
        if cell.launch.layout:
            count = Layout(**cell.launch.layout).devices_of(on_cpu=self._devices[0].kind == "cpu")
        return Ask(share, needs, keys, cell.launch.minutes, cell.launch.index, job.priority, count=count)

    def _select(self, available: dict[str, int]) -> list[Any]:
        free = self._free() if any(ask.share for ask in self._waiting.values()) else {}
        admitted = self._queue.admit(free, available, time.monotonic())
        selected = [job for job, _ in admitted.started]
        if admitted.blocked is not None and not selected and self._must_wait():
            self._queue.discard(admitted.blocked)
            selected.append(admitted.blocked)
        return selected

    def _must_wait(self) -> bool:
        """Whether a cell should queue for its lease although nothing has room: others hold the devices.

        Snakemake asks again only when a job of this run ends, so one cell does the waiting for the others.
        """
        if not self._running:
            return True
        ours = {_label(job) for job, ask in self._running.items() if ask.share}
        leased = self._leased()
        return ours <= leased and bool(leased - ours)

    def _leases(self) -> LeasePool:
        if self._pool is None:
            self._devices = visible_pool(os.environ, load_nvml())
            self._pool = LeasePool(lease_directory(), [device.key for device in self._devices])
        return self._pool

    def _leased(self) -> set[str]:
        return {holder.label for holder in self._leases().holders() if not holder.waiting}

    def _free(self) -> dict[str, int]:
        """Thousandths free on each device, less what cells take that were started but hold no lease yet."""
        pool = self._leases()
        holders = pool.holders()
        free = free_beside(holders, pool.devices)
        leased = {holder.label for holder in holders if not holder.waiting}
        for job, ask in self._running.items():
            if ask.share and _label(job) not in leased:
                place = best_fit({key: free[key] for key in ask.devices or free}, ask.share, ask.count)
                for device in place or ():
                    free[device] -= ask.share
        return free


def _as_progress(record: logging.LogRecord) -> bool:
    """Let `quiet: progress` cover the two lines that Snakemake prints about every round of scheduling."""
    if record.levelno == logging.INFO and str(record.msg).startswith(("Select jobs to execute", "Execute ")):
        record.quietness = Quietness.PROGRESS
    return True


@functools.cache
def _label(job: Any) -> str:
    """The folder of the job's cell, under which it leases its share."""
    return str(Path(str(next(iter(job.output)))).parent.absolute())
