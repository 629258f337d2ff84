"""The cells: one job each, as many at once as the devices have room for."""

PREPARED = f"{RESULTS}/prepare.done"
LEASE_TIMEOUT = PLAN.config.lease_timeout
START = PLAN.config.start


def accepts_failure(wildcards, attempt):
    """1 when a failure of the task counts as the cell's result: with `on_error: nan`, on the last attempt."""
    last = attempt > workflow.execution_settings.retries
    return int(PLAN.config.on_error == "nan" and last)


def prepared(wildcards):
    """Cells that will run wait for prepare(); preparing again must not make a finished one run again."""
    return [] if PLAN.states[wildcards.cell].state == "finished" else PREPARED


rule prepare:
    """Run prepare() of the task's module, once per sweep, before any cell."""
    output:
        PREPARED,
    shell:
        "exec {PYTHON:q} {SCRIPTS:q}/prepare.py --sweep-dir {RESULTS:q} --stamp {output:q}"


rule cell:
    """Run one cell, or hand its result over if it is finished."""
    input:
        prepared if PLAN.task.has_prepare else [],
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
        accept_failure=accepts_failure,
    params:
        # Rises when a result on disk must not count, which makes Snakemake run the cell again.
        rejected=lambda wildcards: PLAN.states[wildcards.cell].rejected,
    shell:
        "exec {PYTHON:q} {SCRIPTS:q}/cell.py --sweep-dir {RESULTS:q} --cell {wildcards.cell}"
        " --share {resources.gpu_milli} --threads {resources.cell_threads} --devices {resources.pool_devices}"
        " --index {resources.cell_index} --round-robin {resources.round_robin} --timeout {LEASE_TIMEOUT} --start {START}"
        " --rejected {params.rejected} --accept-failure {resources.accept_failure}"
