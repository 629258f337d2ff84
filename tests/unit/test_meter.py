"""Measuring one batch size in a process of its own: peaks, everything that can go wrong, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from meter_tools import CPU, SETTINGS, meter, scratch_of
from sweep_tools import check_words, refused
from sweepack.devices import Device
from sweepack.sizing.meter import Measurement, Meter
from sweepack.sizing.trial import MAIN_MEMORY
from sweepack.task import load_task

MB = 10**6
# Runs what a test has written down, with a function that makes a training step.
TASK = """
import os, signal, subprocess, sys, time
from pathlib import Path
import torch
from torch import nn

def step(net, optimizer, inputs):
    optimizer.zero_grad()
    loss = net(inputs).pow(2).mean()
    loss.backward()
    optimizer.step()

def train(cell, **params):
    exec(Path("case.py").read_text(), {**globals(), "cell": cell, "params": params})
    return {}
"""
TRAINING = """
net = nn.Linear(1000, 8)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(1000): step(net, optimizer, torch.randn(cell.batch, 1000))
raise AssertionError("never so far")
"""


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Meter]]:
    root = tmp_path_factory.mktemp("project")
    (root / "task.py").write_text(TASK)
    with meter(root, threads=2, share=250, params={"a": [1]}, seed=3, mem_mb=1000) as measuring:
        yield root, measuring
    assert not list(scratch_of(root).iterdir())
    assert {path.name for path in root.iterdir()} <= {"task.py", "case.py", "seen.json", "__pycache__"}


def measure(opened: tuple[Path, Meter], body: str, batch: int | None = 16) -> Measurement:
    root, measuring = opened
    (root / "case.py").write_text(body)
    return measuring.measure(batch)


def test_peaks_grow_with_the_batch(opened: tuple[Path, Meter]) -> None:
    small, large = (measure(opened, TRAINING, batch) for batch in (16, 60_000))
    for found, rows in ((small, 16), (large, 60_000)):
        assert (found.batch, found.outcome, found.source, found.rows) == (rows, "measured", MAIN_MEMORY, rows), found
    assert small.peak is not None and large.peak is not None
    assert 120 * MB < large.peak - small.peak < 500 * MB  # a batch takes 240


def test_the_task_is_run_as_a_cell_is(opened: tuple[Path, Meter]) -> None:
    body = """
import json, random
facts = {"device": cell.device, "share": cell.share, "batch": cell.batch, "threads": os.environ["OMP_NUM_THREADS"],
         "visible": os.environ["CUDA_VISIBLE_DEVICES"], "folder": os.getcwd(), "params": params, "seed": cell.seed,
         "drawn": random.random(), "dir": str(cell.dir), "torch": torch.rand(1).item()}
Path("seen.json").write_text(json.dumps(facts))
cell.save({"x": torch.ones(1)})
"""
    seen = []
    for batch in (7, None):
        measure(opened, body + TRAINING.replace("cell.batch", "9"), batch)
        seen.append(json.loads((opened[0] / "seen.json").read_text()))
    folder = Path(seen[0].pop("dir"))
    assert folder != Path(seen[1].pop("dir")) and folder.is_relative_to(scratch_of(opened[0]))
    assert [facts.pop("batch") for facts in seen] == [7, None]
    assert seen[0] == seen[1]  # the same random numbers
    assert {name: seen[0][name] for name in ("device", "share", "threads", "visible", "params", "seed", "folder")} == {
        **{"device": "cpu", "share": 0.25, "threads": "2", "visible": "", "params": {"a": [1]}, "seed": 3},
        "folder": str(opened[0]),
    }


def test_rows_tell_of_a_batch_that_the_task_does_not_use(opened: tuple[Path, Meter]) -> None:
    assert measure(opened, TRAINING.replace("cell.batch", "5"), 64).rows == 5


def test_every_optimiser_makes_two_steps_before_it_is_enough(opened: tuple[Path, Meter]) -> None:
    body = """
left, right = nn.Linear(8, 8), nn.Linear(8, 8)
first, second = torch.optim.SGD(left.parameters(), 0.1), torch.optim.SGD(right.parameters(), 0.1)
for number in range(100):
    step(left, first, torch.randn(4, 8))
    Path("seen.json").write_text(str(number))
    if number % 3 == 2: step(right, second, torch.randn(4, 8))
"""
    assert measure(opened, body).outcome == "measured"
    assert (opened[0] / "seen.json").read_text() == "5"


def test_after_running_out_of_memory_a_smaller_batch_is_measured(opened: tuple[Path, Meter]) -> None:
    body = TRAINING.replace("step(net", "held = torch.zeros(cell.batch, 10**7); step(net")
    found = [measure(opened, body, batch) for batch in (1, 64, 2)]  # 40 MB each, of 1000
    assert [each.outcome for each in found] == ["measured", "oom", "measured"], found
    assert found[1].peak is None and "DefaultCPUAllocator" in (found[1].error or "")


@pytest.mark.parametrize(
    ("body", "outcome", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "oom", "was killed"),
        ("raise MemoryError", "oom", "MemoryError"),
        ("raise torch.OutOfMemoryError('CUDA out of memory')", "oom", "CUDA out of memory"),
        ("print('terminate called: std::bad_alloc'); os._exit(1)", "oom", "std::bad_alloc"),
        ("raise KeyError('deep inside')", "failed", "KeyError: 'deep inside'"),
        ("sys.exit(0)", "failed", "sys.exit(0)"),
        ("print('dying words'); os._exit(3)", "failed", "exit status 3\ndying words"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "failed", "crashed: SIGSEGV"),
        (TRAINING.replace("1000): step", "1): step").rpartition("raise")[0], "failed", "made only 1 optimiser step"),
    ],
)
def test_what_goes_wrong_is_told(opened: tuple[Path, Meter], body: str, outcome: str, words: str) -> None:
    found = measure(opened, body)
    assert (found.outcome, found.peak) == (outcome, None)
    assert found.error is not None and words in found.error and "Traceback" not in found.error


def test_without_an_optimiser_the_whole_run_is_measured(opened: tuple[Path, Meter]) -> None:
    none, much = (measure(opened, f"held = bytearray({size})") for size in (1, 100 * MB))
    assert none.outcome == much.outcome == "measured" and much.source == f"{MAIN_MEMORY}, whole run"
    assert none.peak is not None and much.peak is not None and 90 * MB < much.peak - none.peak < 130 * MB


def test_nothing_is_done_at_the_end_of_a_training_that_is_cut_short(opened: tuple[Path, Meter]) -> None:
    tried = "try:" + TRAINING.replace("\n", "\n    ")
    body = f"{tried}\nexcept BaseException: Path('left').touch()\nfinally: Path('left').touch()\n"
    assert measure(opened, body).outcome == "measured"
    assert not (opened[0] / "left").exists()


def test_lightning_writes_no_checkpoint_of_it(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text("""
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
    def training_step(self, batch, _):
        return self.layer(batch).sum()
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

