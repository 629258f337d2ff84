"""Run the same cells through sweepack, its peers and the bound, one after the other, and write down what each cost."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from measure import end_on_sigterm, measure
from runners import RUNNERS, SLOTS, Losses, Runner
from sweepack.environment import THREADS
from sweepack.files import write_atomic
from venvs import HERE, ROOT, environment_of

RATES = [0.003, 0.01, 0.03, 0.05]
STEPS = {"tiny": 25, "long": 1800}  # some 65 ms and 4 s


@dataclass(frozen=True)
class Workload:
    """``cells`` cells of one ``kind`` (`tiny` or `long`)."""

    kind: str
    cells: int

    def axes(self) -> dict[str, Any]:
        return {"lr": RATES, "seed": list(range(self.cells // len(RATES))), "steps": STEPS[self.kind]}


@dataclass(frozen=True)
class Run:
    runner: str
    workload: Workload
    repeat: int


def schedule(names: Sequence[str], workloads: Sequence[Workload], repeats: int, everything: bool) -> Iterator[Run]:
    """All runs, the runners in turn. Unless ``everything``, long cells are run once, and runners that start Python for
    every cell run the first workload once: they take long, and a further cell costs them what the others did.
    """
    for repeat in range(repeats):
        for workload in workloads:
            for place in range(len(names)):
                name = names[(place + repeat) % len(names)]  # nobody always follows the same neighbour
                again = repeat == 0 or (workload.kind == "tiny" and not RUNNERS[name].fresh)
                if everything or (again and (workload == workloads[0] or not RUNNERS[name].fresh)):
                    yield Run(name, workload, repeat)


def clean_environment(home: Path, folder: Path, prefix: Path) -> dict[str, str]:
    """What every runner finds: its virtual environment before ours, one thread, a home that keeps caches only."""
    binaries = [f"{prefix}/bin", f"{sys.prefix}/bin", "/usr/local/bin", "/usr/bin", "/bin"]
    return {
        "PATH": ":".join(binaries),
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "PYTHONPATH": str(folder),
        "SWEEPACK_DEVICES": "cpu",
        "SWEEPACK_LEASES": f"{folder}/leases",
        **dict.fromkeys(THREADS, "1"),
    }


def run_one(run: Run, prefix: Path, home: Path, limit: float) -> tuple[dict[str, Any], Losses]:
    """One run in a folder of its own: its entry of the raw file, and the losses."""
    runner = RUNNERS[run.runner]
    # Short: some of the runners put sockets into it.
    with tempfile.TemporaryDirectory(prefix="swb-", ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch)
        runner.set_up(folder, run.workload.axes())
        load = os.getloadavg()[0]
        log = folder / "log.txt"
        cost = measure(runner.command, folder, clean_environment(home, folder, prefix), log, limit)
        error, losses = None, {}
        try:
            losses = runner.losses(folder)
        except (OSError, ValueError, KeyError) as broken:
            error = f"no losses: {broken!r}"
        if cost.status is None:
            error = f"not done after {limit:g} s"
        elif cost.status != 0:
            error = f"exit status {cost.status}"
        if error:
            error += "\n" + "\n".join(log.read_text(errors="replace").splitlines()[-15:])
    entry = {"runner": run.runner, **asdict(run.workload), "repeat": run.repeat, "load": round(load, 2), **asdict(cost)}
    return {**entry, "error": error}, losses


def difference(losses: Losses, reference: Losses) -> float | None:
    """The largest |difference| to the reference; None when cells are missing."""
    if losses.keys() != reference.keys() or not reference:
        return None
    return max(abs(losses[cell] - reference[cell]) for cell in reference)


def set_up_runners(names: Sequence[str], home: Path, limit: float) -> tuple[dict[str, Path], dict[str, str]]:
    """Install every runner and let it run a few cells, so that all are in the page cache: the virtual environments of
    those that can be used, and of the others what is wrong.
    """
    prefixes, troubles = {}, {}
    for name in names:
        print(f"setting up {name}", file=sys.stderr, flush=True)
        try:
            prefix = environment_of(RUNNERS[name].peer)
        except RuntimeError as failed:
            troubles[name] = f"not installed: {failed}"
            continue
        entry, _ = run_one(Run(name, Workload("tiny", len(RATES)), 0), prefix, home, limit)
        if entry["error"]:
            troubles[name] = entry["error"]
        else:
            prefixes[name] = prefix
    for name, trouble in troubles.items():
        print(f"{name} is left out: {trouble}", file=sys.stderr)
    return prefixes, troubles


def machine() -> dict[str, Any]:
    """This machine, in words and numbers; memory in GB."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": models[0].partition(": ")[2] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9, 1),
        "kernel": platform.release(),
    }


