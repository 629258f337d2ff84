"""From the configuration to the cells: axes, zips, includes, excludes, a sample; ids made from content."""

from __future__ import annotations

import hashlib
import math
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sweepack.axes import axis_values
from sweepack.config import Config, Resources
from sweepack.ddp.layout import Layout
from sweepack.errors import UserError
from sweepack.task import Task
from sweepack.values import canonical, check_name, coerce, dotted_items, get_dotted, set_dotted

ID_LENGTH = 12
DEFAULT_SEED = 0
_COMPARISON = re.compile(r"\s*(<=|>=|<|>)\s*([-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?)\s*")


@dataclass(frozen=True)
class Cell:
    """One cell: its id, its place in the sweep, its parameters with the task's defaults, and what it gets."""

    id: str
    index: int
    params: dict[str, Any]
    slug: str
    resources: Resources

    @property
    def seed(self) -> int:
        """The parameter ``seed`` when it is a whole number, else 0."""
        seed = self.params.get("seed")
        return seed if isinstance(seed, int) and not isinstance(seed, bool) else DEFAULT_SEED


@dataclass(frozen=True)
class Expansion:
    """The cells of a sweep in index order, the dotted names that vary, and remarks for the plan.

    ``factors`` are the factors of the product, ``("lr", 3)``; the last one varies fastest.
    """

    cells: list[Cell]
    varying: list[str]
    factors: list[tuple[str, int]]
    remarks: list[str]


@dataclass(frozen=True)
class _Group:
    """One factor of the product: names that take their values together."""

    names: tuple[str, ...]
    rows: list[tuple[Any, ...]]


def cell_id(reference: str, params: Mapping[str, Any]) -> str:
    """The id of a cell: a hash of the task's reference and the canonical parameters, defaults included."""
    text = canonical([reference, params])
    return hashlib.sha256(text.encode()).hexdigest()[:ID_LENGTH]


def expand(config: Config, task: Task) -> Expansion:
    """All cells of the sweep. Raises UserError for names the task does not take, bad values and duplicates."""
    groups = _groups(config, task)
    base = _base(config, task)
    excludes = [_pattern(entry, task, f"sweep.exclude[{i}]") for i, entry in enumerate(config.sweep.exclude)]
    entries = [_pattern(entry.match, task, f"resources[{i}].match") for i, entry in enumerate(config.resources)]
    _gate(config, groups)

    hits = Counter[int]()

    def excluded(params: Mapping[str, Any]) -> bool:
        matching = [index for index, pattern in enumerate(excludes) if _matches(pattern, params)]
        hits.update(matching)
        return bool(matching)

    chosen = list(_chosen(config, groups, base, excluded))
    included = list(_included(config, base, task))
    sources = [*(("the product", params) for params in chosen), *included]
    if not sources:
        raise UserError(
            "sweep.exclude", config.sweep.exclude, "some cells to be left", "exclude fewer, or add values to the axes"
        )
    if chosen:
        _require_all(chosen[0], task, "sweep.params")
    varying = _varying(groups, [params for _, params in included], [params for _, params in sources])

    cells: list[Cell] = []
    seen: dict[str, str] = {}
    used = Counter[int]()
    for index, (source, params) in enumerate(sources):
        identity = cell_id(task.reference, params)
        if identity in seen:
            raise _duplicate(identity, source, seen[identity], params, varying)
        seen[identity] = source
        entry = next((i for i, pattern in enumerate(entries) if _matches(pattern, params)), None)
        used.update([] if entry is None else [entry])
        resources = Resources() if entry is None else config.resources[entry]
        cells.append(Cell(identity, index, params, slug(params, varying), resources))
    # A sample has not looked at every cell.
    unused = [i for i in range(len(excludes)) if not hits[i] and config.sweep.sample is None]
    remarks = [f"sweep.exclude[{i}] matches no cell" for i in unused]
    remarks += [f"resources[{i}] is used by no cell" for i in range(len(entries)) if not used[i]]
    factors = [("+".join(group.names), len(group.rows)) for group in groups]
    return Expansion(cells, varying, factors, remarks)


def slug(params: Mapping[str, Any], varying: list[str]) -> str:
    """A readable name, ``lr=0.001,model=mlp``: for people and links only, never parsed."""
    parts = []
    for name in varying:
        try:
            value = get_dotted(params, name)
        except KeyError:
            continue
        text = value if isinstance(value, str) else canonical(value)
        parts.append(f"{name}={text}")
    return ",".join(parts) or "the only cell"


