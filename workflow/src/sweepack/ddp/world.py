"""The world of a cell, as one of its ranks sees it."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import dataclass
from typing import Any

from sweepack.ddp.layout import Layout


@dataclass(frozen=True)
class World:
    """This process is ``rank`` of ``size``, ``local_rank`` on its node, one of ``nodes``.

    ``checkpoints`` are the names of those that may be resumed from, the same on every rank.
    """

    rank: int
    local_rank: int
    size: int
    nodes: int
    layout: Layout
    checkpoints: frozenset[str]

    def facts(self, seed: int) -> dict[str, Any]:
        """What provenance says of it: the seeds of all ranks, and where they met."""
        return {
            "world_size": self.size,
            "nodes": self.nodes,
            "strategy": self.layout.strategy,
            "launcher": self.layout.launcher,
            "rank_seeds": [rank_seed(seed, rank) for rank in range(self.size)],
            "rendezvous": f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
        }


def rank_seed(seed: int, rank: int) -> int:
    """The seed of a rank's own draws (dropout, augmentation), below 2**63.

    By SHA-256, so that no two pairs meet: the sum of both would give rank 1 of seed 0 the numbers of rank 0 of seed 1.
    """
    digest = hashlib.sha256(json.dumps([seed, rank]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def joined(size: int) -> bool:
    """Whether this process is in a process group of so many ranks."""
    distributed = sys.modules.get("torch.distributed")
    return bool(
        distributed
        and distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() == size
    )


def gathered(value: Any) -> list[Any]:
    """``value`` of every rank, in the order of the ranks; every rank must call it. Alone: a list of one."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return [value]
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values
