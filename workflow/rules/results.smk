"""The results: one table for the sweep, and a report that shows it."""

import subprocess

from sweepack.contents import contents, read_stamp

TABLES = [
    "table.parquet",
    "table.csv",
    "history.parquet",
    "history.csv",
    "failures.csv",
]
RESULTS_HOST = str(results_host(PLAN, ROOT, os.environ) or "")
OUTDATED = f"{RESULTS}/outdated-{{contents}}"


def finishing(name):
    """Starts a script at the end of the run, by the host that was made ready for it at the beginning."""
    # Where that is differs from run to run, which is no change of the command that Snakemake should see.
    return asking(name, "{RESULTS_HOST:q}") if RESULTS_HOST else script(name)


def write_partial_results():
    """The table of what there is, after a run that failed."""
    command = [sys.executable, f"{SCRIPTS}/table.py"]
    subprocess.run([*command, "--sweep-dir", RESULTS, "--partial"], check=False)


def outdated():
    """What makes the table anew though no job of this run changes it: a cell that ended or left since it was made."""
    now = contents(PLAN.manifest(), PLAN.states)
    if now == read_stamp(ROOT / PLAN.directory):
        return []
    return [OUTDATED.format(contents=now[:16])]


# Also for `all`: of a missing file behind a newer one that was made from it, Snakemake thinks nothing.
WANTED = to_measure() or results_to_make() or outdated()


def remove_old_markers():
    """Those of earlier runs: should the same contents come back, they must be made again to count."""
    for path in (ROOT / PLAN.directory).glob("outdated-*"):
        if f"{RESULTS}/{path.name}" not in WANTED:
            path.unlink(missing_ok=True)


rule outdate:
    """Make Snakemake write a table that does not show what the cells have left."""
    output:
        OUTDATED,
    wildcard_constraints:
        contents=r"[0-9a-f]{16}",
    shell:
        "touch {output:q}"


rule table:
    """Gather the results and histories of all cells."""
    input:
        WANTED,
    output:
        expand(f"{RESULTS}/{{name}}", name=TABLES),
    shell:
        finishing("table.py")


rule report:
    """Show the sweep on one self-contained page."""
    input:
        rules.table.output,
    output:
        f"{RESULTS}/report.html",
    shell:
        finishing("report.py")