def _groups(config: Config, task: Task) -> list[_Group]:
    placed = dict.fromkeys(config.sweep.params, "sweep.params")

    def values(name: str, spec: Any, key: str) -> list[Any]:
        check_name(name, key)
        task.signature.check(name, key)
        here = f"{key}.{name}"
        for other, place in placed.items():
            # A key inside a fixed mapping may vary; anything else would overwrite what stands beside it.
            inside = place != "sweep.params" and name.startswith(f"{other}.")
            if other == name or other.startswith(f"{name}.") or inside:
                expected = f"`{name}` once; `{other}` is under `{place}` too"
                raise UserError(here, spec, expected, "remove one of the two")
        placed[name] = key
        annotation = task.signature.annotation(name)
        return [coerce(value, annotation, f"{here}[{i}]") for i, value in enumerate(axis_values(spec, here))]

    groups = []
    for name, spec in config.sweep.axes.items():
        column = values(name, spec, "sweep.axes")
        _refuse_repeats(column, f"sweep.axes.{name}")
        groups.append(_Group((name,), [(value,) for value in column]))
    for position, axes in enumerate(config.sweep.zip):
        key = f"sweep.zip[{position}]"
        columns = {name: values(name, spec, key) for name, spec in axes.items()}
        if not columns:
            raise UserError(
                key, axes, "axes that vary together", "write `- {a: [1, 2], b: [3, 4]}`, or remove the entry"
            )
        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values())) != 1:
            raise UserError(
                key,
                lengths,
                "axes of equal length, since they vary together",
                "make the lists equally long, or move one of them to `axes`",
            )
        rows = list(zip(*columns.values(), strict=True))
        _refuse_repeats(rows, key)
        groups.append(_Group(tuple(columns), rows))
    return groups


def _refuse_repeats(values: Sequence[Any], key: str) -> None:
    first: dict[str, int] = {}
    for index, value in enumerate(values):
        text = canonical(value)
        if text in first:
            raise UserError(
                f"{key}[{index}]",
                value,
                f"every value once; it is the same as entry {first[text]}",
                "remove one of the two",
            )
        first[text] = index


def _base(config: Config, task: Task) -> dict[str, Any]:
    """The parameters that every cell starts from: the task's defaults, then the fixed ones."""
    base = _copy({p.name: p.default for p in task.signature.parameters.values() if not p.required})
    names = sorted(config.sweep.params, key=lambda name: str(name).count("."))
    for name in names:
        check_name(name, "sweep.params")
        task.signature.check(name, "sweep.params")
        key = f"sweep.params.{name}"
        value = coerce(config.sweep.params[name], task.signature.annotation(name), key)
        set_dotted(base, name, value, key)
    return base


def _gate(config: Config, groups: list[_Group]) -> None:
    total = math.prod(len(group.rows) for group in groups)
    if config.sweep.sample is not None:
        total = min(total, config.sweep.sample.count)
    total += len(config.sweep.include)
    if total > config.confirm_above:
        factors = " × ".join(f"{len(group.rows)} {'+'.join(group.names)}" for group in groups)
        raise UserError(
            "confirm_above",
            config.confirm_above,
            f"at least {total}, the number of cells of this sweep ({factors})",
            f"if so many are meant: `--config confirm_above={total}`, or the same key in the config; "
            "else shorten an axis or add `sample`",
        )


def _chosen(config: Config, groups: list[_Group], base: dict[str, Any], excluded: Any) -> Iterator[dict[str, Any]]:
    """The product's cells that stay, in index order."""
    if not groups and config.sweep.include:
        # A sweep of single cells: there is no product, not even the empty one.
        return
    sizes = [len(group.rows) for group in groups]

    def at(index: int) -> dict[str, Any]:
        params = _copy(base)
        for group, size in zip(reversed(groups), reversed(sizes), strict=True):
            index, position = divmod(index, size)
            for name, value in zip(group.names, group.rows[position], strict=True):
                set_dotted(params, name, value, f"sweep.axes.{name}")
        return params

    total = math.prod(sizes)
    sample = config.sweep.sample
    if sample is None:
        yield from (params for params in map(at, range(total)) if not excluded(params))
        return
    kept: dict[int, dict[str, Any]] = {}
    for index in _shuffled(total, sample.seed):
        params = at(index)
        if not excluded(params):
            kept[index] = params
            if len(kept) == sample.count:
                break
    if len(kept) < sample.count:
        raise UserError(
            "sweep.sample.count", sample.count, f"at most {len(kept)}, which is all there are", "lower it, or drop it"
        )
    yield from (kept[index] for index in sorted(kept))


