"""Follow the ranks of a cell from the first that appears to the last that ends, and judge how the cell has ended.

Whatever goes wrong has a name and ends all ranks: one that is missing, came twice, stands where the layout has none,
is killed, fails, or exits otherwise than it said. No wait is without end.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sweepack.ddp.layout import Layout
from sweepack.ddp.meeting import Meeting, Member
from sweepack.ddp.merge import merged
from sweepack.ddp.starters import Started, wait_for_end
from sweepack.memory import largest
from sweepack.records import State
from sweepack.supervise import CRASHES

# What a rank may take to stop when it is told to, what a cause may come later than its effect, and how long
# the last rank may take to end when the others have.
STOP_SECONDS = 15.0
_UNMET_SECONDS = 1.0
CAUSE_SECONDS = 1.0
_LAST_SECONDS = 1800.0
_EXIT_SECONDS = 40.0
_TICK = 0.2


@dataclass(frozen=True)
class Outcome:
    """How the cell ended; ``error`` names the rank whose doing it was, ``failure`` is as in ``Record``.

    ``memory`` has the largest numbers that the ranks have told.
    """

    state: State
    metrics: dict[str, Any] | None = None
    error: str | None = None
    world_size: int | None = None
    memory: dict[str, int | None] | None = None
    failure: str | None = None


class Follower:
    """Follows the ``started`` processes of ``layout``.

    ``caught`` tells by which signal this process was told to stop, ``go`` what the ranks are told when all are there,
    ``note`` writes a line in the cell's log. ``nodes`` are the names of the nodes, where they are known.
    """

    def __init__(
        self,
        layout: Layout,
        meeting: Meeting,
        started: Sequence[Started],
        caught: Callable[[], int | None],
        go: Callable[[], dict[str, Any]],
        note: Callable[[str], None],
        nodes: Sequence[str] = (),
    ) -> None:
        self._layout = layout
        self._meeting = meeting
        self._started = started
        self._caught = caught
        self._go = go
        self._note = note
        self._nodes = nodes
        self._ranks: dict[int, Member] = {}
        self._world = layout.world_size
        self._gone_ahead = False
        self._since = time.monotonic()
        self._last: float | None = None

    def run(self) -> Outcome:
        """Follow them to the end. None of them is left when this returns, however it does."""
        try:
            outcome = self._follow()
        finally:
            self._end_all(signal.SIGTERM)
        told = [member.end["memory"] for member in self._ranks.values() if member.end and "memory" in member.end]
        return replace(outcome, memory=largest(told))

    def _follow(self) -> Outcome:
        while True:
            changed = self._meeting.look(_TICK)
            if signum := self._caught():
                return self._stopped(signum)
            for member in changed:
                if outcome := self._take_in(member):
                    return outcome
            outcome = self._over() or self._missing() or self._exited()
            if outcome:
                return outcome
            if not self._gone_ahead and len(self._ranks) == self._world:
                self._gone_ahead = True
                told = self._go()
                for member in self._ranks.values():
                    member.send(go=told)

    def _stopped(self, signum: int) -> Outcome:
        return Outcome(State.INTERRUPTED, error=f"stopped by {signal.Signals(signum).name}", world_size=self._world)

    def _take_in(self, member: Member) -> Outcome | None:
        if member.hello.get("problems"):
            return self._failed("; ".join(member.hello["problems"]), member)
        known = self._ranks.setdefault(member.rank, member)
        if known is not member:
            return self._failed(f"it was started twice: {self._who(known)} and {self._who(member)}", member)
        if member.rank == 0 and member.hello["host"] != os.uname().nodename:
            return self._failed(f"it runs on {member.hello['host']}, not with the launcher on this node", member)
        if (member.gone and member.end is None) or (member.end and member.end["state"] != State.FINISHED):
            return self._cause()
        return None

    def _cause(self) -> Outcome:
        """Of what has gone wrong the first: that a rank was killed may be noticed later than what it does to others."""
        end = time.monotonic() + CAUSE_SECONDS
        first = [member for member in self._ranks.values() if member.end and member.end["state"] != State.FINISHED]
        while time.monotonic() < end and not self._lost():
            for member in self._meeting.look(_TICK):
                if member.end and member.end["state"] != State.FINISHED and member not in first:
                    first.append(member)
        lost = self._lost()
        if lost:
            return self._killed(lost)
        return self._ended_by(first[0])

    def _ended_by(self, member: Member) -> Outcome:
        """The end of the cell by what the rank has said of its own."""
        said = member.end or {}
        error = f"{self._name(member.rank)}: {said['error']}"
        return Outcome(State(said["state"]), error=error, world_size=self._world, failure=said.get("failure"))

    def _lost(self) -> Member | None:
        return next((member for member in self._ranks.values() if member.gone and member.end is None), None)

    def _killed(self, member: Member) -> Outcome:
        """How a rank ended that left no word, as far as the process that started it can tell."""
        mine = [each for each in self._started if each.rank in (None, member.rank)]
        wait_for_end(mine, STOP_SECONDS if mine and mine[0].rank is None else CAUSE_SECONDS)
        status = mine[0].status() if mine else None
        if mine and mine[0].rank is None and status is not None and status > 128:
            status = 128 - status  # as srun tells a signal
        return self._by_status(self._name(member.rank), status)

    def _by_status(self, name: str, status: int | None) -> Outcome:
        """The end of a process that left no word; None: nobody knows its ``status``."""
        if status is None:
            return self._outcome(State.INTERRUPTED, f"{name} has gone without a word")
        if status >= 0:
            return self._outcome(State.FAILED, f"{name} ended itself with exit status {status}")
        crashed = -status in CRASHES
        what = f"{'crashed' if crashed else 'was killed'} ({signal.Signals(-status).name})"
        return self._outcome(State.FAILED if crashed else State.INTERRUPTED, f"{name} {what}")

    def _outcome(self, state: State, error: str) -> Outcome:
        return Outcome(state, error=error, world_size=self._world)

    def _missing(self) -> Outcome | None:
        if self._gone_ahead or time.monotonic() - self._since < self._layout.start_seconds:
            return None
        absent = [self._name(rank) for rank in range(self._world) if rank not in self._ranks]
        return Outcome(
            State.FAILED,
            error=f"{', '.join(absent[:8])} did not appear within {self._layout.start_seconds} s, "
            f"{len(self._ranks)} of {self._world} ranks did: is it the number of tasks that `nodes` and "
            "`gpus_per_node` ask for, and can the node reach this one? (`ddp.start_seconds` gives more time)",
            world_size=self._world,
        )

    def _exited(self) -> Outcome | None:
        """A process that started well, and ended before all ranks have."""
        for each in self._started:
            status = each.status()
            if status is None or (each.rank is not None and each.rank in self._ranks):
                continue
            if each.rank is None and self._ranks and all(m.end or m.gone for m in self._ranks.values()):
                continue
            # What it started may still have a word to say.
            if outcome := self._last_words():
                return outcome
            name = self._name(each.rank) if each.rank is not None else "srun"
            return Outcome(State.FAILED, error=f"{name} ended with exit status {status}", world_size=self._world)
        return None

    def _last_words(self) -> Outcome | None:
        end = time.monotonic() + CAUSE_SECONDS
        while time.monotonic() < end:
            for member in self._meeting.look(_TICK):
                if outcome := self._take_in(member):
                    return outcome
        words = [m for m in self._ranks.values() if m.end and m.end["state"] != State.FINISHED]
        if words:
            return self._ended_by(words[0])
        return self._killed(lost) if (lost := self._lost()) else None

    def _over(self) -> Outcome | None:
        """The end, when every rank has told it; the last one is not waited for without end."""
        ended = [member for member in self._ranks.values() if member.end]
        if not ended or not self._gone_ahead:
            return None
        if len(ended) < self._world:
            self._last = self._last or time.monotonic()
            if time.monotonic() - self._last < _LAST_SECONDS:
                return None
            left = [self._name(rank) for rank in self._ranks if not self._ranks[rank].end]
            error = f"{', '.join(left)} went on for {_LAST_SECONDS / 60:.0f} min after another rank had ended"
            return Outcome(State.FAILED, error=error, world_size=self._world)
        if any(m.end and m.end["state"] != State.FINISHED for m in ended):
            return None  # torchrun may start them again; if not, it ends
        wait_for_end(self._started, _EXIT_SECONDS)
        for each in self._started:
            status = each.status()
            if status and not self._layout.elastic:
                name = self._name(each.rank) if each.rank is not None else "a rank"
                error = f"{name} exited with status {status} although it had finished"
                return Outcome(State.FAILED, error=error, world_size=self._world)
        metrics = merged([self._ranks[rank].end["metrics"] for rank in range(self._world)])  # type: ignore[index]
        return Outcome(State.FINISHED, metrics, world_size=self._world)

    def _failed(self, what: str, member: Member) -> Outcome:
        return Outcome(State.FAILED, error=f"{self._name(member.rank, member)}: {what}", world_size=self._world)

    def _name(self, rank: int, member: Member | None = None) -> str:
        member = member or self._ranks.get(rank)
        if member:
            return f"rank {rank} ({self._who(member)})"
        node, local = divmod(rank, self._layout.gpus_per_node)
        where = f"{self._nodes[node]}, " if node < len(self._nodes) else ""
        return f"rank {rank} ({where}local rank {local})"

    def _end_all(self, signum: int) -> None:
        """Tell those that are left to stop, give them time for it, and kill what is left then."""
        for member in self._meeting.members:
            member.send(stop=signum)
        # Those that have not met have nothing to save.
        wait_for_end(self._started, STOP_SECONDS if self._gone_ahead else _UNMET_SECONDS)
        self._meeting.close()
        for each in self._started:
            each.kill()

    @staticmethod
    def _who(member: Member) -> str:
        hello = member.hello
        return f"{hello['host']}, local rank {hello['local_rank']}, pid {hello['pid']}"