def about(runner: Runner, prefix: Path | None, trouble: str | None) -> dict[str, Any]:
    """What the raw file says of a runner; ``prefix`` is its virtual environment, ``trouble`` why it is left out."""
    version = None
    if prefix is not None and runner.package is not None:
        code = f"from importlib import metadata; print(metadata.version({runner.package!r}))"
        done = subprocess.run([f"{prefix}/bin/python", "-c", code], capture_output=True, text=True, timeout=60)
        version = done.stdout.strip()
    kind = {"title": runner.title, "fresh": runner.fresh, "ours": runner.is_ours}
    return {**kind, "package": runner.package, "version": version, "error": trouble}


def commit() -> str:
    """Of this repository, with a + when files differ from it."""
    try:
        git = ["git", "-C", str(ROOT)]
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, timeout=60)
        changes = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        return "unknown"
    return (head.stdout.strip() or "unknown") + ("+" if changes.stdout.strip() else "")


def circumstances() -> dict[str, Any]:
    """When, where and with what is measured: the head of a raw file."""
    packages = ("torch", "pytorch-lightning", "snakemake", "sweepack")
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "commit": commit(),
        "command": sys.argv,
        "machine": machine(),
        "versions": {"python": platform.python_version(), **{name: metadata.version(name) for name in packages}},
    }


def main(argv: Sequence[str] | None = None) -> int:
    end_on_sigterm()
    options = _arguments(argv)
    home = ROOT / ".bench" / "home"
    home.mkdir(parents=True, exist_ok=True)
    names = ["bound", *(name for name in RUNNERS if name in options.only and name != "bound")]
    workloads = [Workload("tiny", cells) for cells in options.cells]
    workloads += [Workload("long", options.long)] if options.long else []
    prefixes, troubles = set_up_runners(names, home, options.limit)
    raw = {
        **circumstances(),
        "runners": {name: about(RUNNERS[name], prefixes.get(name), troubles.get(name)) for name in names},
        "slots": SLOTS,
        "steps": STEPS,
        "runs": [],
    }
    if "bound" in troubles:
        return 1
    references: dict[Workload, Losses] = {}
    for run in schedule([name for name in names if name in prefixes], workloads, options.repeat, options.all):
        entry, losses = run_one(run, prefixes[run.runner], home, options.limit)
        references.setdefault(run.workload, losses)  # the bound's: it runs first
        entry["difference"] = difference(losses, references[run.workload])
        raw["runs"].append(entry)
        write_atomic(options.out, json.dumps(raw, indent=1) + "\n")
        print(
            f"{run.workload.cells:>4} {run.workload.kind} {run.runner:<16} wall {entry['wall']:7.2f} s"
            f"  cpu {entry['cpu']:7.2f} s  difference {entry['difference']}  {entry['error'] or ''}",
            file=sys.stderr,
            flush=True,
        )
    print(options.out)
    wrong = [entry for entry in raw["runs"] if entry["error"] or entry["difference"] != 0]
    return 1 if wrong or any(RUNNERS[name].is_ours for name in troubles) else 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--cells", type=_counts, default=[24, 200], help="numbers of tiny cells, smallest first")
    parser.add_argument("--long", type=_count, default=24, help="number of longer cells, 0 for none")
    parser.add_argument("--repeat", type=int, default=2, help="how often tiny cells are run")
    parser.add_argument(
        "--only", type=_names, default=list(RUNNERS), metavar="NAMES", help="some of the runners; the bound always runs"
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="also repeat long cells, and let runners that start Python for every cell run every workload",
    )
    parser.add_argument("--limit", type=float, default=900.0, metavar="SECONDS", help="longest time for one run")
    today = HERE / "raw" / f"{datetime.date.today()}.json"
    parser.add_argument("--out", type=Path, default=today, help="the raw file to write")
    return parser.parse_args(argv)


def _count(text: str) -> int:
    count = int(text)
    if count < 0 or count % len(RATES):
        raise argparse.ArgumentTypeError(f"{count} is not a multiple of {len(RATES)}, the number of learning rates")
    return count


def _counts(text: str) -> list[int]:
    return sorted(_count(part) for part in text.split(","))


def _names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in RUNNERS:
            raise argparse.ArgumentTypeError(f"no runner {name!r}: {', '.join(RUNNERS)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
