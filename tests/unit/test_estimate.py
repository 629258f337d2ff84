"""The estimate without a GPU: against what tasks really allocate, and for tasks that look at their numbers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from meter_tools import REPOSITORY, meter, scratch_of
from sweepack.sizing.estimate import SOURCE
from sweepack.sizing.meter import Measurement, Meter

HERE = Path(__file__).parent
MIB = 2**20
# Function, parameters, batch, and the ratios to the real peak that are allowed.
EXACT, BY_LIBRARY = (0.98, 1.02), (0.7, 1.05)
# Where a CPU multiplies by a mask, it has the mask in full precision for a moment.
MASKED = (0.93, 1.02)
TRACED = [
    ("loop", {"model": "mlp"}, 64, EXACT),
    ("loop", {"model": "mlp", "amp": True, "accumulate": 2}, 128, EXACT),
    ("loop", {"model": "transformer", "optim": "sgd"}, 16, EXACT),
    ("loop", {"model": "dropout"}, 64, MASKED),
    ("loop", {"model": "conv"}, 64, BY_LIBRARY),
    ("lightning", {"model": "mlp", "optim": "sgd"}, 512, EXACT),
    ("lightning", {"model": "transformer"}, 32, EXACT),
    ("lightning", {"model": "transformer", "precision": "bf16-mixed"}, 32, EXACT),
]


@pytest.fixture(scope="module")
def traced() -> list[int]:
    wanted = json.dumps([entry[:3] for entry in TRACED])
    command = [sys.executable, str(HERE / "allocation_trace.py"), str(HERE / "sized_tasks.py"), wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    return [int(line) for line in done.stdout.split()]


def test_the_estimate_is_what_the_task_really_allocates(tmp_path: Path, traced: list[int]) -> None:
    shutil.copy(HERE / "sized_tasks.py", tmp_path)
    with meter(tmp_path, "sized_tasks.py:chosen", None) as estimator:
        for (function, params, batch, (least, most)), real in zip(TRACED, traced, strict=True):
            (tmp_path / "case.json").write_text(json.dumps([function, params]))
            found = estimator.measure(batch)
            case = (function, params, found, real)
            assert (found.outcome, found.source, found.rows) == ("measured", SOURCE, batch), case
            assert found.peak is not None and least <= found.peak / real <= most, case


# Runs what a test has written down, with a function that makes a training step.
TASK = """
import copy
from pathlib import Path
import numpy
import torch
from torch import nn

def step(net, optimizer, inputs):
    loss = net(inputs).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss

def train(cell):
    exec(Path("case.py").read_text(), {**globals(), "cell": cell})
    return {}
"""


@pytest.fixture(scope="module")
def estimator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Meter]]:
    root = tmp_path_factory.mktemp("project")
    (root / "task.py").write_text(TASK)
    with meter(root, device=None) as opened:
        yield root, opened
    assert not list(scratch_of(root).iterdir())


def estimate(estimator: tuple[Path, Meter], body: str, batch: int = 32) -> Measurement:
    root, opened = estimator
    (root / "case.py").write_text(body)
    return opened.measure(batch)


SETUP = """
net = nn.Linear(64, 64).to(cell.device)
optimizer = torch.optim.Adam(net.parameters())
inputs = torch.randn(cell.batch, 64)
"""


def peak(estimator: tuple[Path, Meter], body: str, batch: int = 32) -> int:
    found = estimate(estimator, body, batch)
    assert found.outcome == "measured" and found.peak is not None, found
    return found.peak


def test_data_counts_where_it_is_moved_to_the_device_and_batches_always(estimator: tuple[Path, Meter]) -> None:
    data = SETUP + "data = torch.randn(100_000, 64)\n"  # 24.4 MiB
    batches = "for part in data.split(cell.batch): step(net, optimizer, part.to(cell.device))\n"
    assert peak(estimator, data + batches) < 1 * MIB
    assert 24 * MIB < peak(estimator, data + "data = data.to(cell.device)\n" + batches) < 26 * MIB
    assert peak(estimator, data + batches, batch=50_000) > 24 * MIB


def test_what_a_device_holds_beside_the_trained_model_counts(estimator: tuple[Path, Meter]) -> None:
    twice = "for _ in range(2): step(net, optimizer, inputs)\n"
    frozen = "frozen = nn.Linear(1024, 4096, bias=False).to(cell.device)\n"  # 16 MiB
    assert peak(estimator, SETUP + twice) < 1 * MIB
    assert 16 * MIB < peak(estimator, SETUP + frozen + twice) < 17 * MIB
    assert 32 * MIB < peak(estimator, SETUP + frozen + "average = copy.deepcopy(frozen)\n" + twice) < 33 * MIB


def test_dropout_takes_what_it_does_on_a_gpu(estimator: tuple[Path, Meter]) -> None:
    def dropping(p: float) -> int:
        body = f"""
