"""The bound: two processes that import once and loop over half of the cells each, with nothing around it."""

import os
import sys

from grid import cells, save

SLOTS = 2

for slot in range(SLOTS):
    if os.fork() == 0:
        from tasks import run

        for cell in cells()[slot::SLOTS]:
            save(cell["lr"], cell["seed"], run(**cell))
        sys.exit()
sys.exit(max(os.wait()[1] for _ in range(SLOTS)) != 0)
