"""The contract of cells on several devices, as each rank compares it with what started it."""

from __future__ import annotations

import pytest
from fake_nvml import FakeNvml, Gpu, Mig
from hypothesis import given
from hypothesis import strategies as st
from sweep_tools import check_words, config_of, refused
from sweepack.config import validate
from sweepack.ddp.layout import Layout, Place, check_machine, find_place, node_range, tasks_per_node
from sweepack.ddp.merge import merged
from sweepack.ddp.ports import Port
from sweepack.ddp.world import rank_seed
from sweepack.devices import visible_pool

TWO_BY_TWO = Layout(2, 2, 2, "srun")


def srun(rank: int, **more: str) -> dict[str, str]:
    """What srun gives a rank of two nodes with two tasks each."""
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % 2),
        "SLURM_NODEID": str(rank // 2),
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        **more,
    }


def torch(rank: int, world: int, per_node: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % per_node),
        "GROUP_RANK": str(rank // per_node),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(per_node),
    }


@given(st.integers(0, 3))
def test_a_rank_that_is_where_the_layout_has_it_finds_its_place(rank: int) -> None:
    assert find_place(TWO_BY_TWO, srun(rank)) == (Place(rank, rank % 2, rank // 2, 4), [])
    assert find_place(Layout(1, 4, 1), torch(rank, 4, 4)) == (Place(rank, rank, 0, 4), [])


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"SLURM_STEP_NUM_TASKS": "3"}, ["srun started 3", "tasks 4", "`nodes` or `gpus_per_node`"]),
        ({"SLURM_STEP_NUM_NODES": "1"}, ["the step has 1", "nodes 2"]),
        ({"SLURM_STEP_TASKS_PER_NODE": "3,1"}, ["3,1", "on each 2"]),
        ({"SLURM_LOCALID": "2"}, ["SLURM_LOCALID is 2", "there are 2"]),
        ({"SLURM_PROCID": "4"}, ["SLURM_PROCID is 4", "there are 4"]),
        ({"RANK": "7"}, ["RANK=7 is left over", "srun says 0", "unset it"]),
        ({"WORLD_SIZE": "1"}, ["WORLD_SIZE=1 is left over", "srun says 4"]),
    ],
)
def test_what_disagrees_is_told_with_both_numbers(told: dict[str, str], words: list[str]) -> None:
    _, problems = find_place(TWO_BY_TWO, srun(0, **told))
    assert problems and all(word in "; ".join(problems) for word in words), problems


def test_variables_of_another_launcher_that_agree_do_no_harm() -> None:
    assert find_place(TWO_BY_TWO, srun(3, RANK="3", LOCAL_RANK="1", WORLD_SIZE="4"))[1] == []


def test_a_process_that_is_no_rank_is_told_what_it_lacks() -> None:
    place, problems = find_place(TWO_BY_TWO, {})
    assert place is None and "SLURM_PROCID" in problems[0] and "not started as a rank by srun" in problems[0]


def test_torchrun_may_have_fewer_nodes_only_where_the_layout_is_elastic() -> None:
    elastic = Layout(4, 2, 2, "torchrun")
    assert find_place(elastic, torch(3, 4, 2)) == (Place(3, 1, 1, 4), [])
    for world, per_node in ((2, 2), (10, 2), (4, 1)):
        assert find_place(elastic, torch(0, world, per_node))[1]
    assert "WORLD_SIZE 4" in find_place(Layout(4, 2, 4, "torchrun"), torch(0, 4, 2))[1][0]


def test_slurms_lists_of_tasks_are_read_however_they_are_written() -> None:
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    assert tasks_per_node("4") == [4] and tasks_per_node("") == []
    with pytest.raises(ValueError, match="no list of tasks"):
        tasks_per_node("2x3")


@pytest.mark.parametrize("bad", [0, -1, True, 2.0, "2", "0:2", "3:2", "a:b", None])
def test_nodes_are_a_number_or_a_range(bad: object) -> None:
    assert node_range(3) == (3, 3) and node_range("1:4") == (1, 4)
    with pytest.raises(ValueError, match="1 or more"):
        node_range(bad)  # type: ignore[arg-type]


@given(st.sets(st.tuples(st.integers(0, 2**32), st.integers(0, 4096)), min_size=2, max_size=200))
def test_no_two_pairs_of_seed_and_rank_meet(pairs: set[tuple[int, int]]) -> None:
    assert len({rank_seed(*pair) for pair in pairs}) == len(pairs)
    assert all(0 <= rank_seed(*pair) < 2**63 for pair in pairs)


def test_floats_that_differ_are_averaged_and_all_else_is_rank_0s() -> None:
    ranks = [{"loss": 0.1, "same": 0.1, "n": 3, "name": "a"}, {"loss": 0.3, "same": 0.1, "n": 4, "name": "b", "x": 1.0}]
    assert merged(ranks) == {"loss": 0.2, "same": 0.1, "n": 3, "name": "a"}
    assert merged(ranks[:1]) == ranks[0]


def test_ports_of_cells_on_a_node_are_distinct_and_come_back() -> None:
    ports = [Port(near=0) for _ in range(5)]
    assert len({port.number for port in ports}) == 5
    for port in ports:
        port.release()
    again = Port(near=0)
    assert again.number == ports[0].number
    again.release()


def test_lightning_gets_what_the_layout_says_and_whole_checkpoints_of_what_is_sharded() -> None:
    from pytorch_lightning.strategies import FSDPStrategy
    from sweepack.ddp.strategy import CellEnvironment, placement
    from sweepack.ddp.world import World

    world = World(3, 1, 4, 2, Layout(2, 2, 2, "srun", strategy="fsdp"), frozenset())
    placed = placement(world, "gpu")
    assert (placed["devices"], placed["num_nodes"]) == (2, 2)
    assert isinstance(placed["strategy"], FSDPStrategy) and placed["strategy"]._state_dict_type == "full"
    environment = CellEnvironment(world)
    assert (environment.global_rank(), environment.local_rank(), environment.node_rank()) == (3, 1, 1)
    assert environment.world_size() == 4 and environment.creates_processes_externally


def test_a_cell_over_several_mig_instances_is_refused() -> None:
    split = Gpu("GPU-1", mig=(Mig("MIG-1", 1), Mig("MIG-2", 2)), mig_mode=True)
    pool = visible_pool({}, FakeNvml(split))
    wide = validate(config_of({}, resources=[{"gpus_per_node": 2}]), "c").resources
    check_words(refused(lambda: check_machine(wide, pool)), "resources[0].gpus_per_node", "MIG 1g.18gb of cuda:0")
    check_machine(validate(config_of({}, resources=[{"gpu": 0.5}]), "c").resources, pool)
