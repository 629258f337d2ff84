"""A Snakemake executor for Slurm whose jobs are the rules' commands themselves, and which never waits without end.

The job's one step is the rule's `shell:` command: no second and third Snakemake starts in the allocation, reads ten
thousand cells again and stands between Slurm's signals and the cells. Jobs that an earlier run has left in the queue
are adopted. What a job asks for stands in its resources `sbatch` and `setup`; what becomes of it is decided in
`sweepack.slurm.watch`.
"""

import shlex
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Optional

from snakemake_interface_common.exceptions import WorkflowError
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo
from snakemake_interface_executor_plugins.executors.remote import RemoteExecutor
from snakemake_interface_executor_plugins.jobs import JobExecutorInterface
from snakemake_interface_executor_plugins.settings import CommonSettings, ExecutorSettingsBase
from sweepack.config import validate_model
from sweepack.slurm.cluster import SlurmError, SlurmJob, cancel
from sweepack.slurm.config import Request
from sweepack.slurm.plan import live_jobs, mark
from sweepack.slurm.submit import Counter, OutOfPatienceError
from sweepack.slurm.watch import Verdict, Watch

_chosen: "ExecutorSettings | None" = None


# No postponed annotations in this file, and no `str | None`: Snakemake makes command line options from the types.
def _setting(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class ExecutorSettings(ExecutorSettingsBase):
    """How the queue is watched, and what holds for a site: it stands in a profile, the configuration wins over it."""

    poll_seconds: int = _setting(10, "Seconds between two looks at the queue (one squeue call for all jobs).")
    silence_minutes: float = _setting(
        60.0, "How long Slurm may not answer until the run gives up. Its jobs go on; the next run adopts them."
    )
    partition: Optional[str] = _setting(None, "Partition, where the configuration names none.")
    account: Optional[str] = _setting(None, "Account, where the configuration names none.")
    qos: Optional[str] = _setting(None, "Quality of service, where the configuration names none.")
    constraint: Optional[str] = _setting(None, "Node features, where the configuration names none.")
    reservation: Optional[str] = _setting(None, "Reservation, where the configuration names none.")
    extra: Optional[str] = _setting(None, "More flags of sbatch, where the configuration has none.")
    setup: Optional[str] = _setting(None, "Shell line for jobs to run first, where the configuration has none.")

    def __post_init__(self) -> None:
        global _chosen
        _chosen = self
        if self.poll_seconds < 1:
            raise WorkflowError(f"--sweepack-slurm-poll-seconds {self.poll_seconds}: expected 1 or more")
        if not 0 < self.silence_minutes < float("inf"):
            raise WorkflowError(f"--sweepack-slurm-silence-minutes {self.silence_minutes}: expected more than 0")


def site_request() -> Request | None:
    """What the profile asks for; None when this call of Snakemake does not run its jobs on Slurm. Raises UserError."""
    if _chosen is None:
        return None
    given = {name: getattr(_chosen, name) for name in Request.model_fields if getattr(_chosen, name, None)}
    return validate_model(Request, given, "sweepack-slurm-")


def site_options() -> list[str]:
    """The settings of this call of Snakemake as options for another one."""
    given = {field.name: getattr(_chosen, field.name) for field in fields(_chosen)} if _chosen else {}
    return [f"--sweepack-slurm-{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None]


common_settings = CommonSettings(
    non_local_exec=True,
    implies_no_shared_fs=False,
    job_deploy_sources=False,
    pass_default_storage_provider_args=True,
    pass_default_resources_args=True,
    pass_envvar_declarations_to_cmd=False,
    auto_deploy_default_storage_provider=False,
    init_seconds_before_status_checks=1,
)


class Executor(RemoteExecutor):
    """Submits the jobs of a sweep, and follows them until Slurm says how each ended."""

    def __post_init__(self) -> None:
        settings = self.workflow.executor_settings
        self.next_seconds_between_status_checks = settings.poll_seconds
        patience = settings.silence_minutes * 60.0
        self._watch = Watch(patience)
        self._counter = Counter(patience, self._in_queue, self.logger.warning)
        self._left: dict[Path, SlurmJob] | None = None
        # By themselves: while the queue is looked at, the jobs are in no list of Snakemake's.
        self._mine: set[str] = set()
        self._given_up = False

    def run_job(self, job: JobExecutorInterface) -> None:
        """Submit ``job``, or adopt the one in the queue that makes the same output."""
        if self._given_up:  # Snakemake hands over the rest of what it has chosen before it looks
            return
        output = Path(str(job.output[0])).absolute()
        try:
            known = self._counter.patiently(lambda: self._left_behind(output) if job.attempt == 1 else _live(output))
            if known:
                identity = known.id
                self.logger.info(f"{_name(output)}: adopted Slurm job {identity} ({known.state.lower()})")
            else:
                identity = self._submit(job, output)
                self.logger.info(f"{_name(output)}: submitted as Slurm job {identity}")
        except OutOfPatienceError as error:
            # Not this job alone: the run ends, without cancelling what is in the queue.
            self._given_up = True
            self.workflow.scheduler.executor_error_callback(WorkflowError(str(error)))
            return
        except (SlurmError, WorkflowError, OSError) as error:
            self._fail(SubmittedJobInfo(job), str(error))
            return
        self._mine.add(identity)
        self.report_job_submission(SubmittedJobInfo(job, external_jobid=identity))

    def _in_queue(self) -> int:
        return 0 if self._given_up else len(self._mine)

    def _left_behind(self, output: Path) -> SlurmJob | None:
        """The job of an earlier run that makes ``output``, told once: should it fail, another is to be submitted."""
        if self._left is None:
            self._left = live_jobs(_sweep(output))
        return self._left.pop(output, None)

    def _submit(self, job: JobExecutorInterface, output: Path) -> str:
        """The id of the Slurm job. Raises SlurmError with Slurm's own words, and OutOfPatienceError."""
        # Snakemake removes old outputs of local jobs only, and an old one must not be taken for this job's. Not at each
        # offer: a job that seemed to be refused may have been taken.
        for path in job.output:
            Path(str(path)).unlink(missing_ok=True)
        name = "-".join(job.wildcards) if job.wildcards else job.name
        log = output.parent / f"slurm-{name}-%j.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        setup = job.resources.get("setup")
        sbatch = [
            *("sbatch", "--parsable", f"--job-name={_sweep(output).name}:{name}", f"--comment={mark(output)}"),
            *(
                f"--output={log}",
                f"--chdir={self.workflow.workdir_init}",
                "--open-mode=append",
                "--export=ALL",
            ),
            *shlex.split(job.resources.get("sbatch") or ""),
        ]
        shell = "#!/bin/bash -l" if setup else "#!/bin/sh"
        # In a step, since only steps hear of a preemption when its grace time begins.
        step = f"exec srun --nodes=1 --ntasks=1 --cpus-per-task={job.threads} --cpu-bind=quiet"
        command = job.shellcmd.removeprefix("exec ")
        # What starts steps of its own stands beside them.
        started = f"exec {command}" if job.resources.get("steps") else f"{step} {command}"
        lines = [f"{line} || exit" for line in (setup or "").splitlines() if line.strip()]
        script = "\n".join([shell, *lines, started, ""])

        def taken() -> str | None:
            found = _live(output)
            return found.id if found else None

        return self._counter.submit(sbatch, script, taken)

    async def check_active_jobs(self, active_jobs: list[SubmittedJobInfo]) -> AsyncGenerator[SubmittedJobInfo, None]:
        """Yield the jobs that go on; report the others."""
        async with self.status_rate_limiter:
            try:
                verdicts = self._watch.look([str(info.external_jobid) for info in active_jobs])
            except SlurmError as error:
                self._given_up = True
                raise WorkflowError(str(error)) from None
        for info in active_jobs:
            verdict, words = verdicts[str(info.external_jobid)]
            if verdict is Verdict.RUNNING:
                yield info
                continue
            self._mine.discard(str(info.external_jobid))
            if verdict is Verdict.SUCCEEDED or self._has_output(info):
                self.report_job_success(info)
            else:
                self._fail(info, f"Slurm job {info.external_jobid}: {words}")
        for words in self._watch.news():
            self.logger.warning(words)

    def _fail(self, info: SubmittedJobInfo, words: str) -> None:
        # Snakemake's own report of it is as long as the job's command, and the profile leaves it out.
        self.logger.error(f"{_name(Path(str(info.job.output[0])))}: {words}")
        self.report_job_error(info)

    def _has_output(self, info: SubmittedJobInfo) -> bool:
        """Slurm may lose sight of a job that has done all it had to."""
        return all(Path(str(path)).exists() for path in info.job.output)

    def cancel_jobs(self, active_jobs: list[SubmittedJobInfo]) -> None:
        """Cancel them; their cells save what they have."""
        try:
            cancel(sorted(self._mine))
        except SlurmError as error:
            self.logger.error(f"scancel failed: {error}. The jobs go on; the next run adopts them.")


def _sweep(output: Path) -> Path:
    """The sweep's folder: its jobs make packs/<name>.done and cells/<id>/result.json."""
    return output.parents[1] if output.parent.name == "packs" else output.parents[2]


def _name(output: Path) -> str:
    """The pack or the cell that ``output`` is of."""
    return output.stem if output.parent.name == "packs" else output.parent.name


def _live(output: Path) -> SlurmJob | None:
    """The job in the queue that makes ``output``, if there is one that is not ending."""
    found = live_jobs(_sweep(output)).get(output)
    return found if found and found.state != "COMPLETING" else None
