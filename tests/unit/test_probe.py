"""The probe: what is measured where, in whose turn, what is pinned, and what is told."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import FakeNvml, Gpu
from simulated_memory import GIB, MIB, SimulatedMemory
from sweepack.errors import UserError
from sweepack.leases import LeasePool, lease_directory
from sweepack.memory import cap
from sweepack.sizing import measuring, probe
from sweepack.sizing.config import Memory, Sizing
from sweepack.sizing.meter import Measurement
from sweepack.sizing.pins import FOLDER, Pin, Profile, read_pins
from sweepack.sizing.probe import Probe
from sweepack.sizing.request import Request, Wanted

MEMORY = Memory().model_dump()
LARGE, SMALL = "NVIDIA A100", "NVIDIA L4"


class Bench:
    """A sweep's folder, and simulated tasks by the ``width`` of their profile, measured by the real probe.

    ``opened`` has (width, device's label or None for an estimate), ``leases`` who held what at each measurement.
    """

    def __init__(self, sweep: Path) -> None:
        self.sweep = sweep
        self.tasks: dict[int, SimulatedMemory] = {}
        self.opened: list[tuple[int, str | None]] = []
        self.leases: list[tuple[str, int]] = []
        self.estimates: dict[int, SimulatedMemory] = {}

    def request(
        self, *widths: int, code: str = "code", sizing: dict[str, Any] | None = None, **profile: Any
    ) -> Request:
        task = {"reference": "task.py:train", "file": "task.py", "module": None, "function": "train", "argv": []}
        wanted = [
            Wanted(
                replace(Profile("task.py:train", {"width": width}, 500, "auto", settings=MEMORY), **profile),
                f"{width:012x}",
                0,
                {"width": width, "seed": 0},
                3,
                f"width={width}",
            )
            for width in widths
        ]
        return Request(task, code, Sizing(**(sizing or {})).model_dump(), MEMORY, wanted)

    @contextlib.contextmanager
    def open(self, request: Request, wanted: Wanted, place: Any, root: Path, scratch: Path) -> Iterator[Any]:
        assert scratch.is_dir()
        width = wanted.params["width"]
        self.opened.append((width, place.device.label if place else None))
        memory = replace((self.tasks if place else self.estimates or self.tasks)[width], asked=[])
        if place and wanted.profile.share:
            memory.cap = measuring.limit(wanted.profile, place, request.memory)
        if place:
            held = LeasePool(lease_directory(), [place.device.key]).holders()
            self.leases += [(device, holder.milli) for holder in held for device in holder.devices]

        class Meter:
            def measure(self, batch: int | None) -> Measurement:
                return replace(memory(batch or 32), batch=batch)

        yield Meter()

    def run(self, request: Request) -> bool:
        scratch = self.sweep / "scratch"
        scratch.mkdir(parents=True, exist_ok=True)
        return Probe(self.sweep, request, Path.cwd(), os.environ, scratch, self.open).run()

    def pins(self) -> dict[tuple[int, str], Pin]:
        found = [pin for models in read_pins(self.sweep).values() for pin in models.values()]
        return {(pin.profile["params"]["width"], pin.device): pin for pin in found}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("SWEEPACK_LEASES", str(tmp_path / "leases"))
    for name in ("CUDA_VISIBLE_DEVICES", "SWEEPACK_DEVICES", "SLURM_MEM_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    gpus = [Gpu("GPU-0", LARGE, 80 * GIB), Gpu("GPU-1", LARGE, 80 * GIB), Gpu("GPU-2", SMALL, 24 * GIB)]
    monkeypatch.setattr(probe, "load_nvml", lambda: FakeNvml(*gpus))
    return Bench(tmp_path / "sweep")


def test_each_model_at_hand_is_measured_under_the_cap_of_the_share(bench, capsys):
    bench.tasks = {8: SimulatedMemory(static=GIB, sample=100 * MIB)}
    assert bench.run(bench.request(8))
    pins = bench.pins()
    assert set(pins) == {(8, LARGE), (8, SMALL)}
    for (_, model), pin in pins.items():
        total = (80 if model == LARGE else 24) * GIB
        assert (pin.total, pin.cap) == (total, cap(500, total, 300 * 10**6, 600 * 10**6))
        assert pin.peak and pin.peak <= pin.cap and pin.batch == int(0.8 * pin.largest)
        assert pin.limited_by == "memory" and pin.code == "code" and pin.source == "simulated"
        assert {pin.batch, pin.largest} <= {m["batch"] for m in pin.measured}
        assert pin.sample == pytest.approx(100 * MIB, rel=0.05)
    assert pins[8, LARGE].batch > 3 * pins[8, SMALL].batch
    told = capsys.readouterr().err
    batch, largest = pins[8, SMALL].batch, pins[8, SMALL].largest
    assert f"width=8 (3 cells): batch {batch}, largest {largest} (limited by memory), peak " in told
    assert "of 11.3 GiB, " in told and "100 MiB a sample" in told and f"on {SMALL}" in told


def test_a_measurement_holds_the_share_that_it_is_about(bench):
    bench.tasks = {8: SimulatedMemory(), 9: SimulatedMemory(static=2 * GIB)}
    bench.run(bench.request(8))
    assert bench.leases == [("GPU-0", 500), ("GPU-2", 500)]
    bench.leases.clear()
    bench.run(bench.request(9, share=None, batch=64))
    assert bench.leases == [("GPU-0", 1000), ("GPU-2", 1000)]
    assert LeasePool(lease_directory(), ["GPU-0"]).holders() == []


def test_only_what_is_not_pinned_yet_is_measured(bench, capsys):
    bench.tasks = {8: SimulatedMemory(), 9: SimulatedMemory(static=2 * GIB)}
    bench.run(bench.request(8))
    before = bench.pins()
    bench.opened.clear()
    capsys.readouterr()
    assert bench.run(bench.request(8, 9))
    assert {width for width, _ in bench.opened} == {9}
    assert bench.pins()[8, LARGE] == before[8, LARGE] and (9, SMALL) in bench.pins()
    assert f"width=8 (3 cells): measured before: batch {before[8, LARGE].batch}" in capsys.readouterr().err


def test_what_was_taken_away_is_measured_again(bench):
    bench.tasks = {8: SimulatedMemory()}
    bench.run(bench.request(8))
    next(path for path in (bench.sweep / FOLDER).glob("*.json") if "l4" in path.name).unlink()
    bench.opened.clear()
    bench.run(bench.request(8))
    assert [device for _, device in bench.opened if device] == [f"cuda:2 {SMALL}"]


def test_what_does_not_fit_is_pinned_as_an_answer_until_the_task_changes(bench, capsys):
    bench.tasks = {8: SimulatedMemory(static=20 * GIB)}
    assert bench.run(bench.request(8)), "that it does not fit is an answer"
    pin = bench.pins()[8, SMALL]
    assert (pin.batch, pin.peak, pin.limited_by) == (None, None, "memory") and "does not fit" in pin.trouble
    assert bench.pins()[8, LARGE].batch
    assert f"does not fit: batch 1 needs more than its 11.3 GiB (on {SMALL})" in capsys.readouterr().err
    bench.opened.clear()
    bench.run(bench.request(8))
    assert bench.opened == []
    bench.tasks = {8: SimulatedMemory(static=2 * GIB)}
    bench.run(bench.request(8, code="changed"))
    assert [device for _, device in bench.opened if device] == [f"cuda:2 {SMALL}"]
    assert bench.pins()[8, SMALL].batch


def test_a_share_that_leaves_nothing_does_not_fit_and_nothing_is_measured(bench):
    assert bench.run(bench.request(8, share=1, batch=16))
    assert "does not fit: a share of 0.001" in bench.pins()[8, SMALL].trouble
    assert bench.pins()[8, SMALL].measured == [] and bench.opened == []


def test_a_task_that_fails_is_told_and_not_pinned_and_the_others_are_measured(bench, capsys):
    error = "ValueError: no such file\n  data.npz"
    bench.tasks = {8: SimulatedMemory(fails=dict.fromkeys(range(1, 5000), error)), 9: SimulatedMemory()}
    assert not bench.run(bench.request(8, 9))
    assert set(bench.pins()) == {(9, LARGE), (9, SMALL)}
    told = capsys.readouterr().err
    assert f"width=8 (3 cells) could not be measured on {LARGE}: the task fails at batch 1: ValueError" in told


def test_a_task_that_ignores_its_batch_is_not_pinned(bench, capsys):
    bench.tasks = {8: SimulatedMemory(ignores=64)}
    assert not bench.run(bench.request(8))
    assert bench.pins() == {} and "`cell.batch`" in capsys.readouterr().err


def test_a_share_that_is_sought_takes_one_measurement_without_a_cap(bench, capsys):
    bench.tasks = {8: SimulatedMemory(static=20 * GIB)}
    assert bench.run(bench.request(8, share=None, batch=16))
    pin = bench.pins()[8, SMALL]
    assert (pin.batch, pin.cap, pin.trouble, len(pin.measured)) == (16, None, None, 1)
    assert pin.peak == bench.tasks[8].peak(16)
    assert "batch 16, peak 20.2 GiB, on" in capsys.readouterr().err
    assert None not in dict(bench.opened).values(), "an estimate would be of no use"


def test_a_tasks_own_batch_is_measured_as_it_is(bench):
    bench.tasks = {8: SimulatedMemory(static=20 * GIB), 9: SimulatedMemory(static=200 * GIB)}
    assert bench.run(bench.request(8, 9, share=None, batch=None))
    assert bench.pins()[8, LARGE].batch is None and bench.pins()[8, LARGE].peak
    assert "the task's own batch needs more" in bench.pins()[9, LARGE].trouble


def test_profiles_with_the_same_estimates_share_a_measurement(bench, capsys):
    bench.tasks = {8: SimulatedMemory(seed=1, noise=0.01), 9: SimulatedMemory(), 10: SimulatedMemory(static=GIB + 1)}
    bench.estimates = {width: replace(task, noise=0.0) for width, task in bench.tasks.items()}
    bench.estimates[10].static = 3 * GIB
    assert bench.run(bench.request(8, 9, 10))
    assert {width for width, device in bench.opened if device} == {8, 10}
    first, second = bench.pins()[8, SMALL], bench.pins()[9, SMALL]
    assert (first.batch, first.peak) == (second.batch, second.peak) and first.key != second.key
    assert second.source == "simulated, of width=8, whose estimates are the same"
    assert "measured as width=8" in capsys.readouterr().err


def test_what_the_data_limits_is_not_taken_for_another(bench):
    bench.tasks = {8: SimulatedMemory(data=40), 9: SimulatedMemory(data=400)}
    assert bench.run(bench.request(8, 9))
    assert [bench.pins()[width, SMALL].largest for width in (8, 9)] == [40, 400]


def test_other_shares_share_no_measurement(bench):
    bench.tasks = {8: SimulatedMemory()}
    one, other = bench.request(8), bench.request(8, share=250)
    assert bench.run(replace(one, profiles=[*one.profiles, *other.profiles]))
    batches = [pin.batch for models in read_pins(bench.sweep).values() for pin in models.values()]
    assert len(set(batches)) == 4


def test_where_an_estimate_fails_the_measurement_is_made_all_the_same(bench):
    bench.tasks = {8: SimulatedMemory(), 9: SimulatedMemory()}
    bench.estimates = {width: SimulatedMemory(fails={8: "no estimate"}) for width in (8, 9)}
    assert bench.run(bench.request(8, 9))
    assert {width for width, device in bench.opened if device} == {8, 9}


def test_the_estimate_spares_measurements(bench):
    task = SimulatedMemory(static=GIB, sample=8 * MIB)
    bench.tasks = {8: task}
    bench.run(bench.request(8))
    guided = len(bench.pins()[8, LARGE].measured)
    bench.estimates = {8: SimulatedMemory(fails={8: "no estimate"})}
    for path in (bench.sweep / FOLDER).glob("*.json"):
        path.unlink()
    bench.run(bench.request(8))
    assert guided + 3 <= len(bench.pins()[8, LARGE].measured)


@pytest.mark.parametrize("devices", ["cpu", "sim:2"])
def test_on_a_cpu_the_limit_is_the_cells_main_memory(bench, monkeypatch, devices):
    monkeypatch.setenv("SWEEPACK_DEVICES", devices)
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "64000")
    bench.tasks = {8: SimulatedMemory(enforced=False)}
    kind = devices[:3]
    bench.run(bench.request(8, mem_mb=4000))
    assert [(key, pin.cap, pin.total) for key, pin in bench.pins().items()] == [((8, kind), 4 * 10**9, 64 * 10**9)]
    (bench.sweep / FOLDER).joinpath(next((bench.sweep / FOLDER).glob("*.json")).name).unlink()
    bench.run(bench.request(8, share=250))
    assert [pin.cap for pin in bench.pins().values()] == [16 * 10**9]


def test_a_gpu_of_which_nothing_can_be_told_is_one_error(bench, monkeypatch):
    monkeypatch.setattr(probe, "load_nvml", lambda: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    bench.tasks = {8: SimulatedMemory()}
    with pytest.raises(UserError, match="whose memory NVML or torch can tell"):
        bench.run(bench.request(8))


def test_devices_beyond_those_of_the_sweep_are_left_alone(bench):
    bench.tasks = {8: SimulatedMemory()}
    bench.run(replace(bench.request(8), devices=1))
    assert set(bench.pins()) == {(8, LARGE)}


def test_another_model_than_the_settings_name_is_told(bench, capsys):
    bench.tasks = {8: SimulatedMemory()}
    bench.run(bench.request(8, sizing={"device": "NVIDIA H200"}))
    assert f"`sizing.device` is NVIDIA H200, and here is {LARGE}, {SMALL}" in capsys.readouterr().err


def write(bench, request: Request) -> list[str]:
    request.write(bench.sweep, "job")
    return ["--sweep-dir", str(bench.sweep), "--request", "job", "--stamp", str(bench.sweep / "stamp")]


@pytest.fixture
def signals() -> Iterator[None]:
    before = {signum: signal.getsignal(signum) for signum in probe.STOP_SIGNALS}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


def test_the_stamp_is_written_when_all_is_measured(bench, monkeypatch, signals):
    monkeypatch.setattr(measuring.Meters, "open", staticmethod(bench.open))
    bench.tasks = {8: SimulatedMemory(fails=dict.fromkeys(range(1, 5000), "ValueError")), 9: SimulatedMemory()}
    arguments = write(bench, bench.request(8, 9))
    assert probe.main(arguments) == 1
    assert not (bench.sweep / "stamp").exists() and (9, LARGE) in bench.pins()
    bench.tasks[8] = SimulatedMemory(static=50 * GIB)
    assert probe.main(arguments) == 0
    assert (bench.sweep / "stamp").exists()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_and_keeps_what_was_measured(bench, monkeypatch, signals, capsys, signum):
    monkeypatch.setattr(measuring.Meters, "open", staticmethod(bench.open))
    bench.tasks = {8: SimulatedMemory(), 9: SimulatedMemory(static=2 * GIB)}
    arguments = write(bench, bench.request(8, 9))

    class Interrupts(SimulatedMemory):
        def __call__(self, batch: int) -> Measurement:
            os.kill(os.getpid(), signum)
            return super().__call__(batch)

    calm, bench.estimates = bench.tasks[9], bench.tasks.copy()
    bench.tasks[9] = Interrupts(static=2 * GIB)
    assert probe.main(arguments) == 128 + signum
    assert set(bench.pins()) == {(8, LARGE), (8, SMALL)} and not (bench.sweep / "stamp").exists()
    assert "what was measured is kept" in capsys.readouterr().err
    assert [path for path in (bench.sweep / FOLDER).iterdir() if path.is_dir()] == []
    assert LeasePool(lease_directory(), ["GPU-0"]).holders() == []
    bench.tasks[9] = calm
    bench.opened.clear()
    assert probe.main(arguments) == 0
    assert {width for width, _ in bench.opened} == {9}


def test_a_request_that_is_not_there_is_one_error(bench, signals, capsys):
    assert probe.main(["--sweep-dir", str(bench.sweep), "--request", "none"]) == 1
    assert "error in --request" in capsys.readouterr().err


def test_a_pin_says_all_that_was_measured(bench):
    bench.tasks = {8: SimulatedMemory()}
    bench.run(bench.request(8))
    path = next((bench.sweep / FOLDER).glob("*a100.json"))
    measured = json.loads(path.read_text())["measured"]
    assert {"batch", "outcome", "peak", "source", "rows"} <= set(measured[0])
    assert "oom" in {entry["outcome"] for entry in measured}
