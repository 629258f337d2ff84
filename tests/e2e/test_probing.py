"""The probe on real processes: pins are kept through a stop and a kill, and what cannot be measured is told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from conftest import REPOSITORY
from sweepack.leases import LeasePool
from sweepack.plan import make_plan
from sweepack.sizing.jobs import request_of
from sweepack.sizing.pins import FOLDER, read_pins

# 8 kB a sample, beside it what a process with torch takes. Wide ones pause, so that they can be caught.
TASK = """
import time
import torch
def train(cell, *, width: int = 1, samples: int = 1000, seed: int = 0):
    model = torch.nn.Linear(1000 * width, 2)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(3):
        if width > 1 and cell.batch > 8:
            time.sleep(0.3)
        rows = torch.ones(min(cell.batch, samples), 1000 * width)
        optimizer.zero_grad()
        model(rows).sum().backward()
        optimizer.step()
    return {"batch": cell.batch}
"""
SWEEP = Path("results/test")


class Bench:
    """A project whose sweep is to be measured by hand: as `snakemake probe` does it, without Snakemake."""

    def __init__(self, sandbox, monkeypatch) -> None:
        self.sandbox = sandbox
        self.root = sandbox.root
        self.arguments = ["--sweep-dir", str(SWEEP), "--request", "job", "--stamp", str(SWEEP / "stamp")]
        monkeypatch.setenv("SWEEPACK_DEVICES", "cpu")
        monkeypatch.chdir(self.root)

    def request(self, task: str = TASK, axes=None, **sizing) -> None:
        self.sandbox.write("task.py", task)
        self.sandbox.config(
            sweep={"name": "test", "task": "task.py:train", "axes": axes or {"width": [1, 2]}},
            resources=[{"gpu": 0.5, "batch": "auto", "mem": "1GB"}],
            sizing={"largest_batch": 64, **sizing},
        )
        plan = make_plan(self.root, REPOSITORY, [], [])
        request_of(plan.sizes.groups, plan.config, plan.task, self.root).write(self.root / SWEEP, "job")

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, REPOSITORY / "scripts/probe.py", *self.arguments],
            cwd=self.root,
            env=self.sandbox.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def probe(self, status: int = 0) -> str:
        process = self.start()
        output, _ = process.communicate(timeout=300)
        assert process.returncode == status, output
        assert (self.root / SWEEP / "stamp").exists() == (status == 0)
        return output

    def pins(self):
        found = [pin for models in read_pins(self.root / SWEEP).values() for pin in models.values()]
        return {pin.profile["params"]["width"]: pin for pin in found}

    def left(self) -> list[str]:
        """What a measurement has left: processes below the project, unfinished folders, leases."""
        processes = [
            str(process.info["cmdline"])
            for process in psutil.process_iter(["cmdline", "cwd"])
            if process.info["cwd"] == str(self.root) and process.pid != os.getpid()
        ]
        folders = [path.name for path in (self.root / SWEEP / FOLDER).glob(".*") if path.is_dir()]
        pool = LeasePool(Path(self.sandbox.environment["SWEEPACK_LEASES"]), ["cpu"])
        return [*processes, *folders, *(holder.label for holder in pool.holders())]


@pytest.fixture
def bench(sandbox, monkeypatch) -> Bench:
    return Bench(sandbox, monkeypatch)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_stopped_half_way_it_keeps_its_pins_and_goes_on_from_there(bench, eventually, signum):
    bench.request()
    process = bench.start()
    eventually(bench.pins, "the first pin")
    first = bench.pins()
    assert set(first) == {1}
    eventually(lambda: any("trial" in what for what in bench.left()), "the second measurement")
    second = bench.start()
    assert "is being measured already; waiting for it" in second.stdout.readline()
    second.send_signal(signal.SIGTERM)
    second.communicate(timeout=60)
    assert second.returncode == 128 + signal.SIGTERM and process.poll() is None
    os.kill(process.pid, signum)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == (-9 if signum == signal.SIGKILL else 128 + signum), output
    if signum != signal.SIGKILL:
        assert "what was measured is kept" in output
        assert bench.left() == []
    eventually(lambda: [what for what in bench.left() if not what.startswith(".measuring")] == [], "its processes' end")
    assert bench.pins() == first and not (bench.root / SWEEP / "stamp").exists()

    output = bench.probe()
    assert "width=1 (1 cell): measured before: batch 51, largest 64" in output
    assert bench.pins()[1] == first[1] and set(bench.pins()) == {1, 2}
    assert bench.left() == []


def test_each_way_in_which_a_measurement_ends_has_its_words(bench):
    bench.request(axes={"width": [1], "samples": [40, 1000]})
    output = bench.probe()
    assert "batch 32, largest 40 (limited by the data, which has no more samples)" in output
    assert "batch 51, largest 64 (limited by `sizing.largest_batch`)" in output
    for pin in [pin for models in read_pins(bench.root / SWEEP).values() for pin in models.values()]:
        assert pin.cap == 10**9 and 0 < pin.peak < pin.cap and pin.device == "cpu"

    bench.request(TASK.replace("rows =", "ballast = torch.ones(400_000_000)\n        rows ="), axes={"width": [3]})
    output = bench.probe()
    assert "does not fit: batch 1 " in output

    bench.request(TASK.replace("rows =", "raise ValueError('no data here')\n        rows ="))
    (bench.root / SWEEP / "stamp").unlink()
    output = bench.probe(status=1)
    assert "width=2 (1 cell) could not be measured on cpu: the task fails at batch 1: ValueError: no data" in output

    (bench.root / "task.py").write_text(f"import no_such_module\n{TASK}")
    output = bench.probe(status=1)
    assert "error in sweep.task" in output and "no_such_module" in output and output.count("error in") == 1


def test_a_probe_waits_for_its_share(bench, eventually):
    bench.request()
    pool = LeasePool(Path(bench.sandbox.environment["SWEEPACK_LEASES"]), ["cpu"])
    pool.directory.mkdir(exist_ok=True)
    with pool.acquire(600, label="somebody"):
        process = bench.start()
        waits = lambda: [holder for holder in pool.holders() if holder.waiting]  # noqa: E731
        eventually(waits, "the probe in the queue")
        assert waits()[0].milli == 500 and bench.pins() == {}
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0 and set(bench.pins()) == {1, 2}
    assert "somebody" in output


def test_sizes_are_estimated_on_a_login_node(bench):
    bench.request()
    output = " ".join(bench.sandbox.sweepack("size", "--estimate", "--gpu-memory", "48GiB", "--cells", "3").split())
    assert "estimating width=1" in output and "start with 51" in output and "On a GPU with 48 GiB" in output
    assert "not measured" in bench.sandbox.sweepack("size")
