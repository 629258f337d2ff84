"""Values from YAML text to the task: nothing is bent on the way, equal values are one value."""

from __future__ import annotations

import ast
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sweep_tools import OPEN, check_words, params_of, refused
from sweepack.task import read_annotation
from sweepack.values import Annotation, canonical, coerce, dotted_items, get_dotted, plain, set_dotted
from sweepack.yaml12 import parse

numbers = st.integers(-(10**290), 10**290) | st.floats(allow_nan=False, allow_infinity=False)
scalars = st.none() | st.booleans() | numbers | st.text()
names = st.text(max_size=20)  # YAML allows keys of up to 1,024 characters, escapes included
json_like = st.recursive(scalars, lambda v: st.lists(v, max_size=4) | st.dictionaries(names, v, max_size=4))


def same(one: Any, other: Any) -> bool:
    """Equal in type as well: 1, 1.0 and true are three values, 0.0 and -0.0 two."""
    return repr(one) == repr(other)


def annotation(text: str) -> Annotation | None:
    return read_annotation(ast.parse(text, mode="eval").body)


@settings(max_examples=100, deadline=None)
@given(json_like)
def test_json_text_is_read_back_as_the_very_same_typed_value(value: Any) -> None:
    text = json.dumps(value).replace("\x7f", "\\u007f")  # the one character that JSON leaves bare and YAML refuses
    assert same(parse(text, "text"), value)
    assert same(parse(f"key:\n  - {text}", "text"), {"key": [value]})


@settings(max_examples=60, deadline=None)
@given(value=json_like)
def test_a_parameter_of_any_kind_reaches_the_cell_unchanged(value: Any) -> None:
    assert same(params_of({"params": {"x": value}}, "x", task=OPEN), [value])
    assert same(params_of({"axes": {"x": [value]}}, "x", task=OPEN), [value])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[(word, word) for word in ("no", "yes", "on", "off", "y", "n", "No", "YES", "tRUE", "nan", "inf", "None")],
        *[("true", True), ("False", False), ("TRUE", True), ("null", None), ("~", None), ("Null", None), ("", None)],
        *[("010", 10), ("-7", -7), ("+7", 7), ("0o17", 15), ("0xFF", 255), ("0", 0), ("08", 8)],
        *[("1_000", "1_000"), ("0b1", "0b1"), ("1:30", "1:30"), ("-0x1F", "-0x1F"), ("1_0.5", "1_0.5"), ("_", "_")],
        *[("1e-3", 0.001), ("1E3", 1000.0), (".5", 0.5), (".5e3", 500.0), ("5.", 5.0), ("-1.5e+2", -150.0)],
        *[(".inf", math.inf), ("-.INF", -math.inf), ("1e3x", "1e3x"), ("1.2.3", "1.2.3"), ("-", "-"), (".", ".")],
        *[("2024-01-31", "2024-01-31"), ("2024-01-31 10:00:00", "2024-01-31 10:00:00"), ("=", "="), ("<<", "<<")],
        *[("'1e-3'", "1e-3"), ('"010"', "010"), ("!!str 010", "010"), ("!!float 1", 1.0), ('!!int "7"', 7)],
    ],
)
def test_a_scalar_means_what_yaml_1_2_says(text: str, value: Any) -> None:
    found = parse(f"key: {text}", "text")["key"] if text != "-" else parse("[-]", "text")[0]
    assert same(found, value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("# nothing but a comment\n", None),
        ("%YAML 1.1\n---\n[no, 010, 1:30]", ["no", 10, "1:30"]),
        (
            "base: &base {lr: 1, width: 2}\nother: *base",
            {"base": {"lr": 1, "width": 2}, "other": {"lr": 1, "width": 2}},
        ),
        ("base: &b {lr: 1}\nother: {<<: *b, width: 2}", {"base": {"lr": 1}, "other": {"lr": 1, "width": 2}}),
        ("=: 1\nno: 2", {"=": 1, "no": 2}),
        ("a: |\n  two\n  lines\n", {"a": "two\nlines\n"}),
        ('{"a":1}', {"a": 1}),
        ("{1: a, '1': b, null: c}", {1: "a", "1": "b", None: "c"}),
    ],
)
def test_a_document_means_what_yaml_1_2_says(text: str, value: Any) -> None:
    assert same(parse(text, "text"), value)


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("a: 1\nb: 2\na: 3", "f.yaml, line 3", ["a: 3", "every key once", "remove one"]),
        ("a:\n\t- b", "f.yaml, line 2", ["YAML 1.2", "'\\t'"]),
        ("a: b: c", "f.yaml, line 1", ["a: b: c", "quote strings"]),
        ("a: [1, 2", "f.yaml, line 1", ["YAML 1.2"]),
        ("a: !!python/object/apply:os.system [ls]", "f.yaml, line 1", ["os.system"]),
        ("a: !mine x", "f.yaml, line 1", ["!mine"]),
        *[(f"a: !!{tag}", "f.yaml, line 1", [tag.split()[0]]) for tag in ("set {a, b}", "binary aGk=", "omap [a: 1]")],
        *[(f"a: !!{tag} foo", "f.yaml, line 1", ["`foo` is not a", tag]) for tag in ("int", "float", "bool", "null")],
        ("a: *nowhere", "f.yaml, line 1", ["nowhere"]),
        ("&a [*a]", "f.yaml", ["alias", "anchor"]),
        ("a: &a {b: *a}", "f.yaml", ["alias", "anchor"]),
        ("[" * 600, "f.yaml", ["deep"]),
        ("9" * 5000, "f.yaml, line 1", ["300 characters"]),
        ("0x" + "f" * 5000, "f.yaml, line 1", ["300 characters"]),
        ('a: "\\ud800"', "f.yaml, line 1", ["half of a pair"]),
        ("a\0b", "f.yaml", ["#x0000"]),
        ("--- 1\n--- 2", "f.yaml, line 2", ["another document"]),
        ("? {a: 1}\n: 2", "f.yaml, line 1", ["unhashable key"]),
        ("<<: 3", "f.yaml, line 1", ["merging"]),
    ],
)
def test_text_that_is_not_plain_yaml_is_refused_where_it_stands(text: str, place: str, words: list[str]) -> None:
    error = refused(lambda: parse(text, "f.yaml"))
    assert error.key.startswith(place)
    check_words(error, error.key, *words)


