"""The cells: a job each, or packs of them; as many at once as the devices have room for."""

PREPARED = f"{RESULTS}/prepare.done"
REFUSED = f"{RESULTS}/cells/{{cell}}/refused-{{number}}"
PACK = f"{RESULTS}/packs/{{pack}}.done"


# Resources and options that few sweeps need: each costs Snakemake time for every job.
MEMORY = (
    {"mem_mb": per_cell(lambda cell: cell.resources.mem or 0)}
    if any(c.resources.mem for c in PLAN.cells)
    else {}
)


def accepts_failure(wildcards, attempt):
    """1 when a failure of the task counts as the cell's result: with `on_error: nan`, on the last attempt."""
    return int(attempt > workflow.execution_settings.retries)


ACCEPT = {"accept_failure": accepts_failure} if PLAN.config.on_error == "nan" else {}
ACCEPTED = " --accept-failure {resources.accept_failure}" if ACCEPT else ""


THREADS = {cell.resources.cpus for cell in PLAN.cells}
# On a cluster the hosts are those of its nodes.
HOSTS = {
    threads: None if PLAN.slurm else cell_host(PLAN, ROOT, os.environ, threads)
    for threads in THREADS
}


def asked_of_slurm(name):
    """What the executor gives sbatch for the pack or cell of that name, and what the job runs first."""
    return {
        "sbatch": lambda wildcards: shlex.join(PLAN.slurm.flags(wildcards[name])),
        "setup": lambda wildcards: "\n".join(PLAN.slurm.setup(wildcards[name])),
    }


if PLAN.slurm:
    CELL_RESOURCES = asked_of_slurm("cell")
    PACK_RESOURCES = asked_of_slurm("pack")
else:
    CELL_RESOURCES = {
        **MEMORY,
        "gpu_milli": per_cell(PLAN.share),
        "host": per_cell(lambda cell: str(HOSTS[cell.resources.cpus] or "none")),
    }
    PACK_RESOURCES = {}


def pack_threads(wildcards):
    if PLAN.slurm is None:
        return workflow.cores
    return PLAN.slurm.allocations[wildcards.pack].cpus


def cell_command():
    """Starts a cell, by the warm host for as many threads."""
    if None in HOSTS.values():
        return script("cell.py")
    host = (
        "{resources.host:q}" if len(HOSTS) > 1 else literal(*map(str, HOSTS.values()))
    )
    return asking("cell.py", host)


def refusal(cell):
    found = PLAN.states[cell]
    return [REFUSED.format(cell=cell, number=found.rejected)] if found.refused else []


def results_to_make():
    """What the jobs of this run bring: results, and what makes Snakemake bring them; or packs of them."""
    return [
        *(PACK.format(pack=pack.name) for pack in PLAN.packs),
        *(RESULT.format(cell=cell) for cell in PLAN.singles),
        *(path for cell in PLAN.singles for path in refusal(cell)),
    ]


def before(cell):
    """What a cell that will run waits for. A finished one waits for nothing, so that nothing makes it run again."""
    if PLAN.states[cell.id].state == "finished":
        return ()
    return (*refusal(cell.id), *prepared())


def prepared():
    return [PREPARED] if PLAN.task.has_prepare else []


rule prepare:
    """Run prepare() of the task's module, once per sweep, before any cell."""
    output:
        PREPARED,
    shell:
        script("prepare.py") + " --stamp {output:q}"


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
        constant({cell.id: before(cell) for cell in PLAN.without_result or PLAN.cells}),
    output:
        RESULT,
    threads: per_cell(lambda cell: cell.resources.cpus)
    resources:
        **CELL_RESOURCES,
        **ACCEPT,
    shell:
        cell_command() + " --cell {wildcards.cell}" + ACCEPTED


rule pack:
    """Run several cells side by side; the job ends well when each has its result."""
    input:
        prepared(),
    output:
        PACK,
    threads: pack_threads
    resources:
        **PACK_RESOURCES,
        **ACCEPT,
    shell:
        script("pack.py") + " --pack {wildcards.pack} --cores {threads}" + ACCEPTED
