"""Slurm jobs are followed to an end, whatever Slurm says of them, and also when it says nothing."""

from __future__ import annotations

import pytest
from sweepack.slurm import watch as module
from sweepack.slurm.cluster import ENDED, SlurmError, SlurmJob, _gres, _limit
from sweepack.slurm.watch import Verdict, Watch

HOURS = 3600.0


class Controller:
    """Answers as a Slurm controller would that has one job, number 7; the clock is turned by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.job: SlurmJob | None = None
        self.accounting: dict[str, str] = {}
        self.trouble: str | None = None
        self.cancelled: list[str] = []
        monkeypatch.setattr(module, "jobs_by_id", self._jobs)
        monkeypatch.setattr(
            module, "accounted_states", lambda ids: {i: self.accounting[i] for i in ids if i in self.accounting}
        )
        monkeypatch.setattr(module, "cancel", self.cancelled.extend)
        self.watch = Watch(silence=HOURS, clock=lambda: self.now)

    def _jobs(self, ids: list[str]) -> dict[str, SlurmJob]:
        if self.trouble:
            raise SlurmError(self.trouble)
        return {self.job.id: self.job} if self.job else {}

    def is_in(self, state: str, reason: str = "None") -> None:
        self.job = SlurmJob("7", state, reason, "")

    def verdict(self, after: float = 0.0) -> tuple[Verdict, str]:
        self.now += after
        return self.watch.look(["7"])["7"]


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Controller:
    return Controller(monkeypatch)


@pytest.mark.parametrize("state", sorted(ENDED - {"COMPLETED", "PREEMPTED", "NODE_FAIL"}))
def test_an_end_is_an_end(controller: Controller, state: str) -> None:
    controller.is_in(state)
    assert controller.verdict() == (Verdict.FAILED, state)


@pytest.mark.parametrize("state", ["PREEMPTED", "NODE_FAIL"])
def test_a_job_that_slurm_may_start_again_gets_a_moment_for_it(controller: Controller, state: str) -> None:
    controller.is_in("RUNNING")
    controller.verdict()
    controller.is_in(state)
    assert controller.verdict(10)[0] is Verdict.RUNNING
    controller.is_in("PENDING", "BeginTime")
    assert controller.verdict(60)[0] is Verdict.RUNNING
    controller.is_in(state)
    assert controller.verdict(10)[0] is Verdict.RUNNING
    assert controller.verdict(31)[0] is Verdict.FAILED


@pytest.mark.parametrize("reason", ["Resources", "Priority", "AssocGrpGRES", "ReqNodeNotAvail, UnavailableNodes:n1"])
def test_a_job_waits_for_its_turn_as_long_as_it_takes(controller: Controller, reason: str) -> None:
    controller.is_in("PENDING", reason)
    assert controller.verdict(24 * HOURS)[0] is Verdict.RUNNING
    assert controller.watch.news() == []


@pytest.mark.parametrize("reason", ["launch failed requeued held", "BadConstraints", "DependencyNeverSatisfied"])
def test_a_job_that_will_never_start_is_cancelled(controller: Controller, reason: str) -> None:
    controller.is_in("PENDING", reason)
    assert controller.verdict()[0] is Verdict.RUNNING  # a controller that has just started may say so of any
    assert controller.cancelled == []
    verdict, words = controller.verdict(31)
    assert verdict is Verdict.FAILED and reason in words
    assert controller.cancelled == ["7"]


def test_a_job_that_somebody_holds_is_waited_for_and_told_of_once_in_a_while(controller: Controller) -> None:
    controller.is_in("PENDING", "JobHeldUser")
    assert controller.verdict()[0] is Verdict.RUNNING
    assert "scontrol release 7" in controller.watch.news()[0]
    controller.verdict(10)
    assert controller.watch.news() == []
    controller.verdict(700)
    assert len(controller.watch.news()) == 1
    assert controller.verdict(72 * HOURS)[0] is Verdict.FAILED
    assert controller.cancelled == ["7"]


def test_what_the_controller_forgot_accounting_knows(controller: Controller) -> None:
    controller.accounting = {"7": "COMPLETED"}
    assert controller.verdict()[0] is Verdict.SUCCEEDED
    controller.accounting = {"7": "CANCELLED"}
    assert controller.verdict()[0] is Verdict.FAILED


def test_accounting_alone_does_not_keep_a_job_alive(controller: Controller) -> None:
    controller.accounting = {"7": "RUNNING"}  # "runaway": the controller has lost it, accounting missed its end
    assert controller.verdict()[0] is Verdict.RUNNING
    assert controller.verdict(HOURS)[0] is Verdict.FAILED


def test_a_job_that_nobody_knows_is_given_up_in_the_end(controller: Controller) -> None:
    assert controller.verdict()[0] is Verdict.RUNNING  # submitted a moment ago
    assert controller.verdict(600)[0] is Verdict.RUNNING
    assert controller.verdict(HOURS)[0] is Verdict.FAILED


def test_a_state_of_a_later_slurm_is_given_up_in_the_end(controller: Controller) -> None:
    controller.is_in("HIBERNATING")
    assert controller.verdict()[0] is Verdict.RUNNING
    assert controller.verdict(HOURS)[0] is Verdict.FAILED


def test_silence_has_an_end_and_begins_anew_with_each_answer(controller: Controller) -> None:
    controller.trouble = "Unable to contact slurm controller"
    assert controller.verdict()[0] is Verdict.RUNNING
    assert "does not answer" in controller.watch.news()[0]
    assert controller.verdict(0.9 * HOURS)[0] is Verdict.RUNNING
    controller.trouble = None
    controller.is_in("RUNNING")
    assert controller.verdict(1)[0] is Verdict.RUNNING
    controller.trouble = "Unable to contact slurm controller"
    assert controller.verdict(0.9 * HOURS)[0] is Verdict.RUNNING
    # The run ends, its jobs do not: none is reported as failed, to be submitted a second time.
    with pytest.raises(SlurmError, match=r"Unable to contact.*adopted"):
        controller.verdict(1.1 * HOURS)


def test_sinfo_is_read() -> None:
    assert _limit("infinite") is None
    assert (_limit("1-12:30:00"), _limit("4:00:00"), _limit("5:00")) == (2190, 240, 5)
    assert _gres("gpu:a100:4(S:0-1),shard:a100:40(S:0-1)") == (4, 40, frozenset({"a100"}))
    assert _gres("gpu:4,shard:40") == (4, 40, frozenset())
    assert _gres("(null)") == (0, 0, frozenset())
