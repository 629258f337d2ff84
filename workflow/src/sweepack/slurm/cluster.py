"""The cluster as its own commands tell it: partitions, this user's jobs, whether a job would be accepted."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from sweepack.errors import UserError, Verbatim
from sweepack.slurm.refusal import plain

COMMAND_SECONDS = 60.0
# More ids than these in one call would make a long line; the controller answers thousands at once.
_IDS_AT_ONCE = 500
# States of jobs that will not go on, as far as the controller knows.
ENDED = {
    *("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "NODE_FAIL"),
    *("PREEMPTED", "REVOKED"),
}


class SlurmError(Exception):
    """A command of Slurm failed or did not answer; the text is its own."""


@dataclass(frozen=True)
class Partition:
    """A partition of ``nodes``: ``minutes`` is its time limit (None: none); the rest is what its largest node has."""

    name: str
    default: bool
    minutes: int | None
    cpus: int
    memory: int
    gpus: int
    shards: int
    models: frozenset[str]
    nodes: int = 1


@dataclass(frozen=True)
class SlurmJob:
    """A job in the queue: ``state`` as `squeue` calls it, ``reason`` why it waits, ``comment`` as it was submitted."""

    id: str
    state: str
    reason: str
    comment: str


def run(command: Sequence[str], *, stdin: str | None = None, seconds: float = COMMAND_SECONDS) -> str:
    """What ``command`` prints. Raises SlurmError with its own words when it fails or takes longer than ``seconds``."""
    try:
        done = subprocess.run(
            command,
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
            env=_outside(os.environ),
        )
    except FileNotFoundError:
        raise SlurmError(f"{command[0]} is not on the path") from None
    except OSError as error:
        raise SlurmError(f"{command[0]} cannot be started: {error.strerror}, temporarily perhaps") from None
    except subprocess.TimeoutExpired as late:
        # Some of Slurm's commands sleep and try again by themselves, and say why.
        said = (late.stderr or b"").decode(errors="replace").strip()
        raise SlurmError(f"{command[0]} has not answered for {seconds:.0f} s{said and f': {said}'}") from None
    if done.returncode != 0:
        raise SlurmError(done.stderr.strip() or done.stdout.strip() or f"{command[0]} failed ({done.returncode})")
    return done.stdout


def _outside(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without that of a job in which this may run: it would pass to the jobs that are submitted."""
    return {name: value for name, value in environ.items() if not re.match(r"(SLURM_(?!CONF$|CLUSTERS$)|SRUN_)", name)}


def require_slurm() -> None:
    """Raises UserError when this machine has no Slurm to submit to."""
    for program in ("sbatch", "squeue", "sinfo", "scancel"):
        if shutil.which(program) is None:
            raise UserError(
                "--profile profiles/slurm",
                Verbatim(f"{program} is not on the path of this machine"),
                "a machine that submits to a Slurm cluster",
                "log in to one (or load its module), or use `--profile profiles/local` on this machine",
            )


def read_partitions() -> list[Partition]:
    """The partitions of the cluster, as ``sinfo`` has them; raises UserError when it does not answer."""
    try:
        text = run(["sinfo", "--noheader", "--exact", "--format=%P|%l|%c|%m|%D|%G"])
    except SlurmError as error:
        raise UserError(
            "--profile profiles/slurm",
            Verbatim(str(error)),
            "a cluster that answers `sinfo`",
            "try again when it does; what has run is kept",
        ) from None
    found: dict[str, Partition] = {}
    for line in text.splitlines():
        name, limit, cpus, memory, nodes, gres = line.strip().split("|", 5)
        gpus, shards, models = _gres(gres)
        one = Partition(
            name.rstrip("*"),
            name.endswith("*"),
            _limit(limit),
            _number(cpus),
            _number(memory),
            gpus,
            shards,
            models,
            _number(nodes),
        )
        known = found.get(one.name)
        found[one.name] = _larger(known, one) if known else one
    return list(found.values())


