"""What Slurm says when it does not do what it is asked: whether that will pass, and what is to be changed if not."""

from __future__ import annotations

import re
from enum import Enum

# The names of Slurm's limits on how many jobs may be in the queue, of an association or a QOS, and for whom.
_FULL = re.compile(r"(Max|Grp)SubmitJob", re.IGNORECASE)
_BUSY = re.compile(
    "unable to contact|connection re|connection fail|timed out|not answered|temporarily|job queue full|try again|"
    "zero bytes|transport endpoint|unexpected message|(send|receive) failure|standby mode",
    re.IGNORECASE,
)
# What Slurm says, and the key that is to be changed.
_KEYS = {
    "account": "slurm.account",
    "partition": "slurm.partition",
    "qos": "slurm.qos",
    "reservation": "slurm.reservation",
    "feature": "slurm.constraint",
    "constraint": "slurm.constraint",
    "time limit": "slurm.time",
    "memory": "slurm.mem",
    "gres": "slurm.gpu_model",
}


class Refusal(Enum):
    """Why Slurm has not done what it was asked: for now, for as many jobs are in the queue, or for good."""

    BUSY = "Slurm is out of reach or too busy"
    FULL = "Slurm takes no more jobs for now"
    FINAL = "Slurm refuses"


def refusal_of(words: str) -> Refusal:
    """What kind of refusal ``words`` are."""
    if _FULL.search(words):
        return Refusal.FULL
    return Refusal.BUSY if _BUSY.search(words) else Refusal.FINAL


def key_of(words: str) -> str:
    """The key of the configuration that ``words`` are about."""
    return next((key for word, key in _KEYS.items() if word in words.lower()), "slurm")


def plain(words: str) -> str:
    """``words`` in one line, without the programs' names in front."""
    lines = (re.sub(r"^((sbatch|error|allocation failure): *)+", "", line) for line in words.splitlines())
    return " ".join(line for line in lines if line)
