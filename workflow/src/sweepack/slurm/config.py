"""The part of the configuration that only Slurm reads."""

from __future__ import annotations

import re
import shlex
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from sweepack.config_types import Megabytes, Minutes, Model

# What the jobs ask for is worked out from the cells; set by hand it would disagree with what runs inside.
_OWN = {
    "--gpus": "slurm.pack.gpus",
    "--gres": "slurm.gpu_flag or slurm.gpu_model",
    "--cpus-per-task": "resources[].cpus or slurm.cpus",
    "--mem": "resources[].mem or slurm.mem",
    "--time": "resources[].runtime or slurm.time",
    "--partition": "slurm.partition",
    "--account": "slurm.account",
    "--qos": "slurm.qos",
    "--constraint": "slurm.constraint",
    "--reservation": "slurm.reservation",
    "--signal": "slurm.grace",
    "--requeue": "slurm.requeue",
    "--no-requeue": "slurm.requeue",
    "--nodes": "resources[].nodes",
    "--ntasks": "resources[].nodes and gpus_per_node",
    "--ntasks-per-node": "resources[].gpus_per_node",
    "--array": "nothing: each job is submitted by itself",
    "--job-name": "nothing: jobs are named by sweep and pack",
    "--comment": "nothing: by their comment jobs are found again",
    "--output": "nothing: the log lies beside the pack",
    "--chdir": "nothing: jobs run in the project's folder",
    "--error": "nothing: the log lies beside the pack",
    **dict.fromkeys(("--parsable", "--wrap", "--wait", "--test-only"), "nothing: the run follows its jobs itself"),
    **dict.fromkeys(("--hold", "--clusters"), "nothing: such jobs could not be followed"),
    **dict.fromkeys(("--mem-per-cpu", "--mem-per-gpu"), "resources[].mem or slurm.mem"),
    **dict.fromkeys(("--gpus-per-node", "--gpus-per-task"), "slurm.pack.gpus or resources[].gpus_per_node"),
    **dict.fromkeys(
        ("--gpu-bind", "--gpus-per-socket", "--ntasks-per-gpu", "--ntasks-per-socket", "--ntasks-per-core"),
        "nothing: each task sees all GPUs of its node's part",
    ),
    **dict.fromkeys(("--distribution", "--overcommit", "--no-kill"), "resources[].nodes and gpus_per_node"),
}
_SHORT = {"-G": "--gpus", "-c": "--cpus-per-task", "-t": "--time", "-p": "--partition", "-A": "--account"}
_SHORT |= {"-q": "--qos", "-C": "--constraint", "-N": "--nodes", "-n": "--ntasks", "-a": "--array", "-J": "--job-name"}
_SHORT |= {"-m": "--distribution", "-O": "--overcommit", "-k": "--no-kill"}
_SHORT |= {"-o": "--output", "-e": "--error", "-D": "--chdir", "-W": "--wait", "-H": "--hold", "-M": "--clusters"}


def _extra(value: Any) -> list[str]:
    """Flags for sbatch from a text or a list; those that are worked out are refused."""
    try:
        words = shlex.split(value) if isinstance(value, str) else value
    except ValueError:
        words = None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError("flags of sbatch|write `extra: --exclusive --mail-type=FAIL`")
    for word in words:
        name = _SHORT.get(word[:2], word.partition("=")[0]) if not word.startswith("--") else word.partition("=")[0]
        if name in _OWN:
            raise ValueError(f"no `{name}`, which is worked out|use {_OWN[name]} instead")
    return words


def _lines(value: Any) -> list[str]:
    lines = [value] if isinstance(value, str) else value
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise ValueError("shell commands|write `setup: module load cuda/12.4`, or a list of such lines")
    return lines


def _seconds(value: Any) -> int:
    if isinstance(value, str) and (found := re.fullmatch(r"(\d+)\s*(s|m)?", value)):
        value = int(found[1]) * (60 if found[2] == "m" else 1)
    if isinstance(value, int) and not isinstance(value, bool) and 5 <= value <= 65_535:
        return value
    raise ValueError("a time of 5 s or more|write `grace: 60s`, `2m` or a number of seconds")


def _count(value: Any) -> Any:
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise ValueError("`auto` or a whole number, 1 or more|write `auto` or for example `6`")


