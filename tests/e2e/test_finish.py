"""The end of a run: table and report are forked from a host that was made ready meanwhile, or else start fresh."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY, make_sandbox
from sweepack.hosts import answers
from traces import hosts, nothing_is_left, processes

TASK = """
import os, time
from pathlib import Path
def train(cell, *, x: int, how: str = ""):
    cell.log({"loss": 1 / (1 + x)}, epoch=x)
    if how == "lose":
        Path("results/test/sweep.json").unlink(missing_ok=True)
    if how == "block":
        # Whoever reads the history waits for somebody to write it.
        (cell.dir / "history.jsonl").unlink()
        os.mkfifo(cell.dir / "history.jsonl")
    while not Path("go").exists():
        Path(f"started-{x}").touch()
        time.sleep(0.02)
    return {"score": x / 3}
"""
# Loaded by every interpreter but the lean client: what was started afresh.
SPY = """
import sys, threading, time
line = " ".join(sys.orig_argv)
with open(FILE, "a") as file:
    file.write(line + "\\n")
if THREAD and '"sweepack.re' in line:
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
"""
NAMES = ("table.parquet", "table.csv", "history.parquet", "history.csv", "failures.csv", "report.html")


class Watched:
    """A run whose cells wait for ``go``, and a list of the scripts and hosts that are started in whole interpreters."""

    def __init__(self, folder, how="", thread=False):
        folder.mkdir(exist_ok=True)
        self.sandbox = make_sandbox(folder)
        self.root = self.sandbox.root
        self._file = folder / "interpreters.txt"
        (folder / "spy").mkdir()
        (folder / "spy/sitecustomize.py").write_text(f"FILE = {str(self._file)!r}\nTHREAD = {thread}\n{SPY}")
        path = self.sandbox.environment.get("PYTHONPATH")
        self.sandbox.environment["PYTHONPATH"] = os.pathsep.join([str(folder / "spy"), *([path] if path else [])])
        self.sandbox.write("task.py", TASK)
        self.configure(how)

    def configure(self, how):
        self.sandbox.config(
            sweep={"name": "test", "task": "task.py:train", "params": {"how": how}, "axes": {"x": [0, 1]}},
            resources=[{"gpu": 0.25}],
            report=True,
        )

    def start(self, eventually):
        self.driver = self.sandbox.start("--cores", "2")
        eventually(lambda: len(list(self.root.glob("started-*"))) == 2, "two cells")

    def host(self, eventually):
        """The host for the results, once it is ready, and its socket."""
        found = {}

        def ready():
            found.update(hosts(self.sandbox, results=True))
            return any(map(answers, found.values()))

        eventually(ready, "the host for the results", 60)
        ((host, path),) = found.items()
        return host, path

    def end(self, status):
        """What it has printed when it has gone on to its end."""
        (self.root / "go").touch()
        output, _ = self.driver.communicate(timeout=300)
        assert self.driver.returncode == status, output
        return output

    def started(self):
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        found = [re.search(r"scripts/(table|report)\.py|sweepack\.(warm) ", line) for line in lines]
        return [match[1] or match[2] for match in found if match]

    def unblock(self):
        """From here on whoever reads the histories finds none."""
        for path in self.root.glob("results/test/cells/*/history.jsonl"):
            fifo = os.open(path, os.O_RDWR)
            path.unlink()
            os.close(fifo)

    def client(self):
        """The lean process that waits for the table, if there is one."""
        lines = processes(self.sandbox).items()
        return next((pid for pid, line in lines if " -I -S " in line and "table.py --host" in line), None)

    def shape(self, output):
        """What was printed, without places and numbers, and whatever the order of cells that run side by side."""
        output = re.sub(r"\S+\.sock", "SOCKET", output).replace(str(self.root), "ROOT")
        return sorted(re.sub(r"[\d.]+", "#", line) for line in output.splitlines())


@pytest.fixture
def watched(tmp_path):
    """Makes watched runs, and ends what they have left when the test ends, however that ends."""
    made = []

    def make(name, **options):
        made.append(Watched(tmp_path / name, **options))
        return made[-1]

    yield make
    for run in made:
        for pid in processes(run.sandbox):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def content(run):
    return {name: (run.root / "results/test" / name).read_bytes() for name in NAMES}


def test_table_and_report_are_forked_and_the_same_as_from_fresh_processes(watched, eventually):
    run = watched("a")
    run.start(eventually)
    run.host(eventually)
    assert "results/test/report.html" in run.end(status=0).splitlines()
    assert run.started() == ["warm", "warm"]
    nothing_is_left(run.sandbox, eventually)

    forked = content(run)
    for name in NAMES:
        (run.root / "results/test" / name).unlink()
    for name in ("table.py", "report.py"):
        command = [sys.executable, REPOSITORY / "scripts" / name, "--sweep-dir", "results/test"]
        subprocess.run(command, cwd=run.root, env=run.sandbox.environment, check=True)
    assert content(run) == forked and run.started() == ["warm", "warm", "table", "report"]

    # Nothing is to be done, or only to be planned, or asked for without hosts.
    run.sandbox.snakemake()
    run.configure(how="other")
    run.sandbox.snakemake("-n")
    run.sandbox.snakemake("--config", "start=fresh")
    assert run.started() == ["warm", "warm", "table", "report", "table", "report"]


@pytest.mark.parametrize("trouble", ["killed", "refused", "removed"])
@pytest.mark.parametrize("how", ["", "lose"])
def test_without_a_host_a_run_ends_as_with_one(watched, eventually, trouble, how):
    served = watched("served", how=how)
    served.start(eventually)
    served.host(eventually)
    expected = served.shape(served.end(status=1 if how else 0))
    # A run that fails makes the table of what there is.
    assert served.started() == ["warm", "warm", *(["table"] if how else [])]

    run = watched("run", how=how, thread=trouble == "refused")
    run.start(eventually)
    if trouble == "refused":
        refusals = run.sandbox.environment["SWEEPACK_LEASES"] + "/warm"
        eventually(lambda: list(Path(refusals).glob("*.refused")), "the host to refuse")
        eventually(lambda: not hosts(run.sandbox, results=True), "the host to end")
    else:
        host, path = run.host(eventually)
        os.kill(host, signal.SIGKILL) if trouble == "killed" else path.unlink()
    assert run.shape(run.end(status=1 if how else 0)) == expected
    assert run.started() == ["warm", "warm", "table", "table" if how else "report"]
    eventually(lambda: not processes(run.sandbox), "the hosts to end")


def test_a_host_that_dies_over_the_table_is_replaced_by_a_fresh_process(watched, eventually):
    run = watched("a", how="block")
    run.start(eventually)
    host, _ = run.host(eventually)
    (run.root / "go").touch()
    eventually(lambda: children(host), "the table to be begun", 60)
    os.kill(host, signal.SIGKILL)
    eventually(lambda: "table" in run.started(), "the table to be begun anew")
    run.unblock()
    run.end(status=0)
    assert run.started() == ["warm", "warm", "table", "report"]
    eventually(lambda: not processes(run.sandbox), "the hosts to end")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_signals_reach_the_process_that_makes_the_table(watched, eventually, signum):
    run = watched("a", how="block")
    run.start(eventually)
    host, _ = run.host(eventually)
    (run.root / "go").touch()
    eventually(lambda: children(host), "the table to be begun", 60)
    if signum == signal.SIGINT:  # Ctrl-C
        os.killpg(run.driver.pid, signum)
    else:
        os.kill(run.client(), signum)
    eventually(lambda: not children(host), "the process that makes the table to end")
    eventually(lambda: "table" in run.started(), "the table of what there is")
    run.unblock()
    output = run.end(status=1)
    assert f"died with <Signals.{signum.name}: " in output and "results/test/report.html" not in output.splitlines()
    nothing_is_left(run.sandbox, eventually)


def children(process):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return []
