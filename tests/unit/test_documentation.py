"""What is generated from the models does not drift, and what is in the repository is valid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from sweep_tools import WHOLE, check_words, refused
from sweepack import documentation
from sweepack.config import Config, validate
from sweepack.loading import load_config
from sweepack.sweep import expand
from sweepack.yaml12 import parse

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = [ROOT / "config" / "config.yaml", *sorted((ROOT / "examples").glob("*.yaml"))]
every_config = pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)


def read(path: Path) -> Any:
    return parse(path.read_text(encoding="utf-8"), path.name)


def valid(config: Any) -> bool:
    return jsonschema.Draft202012Validator(json.loads(documentation.schema())).is_valid(config)


@pytest.mark.parametrize(
    ("name", "made"), [("README.md", documentation.reference), ("schema.json", documentation.schema)]
)
def test_generated_files_are_up_to_date(name: str, made: Any) -> None:
    committed = (ROOT / "config" / name).read_text(encoding="utf-8")
    assert committed == made(), f"config/{name} is not what the models say: run `make docs` and commit it"


def test_docs_are_written_where_they_are_read(tmp_path: Path) -> None:
    assert [path.name for path in documentation.write(tmp_path)] == ["README.md", "schema.json"]
    assert (tmp_path / "README.md").read_text() == documentation.reference()
    assert (tmp_path / "schema.json").read_text() == documentation.schema()


@every_config
def test_every_config_of_the_repository_expands(path: Path) -> None:
    config, task = load_config(CONFIGS[0], [path], [], ROOT)
    expansion = expand(config, task)
    assert expansion.cells and not expansion.remarks
    assert config.objective is not None


def test_the_default_sweep_has_models_learning_rates_and_seeds() -> None:
    expansion = expand(*load_config(CONFIGS[0], [], [], ROOT))
    assert expansion.factors == [("model", 2), ("lr", 4), ("seed", 3)]
    assert len(expansion.cells) == 24


def test_every_example_task_has_a_config_that_runs_it() -> None:
    sources = " ".join(path.read_text(encoding="utf-8") for path in CONFIGS)
    assert [path.name for path in (ROOT / "examples").glob("*.py") if f"examples/{path.name}" not in sources] == []


@every_config
def test_the_schema_accepts_every_config_of_the_repository(path: Path) -> None:
    assert valid(read(path))


def test_the_schema_accepts_every_key() -> None:
    assert valid(WHOLE)


@pytest.mark.parametrize("section", ["", "sweep", "sample", "objective", "resources", "task"])
def test_schema_and_models_both_refuse_an_unknown_key_in_every_section(section: str) -> None:
    config = json.loads(json.dumps(WHOLE))
    config["sweep"]["task"] = {"command": ["ls"]}
    places = {
        "": config,
        "sweep": config["sweep"],
        "sample": config["sweep"]["sample"],
        "task": config["sweep"]["task"],
    }
    places |= {"objective": config["objective"], "resources": config["resources"][0]}
    assert valid(config)
    places[section]["unheard_of"] = 1
    assert not valid(config)
    error = refused(lambda: validate(config, "config.yaml"))
    check_words(error, error.key, "a key that exists", "Known: ")
    assert error.key.endswith("unheard_of")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("gpu", value) for value in (1, 0.25, 0, 1.2, "0.3x", None)],
        *[("mem", value) for value in ("2GB", 2000, None, 1.5, True, [])],
        *[("runtime", value) for value in ("30m", 30, None, 1.5, {})],
        *[("cpus", value) for value in (1, 0, "2", None)],
    ],
)
def test_the_schema_judges_resources_as_the_models_do(key: str, value: Any) -> None:
    config = {"sweep": {"name": "s", "task": "a.py:b"}, "resources": [{key: value}]}
    try:
        validate(config, "config.yaml")
        accepted = True
    except Exception:
        accepted = False
    assert valid(config) is accepted


def test_the_page_has_every_key_with_its_default() -> None:
    page = documentation.reference()
    for line in (
        "- **`sweep.axes`** (default `{}`). Parameters that vary",
        "- **`sweep.name`** (required).",
        "- **`resources[].gpu`** (default `1`).",
        "- **`lease_timeout`** (default `24h`).",
        '- **`on_error`** (default `"raise"`).',
    ):
        assert line in page
    assert [name for name in Config.model_fields if f"**`{name}`**" not in page] == []


def test_what_the_page_shows_for_the_command_line_works() -> None:
    shown = [line for line in documentation.reference().splitlines() if "--config " in line and "snakemake" in line]
    overrides = [line.split("--config ")[1].split("   #")[0].strip().replace("'", "") for line in shown]
    assert len(overrides) == 3
    for override in overrides[:2]:
        assert expand(*load_config(CONFIGS[0], [], [override], ROOT)).cells
    error = refused(lambda: expand(*load_config(CONFIGS[0], [], [overrides[2]], ROOT)))
    check_words(
        error, "sweep.params.optim.lr", "a parameter of the task's function"
    )  # the default task has no optim.lr
