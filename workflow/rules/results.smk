"""The results: one table for the sweep, and a report that shows it."""

import contextlib
import hashlib
import subprocess

TABLES = [
    "table.parquet",
    "table.csv",
    "history.parquet",
    "history.csv",
    "failures.csv",
]


def fingerprint():
    """Changes when the table would, though no cell's result did: cells removed or renamed, another objective."""
    manifest = PLAN.manifest()
    shown = (manifest.task, manifest.axes, manifest.objective, manifest.cells)
    return hashlib.sha256(repr(shown).encode()).hexdigest()[:16]


def write_partial_results():
    """The table of what there is, after a run that failed."""
    command = [PYTHON, f"{SCRIPTS}/table.py", "--sweep-dir", RESULTS, "--partial"]
    subprocess.run(command, check=False)
    for name in TABLES:
        # Older than any result: it stands in for the declared table, and must not be taken for it by the next run.
        with contextlib.suppress(OSError):
            os.utime(f"{RESULTS}/{name}", (1, 1))


rule table:
    """Gather the results and histories of all cells."""
    input:
        expand(RESULT, cell=CELL_IDS),
    output:
        expand(f"{RESULTS}/{{name}}", name=TABLES),
    params:
        fingerprint=fingerprint(),
    shell:
        "exec {PYTHON:q} {SCRIPTS:q}/table.py --sweep-dir {RESULTS:q}"


rule report:
    """Show the sweep on one self-contained page."""
    input:
        rules.table.output,
    output:
        f"{RESULTS}/report.html",
    shell:
        "exec {PYTHON:q} {SCRIPTS:q}/report.py --sweep-dir {RESULTS:q}"
