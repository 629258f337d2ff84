"""`sweepack size`: what is pinned, what is missing, and what can be said without measuring."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import FakeNvml, Gpu
from simulated_memory import GIB, MIB, SimulatedMemory
from sweepack.commands import app
from sweepack.manifest import Manifest
from sweepack.sizing import show, sizes
from sweepack.sizing.measuring import Meters, like
from sweepack.sizing.pins import Pin, Profile
from sweepack.sizing.request import Request
from typer.testing import CliRunner

A100 = "NVIDIA A100-SXM4-80GB"


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("SWEEPACK_RESULTS", "COLUMNS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SWEEPACK_DEVICES", "cpu")
    Path("task.py").write_text("def train(cell, *, width: int = 8, lr: float = 0.1, seed: int = 0): ...\n")


@pytest.fixture
def tasks(monkeypatch) -> dict[int, SimulatedMemory]:
    """Simulated tasks by width, estimated in place of the real one."""
    tasks: dict[int, SimulatedMemory] = {}

    @contextlib.contextmanager
    def open_meter(self, request, wanted, place, root, scratch):
        assert place is None and scratch.is_dir()
        memory = replace(tasks[wanted.params["width"]], asked=[])

        class Meter:
            def measure(self, batch):
                return memory(batch or 64)

        yield Meter()

    monkeypatch.setattr(Meters, "open", open_meter)
    return tasks


def configure(resources: dict[str, Any], path: str = "config/config.yaml", **sweep: Any) -> None:
    axes = {"width": [8, 512], "seed": [0, 1]}
    Path(path).parent.mkdir(exist_ok=True)
    sweep = {"name": "s", "task": "task.py:train", "axes": axes, **sweep}
    Path(path).write_text(json.dumps({"sweep": sweep, "resources": [resources], "report": False}))


def size(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["size", *arguments])
    assert done.exit_code == code, done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return done.output


def pin(width: int, device: str = "cpu", **found: Any) -> None:
    plan = show.plan_of(None, [], [], Path.cwd())
    group = next(g for g in plan.sizes.groups if g.profile.params["width"] == width)
    facts = {"batch": 192, "largest": 240, "peak": 11 * GIB, "source": "s", "limited_by": "memory", **found}
    facts = {"cap": round(13.6 * GIB), "static": 4.0 * GIB, "sample": 41 * MIB, "code": plan.task.digest(), **facts}
    Pin(group.profile.key, device, 48 * GIB, at=1.8e9, **facts).write(plan.directory)


def line(output: str, start: str) -> str:
    (found,) = [row for row in output.splitlines() if row.startswith(start)]
    return " ".join(found.split())


def test_what_was_measured_is_shown_and_what_to_run_for_the_rest():
    configure({"gpu": 0.333, "batch": "auto"})
    pin(8)
    output = size()
    assert line(output, "kind") == "kind cells share batch found on when"
    assert line(output, "width=8 ").startswith(
        "width=8 2 0.333 192 largest 240 (limited by memory), peak 11 GiB of 13.6 GiB, 4 GiB + 41 MiB a sample cpu 2027"
    )
    assert line(output, "width=512") == "width=512 2 0.333 not measured"
    assert "snakemake probe --profile profiles/local" in output
    pin(512, batch=None, largest=None, peak=None, trouble="does not fit: batch 1 needs more", static=None, sample=None)
    output = size()
    assert "none does not fit: batch 1 needs more cpu" in line(output, "width=512")
    assert "snakemake probe" not in output


def test_each_model_of_device_has_a_row(monkeypatch):
    configure({"gpu": 0.333, "batch": "auto"})
    pin(8, batch=16)
    pin(8, A100)
    rows = [row for row in size().splitlines() if row.startswith("width=8 ")]
    assert len(rows) == 2 and any(A100 in row and " 192 " in row for row in rows)


def test_the_share_that_follows_from_a_measurement_is_shown(monkeypatch):
    monkeypatch.delenv("SWEEPACK_DEVICES")
    monkeypatch.setattr(sizes, "load_nvml", lambda: FakeNvml(Gpu("GPU-0", A100, 80 * GIB)))
    configure({"gpu": "auto"})
    pin(8, A100, batch=None, largest=None, peak=3 * GIB, cap=None, static=None, sample=None, limited_by=None)
    assert line(size(), "width=8 ").startswith("width=8 2 0.083 (12 on a device) the task's peak 3 GiB NVIDIA A100")


def test_where_nothing_is_left_open_it_says_so():
    configure({"gpu": 0.5, "batch": 64})
    assert "No size is left open" in size() and "--estimate" in size()


def test_the_worked_example_without_a_gpu(tasks):
    configure({"gpu": 0.25, "batch": "auto"})
    tasks[8] = SimulatedMemory(static=4 * GIB, sample=40 * MIB)
    tasks[512] = SimulatedMemory(static=20 * GIB)
    output = size("--estimate", "--gpu-memory", "48GiB", "--cells", "3")
    assert line(output, "width=8 ") == (
        "width=8 2 0.25 4 GiB + 40 MiB a sample 13.6 GiB first guess: 245 fit, start with 196"
    )
    assert "does not fit: nothing is left for a sample" in line(output, "width=512")
    assert "On a GPU with 48 GiB, 3 cells on it." in output and "estimating width=8" in output


def test_where_some_sizes_are_left_open_only_these_are_estimated(tasks):
    configure({"gpu": 0.25, "batch": "auto", "match": {"width": 8}})
    tasks[8] = SimulatedMemory()
    output = size("--estimate")
    assert "first guess" in line(output, "width=8 ")
    assert "width=512" not in output


def test_by_default_as_many_cells_as_the_share_says_on_the_device_that_is_here(tasks, monkeypatch):
    configure({"gpu": 0.5, "batch": "auto"})
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "40000")
    tasks[8] = tasks[512] = SimulatedMemory(static=GIB, sample=MIB)
    output = size("--estimate")
    # 40 GB / 2 * 0.85
    assert "15.8 GiB first guess: 4096 and more fit, start with 3276" in line(output, "width=8 ")
    assert "On cpu with 37.3 GiB." in output and "`--gpu-memory 48GiB`" in output


def test_shares_are_guessed_from_estimates_and_fixed_ones_are_checked(tasks):
    configure({"gpu": "auto", "batch": 64})
    tasks[8] = tasks[512] = SimulatedMemory(static=3 * GIB, sample=0)
    output = size("--estimate", "--gpu-memory", "80GiB")
    assert "3.01 GiB at batch 64 4 GiB 20 on a device (share 0.05)" in line(output, "width=8 ")
    configure({"gpu": 0.25})
    tasks[512] = SimulatedMemory(static=30 * GIB)
    output = size("--estimate", "--gpu-memory", "80GiB")
    assert line(output, "width=8 ").endswith("0.25 3.01 GiB 19.4 GiB fits")
    assert line(output, "width=512").endswith("19.4 GiB does not fit")
    assert "of 0.5 GiB" in (output := size("--estimate", "--gpu-memory", "512MiB")) and "does not fit" in output


def test_an_estimate_that_fails_says_why(tasks):
    configure({"gpu": 0.25, "batch": "auto"})
    tasks[8] = SimulatedMemory(fails={8: "no estimate: ValueError: x\nand more"})
    tasks[512] = SimulatedMemory()
    output = size("--estimate")
    assert line(output, "width=8 ") == "width=8 2 0.25 no estimate: ValueError: x"
    assert "first guess" in line(output, "width=512")


def test_a_task_that_ignores_its_batch_or_is_not_prepared_is_told(tasks):
    configure({"gpu": 0.25, "batch": "auto"})
    Path("results/s").mkdir(parents=True)
    tasks[8] = tasks[512] = SimulatedMemory(ignores=64)
    output = size("--estimate")
    assert "no estimate: steps saw 64 samples at batches 8 and 32: the task must take" in line(output, "width=8 ")
    assert "prepare()" not in output
    Path("task.py").write_text(f"def prepare(): ...\n{Path('task.py').read_text()}")
    assert "prepare() has not run yet" in size("--estimate")
    Path("results/s/prepare.done").touch()
    assert "prepare()" not in size("--estimate")


@pytest.mark.parametrize("memory", ["48", "many", "0GB", "-3GB"])
def test_what_is_no_amount_of_memory_is_refused(memory):
    configure({"gpu": 0.25, "batch": "auto"})
    assert "error in --gpu-memory" in size("--estimate", "--gpu-memory", memory, code=1)


def test_another_configuration_is_named_as_for_snakemake():
    configure({"gpu": 0.25, "batch": "auto"}, "other.yaml", axes={"width": [1, 2]})
    output = size("--configfile", "other.yaml", "--config", "width=5")
    assert "all cells" in output
    assert "error in" in size("--configfile", "none.yaml", code=1)
    configure({"gpu": 0.25, "batch": "auto"})
    assert "width=512" in size()


def test_of_an_earlier_sweep_it_is_that_ones_configuration():
    configure({"gpu": 0.25, "batch": "auto"}, "other.yaml", name="earlier", axes={"width": [1, 2]})
    Path("results/earlier").mkdir(parents=True)
    Manifest("earlier", "t", [], None, [], ["--configfile", "other.yaml", "--config", "lr=3"]).write(
        Path("results/earlier")
    )
    assert "width=2" in size("earlier")
    # No configuration where it is looked for first: the sweep that there is.
    assert "width=2" in size()
    assert "error in SWEEP" in size("earlier", "--configfile", "other.yaml", code=1)
    assert "error in SWEEP" in size("unknown", code=1)


def test_the_source_of_a_shared_measurement_names_the_other():
    found = Pin("k", "cpu", 1, 1, 1, 1, "s")
    other = like(found, Request({}, "c", {}, {}), Profile("t", {}, 1, "auto"), "width=8")
    assert other.source == "s, of width=8, whose estimates are the same" and other.key != "k"