@pytest.mark.parametrize(
    ("text", "value", "wanted"),
    [
        *[("float", given, 0.001) for given in (1e-3, 0.001, "1e-3", "0.001", "1E-3", ".001")],
        *[("float", 1, 1.0), ("float", "1", 1.0), ("float", "inf", math.inf), ("float", "-.Inf", -math.inf)],
        *[("int", 8.0, 8), ("int", "8", 8), ("int", "010", 10), ("int", "8.0", 8), ("int", 1e3, 1000)],
        *[("bool", True, True), ("bool", "true", True), ("bool", "False", False)],
        *[("str", "1e-3", "1e-3"), ("str", "true", "true"), ("str", "", "")],
        *[("int | float", 3.0, 3.0), ("int | float", "3.0", 3.0), ("int | float", "3", 3)],
        *[("float | str", "0.5", "0.5"), ("float | str", 1, 1.0), ("int | None", None, None), ("int | None", "4", 4)],
        *[
            ("Optional[float]", 1, 1.0),
            ("Union[int, str]", "4", "4"),
            ("'float'", 1, 1.0),
            ("typing.List[float]", [1], [1.0]),
        ],
        *[
            ("list", [1, "a"], [1, "a"]),
            ("list[float]", ["1e-3", 1], [0.001, 1.0]),
            ("tuple[int, ...]", [1, 2], [1, 2]),
        ],
        *[("list[list[float]]", [[1], []], [[1.0], []]), ("list[int] | list[str]", ["a"], ["a"])],
        *[("dict", {"a": 1}, {"a": 1}), ("dict[str, float]", {"a": 1}, {"a": 1}), ("list[int] | None", [1.0], [1])],
        *[("Literal['a', 2, None]", given, given) for given in ("a", 2, None)],
        *[("Literal[16, 32]", 16.0, 16), ("Literal[0.5]", "0.5", 0.5), ("Literal['a'] | None", None, None)],
        *[("Any", "1e-3", "1e-3"), ("Path", 1, 1), ("torch.Tensor", 1, 1), ("Literal[SIZES]", 1, 1)],
    ],
)
def test_a_value_becomes_what_its_annotation_wants(text: str, value: Any, wanted: Any) -> None:
    assert same(coerce(value, annotation(text), "key"), wanted)


