"""What several rules use: places, constraints and the resources of a cell."""

RESULTS = str(PLAN.directory)
SCRIPTS = str(Path(workflow.basedir) / "scripts")
PYTHON = sys.executable
CELL_IDS = [cell.id for cell in PLAN.cells]
CELLS = {cell.id: cell for cell in PLAN.cells}
RESULT = f"{RESULTS}/cells/{{cell}}/result.json"


wildcard_constraints:
    cell=r"[0-9a-f]{12}",


def per_cell(value):
    """``value(cell)`` as a rule wants it: the constant if it is one, which Snakemake need not evaluate for each job."""
    values = {identity: value(cell) for identity, cell in CELLS.items()}
    distinct = set(values.values())
    if len(distinct) == 1:
        return distinct.pop()
    return lambda wildcards: values[wildcards.cell]
