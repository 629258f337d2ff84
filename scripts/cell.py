"""Run one cell of a sweep as its cell.json says, or hand its result over if it is finished.

With `--host SOCKET` in front, as Snakemake's jobs have it, a warm host is asked to do it, if there is one.
"""

import os
import sys

if sys.argv[1:2] == ["--host"]:
    # Without `site`, which takes a third of the interpreter's start, the package is not found by itself.
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../workflow/src"))
    from sweepack.ask import HOST_DIED, ask

    status = ask(sys.argv[2], sys.argv[3:])
    if status is not None and status != HOST_DIED:
        sys.exit(128 - status if status < 0 else status)
    ending = ["--killed", "1"] if status == HOST_DIED else []
    os.execv(sys.executable, [sys.executable, os.path.abspath(__file__), *sys.argv[3:], *ending])

from sweepack.launch import main

sys.exit(main())
