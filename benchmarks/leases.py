"""Measure what a lease costs: to take and to give back a share of a device, alone and beside others.

Adds to a raw file that run.py wrote.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from report import newest
from sweepack.files import write_atomic
from sweepack.leases import LeasePool

HOLDERS = (0, 8, 32, 128)
TIMES = 200


def cost(directory: Path, holders: int, times: int = TIMES) -> list[float]:
    """Milliseconds for each of ``times`` leases of a thousandth beside so many ``holders`` on eight devices."""
    pool = LeasePool(directory, [f"gpu:{number}" for number in range(8)])
    taken = []
    with contextlib.ExitStack() as held:
        for number in range(holders):
            held.enter_context(pool.acquire(30, label=f"cell {number}"))
        for _ in range(times):
            begun = time.perf_counter()
            pool.acquire(1, label="one more", timeout=0).release()
            taken.append(1000 * (time.perf_counter() - begun))
    return taken


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, default=None, help="the raw file (default: the latest in benchmarks/raw)")
    options = parser.parse_args(argv)
    target: Path = options.into or newest()
    raw = json.loads(target.read_text())
    raw["leases"] = []
    for holders in HOLDERS:
        with tempfile.TemporaryDirectory(prefix="swb-", dir="/dev/shm") as directory:
            taken = cost(Path(directory), holders)
        entry = {"holders": holders, "median": statistics.median(taken), "worst": max(taken), "times": len(taken)}
        raw["leases"].append(entry)
        print(f"beside {holders:3} others: {entry['median']:.3f} ms, at worst {entry['worst']:.3f} ms", file=sys.stderr)
    write_atomic(target, json.dumps(raw, indent=1) + "\n")
    print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