def _shuffled(total: int, seed: int) -> Iterator[int]:
    """The numbers below ``total`` in random order, one at a time, so that a huge product is never laid out."""
    generator = random.Random(seed)
    moved: dict[int, int] = {}
    for last in range(total - 1, -1, -1):
        # Fisher and Yates's shuffle on a list that is stored only where it differs from 0, 1, 2, …
        position = generator.randrange(last + 1)
        yield moved.get(position, position)
        moved[position] = moved.pop(last, last)


def _included(config: Config, base: dict[str, Any], task: Task) -> Iterator[tuple[str, dict[str, Any]]]:
    for position, entry in enumerate(config.sweep.include):
        key = f"sweep.include[{position}]"
        params = _copy(base)
        for name in sorted(entry, key=lambda name: str(name).count(".")):
            check_name(name, key)
            task.signature.check(name, key)
            value = coerce(entry[name], task.signature.annotation(name), f"{key}.{name}")
            set_dotted(params, name, value, f"{key}.{name}")
        _require_all(params, task, key)
        yield key, params


def _require_all(params: Mapping[str, Any], task: Task, key: str) -> None:
    for parameter in task.signature.parameters.values():
        if parameter.required and parameter.name not in params:
            raise UserError(
                f"{key}.{parameter.name}",
                None,
                "a value, since the task's function has no default for it",
                f"add `{parameter.name}` here or under `axes`, or give it a default in the function",
            )


def _pattern(entry: Mapping[str, Any], task: Task, key: str) -> dict[str, Any]:
    """A match pattern with its values in canonical form."""
    pattern: dict[str, Any] = {}
    for name, wanted in entry.items():
        check_name(name, key)
        task.signature.check(name, key)
        annotation, here = task.signature.annotation(name), f"{key}.{name}"
        if isinstance(wanted, str) and (found := _COMPARISON.fullmatch(wanted)):
            pattern[name] = (found[1], float(found[2]))
        elif isinstance(wanted, list) and not (annotation and annotation.accepts("list")):
            pattern[name] = {canonical(coerce(v, annotation, f"{here}[{i}]")) for i, v in enumerate(wanted)}
        else:
            pattern[name] = {canonical(coerce(wanted, annotation, here))}
    return pattern


def _matches(pattern: Mapping[str, Any], params: Mapping[str, Any]) -> bool:
    for name, wanted in pattern.items():
        try:
            value = get_dotted(params, name)
        except KeyError:
            return False
        if isinstance(wanted, set):
            if canonical(value) not in wanted:
                return False
        elif not _compares(value, *wanted):
            return False
    return True


def _compares(value: Any, operator: str, bound: float) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    outcomes = {"<": value < bound, "<=": value <= bound, ">": value > bound, ">=": value >= bound}
    return outcomes[operator]


def layouts(cells: Sequence[Cell]) -> dict[str, Layout]:
    """The layout of each cell that has one, by id."""
    known: dict[int, Layout | None] = {}
    for cell in cells:
        if id(cell.resources) not in known:
            known[id(cell.resources)] = cell.resources.layout()
    return {cell.id: layout for cell in cells if (layout := known[id(cell.resources)])}


def _varying(groups: list[_Group], included: list[dict[str, Any]], cells: list[dict[str, Any]]) -> list[str]:
    """The axes in the order written, then whatever the included cells vary beside them."""
    names = [name for group in groups for name in group.names]
    if not included:
        return names
    seen: dict[str, list[str]] = {}
    for params in cells:
        for name, value in dotted_items(params):
            seen.setdefault(name, []).append(canonical(value))
    differ = [name for name, values in seen.items() if len(set(values)) > 1 or len(values) < len(cells)]
    return names + [name for name in differ if name not in names]


def _duplicate(identity: str, source: str, first: str, params: Mapping[str, Any], varying: list[str]) -> UserError:
    return UserError(
        source,
        slug(params, varying),
        f"every cell once; this one (id {identity}) is also in {first}",
        "remove it from one of the two, or exclude it from the product",
    )


def _copy(params: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _copy(value) if isinstance(value, Mapping) else value for name, value in params.items()}
