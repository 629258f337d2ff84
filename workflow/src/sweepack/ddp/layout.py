"""How a cell lies on nodes and devices: one contract, from which all else follows, and what disagrees with it.

Tasks per node == GPUs per node == the Trainer's devices; world size == nodes × GPUs per node. Standard library only:
the checks run on every rank before torch is imported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from sweepack.devices import Device
from sweepack.errors import UserError

# By what a process is told, under each launcher, which rank it is.
_SLURM = {"rank": "SLURM_PROCID", "local_rank": "SLURM_LOCALID", "node": "SLURM_NODEID"}
_TORCH = {"rank": "RANK", "local_rank": "LOCAL_RANK", "node": "GROUP_RANK"}


@dataclass(frozen=True)
class Layout:
    """``nodes`` × ``gpus_per_node`` ranks, one a device.

    ``least_nodes`` is below ``nodes`` for an elastic cell, which goes on with fewer. ``launcher`` is ``local``,
    ``srun`` or ``torchrun``; ``restarts`` is how often torchrun starts the ranks anew. ``start_seconds`` is how long a
    rank may take to appear.
    """

    nodes: int
    gpus_per_node: int
    least_nodes: int
    launcher: str = "local"
    strategy: str = "ddp"
    restarts: int = 0
    start_seconds: int = 120

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def elastic(self) -> bool:
        return self.least_nodes < self.nodes

    def __str__(self) -> str:
        nodes = f"{self.least_nodes} to {self.nodes}" if self.elastic else str(self.nodes)
        return f"{nodes} node{'s' * (self.nodes > 1)} × {self.gpus_per_node} GPU{'s' * (self.gpus_per_node > 1)}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def by(self, launcher: str) -> Layout:
        """The layout with ``launcher``, where none is chosen."""
        return replace(self, launcher=launcher) if self.launcher == "auto" else self

    def on(self, nodes: int) -> Layout:
        """The layout on so many nodes, as an elastic cell was given them."""
        return replace(self, nodes=nodes, least_nodes=min(self.least_nodes, nodes))

    def devices_of(self, on_cpu: bool) -> int:
        """How many devices of this machine it takes; ranks on a CPU share the one that there is."""
        return 1 if on_cpu else self.gpus_per_node


def node_range(nodes: int | str) -> tuple[int, int]:
    """The least and the most nodes of ``2`` or ``1:2``. Raises ValueError."""
    if isinstance(nodes, str) and (found := re.fullmatch(r"\s*(\d+)\s*:\s*(\d+)\s*", nodes)):
        least, most = int(found[1]), int(found[2])
        if 1 <= least <= most:
            return least, most
    elif isinstance(nodes, int) and not isinstance(nodes, bool) and nodes >= 1:
        return nodes, nodes
    raise ValueError("a whole number of nodes, 1 or more, or a range|write `nodes: 2`, or `nodes: 1:2` for torchrun")


@dataclass(frozen=True)
class Place:
    """Where a rank stands, as its launcher told it."""

    rank: int
    local_rank: int
    node: int
    world_size: int


def find_place(layout: Layout, environ: Mapping[str, str]) -> tuple[Place | None, list[str]]:
    """The place of this process in ``layout`` by its launcher's variables, and all that disagrees, for people.

    None when the variables do not even say which rank this is.
    """
    names = _SLURM if layout.launcher == "srun" else _TORCH
    found = {what: _number(environ, name) for what, name in names.items()}
    if missing := [names[what] for what, value in found.items() if value is None]:
        return None, [f"{', '.join(missing)} not set: this process was not started as a rank by {layout.launcher}"]
    world = layout.world_size
    problems = []
    if layout.launcher == "srun":
        problems += _slurm_counts(layout, environ)
        problems += _stale(environ, found, world)
    else:
        told = _number(environ, "WORLD_SIZE")
        if (
            layout.elastic
            and told
            and told % layout.gpus_per_node == 0
            and layout.least_nodes <= told // (layout.gpus_per_node) <= layout.nodes
        ):
            world = told
        elif told != world:
            problems.append(_disagree("WORLD_SIZE", told, "world size", world, layout))
        local = _number(environ, "LOCAL_WORLD_SIZE")
        if local != layout.gpus_per_node:
            problems.append(_disagree("LOCAL_WORLD_SIZE", local, "ranks a node", layout.gpus_per_node, layout))
    place = Place(found["rank"] or 0, found["local_rank"] or 0, found["node"] or 0, world)
    for what, value, bound in (("rank", place.rank, world), ("local_rank", place.local_rank, layout.gpus_per_node)):
        if value >= bound:
            problems.append(f"{names[what]} is {value}, but there are {bound} of them in {layout}")
    return place, problems


def _slurm_counts(layout: Layout, environ: Mapping[str, str]) -> list[str]:
    problems = []
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS") or _number(environ, "SLURM_NTASKS")
    if tasks != layout.world_size:
        problems.append(_disagree("srun started", tasks, "tasks", layout.world_size, layout))
    nodes = _number(environ, "SLURM_STEP_NUM_NODES") or _number(environ, "SLURM_NNODES")
    if nodes != layout.nodes:
        problems.append(_disagree("the step has", nodes, "nodes", layout.nodes, layout))
    per_node = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or ""
    counts = tasks_per_node(per_node)
    if tasks == layout.world_size and any(count != layout.gpus_per_node for count in counts):
        problems.append(_disagree("tasks on the nodes:", per_node, "on each", layout.gpus_per_node, layout))
    return problems


def _stale(environ: Mapping[str, str], found: Mapping[str, int | None], world: int) -> list[str]:
    """Rank variables of another launcher that say otherwise; those that agree do no harm."""
    told = {**{_TORCH[what]: value for what, value in found.items()}, "WORLD_SIZE": world}
    return [
        f"{name}={environ[name]} is left over from another launcher, srun says {value}: unset it (in `slurm.setup`, "
        "a prolog or your shell's start files)"
        for name, value in told.items()
        if name in environ and _number(environ, name) != value
    ]


def _disagree(what: str, found: object, noun: str, wanted: int, layout: Layout) -> str:
    return (
        f"{what} {found}, but {layout} make {noun} {wanted}: change `nodes` or `gpus_per_node` under `resources`, or "
        "what starts the ranks"
    )


def tasks_per_node(text: str) -> list[int]:
    """``2(x3),1`` as Slurm writes it → [2, 2, 2, 1]; raises ValueError for anything else."""
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not found:
            raise ValueError(f"{text!r} is no list of tasks per node")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _number(environ: Mapping[str, str], name: str) -> int | None:
    value = environ.get(name, "")
    return int(value) if value.isdigit() else None


def layout_of(
    nodes: int | str | None, gpus_per_node: int | None, options: Mapping[str, Any], share: int | None, key: str
) -> Layout | None:
    """The layout that an entry of ``resources`` (``key``) asks for; None for a cell on one device.

    ``share`` is what the entry says of ``gpu``, in thousandths, None when it says nothing. ``options`` are those of
    ``ddp``, where some are given. Raises UserError for what contradicts itself.
    """
    if nodes is None and gpus_per_node is None:
        if options:
            raise UserError(f"{key}.ddp", dict(options), "`gpus_per_node` beside it", "add it, or remove `ddp`")
        return None
    given = "nodes" if gpus_per_node is None else "gpus_per_node"
    if share is not None and share < 1000:
        raise UserError(
            f"{key}.gpu",
            share / 1000,
            f"no share beside `{given}`: a cell on several devices never shares one",
            "remove `gpu`, or remove `nodes` and `gpus_per_node` to pack the cell",
        )
    if gpus_per_node is None:
        raise UserError(
            f"{key}.gpus_per_node", None, f"a number of GPUs beside `nodes: {nodes}`", "add `gpus_per_node: 1` or more"
        )
    least, most = node_range(1 if nodes is None else nodes)
    if most * gpus_per_node == 1:
        raise UserError(
            f"{key}.gpus_per_node",
            "1 node × 1 GPU",
            "more than one rank: on one device this is a cell like any other",
            "remove `nodes` and `gpus_per_node` (`gpu: 1` gives the cell a device of its own)",
        )
    chosen = options.get("launcher", "auto")
    if least < most and chosen == "auto":
        chosen = "torchrun"
    if least < most and chosen != "torchrun":
        raise UserError(
            f"{key}.ddp.launcher", chosen, "`torchrun`, which alone can go on with fewer nodes", "remove `launcher`"
        )
    if options.get("restarts") and chosen != "torchrun":
        raise UserError(
            f"{key}.ddp.restarts",
            options["restarts"],
            "`launcher: torchrun` beside it: srun's ranks end together, and Snakemake's `retries` start them anew",
            "add `launcher: torchrun`, or remove `restarts`",
        )
    rest = {name: value for name, value in options.items() if name != "launcher"}
    return Layout(most, gpus_per_node, least, chosen, **rest)


class HasLayout(Protocol):
    """An entry of ``resources``."""

    def layout(self, key: str = ...) -> Layout | None: ...


def check_machine(entries: Sequence[HasLayout], pool: Sequence[Device]) -> None:
    """Raises UserError when this machine, with the devices of ``pool``, cannot hold what an entry asks for.

    The ranks of a cell share a CPU, which counts as one device.
    """
    devices, kind = len(pool), pool[0].kind
    for position, entry in enumerate(entries):
        key = f"resources[{position}]"
        layout = entry.layout(key)
        if layout is None:
            continue
        instance = next((device for device in pool if device.is_instance), None)
        if instance and layout.world_size > 1:
            raise UserError(
                f"{key}.gpus_per_node",
                layout.gpus_per_node,
                f"whole GPUs: {instance.label} is an instance, of which a process can use one only and "
                "which NCCL cannot join",
                "remove `gpus_per_node` (a cell then has an instance, or a share of one), or switch MIG off",
            )
        if layout.nodes > 1:
            raise UserError(
                f"{key}.nodes",
                f"{layout.least_nodes}:{layout.nodes}" if layout.elastic else layout.nodes,
                "one node, since this machine is one",
                "run with `--profile profiles/slurm`, or leave these cells out (`sweep.exclude`)",
            )
        if layout.strategy == "fsdp" and kind != "cuda":
            raise UserError(
                f"{key}.ddp.strategy",
                "fsdp",
                f"GPUs, which Lightning's FSDP needs; here is {kind}",
                "use `strategy: ddp`",
            )
        if kind != "cpu" and layout.gpus_per_node > devices:
            raise UserError(
                f"{key}.gpus_per_node",
                layout.gpus_per_node,
                f"at most {devices}, the number of devices that may be used here",
                "lower it, or make more visible (CUDA_VISIBLE_DEVICES, `devices`)",
            )
