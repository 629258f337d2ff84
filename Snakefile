"""Pack the cells of a sweep onto the devices of this machine.

The configuration is read and checked by the package, not by Snakemake, whose own reading bends values.
"""

import gc
import os
import sys
from pathlib import Path

from snakemake.utils import min_version

min_version("9.27")

try:
    from sweepack.describe import describe
    from sweepack.errors import UserError
    from sweepack.listing import write_listing
    from sweepack.plan import check_pool, make_plan
    from sweepack.preheat import cell_host, check_task, preheat, results_host
    from sweepack.sizing.describe import pinned, require_sizes
    from sweepack.sizing.jobs import PROBE, write_requests
    from sweepack.slurm.plan import check_requests
    from sweepack.slurm.start import clear_queue
    from sweepack.validation.command import TARGET, arguments
    from snakemake_executor_plugin_sweepack_slurm import site_options, site_request
except ModuleNotFoundError as missing:
    sys.exit(
        f"sweepack: {missing.name} is not installed in {sys.prefix}: run `make venv`, then `. .venv/bin/activate`"
    )

ROOT = Path.cwd()
POOL = []
VALIDATION = []


def estimates():
    """What the plan says of cells that were not measured. What makes them is imported only then: it takes a while."""
    if not PLAN.probes:
        return {}
    from sweepack.sizing.preview import preview

    return preview(PLAN, ROOT)


try:
    PLAN = make_plan(
        ROOT,
        Path(workflow.basedir),
        workflow.configfiles,
        workflow.config_settings.config_args or [],
        site_request(),
    )
    dry = {"-n", "--dry-run", "--dryrun"} & set(sys.argv)
    if TARGET in sys.argv:
        VALIDATION = arguments(
            PLAN.config.slurm,
            site_request(),
            ROOT / PLAN.directory.parent,
            Path(workflow.basedir) / "Snakefile",
            site_options(),
        )
    elif PLAN.slurm and workflow.is_main_process:
        check_task(PLAN, ROOT, POOL, os.environ, running=False)
        check_requests(PLAN.slurm)
        print(describe(PLAN, estimates=estimates()), file=sys.stderr)
        require_sizes(PLAN, asked=PROBE in sys.argv)
    elif workflow.is_main_process:
        POOL = check_pool(PLAN, os.environ)
        check_task(PLAN, ROOT, POOL, os.environ, running=not dry)
        # A dry run that is not told has one core.
        cores = workflow.resource_settings.cores
        limit = None if dry and cores == 1 else cores
        print(describe(PLAN, POOL, limit, estimates()), file=sys.stderr)
        require_sizes(PLAN, asked=PROBE in sys.argv)
except UserError as error:
    print(error, file=sys.stderr)
    sys.exit(1)


def runs_cells():
    """Whether this is a run of the sweep: to try the cluster, or to measure, nothing of it is run or written."""
    return not PLAN.probes and set(workflow.dag_settings.targets) not in (
        {TARGET},
        {PROBE},
    )


# What is there by now stays: the garbage collector need not look through it while the jobs are made.
gc.freeze()


include: "workflow/rules/common.smk"
include: "workflow/rules/cells.smk"
include: "workflow/rules/ddp.smk"
include: "workflow/rules/probe.smk"
include: "workflow/rules/results.smk"
include: "workflow/rules/validate.smk"


# On a cluster, what takes a moment stays where Snakemake runs.
localrules:
    all,
    prepare,
    refuse,
    outdate,
    table,
    report,
    probe,
    validate_cluster,


onstart:
    # A limit on job starts wakes the scheduler once in its timespan for every job that was ever started: among many
    # ready cells that grows with their square, and it keeps Snakemake from ending. No local run needs it, and none on
    # a cluster, where jobs are submitted one by one, reaches Snakemake's own 100 a second; a lower one is kept.
    limit = workflow.scheduler.job_rate_limiter
    if limit and (workflow.local_exec or limit.max_jobs >= 100 * limit.timespan):
        workflow.scheduler.job_rate_limiter = None
    if runs_cells():
        if PLAN.slurm:
            clear_queue(PLAN.slurm)
        else:
            preheat(PLAN, ROOT, POOL, os.environ)
        write_listing(PLAN, ROOT)
        remove_old_markers()
    elif TARGET not in workflow.dag_settings.targets:
        write_requests(
            PLAN.probes, PLAN.config, PLAN.task, ROOT, ROOT / PLAN.directory
        )


onsuccess:
    if PLAN.probes and TARGET not in workflow.dag_settings.targets:
        print(pinned(PLAN, ROOT), file=sys.stderr)


onerror:
    if runs_cells():
        write_partial_results()


rule all:
    """The sweep: every cell finished, the table and the report made."""
    default_target: True
    input:
        WANTED,
        rules.table.output if not PLAN.probes else [],
        rules.report.output if PLAN.config.report and not PLAN.probes else [],
