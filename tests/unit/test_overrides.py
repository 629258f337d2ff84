"""What ``--config`` lays over the file: keys, parameters, nested ones, each value as the task wants it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sweep_tools import OPEN, SOURCE, check_words, config_of, load, refused
from sweepack.sweep import expand

FILE = config_of(
    {
        "params": {"tag": "b", "optim": {"lr": 1, "wd": 0}},
        "axes": {"lr": [0.1, 0.2], "width": [8, 16], "optim.lr": [1, 2]},
        "zip": [{"seed": [1, 2], "size": [3, 4]}],
    },
    resources=[{"gpu": 0.5}],
)
PLAIN = config_of({"axes": {"lr": [0.1, 0.2]}})


def values(root: Path, name: str, *overrides: str, file: Any = PLAIN, source: str = SOURCE) -> list[Any]:
    """The values of a parameter that occur in the sweep, in order."""
    cells = expand(*load(root, file, *overrides, source=source)).cells
    return list({repr(cell.params[name]): cell.params[name] for cell in cells}.values())


@pytest.mark.parametrize(
    ("override", "name", "wanted"),
    [
        *[(f"lr={text}", "lr", 0.001) for text in ("1e-3", "0.001", '"1e-3"', "1E-3", " 1e-3 ")],
        *[("lr=1", "lr", 1.0), ("width=64.0", "width", 64), ("width=010", "width", 10)],
        *[("amp=false", "amp", False), ("amp=true", "amp", True), ("amp=True", "amp", True)],
        *[
            ("depth=null", "depth", None),
            ("depth=3", "depth", 3),
            ("free=null", "free", None),
            ("free=no", "free", "no"),
        ],
        *[
            (f"tag={text}", "tag", text)
            for text in ("010", "1e-3", "true", "null", "no", "a=b", "a/b c", "2024-01-01", "")
        ],
        *[("tag='x: {y}'", "tag", "x: {y}"), ('tag="010"', "tag", "010"), ("tag='a, b'", "tag", "a, b")],
        *[
            ("betas=[0.9, 1]", "betas", [0.9, 1.0]),
            ("betas=[]", "betas", []),
            ("free=[1, [no, 1e-3]]", "free", [1, ["no", 0.001]]),
        ],
        *[
            ("optim={lr: 1e-3, x: [1]}", "optim", {"lr": 0.001, "x": [1]}),
            ("size=small", "size", "small"),
            ("size=2", "size", 2.0),
        ],
        *[
            (f"set={{params.{name}: {text}}}", name, held)
            for name, text, held in (("lr", "1e-3", 0.001), ("tag", "010", "010"))
        ],
        *[
            ("set={lr: 1e-3}", "lr", 0.001),
            ("set={sweep.params.lr: 1e-3}", "lr", 0.001),
            ("params.lr=1e-3", "lr", 0.001),
        ],
        *[
            ("set={optim.lr: 5}", "optim", {"lr": 5}),
            ("set={params.optim.x.y: [1]}", "optim", {"lr": 1, "x": {"y": [1]}}),
        ],
        *[("params={width: 8}", "tag", "a"), ("set={params: {tag: c}}", "tag", "c")],
    ],
)
def test_a_parameter_takes_the_type_that_the_task_wants(tmp_path: Path, override: str, name: str, wanted: Any) -> None:
    file = config_of({}) if name == "lr" else PLAIN
    assert repr(values(tmp_path, name, override, file=file)) == repr([wanted])


def test_a_text_list_keeps_what_was_typed(tmp_path: Path) -> None:
    source = "def train(cell, tags: list[str] = [], kind: Literal['010', 'b'] = 'b'): ..."
    assert values(tmp_path, "tags", "tags=[010, no, 1e-3]", file=config_of({}), source=source) == [
        ["010", "no", "1e-3"]
    ]
    assert values(tmp_path, "kind", "kind=010", file=config_of({}), source=source) == ["010"]


def test_a_parameter_replaces_its_axis_and_leaves_the_others(tmp_path: Path) -> None:
    expansion = expand(*load(tmp_path, FILE, "lr=5"))
    assert [name for name, _ in expansion.factors] == ["width", "optim.lr", "seed+size"]
    assert {cell.params["lr"] for cell in expansion.cells} == {5.0}
    nested = expand(*load(tmp_path, FILE, "set={params.optim.lr: 7}"))
    assert [name for name, _ in nested.factors] == ["lr", "width", "seed+size"]
    assert {repr(cell.params["optim"]) for cell in nested.cells} == {"{'lr': 7, 'wd': 0}"}


def test_an_override_names_the_same_cells_as_the_file_would(tmp_path: Path) -> None:
    by_override = expand(*load(tmp_path, PLAIN, "lr=1e-3", "tag=010")).cells[0].id
    by_file = expand(*load(tmp_path, config_of({"params": {"lr": 0.001, "tag": "010"}}))).cells[0].id
    assert by_override == by_file


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("axes.lr=[1, 2, 3]", [1.0, 2.0, 3.0]),
        ("set={axes.lr: {range: 2}}", [0.0, 1.0]),
        ("set={sweep.axes.lr: {logspace: [-2, -1, 2]}}", [0.01, 0.1]),
        ("axes={lr: [4]}", [4.0]),
        ("sweep.axes={lr: [4]}", [4.0]),
    ],
)
def test_an_axis_is_replaced(tmp_path: Path, override: str, wanted: list[float]) -> None:
    assert values(tmp_path, "lr", override) == wanted


def test_an_axis_replaces_a_fixed_parameter(tmp_path: Path) -> None:
    assert values(tmp_path, "tag", "set={axes.tag: [x, y]}", file=FILE) == ["x", "y"]
    assert values(tmp_path, "lr", "axes.lr=[1, 2]", file=config_of({"params": {"lr": 3}})) == [1.0, 2.0]
    assert values(tmp_path, "lr", "axes.lr=[1, 2]", file=config_of({})) == [1.0, 2.0]


@pytest.mark.parametrize(
    ("override", "read", "wanted"),
    [
        ("on_error=nan", lambda config: config.on_error, "nan"),
        ("confirm_above=5", lambda config: config.confirm_above, 5),
        ("results=elsewhere/here", lambda config: config.results, "elsewhere/here"),
        ("devices=null", lambda config: config.devices, None),
        ("lease_timeout=30m", lambda config: config.lease_timeout, 30),
        ("name=other", lambda config: config.sweep.name, "other"),
        ("sweep.name=other", lambda config: config.sweep.name, "other"),
        (
            "set={sweep.name: other, on_error: nan}",
            lambda config: (config.sweep.name, config.on_error),
            ("other", "nan"),
        ),
        ("sample={count: 3}", lambda config: config.sweep.sample.count, 3),
        ("set={sample.count: 3, sample.seed: 4}", lambda config: config.sweep.sample.seed, 4),
        ("resources=[{gpu: 0.25}, {gpu: 1}]", lambda config: [entry.gpu for entry in config.resources], [250, 1000]),
        ("objective={metric: a, mode: min}", lambda config: config.objective.mode, "min"),
        ("exclude=[{lr: 0.1}]", lambda config: config.sweep.exclude, [{"lr": 0.1}]),
        ("zip=[]", lambda config: config.sweep.zip, []),
        ("task=task.py:train", lambda config: config.sweep.task, "task.py:train"),
        ("sweep={name: other, task: 'task.py:train'}", lambda config: config.sweep.axes, {}),
    ],
)
def test_a_key_of_the_configuration_is_replaced(tmp_path: Path, override: str, read: Any, wanted: Any) -> None:
    assert read(load(tmp_path, FILE, override)[0]) == wanted


def test_several_overrides_apply_in_order(tmp_path: Path) -> None:
    config, _ = load(tmp_path, PLAIN, "lr=1", "lr=2", "set={sample.count: 1}", "sample.count=2", "name=x")
    assert (config.sweep.params, config.sweep.axes, config.sweep.name) == ({"lr": 2.0}, {}, "x")
    assert config.sweep.sample and config.sweep.sample.count == 2


def test_a_parameter_that_is_called_like_a_key_of_the_sweep_wins(tmp_path: Path) -> None:
    config, _ = load(tmp_path, config_of({"params": {"name": "x"}}), "name=y", source=OPEN)
    assert (config.sweep.params, config.sweep.name) == ({"name": "y"}, "s")


def test_an_open_task_needs_new_parameters_to_be_set_by_their_full_name(tmp_path: Path) -> None:
    file = config_of({"axes": {"lr": [1], "net.width": [2, 3]}})
    assert values(tmp_path, "new", "set={params.new: 1e-3}", file=file, source=OPEN) == [0.001]
    assert values(tmp_path, "net", "set={net.width: 5}", file=file, source=OPEN) == [{"width": 5}]
    error = refused(lambda: load(tmp_path, file, "lrr=1", source=OPEN))
    check_words(error, "--config lrr", "a key of the config or a parameter", "did you mean `lr`?")


@pytest.mark.parametrize(
    ("override", "key", "words"),
    [
        ("widht=3", "--config widht", ["did you mean `width`?"]),
        ("onerror=nan", "--config onerror", ["did you mean `on_error`?", "sweep.axes"]),
        ("axs=3", "--config axs", ["a key of the config or a parameter"]),
        ("set={params.widht: 3}", "sweep.params.widht", ["did you mean `width`?"]),
        ("set={axes.widht: [3]}", "sweep.axes.widht", ["did you mean `width`?"]),
        ("lr=fast", "--config lr", ["'fast'", "`float`", "1e-3"]),
        ("amp=no", "--config amp", ["'no'", "true or false"]),
        ("width=1.5", "--config width", ["1.5", "`int`"]),
        ("lr=[0.1, 0.2]", "--config lr", ["list the values to try under `axes`"]),
        ("set={params.lr: fast}", "--config params.lr", ["`float`"]),
        ("set={params.betas: [1, x]}", "--config params.betas[1]", ["`float`"]),
        ("seed=3", "--config seed", ["in no `zip` group", "set `zip` as a whole"]),
        ("set={axes.seed: [3]}", "sweep.zip[0].seed", ["under `sweep.axes`"]),
        ("on_error=ignore", "on_error", ["'raise' or 'nan'"]),
        ("set={on_error: ignore}", "on_error", ["'raise' or 'nan'"]),
        ("sweep.nme=x", "--config sweep.nme", ["did you mean `sweep.name`?"]),
        ("set={sample.cout: 3}", "sweep.sample.cout", ["did you mean `count`?"]),
        ("resources.gpu=1", "--config resources.gpu", ["set `resources` as a whole"]),
        ("resources.0.gpu=1", "--config resources.0.gpu", ["set `resources` as a whole"]),
        ("name.x=1", "--config name.x", ["set `name` as a whole"]),
        ("objective.a.b=1", "--config objective.a.b", ["set `objective` as a whole"]),
        ("set=3", "--config set", ["a mapping of dotted keys", "set='{params.lr: 1e-3}'"]),
        ("set={1e-3: 4}", "--config set", ["a mapping of dotted keys"]),
        ("set={lr: 1, lr: 2}", "--config set, line 1", ["every key once"]),
        ("lr={a: ", "--config lr, line 1", ["YAML 1.2"]),
        ("free=&a [*a]", "--config free", ["alias"]),
        ("lr", "--config", ["name=value", "`--config lr=…`"]),
        ("=3", "--config ", ["a key of the config or a parameter"]),
        ("sweep.=3", "--config sweep.", ["a key of the config or a parameter"]),
        ("axes=3", "sweep.axes", ["a mapping"]),
        ("axes.=[1]", "sweep.axes", ["a mapping"]),
        ("task=other.py:train", "sweep.task", ["did you mean `task.py`?", "task.py"]),
    ],
)
def test_an_override_that_cannot_apply_is_refused(tmp_path: Path, override: str, key: str, words: list[str]) -> None:
    error = refused(lambda: expand(*load(tmp_path, FILE, override)))
    check_words(error, error.key if ", line 1" in key else key, *words)
    assert error.key.startswith(key)


@pytest.mark.parametrize(
    ("file", "override", "key"),
    [
        ("sweep: null", "sweep.name=x", "sweep.task"),
        ("sweep: [x]", "sweep.name=x", "--config sweep.name"),
        ("sweep: {name: s, task: 'task.py:train', axes: null, params: null}", "axes.lr=[1]", "sweep.params"),
        ("sweep: {name: s, task: 'task.py:train', axes: [lr]}", "axes.lr=[1]", "--config axes.lr"),
        ("sweep: {name: s, task: 'task.py:train', axes: [lr]}", "lr=1", "sweep.axes"),
        ("sweep: {name: s, task: 'task.py:train', sample: 3}", "sample.count=1", "--config sample.count"),
        ("just text", "lr=1", "sweep"),
        ("", "on_error=nan", "sweep"),
    ],
)
def test_an_override_of_a_broken_file_is_refused_like_the_file(
    tmp_path: Path, file: str, override: str, key: str
) -> None:
    check_words(refused(lambda: load(tmp_path, file, override)), key)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ('free={1: a, "1": b}', ["text as the name of a nested key"]),
        ("optim={1: 2}", ["text as the name of a nested key"]),
        ("free=.nan", ["equals itself"]),
        ("betas=[.nan]", ["equals itself"]),
    ],
)
def test_what_no_value_can_be_does_not_turn_into_text(tmp_path: Path, override: str, words: list[str]) -> None:
    source = "def train(cell, free=None, optim: dict = {}, betas: list = []): ..."
    error = refused(lambda: load(tmp_path, config_of({}), override, source=source))
    check_words(error, error.key, *words)
    assert error.key.startswith("--config ")
