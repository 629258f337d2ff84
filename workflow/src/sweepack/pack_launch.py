"""Run the cells of a pack: as many side by side as their shares and the cores allow, the next one as one ends.

Standard library only. Each cell is run as one that has a job to itself: its own process, lease, lock, log and record.
One that fails fails alone; the pack's job fails at its end, and the next one runs what is left.
"""

from __future__ import annotations

import argparse
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sweepack.admission import Ask, Queue
from sweepack.devices import Device, load_nvml, main_memory, visible_pool
from sweepack.errors import UserError, tells_user_errors
from sweepack.files import is_locked, write_atomic
from sweepack.forecast import rehearsed
from sweepack.job import report
from sweepack.launch import TEMPORARY_FAILURE, watch_driver
from sweepack.leases import Lease, LeaseAbandoned, LeasePool, LeaseTimeout, lease_directory
from sweepack.mps.daemon import require_usable
from sweepack.packs import Pack, pack_file
from sweepack.records import State, assess
from sweepack.start import (
    Startable,
    launcher_options,
    lock_holder,
    must_run,
    next_try,
    read_cell,
    run_leased,
    take_lock,
    with_share,
)
from sweepack.supervise import Relay

_TELL_SECONDS = 10.0
_RETRY_SECONDS = 0.5


def parser() -> argparse.ArgumentParser:
    parser = launcher_options(
        "Run the cells of a pack side by side, each on its share of a device. `snakemake` does this where "
        "cells are packed (`cells_per_job`).",
        "pack",
    )
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1, help="CPU threads for all cells together")
    return parser


