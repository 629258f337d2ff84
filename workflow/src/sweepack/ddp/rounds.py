"""Follow the ranks of a cell that torchrun starts, in rounds: what ends a round need not end the cell."""

from __future__ import annotations

import time
from typing import Any

from sweepack.ddp.follow import CAUSE_SECONDS, Follower, Outcome
from sweepack.ddp.layout import Layout
from sweepack.ddp.meeting import Member
from sweepack.records import State


class RoundFollower(Follower):
    """Follows torchrun's agents, one a node, and the ranks of the round that they have started last."""

    def __init__(self, layout: Layout, *others: Any) -> None:
        super().__init__(layout, *others)
        self._agents: dict[int, Member] = {}
        self._round: str | None = None
        self._past: set[str | None] = set()
        # Ranks of this round that have gone without a word or said that they have not finished, by when they did.
        self._trouble: dict[int, float] = {}

    def _take_in(self, member: Member) -> Outcome | None:
        if "agent" in member.hello:
            self._agents[member.hello["agent"]] = member
            return None
        if member.hello["problems"]:
            return self._failed("; ".join(member.hello["problems"]), member)
        if member.hello["round"] not in {self._round, *self._past} and not member.gone:
            self._turn(member)
        if member.hello["round"] != self._round:
            return None
        known = self._ranks.setdefault(member.rank, member)
        if known is not member:
            return self._failed(f"it was started twice: {self._who(known)} and {self._who(member)}", member)
        if member.end["state"] != State.FINISHED if member.end else member.gone:
            self._trouble.setdefault(member.rank, time.monotonic())
        return None

    def _turn(self, member: Member) -> None:
        """torchrun has started the ranks anew, perhaps another number of them: those of before no longer count."""
        if self._round is not None:
            cause = self._reason()
            self._note(
                f"the ranks start again, now {member.hello['world_size']} of them"
                + (f", since {cause.error}" if cause else "")
            )
        self._past.add(self._round)
        self._round, self._world = member.hello["round"], member.hello["world_size"]
        self._ranks, self._trouble, self._gone_ahead = {}, {}, False
        self._since, self._last = time.monotonic(), None

    def _reason(self) -> Outcome | None:
        """What ended this round: of what has gone wrong the first, but what was killed before those that noticed it."""
        first = min(self._trouble.values(), default=0.0)
        early = [rank for rank, when in self._trouble.items() if when <= first + CAUSE_SECONDS]
        if lost := [rank for rank in early if self._ranks[rank].end is None]:
            return self._vanished(self._ranks[lost[0]])
        return self._ended_by(self._ranks[early[0]]) if early else None

    def _vanished(self, member: Member) -> Outcome:
        name = self._name(member.rank)
        told = [agent.end or {} for agent in self._agents.values() if agent.hello["host"] == member.hello["host"]]
        statuses: dict[str, int] = next((end["statuses"] for end in told if "statuses" in end), {})
        if str(member.rank) in statuses:
            return self._by_status(name, statuses[str(member.rank)])
        lost = any(a.gone and a.end is None for a in self._agents.values() if a.hello["host"] == member.hello["host"])
        return self._outcome(State.INTERRUPTED, f"{name} was lost{' with the agent of its node' if lost else ''}")

    def _missing(self) -> Outcome | None:
        if self._gone_ahead or self._ranks or time.monotonic() - self._since < self._layout.start_seconds:
            return super()._missing()
        absent = [node for node in range(self._layout.nodes) if node not in self._agents]
        nodes = ", ".join(self._nodes[node] if node < len(self._nodes) else f"node {node}" for node in absent)
        return self._outcome(
            State.FAILED,
            f"torchrun started no rank within {self._layout.start_seconds} s: "
            + (f"its agent did not appear on {nodes}; can it reach this node?" if absent else "its agents did not meet")
            + " (`ddp.start_seconds` gives more time)",
        )

    def _exited(self) -> Outcome | None:
        """torchrun has ended, all its agents with it, and not because all ranks had finished."""
        status = self._started[0].status()
        if status is None:
            return None
        end = time.monotonic() + CAUSE_SECONDS  # what was sent before the end may still be under way
        while time.monotonic() < end:
            for member in self._meeting.look(0.1):
                if outcome := self._take_in(member):
                    return outcome
        if outcome := self._over() or self._reason():
            return outcome
        for agent in self._agents.values():
            if agent.end is None:
                return self._outcome(State.INTERRUPTED, f"torchrun's agent on {agent.hello['host']} was lost")
        errors = [f"{a.hello['host']}: {a.end['error']}" for a in self._agents.values() if a.end and "error" in a.end]
        text = f"torchrun ended with exit status {status}" + (f": {'; '.join(errors)}" if errors else "")
        return self._outcome(State.FAILED, text)
