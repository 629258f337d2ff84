"""Start one cell: wait for it to be free, hand it over if it is finished, lease its share, run and watch its process.

Standard library only: a finished cell is handed over in milliseconds.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable, Sequence

from sweepack.devices import load_nvml, visible_pool
from sweepack.errors import tells_user_errors
from sweepack.leases import LeaseAbandoned, LeasePool, LeaseTimeout, lease_directory
from sweepack.mps.daemon import require_usable
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
    write_down_kill,
)
from sweepack.supervise import Relay

TEMPORARY_FAILURE = 75
_REMIND_SECONDS = 60.0


def parser() -> argparse.ArgumentParser:
    parser = launcher_options(
        "Run one cell of a sweep as its cell.json says: lease its share of a device and run its task, or "
        "hand its result over if it is finished. `snakemake` does this for every pending cell.",
        "cell",
    )
    parser.add_argument("--killed", type=int, default=0, help="1: only write down that what ran the cell was killed")
    return parser


@tells_user_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Run the cell that ``argv`` names; the exit status."""
    options = parser().parse_args(argv)
    try:
        cell = read_cell(options.sweep_dir, options.cell)
        return write_down_kill(cell) if options.killed else _launch(cell, accept=bool(options.accept_failure))
    except (LeaseTimeout, LeaseAbandoned) as error:
        print(f"cell {options.cell} did not start: {error}", file=sys.stderr)
        return TEMPORARY_FAILURE
    except OSError as error:
        # A full disk, a lost mount: the cell stays what its record says.
        print(f"cell {options.cell}: {error}", file=sys.stderr)
        return 1


def _launch(cell: Startable, accept: bool) -> int:
    give_up = watch_driver()
    timeout = cell.launch.timeout * 60
    lock = lock_cell(cell, timeout, give_up)
    if not must_run(cell):
        return 0
    cell = with_share(cell)
    pool = visible_pool(os.environ, load_nvml())
    reach = cell.reach(pool)
    if cell.mps is not None:
        require_usable(reach, os.environ)
    leases = LeasePool(lease_directory(), [device.key for device in reach])
    terminal = os.dup(2)
    relay: Relay | None = None

    def stopped() -> str | None:
        return "it was told to stop" if relay and relay.caught else give_up()

    while True:
        with leases.acquire(
            cell.launch.share,
            label=cell.label,
            timeout=timeout,
            on_wait=lambda text: print(text, file=sys.stderr),
            give_up=stopped,
        ) as lease:
            device = next(device for device in pool if device.key == lease.devices[0])
            relay = relay or Relay()
            status = run_leased(cell, device, lease, lock, relay, accept=accept, terminal=terminal)
        again = None if relay.caught else next_try(cell, [terminal])
        if again is None:
            return status
        cell = again


def watch_driver() -> Callable[[], str | None]:
    """Tells when the process that started this one has gone: nobody would wait for a cell started after that."""
    driver = os.getppid()

    def gone() -> str | None:
        return None if os.getppid() == driver else "the process that asked for it has ended"

    return gone


def lock_cell(cell: Startable, timeout: float, give_up: Callable[[], str | None]) -> int:
    """Become the only process that runs the cell; another run's cell is waited for, since it may finish it.

    ``timeout`` is in seconds. The descriptor of the lock; raises LeaseTimeout, and LeaseAbandoned as ``give_up`` says.
    """
    begun = reminded = time.monotonic()
    told = False
    while (lock := take_lock(cell)) is None:
        if reason := give_up():
            raise LeaseAbandoned(reason)
        now = time.monotonic()
        holder = lock_holder(cell.files)
        if now - begun > timeout:
            raise LeaseTimeout(f"still running elsewhere ({holder}) after {timeout / 60:.0f} min")
        if not told or now - reminded > _REMIND_SECONDS:
            told, reminded = True, now
            print(f"cell {cell.id} is running already ({holder}); waiting for it", file=sys.stderr)
        time.sleep(0.2 + 0.2 * random.random())
    return lock
