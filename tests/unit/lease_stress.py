"""One process of the lease stress: ``lease_stress.py DIRECTORY TRACE SEED ROUNDS``, several at once.

The trace says when a share was surely held: ``+ time milli devices`` after it was given, ``- time`` before it is let
go. Now and then the process dies while it holds one, at times with a child that lives on and holds it further.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

from sweepack.leases import LeasePool

DEVICES = ("a", "b", "c", "d")


def main(directory: str, trace: str, seed: str, rounds: str) -> None:
    chance = random.Random(int(seed))
    pool = LeasePool(Path(directory), DEVICES, starve_after=chance.choice([0.05, 30.0]))
    with open(trace, "a", buffering=1) as log:
        for _ in range(int(rounds)):
            count = 1 if chance.random() < 0.9 else 2
            lease = pool.acquire(
                chance.choice([100, 250, 300, 600, 900, 1000]), label=f"stress {seed}", count=count, timeout=60
            )
            print("+", time.monotonic(), lease.milli, *lease.devices, file=log)
            time.sleep(chance.uniform(0.0005, 0.004))
            dies = chance.random() < 0.02
            orphan = dies and chance.random() < 0.5
            if orphan and os.fork() == 0:
                time.sleep(0.02)
                print("-", time.monotonic(), file=log)
                os._exit(0)
            if not orphan:
                print("-", time.monotonic(), file=log)
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
            lease.release()


if __name__ == "__main__":
    main(*sys.argv[1:])