def train(cell):
    keeper = ModelCheckpoint("kept", save_on_exception=True, save_last=True)
    trainer = cell.trainer(max_epochs=9, callbacks=[keeper], logger=CSVLogger(cell.dir), accumulate_grad_batches=2)
    trainer.fit(Net(), torch.utils.data.DataLoader(torch.randn(64, 8), cell.batch, num_workers=1))
""")
    with meter(tmp_path) as measuring:
        found = measuring.measure(4)
    assert (found.outcome, found.rows) == ("measured", 4), found
    assert {path.name for path in tmp_path.iterdir()} <= {"task.py", "__pycache__"}


def test_a_task_that_cannot_be_forked_gets_a_fresh_process_for_each_batch(tmp_path: Path) -> None:
    threaded = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    (tmp_path / "task.py").write_text(threaded + TASK)
    (tmp_path / "case.py").write_text(TRAINING)
    with meter(tmp_path) as measuring:
        found = [measuring.measure(batch) for batch in (8, 16)]
    assert [(each.outcome, each.rows) for each in found] == [("measured", 8), ("measured", 16)], found


def test_a_task_that_hangs_is_ended_with_what_it_started(tmp_path: Path, eventually: Callable[..., None]) -> None:
    (tmp_path / "task.py").write_text("""
import os, subprocess, time
def train(cell):
    if cell.batch == 1:
        return {}
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    open("pid", "w").write(str(child.pid))
    time.sleep(600)
""")
    with meter(tmp_path, timeout=5.0) as measuring:
        found = measuring.measure(2)
        assert found.outcome == "failed" and "took longer than 5 s" in (found.error or "")
        assert measuring.measure(1).outcome == "measured"
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_when_the_meter_is_killed_nothing_is_left(tmp_path: Path, eventually: Callable[..., None]) -> None:
    root = tmp_path / "project"
    root.mkdir()
    (root / "task.py").write_text("""
import os, subprocess, time
def train(cell):
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    open("pids.new", "w").write(f"{child.pid} {os.getpid()} {os.getppid()}")
    os.rename("pids.new", "pids")
    time.sleep(600)
""")
    program = (
        f"from pathlib import Path\nfrom meter_tools import meter\nwith meter(Path({str(root)!r})) as m: m.measure(1)"
    )
    environment = {**os.environ, "PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"}
    killed = subprocess.Popen([sys.executable, "-c", program], env=environment)
    try:
        eventually(lambda: (root / "pids").exists(), "the task to run")
    finally:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    pids = [int(pid) for pid in (root / "pids").read_text().split()]
    eventually(lambda: not any(psutil.pid_exists(pid) for pid in pids), "the end of all processes")
    assert not list(scratch_of(root).iterdir())


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import nowhere_to_be_found\ndef train(cell): ...", ["No module named 'nowhere_to_be_found'"]),
        (
            "import os\nprint('dying words', flush=True)\nos._exit(3)\ndef train(cell): ...",
            ["ended the process", "dying words"],
        ),
        ("import time\ntime.sleep(600)\ndef train(cell): ...", ["within 5 s", "the import did not end"]),
    ],
)
def test_a_task_that_cannot_be_imported_is_refused(tmp_path: Path, source: str, words: list[str]) -> None:
    (tmp_path / "task.py").write_text(source)

    def enter() -> None:
        with meter(tmp_path, timeout=5.0 if "sleep" in source else 300.0):
            pass

    check_words(refused(enter), "sweep.task", "task.py:train", *words)
    assert not list(scratch_of(tmp_path).iterdir())


def test_a_gpu_that_torch_does_not_see_is_told(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text("def train(cell): ...")
    device = Device("GPU-nowhere", "GPU-nowhere", "cuda", "cuda:0 X", "X", 80 * 10**9)
    with meter(tmp_path, device=device, share=250) as measuring:
        found = measuring.measure(1)
    assert found.outcome == "failed" and "torch sees no GPU" in (found.error or ""), found


def test_a_program_is_refused(tmp_path: Path) -> None:
    task = load_task(["./program", "{parameters}"], tmp_path).to_json(tmp_path)
    given = {"device": CPU, "share": None, "threads": 1, "mem_mb": 0, "memory": SETTINGS, "root": tmp_path}
    error = refused(lambda: Meter(task, {}, 0, **given, timeout=9.0, scratch=tmp_path))
    check_words(error, "sweep.task", "a Python function", "`gpu` and `batch` as numbers")
