"""A job that Slurm does not take: offered again while there is hope, told, and never without an end."""

from __future__ import annotations

from pathlib import Path

import pytest
from sweepack.slurm.cluster import SlurmError
from sweepack.slurm.submit import Counter, OutOfPatienceError

HOUR = 3600.0
BUSY = [
    "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)",
    "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
    "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying.",
    "sbatch: error: Batch job submission failed: Resource temporarily unavailable",
    "sbatch: error: Slurm job queue full, sleeping and retrying.",
    "sbatch: error: Batch job submission failed: Zero Bytes were transmitted or received",
    "sbatch: error: Batch job submission failed: Slurm backup controller in standby mode",
]
FULL = (
    "sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission failed: Job violates "
    "accounting/QOS policy (job submit limit, user's size and/or time limits)"
)


class Desk:
    """A counter at which ``sbatch`` refuses so many times, then takes the job; time passes only while it is slept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = 0.0
        self.told: list[str] = []
        self.pauses: list[float] = []
        self.in_queue = 0
        self.taken: str | None = None
        self.counter = Counter(HOUR, lambda: self.in_queue, self.told.append, lambda: self.now, self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def submit(self, words: str, refusals: int) -> str:
        program = self.folder / "sbatch"
        (self.folder / "words").write_text(words)
        (self.folder / "left").write_text("x\n" * refusals)
        program.write_text(
            f"#!/bin/sh\ncd {self.folder}\necho offered >> offers\n"
            "[ -s left ] || { echo '17;cluster'; exit; }\nsed -i 1d left; cat words >&2; exit 1\n"
        )
        program.chmod(0o755)
        return self.counter.submit([str(program)], "#!/bin/sh\n", lambda: self.taken)

    @property
    def offers(self) -> int:
        return len((self.folder / "offers").read_text().split())


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


@pytest.mark.parametrize("words", BUSY)
def test_what_passes_is_waited_for(desk: Desk, words: str) -> None:
    assert desk.submit(words, 3) == "17"
    assert desk.pauses == [1, 2, 4]
    (told,) = desk.told
    assert words.removeprefix("sbatch: error: ") in told and "asking again, for up to 60 min" in told
    assert desk.submit(words, 1) == "17"
    assert len(desk.told) == 1  # it is the same for the next job


def test_what_does_not_pass_has_an_end(desk: Desk) -> None:
    with pytest.raises(OutOfPatienceError, match=r"60 min.*Unable to contact.*adopted"):
        desk.submit(BUSY[0], 10**4)
    assert desk.now == HOUR
    assert max(desk.pauses) == 30


def test_a_limit_on_the_number_of_jobs_is_waited_for_as_long_as_own_jobs_are_in_the_queue(desk: Desk) -> None:
    desk.in_queue = 20
    assert desk.submit(FULL, 500) == "17"
    assert desk.now > HOUR
    assert "QOSMaxSubmitJobPerUserLimit" in desk.told[0] and "set `jobs` of the profile to 20 or less" in desk.told[0]
    desk.in_queue = 0
    with pytest.raises(OutOfPatienceError, match="QOSMaxSubmitJobPerUserLimit"):
        desk.submit(FULL, 500)


@pytest.mark.parametrize(
    "words, key",
    [
        ("sbatch: error: Batch job submission failed: Invalid qos specification", "slurm.qos"),
        ("sbatch: error: Batch job submission failed: Requested time limit is invalid (exceeds)", "slurm.time"),
        ("sbatch: error: something of this site's own", "slurm"),
    ],
)
def test_a_refusal_for_good_is_told_at_once(desk: Desk, words: str, key: str) -> None:
    with pytest.raises(SlurmError, match=f"refused the job: .*Change `{key}`\n"):
        desk.submit(words, 1)
    assert desk.offers == 1 and not desk.pauses


def test_a_job_that_was_taken_though_the_answer_was_lost_is_not_offered_again(desk: Desk) -> None:
    desk.taken = "16"
    assert desk.submit(BUSY[1], 5) == "16"
    assert desk.offers == 1
