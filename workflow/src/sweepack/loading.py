"""Read the configuration: one file, then what ``--config`` lays over it, each value as the task wants it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sweepack import yaml12
from sweepack.config import Config, Sweep, validate
from sweepack.errors import UserError, Verbatim, did_you_mean
from sweepack.task import Signature, Task, load_task
from sweepack.values import coerce

SET = "set"


def load_config(default: Path, given: Sequence[Path], overrides: Sequence[str], root: Path) -> tuple[Config, Task]:
    """The validated configuration and its task.

    ``given`` are the files of ``--configfile``: one replaces the default. ``overrides`` are the ``name=value`` entries
    of ``--config``: a key of the configuration (``on_error=nan``), a parameter (``lr=1e-3``), or ``set={…}`` with
    dotted keys. Raises UserError.
    """
    if len(given) > 1:
        names = " ".join(str(path) for path in given)
        raise UserError("--configfile", names, "one file, which replaces the default", "join the files into one")
    path = given[0] if given else default
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fix = "create it, or name another with `--configfile path/to/config.yaml`"
        trouble = getattr(error, "strerror", None) or str(error)
        raise UserError(_shown(path, root), Verbatim(trouble), "a configuration in a text file", fix) from None
    data = yaml12.parse(text, _shown(path, root))
    if not overrides:
        config = validate(data, _shown(path, root))
        return config, _task(config, root)
    entries = [entry for override in overrides for entry in _entries(override)]
    data = data if isinstance(data, dict) else {}
    later = [entry for entry in entries if not _set_key(data, *entry)]
    config = validate(data, _shown(path, root))
    task = _task(config, root)
    if later:
        for name, value, typed in later:
            _set_parameter(data["sweep"], name, value, typed, task.signature)
        config = validate(data, "--config")
    return config, task


def _task(config: Config, root: Path) -> Task:
    reference = config.sweep.task
    return load_task(reference if isinstance(reference, str) else reference.command, root)


def _entries(override: str) -> list[tuple[str, Any, Any]]:
    """``(dotted name, value, value as typed)`` of one ``name=value`` of the command line."""
    name, separator, text = override.partition("=")
    key = f"--config {name}"
    if not separator:
        raise UserError("--config", name, "name=value", f"write `--config {name}=…`")
    value, typed = yaml12.parse(text, key), yaml12.parse_texts(text)
    if name != SET:
        return [(name, value, "" if typed is None else typed)]
    if not isinstance(value, dict) or not all(isinstance(path, str) for path in value):
        raise UserError(key, value, "a mapping of dotted keys", "write `--config set='{params.lr: 1e-3}'`")
    return [(path, inner, typed.get(path)) for path, inner in value.items()]


def _set_key(data: dict[str, Any], name: str, value: Any, typed: Any) -> bool:
    """Set a key of the configuration itself; False when ``name`` is not one."""
    head, _, rest = name.removeprefix("sweep.").partition(".")
    in_sweep = name.startswith("sweep.") or (head in Sweep.model_fields and head not in _parameters(data))
    if head not in (Sweep if in_sweep else Config).model_fields or (head == "params" and rest):
        return False
    if in_sweep:
        data = _inner(data, "sweep", name, value)
    if not rest:
        data[head] = value
        return True
    inner = _inner(data, head, name, value)
    if head == "axes" and isinstance(params := data.get("params"), dict):
        params.pop(rest, None)
    elif "." in rest and head != "axes":
        raise UserError(f"--config {name}", value, f"a key inside `{head}`", f"set `{head}` as a whole")
    inner[rest] = value
    return True


def _inner(data: dict[str, Any], head: str, name: str, value: Any) -> dict[str, Any]:
    """The mapping under ``head``, made if there is none."""
    inner = data.get(head)
    if inner is None:
        inner = data[head] = {}
    if not isinstance(inner, dict):
        raise UserError(f"--config {name}", value, f"a key inside `{head}`", f"set `{head}` as a whole")
    return inner


def _parameters(data: dict[str, Any]) -> set[str]:
    sweep = data.get("sweep")
    names: set[str] = set()
    for section in ("params", "axes"):
        found = sweep.get(section) if isinstance(sweep, dict) else None
        names |= set(found) if isinstance(found, dict) else set()
    return names


def _set_parameter(sweep: dict[str, Any], name: str, value: Any, typed: Any, signature: Signature) -> None:
    """Fix a parameter, in place of its axis if it has one."""
    explicit = name.removeprefix("sweep.").startswith("params.")
    parameter = name.removeprefix("sweep.").removeprefix("params.")
    if not explicit:
        known = signature.parameters.keys() | _parameters({"sweep": sweep})
        if parameter.split(".")[0] not in {given.split(".")[0] for given in known}:
            names = {*known, *Config.model_fields, *(f"sweep.{field}" for field in Sweep.model_fields)}
            raise UserError(f"--config {name}", value, "a key of the config or a parameter", did_you_mean(name, names))
    for group in sweep.get("zip", []):
        if parameter in group:
            raise UserError(
                f"--config {name}", value, "a parameter that is in no `zip` group", "set `zip` as a whole instead"
            )
    annotation = signature.annotation(parameter)
    try:
        value = coerce(value, annotation, f"--config {name}")
    except UserError as error:
        # On a command line `name=010` is the text 010 for a parameter that is text, `[010]` a list of it.
        entries = annotation.items if annotation and isinstance(typed, list) else None
        if annotation is None or not (isinstance(typed, str) or (entries and entries.accepts("str"))):
            raise
        try:
            value = coerce(typed, annotation, "")
        except UserError:
            raise error from None
    sweep.get("axes", {}).pop(parameter, None)
    sweep.setdefault("params", {})[parameter] = value


def _shown(path: Path, root: Path) -> str:
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)
