"""Why a sweep that was tried did not end well, and what to change."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from sweepack.validation.trial import Trial

# What is found in the words of a cell, of Slurm or of a job's shell → what to change. The first that fits counts.
_ADVICE = (
    (
        r"srun started|the step has|tasks on the nodes|SLURM_\w+ not set|there are \d+ of them",
        "what decides how many tasks srun starts: flags in `slurm.extra`, SLURM_ and SRUN_ variables in `slurm.setup`, "
        "or a wrapper around srun (`type -a srun` in a job)",
    ),
    (
        r"sees \d+ devices",
        "`slurm.extra` and `slurm.setup`: no --gpus-per-task, no --gpu-bind, no SLURM_GPU_BIND, SLURM_GPUS_PER_TASK or "
        "SWEEPACK_DEVICES; or ask by `slurm.gpu_flag: gres`",
    ),
    (r"left over from another launcher", "unset that variable in `slurm.setup`"),
    (
        r"did not appear|cannot reach the launcher|[Tt]imed? ?out.*(store|connect)|Connection (refused|reset)",
        "the nodes' firewall: they must reach each other by TCP on any port. If they are only slow to start, give "
        "more `ddp.start_seconds`",
    ),
    (
        r"NCCL",
        "NCCL's network in `slurm.setup`, for example `export NCCL_SOCKET_IFNAME=ib0` (NCCL_DEBUG=INFO says more)",
    ),
    (r"torch sees no GPU", "the build of torch in this environment, which must fit the driver of the nodes"),
    (r"OUT_OF_MEMORY|oom|SIGKILL", "`slurm.mem`: the memory of a job was too small for a small net"),
    (
        r"[Mm]odule\S* (command )?not found|[Mm]odule.*unknown|command not found",
        "`slurm.setup`: its lines run in `bash -l`",
    ),
    (
        r"No module named|ImportError|libcuda|cannot open shared object",
        "`slurm.setup`, until this Python runs on the nodes",
    ),
    (
        r"No such file or directory|Stale file handle|not found",
        "where the project and its environment (.venv) lie: on a file system that all nodes share, under one path",
    ),
    (
        r"No locks available|flock|Operation not supported",
        "how the file system is mounted: with flock (Lustre: -o flock)",
    ),
    (r"TIMEOUT|stopped by", "the time limit of the partition (`slurm.partition`), or what else ends jobs there"),
)
_LOG_LINES = 3


@dataclass(frozen=True)
class Cause:
    """What went wrong, what to change, and where there is more to read."""

    words: str
    change: str
    log: Path | None = None


def advice(words: str) -> str | None:
    """What to change when ``words`` were said; None when nothing is known about them."""
    return next((change for pattern, change in _ADVICE if re.search(pattern, words)), None)


def stated(error: str) -> str:
    """What ``error`` says is wrong, without its advice on `resources`: those of the sweeps that are tried are right."""
    return re.sub(r": change `nodes` or [^;]*", "", error)


def cause_of(trial: Trial) -> Cause:
    """Of what has gone wrong in ``trial`` the likeliest cause: its own cells know best, then Slurm, then Snakemake."""
    output = trial.output
    if refused := _refused(output):
        return refused
    said = re.findall(r"(Slurm (?:job \d+: |refused the job: ).*)", output)
    for cell in trial.tried():
        if cell.record and cell.record.error and not cell.finished:
            words = stated(cell.record.error)
            killed = said and not re.search(r": FAILED$", said[-1]) and advice(said[-1])
            if killed:
                words += f" ({said[-1]})"
            change = killed or advice(words) or advice(_tail(cell.files.log)) or "what the log says"
            return Cause(words, change, cell.files.log)
    logs = sorted(trial.directory.glob("**/slurm-*.log"))
    shell = _tail(logs[-1]) if logs else ""
    words = "; ".join(part for part in (said[-1] if said else "", shell) if part)
    if words:
        change = advice(shell) or advice(words) or "what the log says"
        return Cause(words, change, logs[-1] if logs else trial.log)
    return Cause(_tail(trial.log) or "Snakemake has said nothing", advice(output) or "what the log says", trial.log)


def _refused(output: str) -> Cause | None:
    """What the plan of the sweep has refused: it names the key itself."""
    found = re.search(
        r"sweepack: error in (.+)\n  value: +(.+(?:\n {12}.*)*)\n  expected: +(.+(?:\n {12}.*)*)\n"
        r"  fix: +(.+(?:\n {12}.*)*)",
        output,
    )
    if not found:
        return None
    key, value, expected, fix = (re.sub(r"\s*\n\s+", " ", text) for text in found.groups())
    return Cause(f"{key}: {value}, expected {expected}", fix)


def _tail(log: Path) -> str:
    """The last lines of ``log`` that say something."""
    text = log.read_text(errors="replace") if log.exists() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " / ".join(lines[-_LOG_LINES:])