net = nn.Sequential(nn.Linear(64, 4096), nn.Dropout({p}), nn.Linear(4096, 1)).to(cell.device)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(2):
    step(net, optimizer, torch.randn(cell.batch, 64))
"""
        return peak(estimator, body, batch=2048)

    # Its result, with which 32 MiB are done with, and a mask of a byte an element.
    assert 8 * MIB <= dropping(0.5) - dropping(0.0) < 42 * MIB

    body = """
attention = nn.MultiheadAttention(64, 4, dropout=0.1, batch_first=True).to(cell.device)
optimizer = torch.optim.SGD(attention.parameters(), 0.1)
for _ in range(2):
    inputs = torch.randn(cell.batch, 2048, 64)
    step(lambda x: attention(x, x, x, need_weights=False)[0], optimizer, inputs)
"""
    # Not the weights of all pairs, which are 256 MiB.
    assert 8 * MIB < peak(estimator, body, batch=4) < 64 * MIB


def test_a_model_larger_than_this_machine_takes_nothing(estimator: tuple[Path, Meter]) -> None:
    body = """
net = nn.Linear(100_000, 100_000, bias=False).to(cell.device)
optimizer = torch.optim.Adam(net.parameters())
for _ in range(2):
    step(net, optimizer, torch.randn(cell.batch, 100_000, device=cell.device))
"""
    # The parameters, their gradients, two moments, and what foreach takes for a while.
    assert peak(estimator, body) > 4 * 40e9


def test_a_task_that_looks_at_its_numbers_gets_some(estimator: tuple[Path, Meter]) -> None:
    body = """
labels = torch.from_numpy(numpy.array([0, 4, 2, 1] * 8))
assert labels.max().item() == 4 and sorted(torch.randperm(5).tolist()) == [0, 1, 2, 3, 4]
net = nn.Linear(64, int(labels.max()) + 1).half().float().to(cell.device)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(2):
    loss = step(net, optimizer, torch.randn(cell.batch, 64))
    if torch.isnan(loss).any() or not torch.isfinite(loss):
        raise ArithmeticError
    print(f"{loss:.3f}", loss.detach().numpy(), net.weight[0].tolist(), bool(loss > 0), 1 / loss.item())
    torch.save(net.state_dict(), cell.dir / "net.pt")
"""
    assert estimate(estimator, body).outcome == "measured"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (SETUP + "inputs = inputs[inputs[:, 0] > 0]\n", "aten.nonzero.default makes a tensor whose shape depends"),
        (SETUP + "raise KeyError('deep inside')\n", "KeyError: 'deep inside'"),
        (SETUP + "step(net, optimizer, inputs)\n", "made only 1 optimiser step"),
        ("pass", "no step of an optimiser of torch"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n", "crashed: SIGSEGV"),
        ("raise SystemExit(3)\n", "sys.exit(3)"),
    ],
)
def test_what_cannot_be_estimated_is_told_in_a_line(estimator: tuple[Path, Meter], body: str, reason: str) -> None:
    found = estimate(estimator, body)
    assert found.outcome == "failed" and found.peak is None
    assert found.error is not None and found.error.startswith("no estimate: ") and reason in found.error
    assert "Traceback" not in found.error


def test_the_examples_are_estimated_as_they_are(tmp_path: Path) -> None:
    shutil.copytree(REPOSITORY / "examples", tmp_path / "examples")
    prepare = "import sys; sys.path.insert(0, 'examples'); import digits; digits.prepare()"
    subprocess.run([sys.executable, "-c", prepare], cwd=tmp_path, check=True)
    peaks = []
    with meter(tmp_path, "examples/digits.py:train", None) as estimator:
        for batch in (64, 2048):
            estimator.aim({"model": "cnn", "lr": 0.1, "batch": batch}, seed=0)
            found = estimator.measure(None)
            # Fewer samples than the largest batch.
            assert (found.error, found.rows) == (None, min(batch, 1437))
            peaks.append(found.peak or 0)
    assert 0 < peaks[0] < peaks[1]
    with meter(tmp_path, "examples/torch_loop.py:train", None, params={"lr": 0.1}) as estimator:
        found = estimator.measure(None)
    assert (found.outcome, found.rows) == ("measured", 32)
