"""What a run on Slurm does before its first job: end those of an earlier run that it is not to adopt."""

from __future__ import annotations

import sys
import time

from sweepack.slurm.cluster import ENDED, SlurmError, cancel, jobs_by_id
from sweepack.slurm.plan import SlurmPlan

_GONE_SECONDS = 300.0


def clear_queue(plan: SlurmPlan) -> None:
    """Cancel what an earlier run has left, if the plan is not to adopt it, and wait until it has ended."""
    if plan.settings.live == "adopt" or not plan.live:
        return
    ids = [job.id for job in plan.live.values()]
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
