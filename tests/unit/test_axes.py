"""The values of an axis: as listed, or as one of the four formulas describes them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from sweep_tools import OPEN, check_words, expanded, ids_of, params_of, refused


@pytest.mark.parametrize(
    ("spec", "values"),
    [
        ([3, 1, 2], [3, 1, 2]),
        ({"range": 3}, [0, 1, 2]),
        ({"range": [2, 5]}, [2, 3, 4]),
        ({"range": [5, 0, -2]}, [5, 3, 1]),
        ({"linspace": [0, 1, 11]}, [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]),
        ({"linspace": [0.3, -0.3, 7]}, [0.3, 0.2, 0.1, 0.0, -0.1, -0.2, -0.3]),
        ({"linspace": [-0.1, 0.2, 4]}, [-0.1, 0.0, 0.1, 0.2]),
        ({"linspace": [5, 9, 1]}, [5.0]),
        ({"linspace": [-1e308, 1e308, 3]}, [-1e308, 0.0, 1e308]),
        ({"logspace": [-4, -1, 4]}, [1e-4, 1e-3, 1e-2, 1e-1]),
        ({"logspace": [0, 1, 3]}, [1.0, 3.16227766017, 10.0]),
        ({"geomspace": [1e-4, 1e-1, 4]}, [1e-4, 1e-3, 1e-2, 1e-1]),
        ({"geomspace": [64, 1, 4]}, [64.0, 16.0, 4.0, 1.0]),
        ({"geomspace": [1e-300, 1e300, 3]}, [1e-300, 1.0, 1e300]),
        ([{"range": 3}], [{"range": 3}]),
    ],
)
def test_an_axis_lists_its_values_or_describes_them(spec: Any, values: list[Any]) -> None:
    assert repr(params_of({"axes": {"x": spec}}, "x", task=OPEN)) == repr(values)


def test_values_made_by_a_formula_name_the_same_cells_as_written_ones() -> None:
    assert ids_of({"axes": {"lr": {"logspace": [-3, -1, 3]}}}) == ids_of({"axes": {"lr": ["1e-3", 0.01, "0.1"]}})
    assert ids_of({"axes": {"width": {"geomspace": [16, 64, 3]}}}) == ids_of({"axes": {"width": [16, 32, 64]}})


def test_a_list_is_a_value_under_params_and_values_under_axes() -> None:
    assert params_of({"params": {"betas": [0.9, 0.99]}}, "betas") == [[0.9, 0.99]]
    assert params_of({"axes": {"lr": [0.9, 0.99]}}, "lr") == [0.9, 0.99]
    assert params_of({"axes": {"betas": [[0.9, 0.99], []]}}, "betas") == [[0.9, 0.99], []]


@pytest.mark.parametrize(
    ("spec", "key", "words"),
    [
        ([], "sweep.axes.x", ["at least one value", "remove the axis"]),
        (3, "sweep.axes.x", ["write `[3]`", "`params`"]),
        ("ab", "sweep.axes.x", ["write `['ab']`"]),
        (None, "sweep.axes.x", ["the list of values to try"]),
        ({}, "sweep.axes.x", ["exactly one of range, linspace", "goes into a list"]),
        ({"rnge": 3}, "sweep.axes.x", ["did you mean `range`?"]),
        ({"range": 3, "linspace": 3}, "sweep.axes.x", ["exactly one of"]),
        ({1: 3}, "sweep.axes.x", ["exactly one of"]),
        ({"range": [5, 0]}, "sweep.axes.x.range", ["at least one value", "stop is not included"]),
        ({"range": [0, 5, 0]}, "sweep.axes.x.range", ["a step other than 0"]),
        *[
            ({"range": bad}, "sweep.axes.x.range", ["whole numbers: stop"])
            for bad in ([], 1.5, "3", True, None, [1, 2, 3, 4])
        ],
        ({"range": 10**12}, "sweep.axes.x.range", ["at most 1,000,000 values"]),
        *[
            ({form: [1, 2, 10**12]}, f"sweep.axes.x.{form}", ["at most 1,000,000"])
            for form in ("linspace", "geomspace")
        ],
        *[
            ({"linspace": bad}, "sweep.axes.x.linspace", ["[start, stop, count]"])
            for bad in (3, [0, 1], [0, "1", 3], [0, True, 2], {})
        ],
        *[
            ({"linspace": [0, 1, bad]}, "sweep.axes.x.linspace", ["a whole count of at least 1"])
            for bad in (0, -1, 1.5)
        ],
        *[
            ({"linspace": [0, bad, 3]}, "sweep.axes.x.linspace", ["finite ends"])
            for bad in (math.inf, math.nan, 10**400)
        ],
        ({"logspace": [1e-4, 1e-1, 4]}, "sweep.axes.x.logspace", ["exponents of ten", "`geomspace: [0.0001, 0.1, 4]`"]),
        ({"logspace": [0, 400, 3]}, "sweep.axes.x.logspace", ["exponents of ten"]),
        *[
            ({"geomspace": [bad, 1, 3]}, "sweep.axes.x.geomspace", ["end points above 0", "`logspace:"])
            for bad in (0, -4)
        ],
        ({"linspace": [1, 1, 3]}, "sweep.axes.x[1]", ["every value once", "the same as entry 0"]),
        ([1, {"a": [2]}, {"a": [2]}], "sweep.axes.x[2]", ["every value once", "entry 1"]),
        ([1, math.nan], "sweep.axes.x[1]", ["equals itself"]),
        ([1, {1: 2}], "sweep.axes.x[1]", ["text as the name"]),
    ],
)
def test_an_axis_that_cannot_be_one_is_refused(spec: Any, key: str, words: list[str]) -> None:
    check_words(refused(lambda: expanded({"axes": {"x": spec}}, OPEN)), key, *words)
