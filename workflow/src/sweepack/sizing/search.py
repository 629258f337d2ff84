"""Find the largest batch that fits, by measuring: the answer is always a batch that was measured to fit.

Memory as a function of the batch is not a line, may jump, and is a little different each time. So: down by halves from
the first guess until one fits, up by doubling until one does not, then a few between the two.

Standard library only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sweepack.sizing.rule import static_and_sample, whole
from sweepack.sizing.words import amount

if TYPE_CHECKING:
    from sweepack.sizing.meter import Measurement

FIRST = 16  # where there is no guess
_BELOW_GUESS = 2  # a guess that is too high costs an out-of-memory, one that is too low a doubling
_REFINEMENTS = 5
_GRAIN = 8  # from 64 on, batches are multiples of this
_CLOSE = 32  # the answer may be lower than the truth by a part of so many
_TRIES = 3
_TINY = 2
_ALIKE = 0.05  # peaks that differ by a smaller part than this may be the same
_FAR = 8  # of batches that differ by this factor a peak should tell

Measure = Callable[[int], "Measurement"]


@dataclass(frozen=True)
class Answer:
    """What was found: the fields are those of ``Pin``, and ``measured`` is in the order in which it was.

    ``limited_by`` is ``memory``, ``data`` (the task has no more samples), ``largest_batch`` or ``error`` (a larger
    batch fails otherwise; with ``trouble``: nothing could be measured). ``remarks`` are for people.
    """

    batch: int | None = None
    largest: int | None = None
    peak: int | None = None
    limited_by: str | None = None
    trouble: str | None = None
    static: float | None = None
    sample: float | None = None
    measured: list[Measurement] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


class _Ignored(Exception):
    """The task does not heed the batch; the message says how that was seen."""


def search(
    measure: Measure, budget: int | None, *, largest_batch: int, start: float, guess: int | None = None
) -> Answer:
    """The largest batch up to ``largest_batch`` that ``measure`` finds to take at most ``budget`` bytes.

    ``budget`` None: whatever does not run out of memory. ``batch`` of the answer is the part ``start`` of it, measured
    too. Each batch is measured once, 2 log2(``largest_batch``) + 16 at most.
    """
    run = _Run(measure, budget, largest_batch)
    try:
        fits = run.descend(guess)
        if fits is None:
            return run.nothing()
        run.refine(*run.climb(fits))
        return run.conclude(start)
    except _Ignored as ignored:
        return run.answer(limited_by="error", trouble=str(ignored))


class _Run:
    def __init__(self, measure: Measure, budget: int | None, largest_batch: int) -> None:
        self._measure = measure
        self._budget = budget
        self._largest_batch = largest_batch
        self._limit = largest_batch
        self._limited_by = "largest_batch"
        self._measured: dict[int, Measurement] = {}
        self._remarks: list[str] = []
        self._rows_tell = True

    def descend(self, guess: int | None) -> int | None:
        """A batch that fits, below the guess or as far below as need be; None when there is none."""
        first = guess // _BELOW_GUESS if guess else FIRST
        return self._down(2 ** int(math.log2(min(max(first, 1), self._limit))))

    def _down(self, batch: int) -> int | None:
        while not self._fits(batch):
            if batch == 1:
                return None
            if batch > self._limit:
                batch = self._limit
            elif self._measured[batch].outcome == "failed":
                # That is seldom for want of memory; batch normalisation fails at 1.
                batch = _TINY if batch > _TINY else 1
            else:
                batch //= 2
        return batch

    def climb(self, fits: int) -> tuple[int, int | None]:
        """The largest batch by doubling that fits, and the first that does not (None: the limit was reached)."""
        while fits < self._limit:
            above = min((batch for batch in self._measured if fits < batch <= self._limit), default=None)
            if above is None:
                above = min(2 * fits, self._limit)
                if not self._fits(above) and above > self._limit:
                    continue  # the samples have run out
            if not self._fits(above):
                return fits, above
            fits = above
        return fits, None

    def refine(self, fits: int, above: int | None) -> None:
        """Measure a few batches between what fits and what does not."""
        first = None
        for turn in range(_REFINEMENTS):
            if above is None or above > self._limit:
                return
            grain = _GRAIN if above >= 8 * _GRAIN else 1
            if above - fits <= max(grain, fits // _CLOSE):
                return
            batch = self._line(above) if turn == 0 else None
            if turn == 1 and first == fits:
                batch = fits + grain  # the line is right if the next one does not fit
            batch = (fits + above) // 2 if batch is None else batch
            batch = max(min(batch, above - 1) // grain, fits // grain + 1) * grain
            first = first or batch
            if self._fits(batch):
                fits = batch
            else:
                above = batch

    def _line(self, above: int) -> int | None:
        """Where the line through what was measured meets the budget."""
        peaks = self._peaks()
        if (over := self._measured[above].peak) is not None and self._measured[above].outcome == "measured":
            peaks[above] = over
        line = static_and_sample(peaks)
        if line is None or self._budget is None or line[1] <= 0:
            return None
        return whole((self._budget - line[0]) / line[1])

    def conclude(self, start: float) -> Answer:
        """Measure the batch that cells get, and answer; of batches that don't follow suit the conservative one."""
        for tries in range(_TRIES + 1):
            if not self._safe() and self._down(max(1, min(self._measured) // 2)) is None:
                return self.nothing()
            safe = self._safe()
            largest = max(safe)
            batch = max(1, whole(start * largest))
            if batch in self._measured or tries == _TRIES or self._fits(batch):
                break
            self._remarks.append(f"batch {batch} does not fit, though {largest} does: the answer is below it")
        safe = self._safe()
        if batch not in safe:
            # Measuring is not to go on for ever; or the batch is one that fails because it is too small.
            batch = max((other for other in safe if other <= batch), default=min(safe))
        above = min((other for other in self._measured if largest < other <= self._limit), default=None)
        limited_by = self._limited_by
        if above is not None:
            failed = self._measured[above].outcome == "failed"
            limited_by = "error" if failed else "memory"
            if failed:
                self._remarks.append(f"batch {above} fails: {self._measured[above].error}")
        self._remark_on_peaks()
        static, sample = static_and_sample(self._peaks()) or (None, None)
        return self.answer(
            batch=batch,
            largest=largest,
            peak=self._measured[batch].peak,
            limited_by=limited_by,
            static=static,
            sample=sample,
        )

    def nothing(self) -> Answer:
        """The answer when no batch fits: because of memory, or since the task fails."""
        least = min(self._measured)
        found = self._measured[least]
        two = self._measured.get(2)
        if found.outcome != "failed":
            return self.answer(limited_by="memory", trouble=f"does not fit: batch {least} {self._excess(least)}")
        if two is not None and two.outcome != "failed":
            trouble = f"does not fit: batch 2 {self._excess(2)}, and batch 1 fails: {found.error}"
            return self.answer(limited_by="memory", trouble=trouble)
        return self.answer(limited_by="error", trouble=f"the task fails at batch {least}: {found.error}")

    def answer(self, **found: object) -> Answer:
        return Answer(**found, measured=list(self._measured.values()), remarks=self._remarks)  # type: ignore[arg-type]

    def _excess(self, batch: int) -> str:
        found = self._measured[batch]
        limit = "the device has" if self._budget is None else f"its {amount(self._budget)}"
        if found.outcome == "oom" or found.peak is None:
            return f"needs more than {limit}"
        return f"takes {amount(found.peak)}, more than {limit}"

    def _fits(self, batch: int) -> bool:
        """Whether the batch, measured now if it was not yet, counts and fits."""
        if batch not in self._measured:
            self._measured[batch] = self._measure(batch)
            self._look_at_rows(batch)
        found = self._measured[batch]
        within = found.peak is not None and (self._budget is None or found.peak <= self._budget)
        return found.outcome == "measured" and within and batch <= self._limit

    def _safe(self) -> list[int]:
        """The batches that fit and below which everything measured does, but for what is too small to be normalised."""
        safe: list[int] = []
        for batch in sorted(self._measured):
            if self._fits(batch):
                safe.append(batch)
            elif batch > _TINY or self._measured[batch].outcome != "failed":
                break
        return safe

    def _peaks(self) -> dict[int, float]:
        return {batch: self._measured[batch].peak or 0 for batch in self._measured if self._fits(batch)}

    def _look_at_rows(self, batch: int) -> None:
        """Tell from the samples that a step really saw whether the data has run out, or the task ignores its batch."""
        rows = self._rows()
        if batch not in rows:
            return
        if self._grows(other for other in rows if rows[other] == rows[batch]):
            # What looked like samples is another dimension, say the length of sequences.
            self._rows_tell = False
            self._limit, self._limited_by = self._largest_batch, "largest_batch"
            return
        least, same = min(rows), len(set(rows.values())) == 1
        smaller = max(1, rows[batch] // 2)
        if same and rows[batch] < batch and rows[batch] <= least and smaller not in self._measured:
            # It may have no more, or always take so many: a smaller batch shows.
            self._fits(smaller)
            self._look_at_rows(batch)
            return
        if same and len(rows) > 1 and rows[least] > least:
            if max(rows) >= _FAR * least or max(rows) == self._limit:
                raise _Ignored(
                    f"the task's steps saw {rows[least]} samples at batch {least} and at batch {max(rows)}: it must "
                    "take its batch from `cell.batch`"
                )
            return
        ratio = rows[least] / least
        if rows[batch] < ratio * batch * (1 - 1e-9):
            full = max((other for other in rows if rows[other] >= ratio * other * (1 - 1e-9)), default=1)
            end = max(math.ceil(rows[batch] / ratio - 1e-9), full, 1)
            if end < self._limit:
                self._limit, self._limited_by = end, "data"

    def _rows(self) -> dict[int, int]:
        return {batch: found.rows for batch, found in self._measured.items() if found.rows and self._rows_tell}

    def _grows(self, batches: Iterable[int]) -> bool:
        """Whether the peaks at these batches differ by more than by chance."""
        peaks = [peak for batch in batches if (peak := self._measured[batch].peak) is not None]
        return bool(peaks) and max(peaks) > min(peaks) * (1 + _ALIKE)

    def _remark_on_peaks(self) -> None:
        peaks = sorted(self._peaks().items())
        if not self._rows() and peaks[-1][0] >= _FAR * peaks[0][0] and not self._grows(self._peaks()):
            self._remarks.append("the batch hardly changes what it takes: does the task use `cell.batch`?")
        for (low, before), (high, after) in itertools.pairwise(peaks):
            if before > after * (1 + _ALIKE):
                self._remarks.append(f"batch {low} takes more ({amount(before)}) than batch {high} ({amount(after)})")
