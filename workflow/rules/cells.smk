"""The cells: one job each, as many at once as the devices have room for."""

PREPARED = f"{RESULTS}/prepare.done"
REFUSED = f"{RESULTS}/cells/{{cell}}/refused-{{number}}"
LEASE_TIMEOUT = PLAN.config.lease_timeout
START = PLAN.config.start


def accepts_failure(wildcards, attempt):
    """1 when a failure of the task counts as the cell's result: with `on_error: nan`, on the last attempt."""
    last = attempt > workflow.execution_settings.retries
    return int(PLAN.config.on_error == "nan" and last)


def refusal(cell, found):
    return [REFUSED.format(cell=cell, number=found.rejected)] if found.refused else []


def wanted_by_name():
    """What to ask for: of a missing file behind a newer one that was made from it, Snakemake thinks nothing."""
    missing = [cell for cell, found in PLAN.states.items() if not found.handed_over]
    refused = [path for cell in missing for path in refusal(cell, PLAN.states[cell])]
    return expand(RESULT, cell=missing) + refused


def before(wildcards):
    """What a cell that will run waits for. A finished one waits for nothing, so that nothing makes it run again."""
    found = PLAN.states[wildcards.cell]
    if found.state == "finished":
        return []
    return refusal(wildcards.cell, found) + (
        [PREPARED] if PLAN.task.has_prepare else []
    )


rule prepare:
    """Run prepare() of the task's module, once per sweep, before any cell."""
    output:
        PREPARED,
    shell:
        "exec {PYTHON:q} {SCRIPTS:q}/prepare.py --sweep-dir {RESULTS:q} --stamp {output:q}"


rule refuse:
    """Make Snakemake run a cell whose result is on disk but does not count: accepted failures, broken files."""
    output:
        REFUSED,
    wildcard_constraints:
        number=r"\d+",
    shell:
        "touch {output:q}"


rule cell:
    """Run one cell, or hand its result over if it is finished."""
    input:
        before,
    output:
        RESULT,
    threads: per_cell(lambda cell: cell.resources.cpus)
    resources:
        gpu_milli=per_cell(PLAN.share),
        cell_threads=per_cell(lambda cell: cell.resources.cpus),
        cell_index=per_cell(lambda cell: cell.index),
        round_robin=int(PLAN.config.placement == "round_robin"),
        pool_devices=PLAN.config.devices or 0,
        mem_mb=per_cell(lambda cell: cell.resources.mem or 0),
        rejected=per_cell(lambda cell: PLAN.states[cell.id].rejected),
        accept_failure=accepts_failure,
    shell:
        "exec {PYTHON:q} {SCRIPTS:q}/cell.py --sweep-dir {RESULTS:q} --cell {wildcards.cell}"
        " --share {resources.gpu_milli} --threads {resources.cell_threads} --devices {resources.pool_devices}"
        " --index {resources.cell_index} --round-robin {resources.round_robin} --timeout {LEASE_TIMEOUT} --start {START}"
        " --rejected {resources.rejected} --accept-failure {resources.accept_failure}"
