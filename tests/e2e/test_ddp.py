"""Cells on several devices of this machine: real gloo ranks, in a sweep with packed cells."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pandas as pd
import pytest
import torch
from ddp_tasks import NET, history, ranks_of, samples, wide

QUICK = {"start_seconds": 30}


@pytest.fixture
def nothing_left(sandbox, eventually):
    yield
    eventually(lambda: not ranks_of(sandbox), "all ranks to end", 20)


pytestmark = pytest.mark.usefixtures("nothing_left")


def test_wide_and_packed_cells_in_one_sweep_count_once(sandbox):
    wide(
        sandbox,
        {"match": {"n": [0, 1]}, "gpus_per_node": 2, "ddp": QUICK},
        {"match": {"n": 2}, "gpus_per_node": 4, "ddp": QUICK},
        {"gpu": 0.25},
        axes={"n": [0, 1, 2, 3, 4]},
    )
    plan = sandbox.snakemake("-n", "--cores", "4", profile=None)
    assert "2 cells on 1 node × 2 GPUs" in plan and "1 cell on 1 node × 4 GPUs" in plan
    sandbox.snakemake("--cores", "4")
    cells = {cell["params"]["n"]: cell for cell in sandbox.cells().values()}
    sizes = {0: 2, 1: 2, 2: 4, 3: 1, 4: 1}
    for n, size in sizes.items():
        assert samples(cells[n], size) == [list(range(64))] * 4, "each sample once an epoch"
        assert [epoch for epoch, _ in history(cells[n])] == [0, 1, 2, 3]
        assert cells[n]["metrics"]["rank"] == 0 and cells[n]["metrics"]["world"] == size
        assert len(list(cells[n]["dir"].glob("result.json*"))) == 1
    assert {n: cell["world_size"] for n, cell in cells.items()} == {0: 2, 1: 2, 2: 4, 3: None, 4: None}
    assert all(cell["memory"]["rss"] > 50e6 for cell in cells.values())
    assert cells[0]["device"].count("sim:") == 2 and cells[2]["device"].count("sim:") == 4
    if min(cells[0]["ended"], cells[1]["ended"]) > max(cells[0]["started"], cells[1]["started"]):
        assert not set(cells[0]["device"].split(", ")) & set(cells[1]["device"].split(", ")), "side by side"
    met = [json.loads((cells[n]["dir"] / "provenance.json").read_text()) for n in (0, 1, 2)]
    assert len({entry["rendezvous"] for entry in met}) == 3, "each meets at a port of its own"
    seeds = [tuple(entry["rank_seeds"]) for entry in met]
    assert len(set(seeds[2])) == 4 and seeds[0] == seeds[1] == seeds[2][:2]
    table = pd.read_csv(sandbox.root / "results/test/table.csv")
    assert len(table) == 5 and table["metrics.loss"].notna().all()
    assert "nothing" in sandbox.snakemake("--cores", "4").lower(), "finished cells stay finished"


def test_the_same_global_batch_gives_the_same_losses_on_1_2_and_4_ranks(sandbox):
    """As the README says: without dropout within 1e-5 of each other; shuffled by Lightning, between 2 and 4 ranks."""
    wide(
        sandbox,
        {"match": {"n": [2, 3]}, "gpus_per_node": 2},
        {"match": {"n": [4, 5]}, "gpus_per_node": 4},
        {"gpu": 1},
        axes={"n": [1, 2, 4]},
        params={"shuffle": False},
    )
    config = json.loads((sandbox.root / "config/config.yaml").read_text())
    config["sweep"]["include"] = [{"n": 3, "shuffle": True}, {"n": 5, "shuffle": True}]
    sandbox.config(**config)
    sandbox.snakemake()
    losses = {cell["params"]["n"]: [loss for _, loss in history(cell)] for cell in sandbox.cells().values()}
    assert losses[2] == pytest.approx(losses[1], rel=1e-5)
    assert losses[4] == pytest.approx(losses[1], rel=1e-5)
    assert losses[5] == pytest.approx(losses[3], rel=1e-5)
    assert losses[3] != pytest.approx(losses[2], rel=1e-3), "shuffled otherwise"


def test_a_kill_in_mid_training_is_not_seen_in_history_and_weights(sandbox):
    wide(
        sandbox,
        {"gpus_per_node": 2},
        axes={"n": [0]},
        params={"dropout": 0.3, "trouble": "vanish"},
        devices="cpu",
    )
    output = sandbox.snakemake(status=1)
    assert "rank 1" in output and "was killed (SIGKILL)" in output
    (cell,) = sandbox.cells().values()
    assert (cell["status"], cell["attempt"]) == ("interrupted", 1)
    sandbox.snakemake()
    (cell,) = sandbox.cells().values()
    assert (cell["status"], cell["attempt"]) == ("finished", 2)
    interrupted = history(cell), torch.load(cell["dir"] / "weights.pt")
    assert [epoch for epoch, _ in interrupted[0]] == [0, 1, 2, 3]

    sandbox.sweepack("rerun", cell["cell"])
    sandbox.snakemake()
    (cell,) = sandbox.cells().values()
    undisturbed = history(cell), torch.load(cell["dir"] / "weights.pt")
    assert interrupted[0] == undisturbed[0]
    assert all(torch.equal(interrupted[1][name], tensor) for name, tensor in undisturbed[1].items())


def test_a_rank_that_fails_or_exits_otherwise_ends_all_and_is_named(sandbox):
    wide(
        sandbox,
        {"gpus_per_node": 2},
        axes={"trouble": ["fail"]},
        devices="cpu",
    )
    output = sandbox.snakemake(status=1)
    assert "rank 1" in output and "RuntimeError: as asked" in output
    (cell,) = sandbox.cells().values()
    assert cell["status"] == "failed" and cell["ended"] - cell["started"] < 60
    assert cell["memory"]["rss"] > 50e6
    (sandbox.root / "once").unlink()
    sandbox.snakemake("--config", "trouble=exit", status=1)
    other = next(cell for cell in sandbox.cells().values() if cell["params"]["trouble"] == "exit")
    assert other["status"] == "failed" and "rank 1" in other["error"] and "exit status 3" in other["error"]


def test_ctrl_c_and_a_killed_launcher_leave_no_rank_behind(sandbox, eventually):
    wide(sandbox, {"gpus_per_node": 2}, params={"trouble": "hang"}, devices="cpu")
    run = sandbox.start()
    eventually((sandbox.root / "once").exists, "the last rank to hang")
    os.killpg(run.pid, signal.SIGINT)
    run.communicate(timeout=60)
    (cell,) = sandbox.cells().values()
    assert cell["status"] == "interrupted" and "SIGINT" in cell["error"]
    eventually(lambda: not ranks_of(sandbox), "the ranks to end", 20)

    (sandbox.root / "once").unlink()
    run = sandbox.start()
    eventually((sandbox.root / "once").exists, "the last rank to hang again")
    launcher = next(
        int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in ranks_of(sandbox)
    )
    os.kill(launcher, signal.SIGKILL)
    run.communicate(timeout=60)
    eventually(lambda: not ranks_of(sandbox), "the ranks of a killed launcher to end", 20)
    sandbox.snakemake()
    (cell,) = sandbox.cells().values()
    assert cell["status"] == "finished" and [epoch for epoch, _ in history(cell)] == [0, 1, 2, 3]


def test_another_number_of_ranks_goes_on_with_the_same_global_batch_only(sandbox):
    wide(sandbox, {"gpus_per_node": 2}, params={"trouble": "vanish"}, devices="cpu")
    sandbox.snakemake(status=1)
    wide(sandbox, {"gpus_per_node": 4}, params={"trouble": "vanish"}, devices="cpu")
    sandbox.snakemake()
    (cell,) = sandbox.cells().values()
    assert (cell["world_size"], [epoch for epoch, _ in history(cell)]) == (4, [0, 1, 2, 3])
    assert "from a checkpoint of 2" in (cell["dir"] / "log.txt").read_text()

    sandbox.write("task.py", NET.replace("cell.per_rank(batch)", "batch"))
    sandbox.config(
        sweep={"name": "test", "task": "task.py:train", "axes": {"n": [7]}, "params": {"trouble": "vanish"}},
        resources=[{"gpus_per_node": 2}],
    )
    (sandbox.root / "once").unlink()
    sandbox.snakemake(status=1)
    config = json.loads((sandbox.root / "config/config.yaml").read_text())
    sandbox.config(**{**config, "resources": [{"gpus_per_node": 4}]})
    output = sandbox.snakemake(status=1)
    assert "2 ranks with a global batch of 32" in output and "4 ranks have 64" in output


TESTED = """
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 1)

    def loss(self, name, batch):
        loss = (self.net(batch[0]) - batch[0].sum(1, keepdim=True)).pow(2).mean()
        self.log(name, loss, on_step=False, on_epoch=True)
        return loss

    def training_step(self, batch, _):
        return self.loss("loss", batch)

    def validation_step(self, batch, _):
        self.loss("val_loss", batch)

    def test_step(self, batch, _):
        self.loss("test_loss", batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

def train(cell, *, n: int):
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(inputs), batch_size=cell.per_rank(16))
    trainer, net = cell.trainer(max_epochs=2), Net()
    trainer.fit(net, loader, loader)
    fitted = dict(trainer.callback_metrics)
    return {**fitted, **trainer.test(net, loader, verbose=False)[0]}
