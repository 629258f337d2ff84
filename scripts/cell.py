"""Run one cell of a sweep as its cell.json says, or hand its result over if it is finished.

With `--host SOCKET` in front, as Snakemake's jobs have it, a warm host is asked to do it, if there is one.
"""

import os
import sys

if sys.argv[1:2] == ["--host"]:
    # Without `site`, which takes a third of the interpreter's start, the package is not found by itself.
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../workflow/src"))
    from sweepack.ask import ask_first

    status = ask_first(__file__, if_host_dies=("--killed", "1"))
    sys.exit(128 - status if status < 0 else status)

from sweepack.launch import main

sys.exit(main())