class Request(Model):
    """What Slurm is asked for beside the sizes, which follow from the cells."""

    partition: str | None = Field(default=None, description="Partition; without it the cluster's default.")
    account: str | None = Field(default=None, description="Account that is charged.")
    qos: str | None = Field(default=None, description="Quality of service.")
    constraint: str | None = Field(default=None, description="Features that the node must have.", examples=["a100"])
    reservation: str | None = Field(default=None, description="Reservation to run in.")
    gpu_model: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9_.-]+$",
        description="Model of GPU, as the cluster calls it in its GRES (`sinfo -o %G`).",
        examples=["a100"],
    )
    extra: Annotated[list[str], BeforeValidator(_extra)] | None = Field(
        default=None, description="More flags of sbatch, as text or a list.", examples=["--mail-type=FAIL"]
    )
    setup: Annotated[list[str], BeforeValidator(_lines)] | None = Field(
        default=None,
        description="Shell lines that the job runs first, in a login shell: module loads and the like.",
        examples=["module load cuda/12.4"],
    )

    def over(self, other: Request) -> Request:
        """What is set here, and for the rest what is set in ``other``."""
        own = {name: getattr(self, name) for name in Request.model_fields}
        return Request(**{n: v if v is not None else getattr(other, n) for n, v in own.items()})

    def flags(self) -> list[str]:
        """As sbatch takes it; without the model, which belongs to the number of GPUs."""
        named = ("partition", "account", "qos", "constraint", "reservation")
        return [f"--{name}={getattr(self, name)}" for name in named if getattr(self, name)] + (self.extra or [])


class PackSettings(Model):
    """How cells are gathered into packs."""

    gpus: int = Field(default=1, ge=1, le=64, description="GPUs of a pack, all on one node.")
    count: Annotated[Literal["auto"] | int, BeforeValidator(_count)] = Field(
        default="auto",
        description="How many packs (for each group of cells that ask for the same), where they do not get longer than "
        "the time limit. `auto`: as many as it takes for each to last about `minutes`.",
    )
    minutes: Minutes = Field(default=60, description="How long a pack should last, if `count` is `auto`.")


class Slurm(Request):
    """How cells run on a Slurm cluster. The keys of `resources[].slurm` stand here for the whole sweep."""

    mode: Literal["pack", "shard", "exclusive"] = Field(
        default="pack",
        description="`pack`: jobs with whole GPUs, in each of which many cells run side by side. `shard`: a job a "
        "cell, which asks for as many shards of a GPU as its share is worth (where the cluster has them). "
        "`exclusive`: a job and a whole GPU for each cell.",
    )
    pack: PackSettings = Field(default=PackSettings(), description="How cells are gathered into packs.")
    gpu_flag: Literal["gpus", "gres"] = Field(
        default="gpus", description="Ask by `--gpus=1` or by `--gres=gpu:1`; some sites take only one of them."
    )
    shards_per_gpu: int | None = Field(
        default=None, ge=1, description="Only with `mode: shard`, and where sinfo does not tell."
    )
    cpus: int | None = Field(
        default=None,
        ge=1,
        description="CPUs of a job. Without it: what the cells need that fit on its GPUs at once, but no more than "
        "its part of the node; cells wait for CPUs within the job.",
    )
    mem: Megabytes | None = Field(
        default=None,
        description="Main memory of a job. Without it: what its cells need at once by their `mem`, and for cells "
        "that do not say the cluster's default.",
        examples=["32GB"],
    )
    time: Minutes | None = Field(
        default=None,
        description="Time limit of jobs whose cells do not give their `runtime`. Without it: 4 h, or the partition's "
        "limit if that is less. What a job does not finish in time, another one continues.",
    )
    grace: Annotated[int, BeforeValidator(_seconds)] = Field(
        default=120,
        description="How long before its time limit a job is told to stop, so that its cells save what they have: "
        "`120s` or `2m`.",
    )
    requeue: bool = Field(
        default=True, description="Whether Slurm may start a job again that it has preempted or lost with its node."
    )
    live: Literal["adopt", "cancel"] = Field(
        default="adopt",
        description="What becomes of jobs of this sweep that an earlier run, which was killed, has left in the queue. "
        "`adopt`: they go on, and this run waits for them. `cancel`: they are cancelled before others are submitted.",
    )
