"""What several rules use: places, constraints, commands and the resources of a cell."""

import shlex

RESULTS = str(PLAN.directory)
SCRIPTS = str(Path(workflow.basedir) / "scripts")
CELLS = {cell.id: cell for cell in PLAN.cells}
RESULT = f"{RESULTS}/cells/{{cell}}/result.json"


wildcard_constraints:
    cell=r"[0-9a-f]{12}",
    pack=r"[0-9a-f]{12}",
    pins=r"[0-9a-f]{12}",


def script(name):
    """The start of a command: what is the same for all jobs is put in once, not by Snakemake for each of them."""
    return "exec " + literal(
        sys.executable, f"{SCRIPTS}/{name}", "--sweep-dir", RESULTS
    )


def asking(name, host):
    """As `script`, for a bare interpreter: it asks the warm host to do it; only where there is none, a whole one does.

    `host` is part of a shell command already.
    """
    words = literal(sys.executable, "-I", "-S", f"{SCRIPTS}/{name}", "--host")
    return f"exec {words} {host} --sweep-dir {literal(RESULTS)}"


def literal(*words):
    """The words as a shell takes them, and Snakemake leaves them."""
    return shlex.join(words).replace("{", "{{").replace("}", "}}")


def constant(values):
    """The value that all cells have, which Snakemake need not ask for in each job, or else a look-up by cell."""
    distinct = set(values.values())
    if len(distinct) == 1:
        return distinct.pop()
    return lambda wildcards: values[wildcards.cell]


def per_cell(value):
    """``value(cell)`` for each cell, as a rule wants it."""
    return constant({identity: value(cell) for identity, cell in CELLS.items()})
