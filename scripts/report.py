"""Write a sweep's report.html, one self-contained page, from what its cells have left.

With `--host SOCKET` in front, as Snakemake's jobs have it, a warm host is asked to do it, if there is one.
"""

import os
import sys

if sys.argv[1:2] == ["--host"]:
    # Without `site`, which takes a third of the interpreter's start, the package is not found by itself.
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../workflow/src"))
    from sweepack.ask import ask_first, end_like

    end_like(ask_first(__file__))

from sweepack.finish import report

sys.exit(report())
