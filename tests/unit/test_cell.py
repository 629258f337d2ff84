"""What a task has in its hands: history, state to resume from, metrics and a clean environment."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import numpy as np
import pytest
from sweepack.cell import Cell, plain_metrics
from sweepack.environment import cell_environment
from sweepack.records import CellFiles


def make(tmp_path, identity="c1"):
    return Cell(identity, {"lr": 0.1}, 3, CellFiles(tmp_path))


def rows(tmp_path):
    return [json.loads(line)["metrics"]["loss"] for line in (tmp_path / "history.jsonl").read_text().splitlines()]


def test_parameters_cannot_be_changed(tmp_path):
    with pytest.raises(TypeError):
        make(tmp_path).params["lr"] = 1


def test_state_brings_back_random_numbers_and_forgets_what_was_logged_after_it(tmp_path):
    import torch

    cell = make(tmp_path)
    assert cell.load() is None
    cell.log({"loss": 1.0})
    cell.save({"weights": torch.ones(2), "epoch": 1})
    drawn = random.random(), np.random.rand(), torch.rand(1).item()
    cell.log({"loss": 2.0})

    again = make(tmp_path)
    random.seed(0)
    torch.manual_seed(0)
    np.random.seed(0)
    state = again.load()
    assert state["epoch"] == 1 and state["weights"].tolist() == [1, 1]
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == drawn
    again.log({"loss": 3.0})
    assert rows(tmp_path) == [1.0, 3.0]


def test_a_fresh_attempt_starts_its_history_anew(tmp_path):
    make(tmp_path).log({"loss": 1.0})
    cell = make(tmp_path)
    cell.log({"loss": 2.0})
    cell.log({"loss": 3.0})
    assert rows(tmp_path) == [2.0, 3.0]
    make(tmp_path).history.close()
    assert not (tmp_path / "history.jsonl").exists()


def test_state_of_another_cell_is_refused(tmp_path):
    make(tmp_path).save({})
    with pytest.raises(RuntimeError, match="belongs to cell c1, not to c2"):
        make(tmp_path, "c2").load()


def test_a_truncated_state_gives_way_to_the_one_before(tmp_path):
    cell = make(tmp_path)
    cell.save({"epoch": 1})
    cell.save({"epoch": 2})
    path = tmp_path / "checkpoints/state.pt"
    path.write_bytes(path.read_bytes()[:-100])
    assert make(tmp_path).load()["epoch"] == 1


@pytest.mark.parametrize("bad", [np.ones(2), {"a": [object()]}, {"b": np.float64(1)}, (np.int64(3),)])
def test_state_that_could_not_be_loaded_is_refused_when_it_is_saved(tmp_path, bad):
    with pytest.raises(TypeError, match="state"):
        make(tmp_path).save(bad)
    assert make(tmp_path).load() is None


def test_generators_that_are_imported_later_are_seeded_then():
    program = """
import sys
from sweepack.randomness import seed_all
seed_all(int(sys.argv[1]))
import numpy, torch, random
print(numpy.random.rand(), torch.rand(1).item(), random.random())
"""
    command = [sys.executable, "-c", program]
    drawn = [subprocess.check_output([*command, seed]) for seed in ("7", "7", "8", str(2**70))]
    assert drawn[0] == drawn[1] and len(set(drawn)) == 3


def test_metrics_become_plain_values():
    import torch

    given = {"a": torch.tensor(2), "b": np.float32(0.5), "c": [1, 2], "d": None, "e": "x", "f": np.arange(2), "g": True}
    assert plain_metrics(given) == {"a": 2, "b": 0.5, "c": [1, 2], "d": None, "e": "x", "f": [0, 1], "g": True}


@pytest.mark.parametrize("bad", [None, 0.5, {"a": object()}, {1: 2}, {"a": {1, 2}}])
def test_what_is_no_metric_is_named(bad):
    with pytest.raises(TypeError, match="metric"):
        plain_metrics(bad)


@pytest.mark.parametrize("argument", [{"devices": 2}, {"num_nodes": 2}, {"strategy": "ddp"}])
def test_a_trainer_takes_nothing_that_contradicts_the_cell(tmp_path, argument):
    with pytest.raises(TypeError, match="follows from the cell's resources"):
        make(tmp_path).trainer(**argument)


def test_the_environment_is_scrubbed_of_ranks_and_keeps_the_rest():
    inherited = {
        "PATH": "/bin",
        "NCCL_DEBUG": "INFO",
        "WANDB_API_KEY": "secret",
        "SLURM_NTASKS": "4",
        "SLURM_JOB_ID": "7",
        "RANK": "1",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "n1",
        "PL_GLOBAL_SEED": "9",
        "TORCHELASTIC_RUN_ID": "x",
        "PMI_RANK": "1",
        "OMP_NUM_THREADS": "64",
        "CUDA_VISIBLE_DEVICES": "0,1",
    }
    clean = cell_environment(inherited, visible="GPU-1", threads=2)
    assert clean["PATH"] == "/bin" and clean["NCCL_DEBUG"] == "INFO" and clean["WANDB_API_KEY"] == "secret"
    assert clean["CUDA_VISIBLE_DEVICES"] == "GPU-1" and clean["OMP_NUM_THREADS"] == clean["MKL_NUM_THREADS"] == "2"
    gone = {"SLURM_NTASKS", "SLURM_JOB_ID", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "PL_GLOBAL_SEED"}
    assert not (gone | {"TORCHELASTIC_RUN_ID", "PMI_RANK"}) & clean.keys()
