"""The cells on several devices: a job each, which starts the ranks and follows them."""

# An id that no cell has, where no cell is wide.
WIDE = "|".join(PLAN.layouts) or "none"


if PLAN.slurm:
    DDP_RESOURCES = {**asked_of_slurm("cell"), "steps": 1}
else:
    DDP_RESOURCES = {
        **MEMORY,
        "gpu_milli": per_cell(lambda cell: PLAN.share(cell) * PLAN.devices(cell, POOL)),
    }


# Both rules make results; of a wide cell it is this one that does.
ruleorder: ddp > cell


rule ddp:
    """Run one cell on several devices, or hand its result over if it is finished."""
    input:
        constant({cell.id: before(cell) for cell in PLAN.without_result or PLAN.cells}),
    output:
        RESULT,
    wildcard_constraints:
        cell=WIDE,
    threads: per_cell(PLAN.threads)
    resources:
        **DDP_RESOURCES,
        **ACCEPT,
    shell:
        script("ddp.py") + " --cell {wildcards.cell}" + ACCEPTED
