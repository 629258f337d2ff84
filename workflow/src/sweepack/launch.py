"""Start one cell: wait for it to be free, hand it over if it is finished, lease its share, run and watch its process.

Standard library only: a finished cell is handed over in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from sweepack.devices import Device, load_nvml, visible_pool
from sweepack.environment import cell_environment
from sweepack.errors import UserError, tells_user_errors
from sweepack.files import try_lock
from sweepack.job import Job
from sweepack.leases import WHOLE, Lease, LeaseAbandoned, LeasePool, LeaseTimeout, lease_directory
from sweepack.manifest import cell_files
from sweepack.records import Assessment, CellFiles, State, archive_attempt, assess, hand_over
from sweepack.supervise import run_cell

TEMPORARY_FAILURE = 75
_REMIND_SECONDS = 60.0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Run one cell of a sweep: lease its share of a device and run its task, or hand its result over "
        "if it is finished. `snakemake` does this for every pending cell."
    )
    parser.add_argument("--sweep-dir", type=Path, required=True, help="the sweep's directory, results/<sweep>")
    parser.add_argument("--cell", required=True, help="the cell's id, as in cells.tsv")
    parser.add_argument("--share", type=int, default=WHOLE, help="thousandths of a device (default: all of it)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads to pin (default: 1)")
    parser.add_argument("--devices", type=int, default=0, help="use only the first so many devices (0: all)")
    parser.add_argument("--index", type=int, default=0, help="the cell's place in the sweep")
    parser.add_argument("--round-robin", type=int, default=0, help="1: use device `index` modulo the devices")
    parser.add_argument("--rejected", type=int, default=0, help="how many results of this cell were refused so far")
    parser.add_argument("--accept-failure", type=int, default=0, help="1: a failure of the task is a result too")
    parser.add_argument("--start", choices=["auto", "fresh"], default="auto", help="auto: from the warm host")
    parser.add_argument("--timeout", type=float, default=1440.0, help="minutes to wait for the share (default: a day)")
    return parser


@tells_user_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Run the cell that ``argv`` names; the exit status."""
    options = parser().parse_args(argv)
    try:
        return _launch(options)
    except (LeaseTimeout, LeaseAbandoned) as error:
        print(f"cell {options.cell} did not start: {error}", file=sys.stderr)
        return TEMPORARY_FAILURE
    except OSError as error:
        # A full disk, a lost mount: the cell stays what its record says.
        print(f"cell {options.cell}: {error}", file=sys.stderr)
        return 1


def _launch(options: argparse.Namespace) -> int:
    files = cell_files(options.sweep_dir, options.cell)
    if not files.meaning.is_file():
        raise UserError(
            "--cell", options.cell, f"a cell of {options.sweep_dir}", "run `snakemake` once, or see its cells.tsv"
        )
    give_up = _watch_driver()
    lock = _lock_cell(files, options.timeout * 60, give_up)
    found = assess(files.directory, options.cell)
    if found.state is State.FINISHED and options.rejected <= found.rejected:
        hand_over(files)
        return 0
    _clear(files, found, options.rejected)
    pool = visible_pool(os.environ, load_nvml())[: options.devices or None]
    with _lease(options, pool, give_up) as lease:
        device = next(device for device in pool if device.key == lease.devices[0])
        return _run(options, files, device, lease, lock)


def _watch_driver() -> Callable[[], str | None]:
    """Tells when the process that started this one has gone: nobody would wait for a cell started after that."""
    driver = os.getppid()

    def gone() -> str | None:
        return None if os.getppid() == driver else "the process that asked for it has ended"

    return gone


def _lock_cell(files: CellFiles, timeout: float, give_up: Callable[[], str | None]) -> int:
    """Become the only process that runs the cell; another run's cell is waited for, since it may finish it."""
    begun = reminded = time.monotonic()
    told = False
    while (lock := try_lock(files.lock)) is None:
        if reason := give_up():
            raise LeaseAbandoned(reason)
        now = time.monotonic()
        holder = _lock_holder(files)
        if now - begun > timeout:
            raise LeaseTimeout(f"still running elsewhere ({holder}) after {timeout / 60:.0f} min")
        if not told or now - reminded > _REMIND_SECONDS:
            told, reminded = True, now
            print(f"cell {files.directory.name} is running already ({holder}); waiting for it", file=sys.stderr)
        time.sleep(0.2 + 0.2 * random.random())
    os.ftruncate(lock, 0)
    os.pwrite(lock, json.dumps({"pid": os.getpid(), "host": os.uname().nodename}).encode(), 0)
    return lock


def _lock_holder(files: CellFiles) -> str:
    try:
        holder = json.loads(files.lock.read_bytes())
        return f"pid {holder['pid']} on {holder['host']}"
    except (OSError, ValueError, KeyError):
        return "holder unknown"


def _clear(files: CellFiles, found: Assessment, rejected: int) -> None:
    """Take away what must not be continued from: the state behind a result that turned out to be broken."""
    if found.trouble or (found.state is State.FINISHED and rejected > found.rejected):
        archive = archive_attempt(files)
        reason = found.trouble or "its result.json is broken"
        print(f"cell {files.directory.name} runs again: {reason}; kept in {archive}", file=sys.stderr)


def _lease(options: argparse.Namespace, pool: list[Device], give_up: Callable[[], str | None]) -> Lease:
    pinned = pool[options.index % len(pool)].key if options.round_robin else None
    leases = LeasePool(lease_directory(), [device.key for device in pool])
    return leases.acquire(
        options.share,
        label=str(cell_files(options.sweep_dir, options.cell).directory.absolute()),
        device=pinned,
        timeout=options.timeout * 60,
        on_wait=lambda text: print(text, file=sys.stderr),
        give_up=give_up,
    )


def _run(options: argparse.Namespace, files: CellFiles, device: Device, lease: Lease, lock: int) -> int:
    """Run the cell in a process of its own, in its own environment, with its own log; the exit status."""
    job = Job(
        directory=str(files.directory.absolute()),  # a task may change its folder
        device=device.label,
        kind=device.kind,
        checked=device.model is not None,
        share=options.share,
        threads=options.threads,
        rejected=options.rejected,
        accept=bool(options.accept_failure),
        kept_open=(lease.fd, lock),
        terminal=os.dup(2),
    )
    log = os.open(files.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    os.write(log, f"--- {stamp} on {os.uname().nodename}, {device.label}\n".encode())
    environment = cell_environment(os.environ, visible=device.entry, threads=options.threads)
    task = json.loads(files.meaning.read_bytes())["task"]
    return run_cell(job, environment, log, task, warm=options.start == "auto" and not task["argv"])