def _larger(one: Partition, other: Partition) -> Partition:
    bigger = max(one, other, key=lambda partition: (partition.gpus, partition.cpus, partition.memory))
    return replace(
        bigger, shards=max(one.shards, other.shards), models=one.models | other.models, nodes=one.nodes + other.nodes
    )


def _number(text: str) -> int:
    """Of ``32``, and of ``32+``, which means that some have more."""
    return int(text.rstrip("+"))


def _limit(text: str) -> int | None:
    """Minutes of ``[days-]hours:minutes:seconds`` or ``minutes:seconds``; None for ``infinite``."""
    if not (found := re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)):
        return None
    days, hours, minutes, _ = (int(part or 0) for part in found.groups())
    return (days * 24 + hours) * 60 + minutes


def _gres(text: str) -> tuple[int, int, frozenset[str]]:
    """GPUs, shards and models of GPUs in ``gpu:a100:4(S:0-1),shard:a100:40``."""
    gpus = shards = 0
    models = set()
    for entry in text.split(","):
        if found := re.match(r"(gpu|shard)(?::([^:()]+(?=:)))?:(\d+)", entry):
            kind, model, count = found.groups()
            if kind == "gpu":
                gpus += int(count)
                models |= {model} if model else set()
            else:
                shards += int(count)
    return gpus, shards, frozenset(models)


def my_jobs() -> list[SlurmJob]:
    """The jobs of this user that have not ended; raises SlurmError."""
    text = run(["squeue", "--noheader", f"--user={getpass.getuser()}", "--format=%i|%T|%r|%k"])
    return _jobs(text)


def jobs_by_id(ids: Iterable[str]) -> dict[str, SlurmJob]:
    """What the controller knows about the jobs, those that have ended a while ago missing; raises SlurmError."""
    wanted = list(ids)
    found: dict[str, SlurmJob] = {}
    for start in range(0, len(wanted), _IDS_AT_ONCE):
        part = ",".join(wanted[start : start + _IDS_AT_ONCE])
        try:
            text = run(["squeue", "--noheader", "--states=all", f"--jobs={part}", "--format=%i|%T|%r|%k"])
        except SlurmError as error:
            if "Invalid job id" not in str(error):
                raise
            continue  # the only one that was asked for is forgotten
        found |= {job.id: job for job in _jobs(text)}
    return found


def _jobs(text: str) -> list[SlurmJob]:
    rows = (line.strip().split("|", 3) for line in text.splitlines())
    return [SlurmJob(*row) for row in rows if len(row) == 4]


def accounted_states(ids: Iterable[str]) -> dict[str, str]:
    """The states of jobs that the controller has forgotten, as far as accounting knows them."""
    wanted = list(ids)
    if not wanted or shutil.which("sacct") is None:
        return {}
    try:
        columns = "--format=JobIDRaw,State"
        text = run(["sacct", "--noheader", "--parsable2", "--allocations", columns, f"--jobs={','.join(wanted)}"])
    except SlurmError:
        return {}
    rows = (line.split("|") for line in text.splitlines())
    # "CANCELLED by 1000"
    return {row[0]: row[1].split()[0] for row in rows if len(row) == 2 and row[1].strip()}


def cancel(ids: Iterable[str]) -> None:
    """Cancel the jobs, those that have ended left out; raises SlurmError when some could not be."""
    wanted = list(ids)
    troubles = []
    for start in range(0, len(wanted), _IDS_AT_ONCE):
        try:
            run(["scancel", *wanted[start : start + _IDS_AT_ONCE]])
        except SlurmError as error:
            troubles += [line for line in str(error).splitlines() if "Invalid job id" not in line]
    if troubles:
        raise SlurmError(" ".join(troubles))


def refusal(flags: Sequence[str]) -> str | None:
    """Slurm's own words when it would not take a job with these ``flags`` of sbatch; None when it would."""
    try:
        run(["sbatch", "--test-only", *flags, "/dev/stdin"], stdin="#!/bin/sh\ntrue\n")
    except SlurmError as error:
        return plain(str(error))
    return None
