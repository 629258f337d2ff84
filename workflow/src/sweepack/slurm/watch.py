"""What has become of Slurm jobs: every state is either an end or on its way to one, and silence has an end too."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from enum import Enum

from sweepack.slurm.cluster import ENDED, SlurmError, SlurmJob, accounted_states, cancel, jobs_by_id

# The controller starts jobs in these states again, if it does, within a moment.
_MAYBE_AGAIN = {"PREEMPTED", "NODE_FAIL"}
_AGAIN_SECONDS = 30.0
# Reasons for which a pending job will never start unless somebody changes it or the cluster.
_NEVER = (
    "launch failed requeued held",
    "launch_failed_requeued_held",
    "JobHoldMaxRequeue",
    "job requeued in held state",
    "DependencyNeverSatisfied",
    "BadConstraints",
    "PartitionNodeLimit",
    "PartitionTimeLimit",
    "AccountNotAllowed",
    "InvalidAccount",
    "InvalidQOS",
    "QOSNotAllowed",
)
_UNDERWAY = {
    *("PENDING", "RUNNING", "SUSPENDED", "STOPPED", "CONFIGURING", "COMPLETING", "STAGE_OUT", "RESIZING", "SIGNALING"),
    *("REQUEUED", "REQUEUE_FED"),
}
# Held until somebody releases them.
_HELD = {"REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
# A controller that has just started may say so of jobs for a moment.
_NEVER_SECONDS = 30.0
# Somebody who holds a job by hand may have gone home.
_HOLD_SECONDS = 3 * 24 * 3600.0
_UNKNOWN_SECONDS = 30 * 60.0
_TELL_SECONDS = 10 * 60.0


class Verdict(Enum):
    """What the run is told about a job."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


class Watch:
    """Looks at jobs from time to time and remembers what was odd about them, and for how long.

    ``silence``: seconds after which a job that Slurm does not know has failed, and for which Slurm may not answer.
    """

    def __init__(self, silence: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._silence = silence
        self._clock = clock
        self._odd: dict[tuple[str, str], float] = {}
        self._silent_since: float | None = None
        self._told: dict[str, float] = {}
        self._news: list[str] = []

    def look(self, ids: Sequence[str]) -> dict[str, tuple[Verdict, str]]:
        """By id: the verdict, and Slurm's words for it. Raises SlurmError when Slurm has been silent for too long."""
        if not ids:
            return {}
        now = self._clock()
        try:
            known = jobs_by_id(ids)
        except SlurmError as error:
            return self._silent(ids, str(error), now)
        self._silent_since = None
        accounted = accounted_states(identity for identity in ids if identity not in known)
        return {identity: self._judge(identity, known.get(identity), accounted, now) for identity in ids}

    def news(self) -> list[str]:
        """What people should know, once."""
        news, self._news = self._news, []
        return news

    def _silent(self, ids: Sequence[str], words: str, now: float) -> dict[str, tuple[Verdict, str]]:
        self._silent_since = self._silent_since if self._silent_since is not None else now
        for_seconds = now - self._silent_since
        if for_seconds > self._silence:
            raise SlurmError(
                f"Slurm has not answered for {for_seconds / 60:.3g} min ({words}). Its jobs go on: run the same "
                "command when it does, and they are adopted"
            )
        self._tell(
            "silence", f"Slurm does not answer ({words}); waiting for it, up to {self._silence / 60:.3g} min", now
        )
        return dict.fromkeys(ids, (Verdict.RUNNING, words))

    def _judge(self, identity: str, job: SlurmJob | None, accounted: dict[str, str], now: float) -> tuple[Verdict, str]:
        state = job.state if job else accounted.get(identity)
        if state == "COMPLETED":
            return Verdict.SUCCEEDED, state
        if state in _MAYBE_AGAIN:
            return self._for(identity, state, _AGAIN_SECONDS, now)
        if state in ENDED:
            return Verdict.FAILED, state
        if job is None:
            # Just submitted, or long gone: both look alike to a controller that answers "Invalid job id", and
            # accounting alone may never hear of an end.
            return self._for(identity, "unknown to Slurm", min(self._silence, _UNKNOWN_SECONDS), now)
        if job.state not in _UNDERWAY | _HELD:
            return self._for(identity, f"in the unknown state {job.state}", _UNKNOWN_SECONDS, now)
        pending = job.state == "PENDING"
        if job.state in _HELD or (pending and job.reason.startswith(_NEVER)):
            verdict, _ = self._for(identity, job.reason, _NEVER_SECONDS, now)
            return self._give_up(identity, job.reason) if verdict is Verdict.FAILED else (verdict, job.reason)
        if pending and job.reason.startswith("JobHeld"):
            if self._for(identity, "held", _HOLD_SECONDS, now)[0] is Verdict.FAILED:
                return self._give_up(identity, job.reason)
            self._tell(identity, f"Slurm job {identity} is held ({job.reason}): `scontrol release {identity}`", now)
            return Verdict.RUNNING, job.reason
        self._forget(identity)
        return Verdict.RUNNING, job.state

    def _for(self, identity: str, what: str, limit: float, now: float) -> tuple[Verdict, str]:
        """A failure once ``what`` has been so for ``limit`` seconds."""
        since = self._odd.setdefault((identity, what), now)
        verdict = Verdict.FAILED if now - since >= limit else Verdict.RUNNING
        return verdict, f"{what}, for {now - since:.0f} s" if what not in _MAYBE_AGAIN else what

    def _forget(self, identity: str) -> None:
        for key in [key for key in self._odd if key[0] == identity]:
            del self._odd[key]

    def _give_up(self, identity: str, reason: str) -> tuple[Verdict, str]:
        try:
            cancel([identity])
        except SlurmError as error:
            return Verdict.FAILED, f"{reason}, and scancel failed: {error}"
        return Verdict.FAILED, f"it would wait for ever ({reason}), so it was cancelled"

    def _tell(self, key: str, words: str, now: float) -> None:
        if now - self._told.get(key, -_TELL_SECONDS) >= _TELL_SECONDS:
            self._told[key] = now
            self._news.append(words)
