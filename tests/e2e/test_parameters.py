"""Parameters of every kind reach the task unchanged and typed, through files, ids and processes."""

from __future__ import annotations

import json

import yaml
from conftest import REPOSITORY
from hypothesis import HealthCheck, assume, given, seed, settings
from hypothesis import strategies as st

TASK = """
import json
def train(cell, **params):
    with open(f"seen-{cell.id}.json", "w") as file:
        json.dump(params, file)
    return {}
"""

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
cells = st.lists(
    st.dictionaries(st.sampled_from(["a", "b", "long_name", "seed"]), values, min_size=1), min_size=30, max_size=30
)


def typed(value):
    """`value` with its types spelt out: 1, 1.0 and true differ."""
    if isinstance(value, dict):
        return {name: typed(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [typed(inner) for inner in value]
    return type(value).__name__, repr(value)


@seed(1)
@settings(max_examples=1, deadline=None, suppress_health_check=list(HealthCheck))
@given(cells)
def test_parameters_make_the_round_trip(sandbox, params):
    distinct = list({json.dumps(typed(entry), sort_keys=True): entry for entry in params}.values())
    assume(len(distinct) > 20)  # the simplest example comes first
    sandbox.write("task.py", TASK)
    sandbox.config(sweep={"name": "test", "task": "task.py:train", "include": distinct}, resources=[{"gpu": 0.1}])
    sandbox.snakemake()
    seen = [json.loads(path.read_text()) for path in sandbox.root.glob("seen-*.json")]
    assert sorted(map(repr, map(typed, seen))) == sorted(map(repr, map(typed, distinct)))


def test_no_key_stands_in_the_default_profile_and_in_another():
    profiles = {
        path.parent.name: yaml.safe_load(path.read_text()) for path in (REPOSITORY / "profiles").glob("*/config.yaml")
    }
    default = profiles.pop("default").keys() - {"__use_yte__", "__definitions__"}
    assert "rerun-incomplete" in default and profiles
    for name, profile in profiles.items():
        assert not default & profile.keys(), name