"""


def test_what_is_fitted_validated_and_tested_on_two_ranks_is_in_the_table_as_from_one_device(sandbox):
    sandbox.write("task.py", TESTED)
    sandbox.config(
        sweep={"name": "test", "task": "task.py:train", "axes": {"n": [1, 2]}},
        resources=[{"match": {"n": 2}, "gpus_per_node": 2}, {"gpu": 1}],
    )
    sandbox.snakemake()
    alone, wide = pd.read_csv(sandbox.root / "results/test/table.csv").to_dict("records")
    names = ["metrics.loss", "metrics.val_loss", "metrics.test_loss"]
    assert [wide[name] for name in names] == pytest.approx([alone[name] for name in names], rel=1e-5)
    history = pd.read_csv(sandbox.root / "results/test/history.csv")
    rows = [part.drop(columns="cell").to_numpy() for _, part in history.groupby("cell")]
    assert rows[0].shape == rows[1].shape == (2, 4) and rows[0] == pytest.approx(rows[1], rel=1e-5)


LOOP = """
import json
import os
import torch
from torch import nn

def train(cell, *, alone: bool = False):
    if alone:
        return {"loss": 1.0}
    net = nn.Linear(4, 1)
    cell.join()
    assert os.environ["NCCL_DEBUG"] == "WARN", "settings of the libraries pass"
    if cell.world_size > 1:
        net = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    done = 0
    if state := cell.load():
        net.load_state_dict(state["net"])
        done = state["done"]
    for step in range(done, 3):
        noise = torch.rand(1)
        net(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        cell.log({"noise": noise[0]}, step=step)
        cell.save({"net": net.state_dict(), "done": step + 1})
    noise = torch.rand(())
    with open(cell.dir / "noise.jsonl", "a") as stream:
        stream.write(json.dumps({"noise": noise.item()}) + "\\n")
    return {"noise": noise, "same": 0.25}
"""


def test_a_loop_of_ones_own_joins_and_a_task_that_ignores_its_devices_is_told(sandbox):
    sandbox.write("task.py", LOOP)
    sandbox.environment["NCCL_DEBUG"] = "WARN"
    sandbox.config(
        sweep={"name": "test", "task": "task.py:train", "axes": {"alone": [False, True]}},
        resources=[{"gpus_per_node": 2}],
    )
    output = sandbox.snakemake(status=1)
    assert "ran on 2 ranks but each trained by itself: use `cell.trainer(...)`" in output
    done = next(cell for cell in sandbox.cells().values() if cell["status"] == "finished")
    rows = [json.loads(line)["metrics"] for line in (done["dir"] / "history.jsonl").read_text().splitlines()]
    assert len(rows) == 3, "only rank 0 writes"
    assert done["metrics"]["same"] == 0.25
    noise = [json.loads(line)["noise"] for line in (done["dir"] / "noise.jsonl").read_text().splitlines()]
    assert len(set(noise)) == 2, "each rank draws its own"
    assert done["metrics"]["noise"] == pytest.approx(sum(noise) / 2)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"gpus_per_node": 3}, ["resources[0].gpus_per_node", "at most 2"]),
        ({"nodes": 2, "gpus_per_node": 1}, ["resources[0].nodes", "--profile profiles/slurm"]),
        ({"gpus_per_node": 2, "ddp": {"strategy": "fsdp"}}, ["resources[0].ddp.strategy", "GPUs"]),
    ],
)
def test_what_this_machine_does_not_have_is_told_in_the_plan(sandbox, entry, words):
    wide(sandbox, entry, devices="sim:2")
    output = sandbox.snakemake("-n", status=1, profile=None)
    assert all(word in output for word in words), output


def test_the_launcher_and_a_rank_started_by_other_means_say_what_to_start(sandbox):
    import subprocess
    import sys

    wide(sandbox, {"gpus_per_node": 2}, devices="cpu")
    environment = {**sandbox.environment, "RANK": "0", "WORLD_SIZE": "2"}
    script = Path(__file__).parents[2] / "scripts/ddp.py"
    for command, words in (
        ([str(script), "--sweep-dir", "results/test", "--cell", "x"], "start scripts/ddp.py once"),
        (["-m", "sweepack.ddp.rank"], "a rendezvous: start that, once"),
    ):
        done = subprocess.run(
            [sys.executable, *command], cwd=sandbox.root, env=environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 1 and words in done.stderr
