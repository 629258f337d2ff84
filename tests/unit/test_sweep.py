"""Cells: which there are, in which order, under which ids, with which resources."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sweep_tools import OPEN, TASK, check_words, expanded, ids_of, params_of, refused, task_of
from sweepack.sweep import cell_id

few = settings(max_examples=50, deadline=None)

# Values for every parameter of the task, so that each draw is a valid sweep.
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "lr": st.floats(allow_nan=False) | st.integers(-9, 9),
    "width": st.integers(-(10**20), 10**20),
    "tag": st.text(max_size=5) | st.sampled_from(["no", "010", "a=b", "a/b", "{x}", "a,b", '"q"', "two words"]),
    "amp": st.booleans(),
    "depth": st.none() | st.integers(0, 9),
    "betas": st.lists(st.floats(0, 1), max_size=3),
    "optim.lr": st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    "free": st.none() | st.booleans() | st.integers(0, 2) | st.text(max_size=3) | st.lists(st.integers(), max_size=2),
}
fixed = st.fixed_dictionaries({}, optional=VALUES)
columns = {name: st.lists(value, min_size=1, max_size=3, unique_by=repr) for name, value in VALUES.items()}
# A float axis has 1 and 1.0 as one value.
columns["lr"] = st.lists(st.floats(allow_nan=False), min_size=1, max_size=3, unique_by=repr)
varied = st.fixed_dictionaries({}, optional=columns).filter(lambda axes: math.prod(map(len, axes.values())) < 200)


def shuffled(mapping: dict[str, Any], draw: st.DataObject) -> dict[str, Any]:
    return dict(draw.draw(st.permutations(list(mapping.items()))))


@few
@given(varied, st.data())
def test_the_order_is_that_of_nested_loops_with_the_last_axis_fastest(
    axes: dict[str, Any], draw: st.DataObject
) -> None:
    zipped = {"size": [1.0, 2.0], "seed": [5, 6]} if draw.draw(st.booleans()) else None
    expansion = expanded({"axes": axes, "zip": [zipped] if zipped else []})
    factors = [[{name: value} for value in values] for name, values in axes.items()]
    factors += [[dict(zip(zipped, row, strict=True)) for row in zip(*zipped.values(), strict=True)]] if zipped else []
    wanted = [{name: value for part in row for name, value in part.items()} for row in itertools.product(*factors)]
    flat = [
        cell.params | {f"optim.{key}": value for key, value in cell.params["optim"].items()} for cell in expansion.cells
    ]
    assert repr([{name: params[name] for name in wanted[0]} for params in flat]) == repr(wanted)
    assert [cell.index for cell in expansion.cells] == list(range(len(wanted)))
    assert math.prod(size for _, size in expansion.factors) == len(wanted)


@few
@given(fixed, varied, st.data())
def test_ids_do_not_depend_on_the_order_of_keys_and_values(
    params: dict[str, Any], axes: dict[str, Any], draw: st.DataObject
) -> None:
    params = {name: value for name, value in params.items() if name not in axes}
    turned = {name: draw.draw(st.permutations(values)) for name, values in shuffled(axes, draw).items()}
    ids = ids_of({"params": params, "axes": axes})
    assert set(ids_of({"params": shuffled(params, draw), "axes": turned})) == set(ids)
    assert len(set(ids)) == len(ids)


@few
@given(fixed, st.data())
def test_an_id_is_the_same_for_a_fixed_parameter_and_for_an_axis(params: dict[str, Any], draw: st.DataObject) -> None:
    moved = draw.draw(st.sets(st.sampled_from(sorted(params)))) if params else set()
    kept = {name: value for name, value in params.items() if name not in moved}
    axes = {name: [params[name]] for name in moved}
    assert ids_of({"params": kept, "axes": axes}) == ids_of({"params": params})
    assert ids_of({"include": [params]}) == ids_of({"params": params})


@few
@given(varied, st.data())
def test_new_values_and_new_axes_rename_no_cell(axes: dict[str, Any], draw: st.DataObject) -> None:
    before = ids_of({"axes": axes})
    for name, values in {"lr": [0.1, 7.5], "amp": [False, True], "tag": ["a", "zz"], "free": [None, 99]}.items():
        if name not in axes:  # its default was in force, so the old cells are among the new ones
            assert set(before) < set(ids_of({"axes": {name: values, **axes}}))
    for name in axes:
        longer = [*axes[name], *draw.draw(columns[name])]
        grown = {**axes, name: list({repr(value): value for value in longer}.values())}
        assert set(before) <= set(ids_of({"axes": grown}))


def test_stating_a_default_renames_no_cell() -> None:
    source = "W = 64\ndef train(cell, lr: float = 1, width: int = W, betas=(0.9, 0.99), depth: int = None, **more): ..."
    stated = {"lr": 1, "width": "64", "betas": [0.9, 0.99], "depth": None}
    for name, value in stated.items():
        assert ids_of({"params": {name: value}}, source) == ids_of({}, source)
    assert ids_of({"axes": {name: [value] for name, value in stated.items()}}, source) == ids_of({}, source)


def test_a_nested_key_is_the_same_however_it_is_written() -> None:
    nested, dotted = {"optim": {"lr": 2, "wd": 0}}, {"optim.wd": 0, "optim.lr": 2}
    assert (
        ids_of({"params": nested})
        == ids_of({"params": dotted})
        == ids_of({"axes": {"optim.lr": [2]}, "params": {"optim.wd": 0}})
    )


def test_ids_are_kept_from_version_to_version() -> None:
    # If this fails, every finished cell of every user runs again.
    assert cell_id("task.py:train", {"lr": 1e-3, "tag": "é", "optim": {"b": None, "a": [1, True]}}) == "da1684e48401"
    assert ids_of({}) == ["0a7b0bad9317"]


def test_the_task_and_the_type_of_a_value_are_part_of_the_id() -> None:
    values = [1, 1.0, True, "1", None, [1], {"a": 1}, "true", "null"]
    assert len(set(ids_of({"axes": {"x": values}}, OPEN))) == len(values)
    assert cell_id("a.py:train", {}) != cell_id("b.py:train", {})


@pytest.mark.parametrize("values", [[1e-3, 0.001], [0.001, "1e-3"], ["1E-3", 5, "0.0010"], [1, 1.0], [1.0, "1"]])
def test_two_spellings_of_one_number_are_a_duplicate(values: list[Any]) -> None:
    error = refused(lambda: expanded({"axes": {"lr": values}}))
    check_words(error, f"sweep.axes.lr[{len(values) - 1}]", "every value once", "entry 0", "remove one of the two")


def test_a_value_of_the_wrong_type_is_refused_in_every_section() -> None:
    bad = {"width": "wide"}
    for sweep, key in [
        ({"params": bad}, "sweep.params.width"),
        ({"axes": {"width": [1, "wide"]}}, "sweep.axes.width[1]"),
        ({"zip": [{"lr": [1], "width": ["wide"]}]}, "sweep.zip[0].width[0]"),
        ({"include": [bad]}, "sweep.include[0].width"),
        ({"exclude": [{"width": [1, "wide"]}]}, "sweep.exclude[0].width[1]"),
    ]:
        check_words(refused(lambda sweep=sweep: expanded(sweep)), key, "'wide'", "`int`", "a whole number such as 64")
    error = refused(lambda: expanded({}, resources=[{"match": bad}]))
    check_words(error, "resources[0].match.width", "`int`")


@pytest.mark.parametrize(
    ("sweep", "key", "words"),
    [
        ({"params": {"lr": 1}, "axes": {"lr": [1]}}, "sweep.axes.lr", ["`lr` once", "under `sweep.params`"]),
        ({"axes": {"lr": [1]}, "zip": [{"lr": [1]}]}, "sweep.zip[0].lr", ["under `sweep.axes`", "remove one"]),
        ({"zip": [{"lr": [1]}, {"lr": [1]}]}, "sweep.zip[1].lr", ["under `sweep.zip[0]`"]),
        ({"axes": {"optim": [{}], "optim.lr": [1]}}, "sweep.axes.optim.lr", ["`optim` is under `sweep.axes`"]),
        ({"axes": {"optim.lr": [1], "optim": [{}]}}, "sweep.axes.optim", ["`optim.lr` is under `sweep.axes`"]),
        (
            {"params": {"optim.wd": 1}, "axes": {"optim": [{}]}},
            "sweep.axes.optim",
            ["`optim.wd` is under `sweep.params`"],
        ),
        (
            {"params": {"free": 3}, "axes": {"free.a": [1]}},
            "sweep.axes.free.a",
            ["`free` to be a mapping, but it is 3"],
        ),
        (
            {"zip": [{"lr": [1, 2], "width": [1]}]},
            "sweep.zip[0]",
            ["'lr': 2, 'width': 1", "equal length", "equally long"],
        ),
        ({"zip": [{}]}, "sweep.zip[0]", ["vary together", "remove the entry"]),
        ({"zip": [{"lr": [], "width": []}]}, "sweep.zip[0].lr", ["at least one value"]),
        ({"zip": [{"lr": [1, 2, 1], "width": [3, 4, 3]}]}, "sweep.zip[0][2]", ["the same as entry 0"]),
        ({"exclude": [{}]}, "sweep.exclude", ["some cells to be left"]),
        ({"axes": {"lr": [1, 2]}, "exclude": [{"lr": "> 0"}]}, "sweep.exclude", ["exclude fewer"]),
        (
            {"axes": {"lr": [1, 2]}, "include": [{"lr": 2}]},
            "sweep.include[0]",
            ["every cell once", "in the product", "lr=2.0"],
        ),
        ({"include": [{"lr": 2}, {"lr": "2.0"}]}, "sweep.include[1]", ["every cell once", "sweep.include[0]"]),
        ({"axes": {"lr": [1, 2]}, "sample": {"count": 3}}, "sweep.sample.count", ["at most 2", "lower it"]),
    ],
)
def test_sections_that_contradict_each_other_are_refused(sweep: dict[str, Any], key: str, words: list[str]) -> None:
    check_words(refused(lambda: expanded(sweep)), key, *words)


def test_a_key_inside_a_fixed_mapping_may_vary() -> None:
    sweep = {"params": {"optim": {"lr": 1, "wd": 0}}, "axes": {"optim.lr": [1, 2]}}
    assert params_of(sweep, "optim") == [{"lr": 1, "wd": 0}, {"lr": 2, "wd": 0}]


def test_expanding_twice_gives_the_same_cells() -> None:
    sweep = {"params": {"optim.wd": 1}, "axes": {"optim.lr": [1, 2]}}
    assert ids_of(sweep) == ids_of(sweep)
    assert ids_of({}) == ids_of({}, task_of())  # the task's own default was left alone


def test_zipped_axes_vary_together_behind_the_others() -> None:
    sweep = {"axes": {"seed": [0, 1]}, "zip": [{"lr": [1, 2], "width": {"range": [3, 5]}}]}
    assert params_of(sweep, "seed", "lr", "width") == [(0, 1.0, 3), (0, 2.0, 4), (1, 1.0, 3), (1, 2.0, 4)]
    assert expanded(sweep).factors == [("seed", 2), ("lr+width", 2)]


def test_included_cells_come_last_and_start_from_the_fixed_parameters() -> None:
    sweep = {"params": {"tag": "b"}, "axes": {"lr": [1]}, "include": [{"width": "8"}, {"tag": "c", "optim.lr": 3}]}
    assert params_of(sweep, "lr", "width", "tag") == [(1.0, 64, "b"), (0.1, 8, "b"), (0.1, 64, "c")]
    assert expanded(sweep).varying == ["lr", "width", "tag", "optim.lr"]
    assert len(ids_of({"include": [{"lr": 1}, {"lr": 2}]})) == 2  # without axes there is no product


def test_an_included_cell_is_told_apart_by_a_parameter_that_only_it_has() -> None:
    slugs = [cell.slug for cell in expanded({"axes": {"x": [1]}, "include": [{"x": 1, "y": 2}]}, OPEN).cells]
    assert slugs == ["x=1", "x=1,y=2"]


@pytest.mark.parametrize(
    ("pattern", "left"),
    [
        ({"lr": 0.1}, [(1.0, 2), (1.0, 3)]),
        ({"lr": "1e-1"}, [(1.0, 2), (1.0, 3)]),
        ({"lr": [0.1, 1]}, []),
        ({"lr": 0.1, "width": 2}, [(0.1, 3), (1.0, 2), (1.0, 3)]),
        ({"width": "> 2"}, [(0.1, 2), (1.0, 2)]),
        ({"width": " >=2 "}, []),
        ({"lr": "< .5"}, [(1.0, 2), (1.0, 3)]),
        ({"lr": "<=1e-1", "width": ["2"]}, [(0.1, 3), (1.0, 2), (1.0, 3)]),
        ({"optim.lr": 1, "width": 3}, [(0.1, 2), (1.0, 2)]),
        ({"betas": [0.9, 0.99], "width": 3}, [(0.1, 2), (1.0, 2)]),
        ({"tag": "b"}, [(0.1, 2), (0.1, 3), (1.0, 2), (1.0, 3)]),
        ({"tag": "> 2"}, [(0.1, 2), (0.1, 3), (1.0, 2), (1.0, 3)]),
    ],
)
def test_exclude_leaves_out_what_matches(pattern: dict[str, Any], left: list[Any]) -> None:
    sweep = {"axes": {"lr": [0.1, 1], "width": [2, 3]}, "exclude": [pattern], "include": [{"lr": 9}]}
    assert params_of(sweep, "lr", "width") == [*left, (9.0, 64)]


def test_the_first_resources_that_match_count() -> None:
    resources = [
        {"match": {"width": ">= 512", "tag": ["b", "c"]}, "gpu": 0.5},
        {"match": {"width": 512}, "gpu": 0.25},
        {"match": {"lr": [0.5, "1e-2"]}, "cpus": 3},
        {"match": {"depth": None, "tag": "d"}, "mem": "1GB"},
    ]
    cells = [
        {"width": 512, "tag": "b"},
        {"width": 512},
        {"width": 513, "tag": "a", "lr": 0.01},
        {"tag": "d"},
        {"tag": "d", "depth": 1},
    ]
    got = [cell.resources for cell in expanded({"include": cells}, resources=resources).cells]
    assert [(r.gpu, r.cpus, r.mem) for r in got] == [
        (500, 1, None),
        (250, 1, None),
        (1000, 3, None),
        (1000, 1, 1000),
        (1000, 1, None),
    ]


def test_entries_that_fit_no_cell_are_remarked() -> None:
    sweep = {"axes": {"lr": [1, 2]}, "exclude": [{"lr": 3}, {"lr": 2}]}
    resources = [{"match": {"width": 1}}, {"gpu": 1}, {"gpu": 0.5}]
    assert expanded(sweep, resources=resources).remarks == [
        "sweep.exclude[0] matches no cell",
        "resources[0] is used by no cell",
        "resources[2] is used by no cell",
    ]
    # A sample looks at some cells only, so that it cannot tell.
    sampled = {"axes": {"lr": {"range": 50}}, "exclude": [{"lr": "< 1"}], "sample": {"count": 1}}
    assert expanded(sampled).remarks == []


@few
@given(st.integers(1, 60), st.integers(1, 60), st.integers(-5, 5))
def test_a_larger_sample_keeps_the_cells_of_a_smaller_one(one: int, other: int, seed: int) -> None:
    sweep = {"axes": {"lr": {"range": 4}, "width": {"range": 20}}, "exclude": [{"lr": 1}]}
    everything = ids_of(sweep)
    small, large = (ids_of({**sweep, "sample": {"count": count, "seed": seed}}) for count in sorted((one, other)))
    assert (len(small), len(large)) == tuple(sorted((one, other)))
    assert set(small) <= set(large) <= set(everything)
    assert large == [identity for identity in everything if identity in large]  # still in index order


def test_the_seed_of_a_sample_chooses_the_cells_and_included_ones_always_stay() -> None:
    def sample(seed: int) -> list[int]:
        sweep = {"axes": {"width": {"range": 50}}, "include": [{"width": -1}], "sample": {"count": 5, "seed": seed}}
        return params_of(sweep, "width")

    assert len({tuple(sample(seed)) for seed in range(5)}) == 5
    assert sample(1) == sample(1) and sample(1)[-1] == -1 and len(sample(1)) == 6


def test_a_sample_of_an_astronomic_product_is_drawn_without_laying_it_out() -> None:
    axes = {f"x{number}": {"range": 100} for number in range(20)}
    assert len(ids_of({"axes": axes, "sample": {"count": 7}}, OPEN)) == 7


def test_more_cells_than_confirm_above_are_refused_with_the_override() -> None:
    sweep = {"axes": {"lr": {"range": 30}}, "zip": [{"width": [1, 2], "seed": [1, 2]}], "include": [{"tag": "x"}]}
    error = refused(lambda: expanded(sweep, confirm_above=60))
    check_words(error, "confirm_above", "at least 61", "30 lr × 2 width+seed", "--config confirm_above=61", "`sample`")
    assert len(ids_of(sweep, confirm_above=61)) == 61
    assert len(ids_of({**sweep, "sample": {"count": 4}}, confirm_above=5)) == 5
    huge = {f"x{number}": {"range": 1000} for number in range(9)}
    check_words(refused(lambda: expanded({"axes": huge}, OPEN)), "confirm_above", f"{10**27}")


def test_slugs_show_what_varies_and_the_seed_is_the_parameter_or_0() -> None:
    cells = expanded({"axes": {"tag": ["a b", "x/y"], "seed": [3], "betas": [[0.5]]}}).cells
    assert [cell.slug for cell in cells] == ["tag=a b,seed=3,betas=[0.5]", "tag=x/y,seed=3,betas=[0.5]"]
    assert [cell.seed for cell in cells] == [3, 3]
    assert [cell.seed for cell in expanded({"axes": {"seed": [7, "7", True, None, 1.5]}}, OPEN).cells] == [
        7,
        0,
        0,
        0,
        0,
    ]
    assert expanded({}, OPEN).cells[0].seed == 0
    assert expanded({}).cells[0].slug == "the only cell"
    assert TASK.signature.parameters["seed"].default == 0
