"""Jobs handed to Slurm: where it does not take one for now, or is silent, it is asked again until patience ends."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from sweepack.slurm.cluster import SlurmError, run
from sweepack.slurm.refusal import Refusal, key_of, plain, refusal_of

T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0
_TELL_SECONDS = 10 * 60.0


class OutOfPatienceError(Exception):
    """Slurm has not done what it was asked for as long as the run is patient; the jobs that it has go on."""


class Counter:
    """Where jobs are handed in, one after the other.

    ``patience``: seconds after which the run ends if Slurm does not take a job. ``in_queue``: how many jobs this run
    has in the queue; where a limit on their number is in the way, they are waited for however long they take, since
    each has a time limit of its own. ``tell`` is told what is waited for.
    """

    def __init__(
        self,
        patience: float,
        in_queue: Callable[[], int],
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._patience = patience
        self._in_queue = in_queue
        self._tell = tell
        self._clock = clock
        self._sleep = sleep
        self._told: dict[Refusal, float] = {}

    def submit(self, sbatch: Sequence[str], script: str, taken: Callable[[], str | None]) -> str:
        """The id of the job; ``taken`` tells it where Slurm has taken the job and yet seemed not to.

        Raises SlurmError with Slurm's own words where it will never take it, and OutOfPatienceError.
        """
        offered = False

        def offer() -> str:
            nonlocal offered
            if offered and (identity := taken()):
                return identity
            offered = True
            return run([*sbatch, "/dev/stdin"], stdin=script)

        try:
            answer = self.patiently(offer)
        except SlurmError as error:
            words = plain(str(error))
            raise SlurmError(
                f"Slurm refused the job: {words}. Change `{key_of(words)}`\n  {shlex.join(sbatch)}"
            ) from None
        # "1234", or "1234;cluster"
        identity = answer.strip().split(";")[0]
        if not identity.isdigit():
            raise SlurmError(f"sbatch answered {answer!r}, which is no job id")
        return identity

    def patiently(self, ask: Callable[[], T]) -> T:
        """What ``ask`` brings. Raises what it raises for good, and OutOfPatienceError."""
        end = self._clock() + self._patience
        pause = _FIRST_PAUSE
        while True:
            try:
                return ask()
            except SlurmError as error:
                words = plain(str(error))
                kind = refusal_of(words)
                if kind is Refusal.FINAL:
                    raise
            now = self._clock()
            if kind is Refusal.FULL and self._in_queue():
                end = now + self._patience
            if now >= end:
                raise OutOfPatienceError(
                    f"{kind.value}, for {self._patience / 60:.3g} min now ({words}). The jobs in the queue go on: run "
                    "the same command later, and they are adopted"
                )
            self._say(kind, words, now)
            self._sleep(min(pause, end - now))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _say(self, kind: Refusal, words: str, now: float) -> None:
        """Once in a while: it is the same for the jobs that follow."""
        if now - self._told.get(kind, -_TELL_SECONDS) < _TELL_SECONDS:
            return
        self._told[kind] = now
        mine = self._in_queue()
        if kind is Refusal.FULL and mine:
            doing = f"waiting for one of the {mine} of this run to end; set `jobs` of the profile to {mine} or less"
        else:
            doing = f"asking again, for up to {self._patience / 60:.3g} min"
        self._tell(f"{kind.value} ({words}): {doing}")