@pytest.mark.parametrize(
    ("text", "value", "words"),
    [
        *[("float", given, ["`float`", "1e-3"]) for given in ("fast", "", True, None, "1_000", "0x1", "٣", ".iNfx")],
        *[("int", given, ["`int`", "whole number"]) for given in (1.5, "1.5", True, "a", math.inf, None)],
        *[("bool", given, ["`bool`", "true or false"]) for given in (0, 1, "yes", "1", None)],
        *[
            ("str", given, ["`str`", f'quote it to give text: "{shown}"'])
            for given, shown in ((10, 10), (True, "true"))
        ],
        *[("str", ["a"], ["list the values to try under `axes`"]), ("float", [0.9], ["one value", "under `axes`"])],
        *[("list[int]", [1, "x"], ["key[1]", "`int`"]), ("list", 3, ["a list such as"]), ("dict", [1], ["`dict`"])],
        *[("Literal['mlp', 'cnn']", "mpl", ["Literal", '"mlp", "cnn"']), ("Literal[1]", True, ["one of 1"])],
        *[("Literal['a'] | int", "b", ['one of "a" or a whole number']), ("None", 1, ["null"])],
        *[
            ("int", "9" * 5000, ["`int`"]),
            ("float", 10**400, ["1.8e308"]),
            ("float", math.nan, ["equals itself", "null"]),
        ],
        *[
            ("Any", {1: 2}, ["text as the name", '"1"']),
            ("Any", b"x", ["a list or a mapping"]),
            ("Any", {"a": {3}}, ["key.a"]),
        ],
    ],
)
def test_nothing_is_bent_beyond_that(text: str, value: Any, words: list[str]) -> None:
    error = refused(lambda: coerce(value, annotation(text), "key"))
    assert error.key.startswith("key")
    assert [word for word in words if word not in str(error)] == [], str(error)


ANNOTATIONS = ["float", "int", "bool", "str", "int | float", "float | str | None", "list[float]", "list[int | bool]"]


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(["1", "1.0", "1e3", "true", "x", "inf", "-0"]) | json_like | st.lists(numbers, max_size=3),
    st.sampled_from([*ANNOTATIONS, "Literal[1, 'a', 2.5]", "Any"]),
)
def test_coercing_twice_is_coercing_once(value: Any, text: str) -> None:
    wanted = annotation(text)
    try:
        once = coerce(value, wanted, "key")
    except Exception as error:
        assert type(error).__name__ == "UserError"
    else:
        assert same(coerce(once, wanted, "key"), once)


@given(json_like)
@settings(max_examples=60, deadline=None)
def test_canonical_text_is_one_per_value(value: Any) -> None:
    def turned(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: turned(inner) for name, inner in reversed(value.items())}
        return [turned(inner) for inner in value] if isinstance(value, list) else value

    assert canonical(turned(value)) == canonical(value)
    assert same(json.loads(canonical(value)), json.loads(json.dumps(value, sort_keys=True)))
    assert canonical(value).isascii()


def test_true_one_and_one_point_zero_are_three_values() -> None:
    assert len({canonical(value) for value in (True, 1, 1.0, "1", None, [1], {"1": 1})}) == 7


def test_a_dotted_name_sets_a_nested_key_beside_what_is_there() -> None:
    params: dict[str, Any] = {"optim": {"lr": 1}}
    head = {"width": 3}
    set_dotted(params, "optim.wd", 2, "key")
    set_dotted(params, "net.head", head, "key")
    head["width"] = 4  # a copy was set
    assert params == {"optim": {"lr": 1, "wd": 2}, "net": {"head": {"width": 3}}}
    assert dict(dotted_items(params)) == {"optim.lr": 1, "optim.wd": 2, "net.head.width": 3}
    assert get_dotted(params, "net.head") == {"width": 3}
    for missing in ("net.head.width.x", "optim.x", "x"):
        with pytest.raises(KeyError):
            get_dotted(params, missing)


def test_a_dotted_name_below_a_plain_value_is_refused() -> None:
    error = refused(lambda: set_dotted({"optim": {"lr": 1}}, "optim.lr.x", 2, "sweep.axes.optim.lr.x"))
    check_words(error, "sweep.axes.optim.lr.x", "`optim.lr` to be a mapping, but it is 1")


def test_tuples_count_as_lists_and_empty_mappings_as_leaves() -> None:
    assert same(plain({"a": (1, (2,))}, "key"), {"a": [1, [2]]})
    assert list(dotted_items({"a": {}, "b": {"c": {}}})) == [("a", {}), ("b.c", {})]
