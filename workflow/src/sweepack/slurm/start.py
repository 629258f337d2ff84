"""What a run on Slurm does before its first job: ask whether the jobs would be taken, end those it is not to adopt."""

from __future__ import annotations

import sys
import time

from sweepack.plan import Plan
from sweepack.slurm.cluster import ENDED, SlurmError, cancel, jobs_by_id
from sweepack.slurm.plan import check_requests

_GONE_SECONDS = 300.0


def check_jobs(plan: Plan) -> None:
    """Raises UserError with Slurm's own words when it would not take a job of ``plan``."""
    if plan.slurm:
        check_requests(plan.slurm)


def clear_queue(plan: Plan) -> None:
    """Cancel what an earlier run has left, if the plan is not to adopt it, and wait until it has ended."""
    if plan.slurm is None or plan.slurm.settings.live == "adopt" or not plan.slurm.live:
        return
    ids = [job.id for job in plan.slurm.live.values()]
    end = time.monotonic() + _GONE_SECONDS
    try:
        cancel(ids)
        while left := [job.id for job in jobs_by_id(ids).values() if job.state not in ENDED]:
            if time.monotonic() > end:
                sys.exit(f"sweepack: Slurm has not ended the jobs {', '.join(left)} within {_GONE_SECONDS:.0f} s")
            print(f"waiting for the end of Slurm jobs {', '.join(left[:8])}", file=sys.stderr)
            time.sleep(2)
    except SlurmError as error:
        sys.exit(f"sweepack: the jobs that an earlier run has left cannot be cancelled: {error}")