@tells_user_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Run the pack that ``argv`` names; the exit status."""
    options = parser().parse_args(argv)
    pack = Pack.read(options.sweep_dir, options.pack)
    try:
        return PackLauncher(options.sweep_dir, pack, options.cores, accept=bool(options.accept_failure)).run()
    except OSError as error:
        # A full disk, a lost mount: the cells stay what their records say.
        print(f"pack {options.pack}: {error}", file=sys.stderr)
        return 1


class PackLauncher:
    """Runs the cells of ``pack`` on the devices of this node with ``cores`` CPU threads in all."""

    def __init__(self, sweep: Path, pack: Pack, cores: int, accept: bool) -> None:
        self._sweep = sweep
        self._pack = pack
        self._accept = accept
        self._capacity = {"cores": cores, "mem_mb": main_memory()}
        self._driver_gone = watch_driver()
        self._relay = Relay()
        self._devices = visible_pool(os.environ, load_nvml())
        self._leases = LeasePool(lease_directory(), [device.key for device in self._devices])
        self._cells = {cell: with_share(read_cell(sweep, cell)) for cell in pack.cells}
        self._asks: dict[str, Ask] = {}
        self._queue: Queue[str] = Queue()
        self._running: dict[str, threading.Thread] = {}
        self._elsewhere: dict[str, float] = {}  # what another run has locked, and since when we wait for it
        self._ends: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self._statuses: dict[str, int] = {}
        self._begun = self._told = time.monotonic()
        self._log_file = pack_file(sweep, pack.name, "log")
        self._log = os.open(self._log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def run(self) -> int:
        """Run them all; the exit status: 0 when each has its result."""
        self._note(f"pack {self._pack.name} of {len(self._cells)} cells on {_place()}")
        if any(cell.mps for cell in self._cells.values()):
            require_usable(self._devices, os.environ)
        devices = [device.key for device in self._devices]
        asks = rehearsed([self._ask(cell) for cell in self._cells.values()], devices, self._capacity)
        self._asks = dict(zip(self._cells, asks, strict=True))
        for cell in self._cells.values():
            self._enqueue(cell)
        while self._queue or self._running or self._elsewhere:
            if self._stop_reason():
                for name in self._cells:
                    self._queue.discard(name)
                self._elsewhere.clear()
            elif self._start_what_fits():
                continue
            self._wait()
            self._look_elsewhere()
            self._tell()
        return self._conclude()

    def _stop_reason(self) -> str | None:
        return "stopped" if self._relay.caught else self._driver_gone()

    def _ask(self, cell: Startable) -> Ask:
        wanted = {"cores": cell.launch.threads, "mem_mb": cell.launch.mem_mb}
        needs = {name: min(amount, self._capacity[name]) for name, amount in wanted.items()}
        reach = tuple(device.key for device in cell.reach(self._devices))
        return Ask(cell.launch.share, needs, reach, cell.launch.minutes, cell.launch.index)

    def _enqueue(self, cell: Startable) -> None:
        self._queue.add(cell.id, self._asks[cell.id])

    def _start_what_fits(self) -> bool:
        """Start the cells for which there is room; whether some were settled without, so that there may be more."""
        if not self._queue:
            return False
        left = dict(self._capacity)
        for name in self._running:
            for what, amount in self._asks[name].needs.items():
                left[what] -= amount
        if left["cores"] < 1:
            return False
        admitted = self._queue.admit(self._leases.free(), left, time.monotonic())
        blocked, settled = admitted.blocked, False
        for name, (device, *_) in admitted.started:
            cell = self._cells[name]
            lock = self._lock(cell)
            if lock is None:
                continue
            if self._settle(cell, lock):
                settled = True
                continue
            try:
                lease = self._leases.acquire(cell.launch.share, label=cell.label, device=device, timeout=0)
            except LeaseTimeout:
                # Another run was quicker, or has waited for longer.
                os.close(lock)
                self._enqueue(cell)
                blocked = blocked or name
                continue
            self._start(cell, lease, lock)
        if blocked and not self._running and not settled:
            self._queue_for_lease(self._cells[blocked])
        return settled

    def _lock(self, cell: Startable) -> int | None:
        """Become the only process that runs the cell. None when another run has it, which may finish it."""
        if (lock := take_lock(cell)) is not None:
            return lock
        print(f"cell {cell.id} is running already ({lock_holder(cell.files)}); waiting for it", file=sys.stderr)
        self._elsewhere[cell.id] = time.monotonic()
        return None

    def _settle(self, cell: Startable, lock: int) -> bool:
        """Whether there is nothing to run, the cell being finished or its folder out of order."""
        try:
            if must_run(cell):
                return False
            self._statuses[cell.id] = 0
        except OSError as error:
            print(f"cell {cell.id}: {error}", file=sys.stderr)
            self._statuses[cell.id] = 1
        os.close(lock)
        return True

    def _queue_for_lease(self, cell: Startable) -> None:
        """Others hold the devices: let this cell stand in line for whichever comes free."""
        self._queue.discard(cell.id)
        lock = self._lock(cell)
        if lock is None or self._settle(cell, lock):
            return
        pool = LeasePool(self._leases.directory, [device.key for device in cell.reach(self._devices)])
        try:
            lease = pool.acquire(
                cell.launch.share,
                label=cell.label,
                timeout=cell.launch.timeout * 60,
                on_wait=lambda text: print(text, file=sys.stderr),
                give_up=self._stop_reason,
            )
        except (LeaseTimeout, LeaseAbandoned) as error:
            os.close(lock)
            self._not_started(cell, str(error))
        else:
            self._start(cell, lease, lock)

    def _not_started(self, cell: Startable, reason: str) -> None:
        print(f"cell {cell.id} did not start: {reason}", file=sys.stderr)
        self._statuses[cell.id] = TEMPORARY_FAILURE

    def _start(self, cell: Startable, lease: Lease, lock: int) -> None:
        device = next(device for device in self._devices if device.key == lease.devices[0])
        self._note(f"cell {cell.id} ({cell.slug}) starts on {device.label}")
        thread = threading.Thread(target=self._run_cell, args=(cell, device, lease, lock), name=cell.id)
        self._running[cell.id] = thread
        thread.start()

    def _run_cell(self, cell: Startable, device: Device, lease: Lease, lock: int) -> None:
        status = 1
        try:
            status = run_leased(cell, device, lease, lock, self._relay, accept=self._accept, terminal=self._log)
        except UserError as error:
            print(f"cell {cell.id} did not start: {error}", file=sys.stderr)
            status = TEMPORARY_FAILURE
        except OSError as error:
            print(f"cell {cell.id}: {error}", file=sys.stderr)
        finally:
            lease.release()
            os.close(lock)
            self._ends.put((cell.id, status))

    def _wait(self) -> None:
        """Wait for a cell to end, or, where other runs may make room, for a moment."""
        if not self._running and not self._elsewhere:
            return
        try:
            name, status = self._ends.get(timeout=_RETRY_SECONDS if self._queue or self._elsewhere else _TELL_SECONDS)
        except queue.Empty:
            return
        self._running.pop(name).join()
        cell = self._cells[name]
        record = assess(cell.files.directory, name).record
        if record is not None and record.status is not State.FINISHED:
            report(record, cell.slug, cell.files, sys.stderr.fileno())
        again = None if self._stop_reason() else next_try(cell, [self._log, sys.stderr.fileno()])
        if again is None:
            self._statuses[name] = status
            return
        self._cells[name] = again
        self._asks[name] = replace(self._asks[name], share=again.launch.share)
        self._enqueue(again)

    def _look_elsewhere(self) -> None:
        for name, since in list(self._elsewhere.items()):
            cell = self._cells[name]
            if not is_locked(cell.files.lock):
                del self._elsewhere[name]
                self._enqueue(cell)
            elif time.monotonic() - since > cell.launch.timeout * 60:
                del self._elsewhere[name]
                self._not_started(cell, f"still running elsewhere after {cell.launch.timeout} min")

    def _tell(self) -> None:
        now = time.monotonic()
        if now - self._told >= _TELL_SECONDS:
            self._told = now
            ended = f"{len(self._statuses)} of {len(self._cells)} cells ended{self._failures()}"
            print(f"pack {self._pack.name}: {ended}, {len(self._running)} running", file=sys.stderr)

    def _failures(self) -> str:
        failed = sum(status != 0 for status in self._statuses.values())
        return f" ({failed} without a result)" if failed else ""

    def _note(self, text: str) -> None:
        """A line in the pack's log."""
        os.write(self._log, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n".encode())

    def _conclude(self) -> int:
        missing = [name for name in self._cells if self._statuses.get(name) != 0]
        seconds = time.monotonic() - self._begun
        ended = f"{len(self._cells) - len(missing)} of {len(self._cells)} cells have their result"
        print(f"pack {self._pack.name}: {ended} after {seconds:.1f} s", file=sys.stderr)
        self._note(f"pack {self._pack.name}: {ended} after {seconds:.1f} s")
        if self._relay.caught:
            self._note(f"stopped by {signal.Signals(self._relay.caught).name}")
            return 128 + self._relay.caught
        if missing:
            print(f"  log: {self._log_file}", file=sys.stderr)
            return 1
        write_atomic(pack_file(self._sweep, self._pack.name, "done"), "")
        return 0


def _place() -> str:
    """Where this runs: the host and, in one, the Slurm job."""
    job = os.environ.get("SLURM_JOB_ID")
    again = os.environ.get("SLURM_RESTART_COUNT", "0")
    suffix = f", Slurm job {job}" if job else ""
    return os.uname().nodename + suffix + (f" (started again: {again})" if job and again != "0" else "")
