"""What the plan makes of pins: shares and batches of cells, what is missing, what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_nvml import GIB, FakeNvml, Gpu
from sweep_tools import TASK, check_words, config_of, refused
from sweepack.config import Config, validate
from sweepack.records import NEVER_RUN, Assessment, Record, State
from sweepack.sizing import sizes
from sweepack.sizing.pins import FOLDER, Pin
from sweepack.sizing.sizes import Sizes, find_sizes, kept_batch, profile_of
from sweepack.sweep import Expansion, expand

MB = 10**6


class Planned:
    """A sweep over ``lr`` and ``seed`` whose pins lie in ``folder``."""

    def __init__(self, folder: Path, resources: dict[str, Any], axes: dict[str, Any] | None = None, **top: Any) -> None:
        axes = axes or {"lr": [0.1, 0.2], "seed": [0, 1]}
        self.config: Config = validate(config_of({"axes": axes}, resources=[resources], **top), "config.yaml")
        self.expansion: Expansion = expand(self.config, TASK)
        self.cells = self.expansion.cells
        self.states: dict[str, Assessment] = {cell.id: NEVER_RUN for cell in self.cells}
        self.folder = folder

    def find(self, on_slurm: bool = False) -> Sizes:
        return find_sizes(
            self.config, "t", "code", self.cells, self.expansion.varying, self.states, self.folder, on_slurm
        )

    def pin(self, number: int = 0, device: str = "cpu", total: int = 100 * GIB, **found: Any) -> None:
        """Pin the profile of cell ``number``."""
        facts = {"batch": 64, "largest": 80, "peak": 9 * GIB, "source": "s", "code": "code", **found}
        Pin(profile_of(self.config, "t", self.cells[number]).key, device, total, **facts).write(self.folder)

    def stands(self, number: int, state: State, **facts: Any) -> None:
        cell = self.cells[number].id
        self.states[cell] = Assessment(state, Record(cell, state, 1, **facts), False, 0)


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWEEPACK_DEVICES", "cpu")


def with_gpus(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.delenv("SWEEPACK_DEVICES")
    gpus = [Gpu(f"GPU-{number}", name, 100 * GIB) for number, name in enumerate(names)]
    monkeypatch.setattr(sizes, "load_nvml", lambda: FakeNvml(*gpus))


def test_where_nothing_is_left_open_nothing_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWEEPACK_DEVICES", "nonsense")
    assert Planned(tmp_path, {"gpu": 0.5, "batch": 64}).find() == Sizes()


def test_cells_that_differ_in_what_does_not_matter_share_a_measurement(tmp_path: Path) -> None:
    assert [group.name for group in Planned(tmp_path, {"gpu": 0.5, "batch": "auto"}).find().unpinned] == [
        "lr=0.1",
        "lr=0.2",
    ]
    alike = Planned(tmp_path, {"gpu": 0.5, "batch": "auto"}, sizing={"ignore": ["lr"]}).find().unpinned
    assert [(group.name, len(group.cells)) for group in alike] == [("all cells", 4)]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"gpu": 0.5}, {"gpu": 0.25}),
        ({"cpus": 1}, {"cpus": 2}),
        ({"mem": "1GB"}, {"mem": "2GB"}),
    ],
)
def test_what_a_cell_is_given_is_part_of_what_was_measured(
    tmp_path: Path, one: dict[str, Any], other: dict[str, Any]
) -> None:
    pinned = Planned(tmp_path, {"batch": "auto", **one})
    for number in (0, 2):
        pinned.pin(number)
    assert pinned.find().unpinned == []
    assert len(Planned(tmp_path, {"batch": "auto", **other}).find().unpinned) == 2


def test_what_is_measured_has_the_share_that_cells_will_have(tmp_path: Path) -> None:
    planned = Planned(tmp_path, {"batch": "auto"}, {"seed": [0]}, placement="round_robin", jobs_per_gpu=4)
    assert profile_of(planned.config, "t", planned.cells[0]).share == 250


def test_cells_get_the_batch_that_was_pinned(tmp_path: Path) -> None:
    planned = Planned(tmp_path, {"gpu": 0.5, "batch": "auto"})
    planned.pin(0, batch=48)
    found = planned.find()
    assert found.batches == {planned.cells[0].id: 48, planned.cells[1].id: 48}
    assert [group.name for group in found.unpinned] == ["lr=0.2"]


@pytest.mark.parametrize(
    ("state", "kept"), [(State.INTERRUPTED, 32), (State.LOST, 32), (State.RUNNING, 32), (State.FAILED, None)]
)
def test_only_a_cell_that_goes_on_keeps_the_batch_with_which_it_began(state: State, kept: int | None) -> None:
    assert kept_batch(Assessment(state, Record("c", state, 1, batch=32), False, 0)) == kept


def test_finished_cells_need_no_measurement(tmp_path: Path) -> None:
    planned = Planned(tmp_path, {"gpu": 0.5, "batch": "auto"}, {"seed": [0, 1]})
    for number in range(2):
        planned.stands(number, State.FINISHED)
    assert planned.find().unpinned == []


def test_each_model_at_hand_is_measured_and_the_smallest_batch_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpus(monkeypatch, "NVIDIA A100", "NVIDIA L4")
    planned = Planned(tmp_path, {"gpu": 0.5, "batch": "auto"}, {"seed": [0, 1]})
    planned.pin(device="NVIDIA A100", batch=64)
    assert planned.find().unpinned[0].missing == ("NVIDIA L4",)
    planned.pin(device="NVIDIA L4", batch=16)
    assert planned.find().unpinned == []
    assert set(planned.find().batches.values()) == {16}


def test_a_plan_that_sees_no_device_goes_by_what_was_measured(tmp_path: Path) -> None:
    planned = Planned(tmp_path, {"gpu": 0.5, "batch": "auto"}, {"seed": [0]})
    assert planned.find(on_slurm=True).unpinned[0].missing == ("",)
    planned.pin(device="NVIDIA A100", batch=64)
    planned.pin(device="NVIDIA L4", batch=16)
    assert set(planned.find(on_slurm=True).batches.values()) == {16}
    chosen = Planned(tmp_path, {"gpu": 0.5, "batch": "auto"}, {"seed": [0]}, sizing={"device": "NVIDIA A100"})
    assert set(chosen.find(on_slurm=True).batches.values()) == {64}
    other = Planned(tmp_path, {"gpu": 0.5, "batch": "auto"}, {"seed": [0]}, sizing={"device": "NVIDIA B200"})
    assert other.find(on_slurm=True).unpinned[0].missing == ("NVIDIA B200",)


def test_what_does_not_fit_is_refused_until_the_task_is_changed(tmp_path: Path) -> None:
    planned = Planned(tmp_path, {"gpu": 0.5, "batch": "auto"}, {"seed": [0]})
    planned.pin(batch=None, largest=None, peak=None, trouble="does not fit: a batch of 1 needs more")
    found = planned.find()
    assert [group.trouble for group in found.refused] == ["does not fit: a batch of 1 needs more (measured on cpu)"]
    planned.pin(batch=None, largest=None, peak=None, trouble="does not fit: a batch of 1 needs more", code="before")
    found = planned.find()
    assert found.refused == []
    assert len(found.unpinned) == 1


def test_what_was_measured_before_the_task_was_changed_counts_and_is_told(tmp_path: Path) -> None:
    planned = Planned(tmp_path, {"gpu": 0.5, "batch": "auto"}, {"seed": [0]})
    planned.pin(code="before")
    found = planned.find()
    assert found.unpinned == []
    assert ["measured before the task's file was changed" in remark for remark in found.remarks] == [True]


def test_the_share_holds_what_was_measured_as_often_as_a_device_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpus(monkeypatch, "NVIDIA A100")
    planned = Planned(tmp_path, {"gpu": "auto"}, {"seed": [0]})
    planned.pin(device="NVIDIA A100", batch=None, largest=None, peak=9 * GIB)
    found = planned.find()
    # 9 GiB, a tenth more and 600 MB a process: 9 of these are in 100 GiB less 300 MB.
    assert list(found.shares.values()) == [111]
    assert found.groups[0].fit and found.groups[0].fit.cells == 9
    roomy = Planned(tmp_path, {"gpu": "auto"}, {"seed": [0]}, sizing={"margin": 1.0})
    assert list(roomy.find().shares.values()) == [200]


def test_a_cell_that_needs_over_40_percent_has_a_device_to_itself_unless_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpus(monkeypatch, "NVIDIA A100")
    planned = Planned(tmp_path, {"gpu": "auto"}, {"seed": [0]})
    planned.pin(device="NVIDIA A100", peak=40 * GIB)
    assert list(planned.find().shares.values()) == [1000]
    told = Planned(tmp_path, {"gpu": "auto"}, {"seed": [0]}, sizing={"alone_above": 1.0})
    assert list(told.find().shares.values()) == [500]


def test_a_pin_that_cannot_be_read_counts_as_none(tmp_path: Path) -> None:
    planned = Planned(tmp_path, {"gpu": 0.5, "batch": "auto"}, {"seed": [0]})
    planned.pin()
    for path in (tmp_path / FOLDER).glob("*.json"):
        path.write_text(path.read_text()[:50])
    assert len(planned.find().unpinned) == 1


@pytest.mark.parametrize(
    ("resources", "top", "key", "words"),
    [
        ({"gpu": "auto", "batch": "auto"}, {}, "resources[0].gpu", ["gpu: auto` and a batch"]),
        ({"batch": "auto", "gpus_per_node": 2}, {}, "resources[0].batch", ["one device is measured"]),
        (
            {"gpu": "auto", "nodes": 2, "gpus_per_node": 1},
            {},
            "resources[0].gpu",
            ["one device is measured", "remove it"],
        ),
        (
            {"gpu": "auto"},
            {"jobs_per_gpu": 2, "placement": "round_robin"},
            "resources[0].gpu",
            ["jobs_per_gpu", "remove one"],
        ),
    ],
)
def test_what_cannot_be_left_open_is_refused(
    tmp_path: Path, resources: dict[str, Any], top: dict[str, Any], key: str, words: list[str]
) -> None:
    check_words(refused(Planned(tmp_path, resources, {"seed": [0]}, **top).find), key, *words)


def test_a_program_cannot_be_measured(tmp_path: Path) -> None:
    planned = Planned(tmp_path, {"batch": "auto"}, {"seed": [0]})
    planned.config = validate(
        {"sweep": {"name": "s", "task": {"command": ["x"]}}, "resources": [{"batch": "auto"}]}, "c"
    )
    check_words(refused(planned.find), "resources[0].batch", "program", "batch: 64")
