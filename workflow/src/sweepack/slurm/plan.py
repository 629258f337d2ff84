"""Slurm in the plan: which jobs there will be, what each asks for, and what the cluster refuses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sweepack.config import Config, Resources
from sweepack.errors import UserError, Verbatim, did_you_mean
from sweepack.leases import WHOLE
from sweepack.packs import Pack, name_of, pack_file
from sweepack.records import Assessment
from sweepack.slurm.cluster import Partition, SlurmError, SlurmJob, my_jobs, read_partitions, refusal, require_slurm
from sweepack.slurm.config import Request, Slurm
from sweepack.slurm.gather import Estimate, Lane, estimate, margin
from sweepack.slurm.refusal import Refusal, key_of, refusal_of
from sweepack.slurm.request import Allocation
from sweepack.sweep import Cell, layouts

# In the comment of every job, before the output that it makes: by it a later run finds the job again.
MARK = "sweepack "
# Of so many different requests Slurm is asked whether it would take them.
_TRIED = 20


@dataclass(frozen=True)
class SlurmPlan:
    """The jobs: ``packs`` and cells with a job of their own (``singles``), and what each asks for, by its name.

    ``live`` are the jobs in the queue that an earlier run has left, by the name of the pack or the cell.
    ``expected`` is the sum over the packs of how long each will take, in GPU minutes, ``alone`` that over cells with a
    GPU for each. ``guessed`` says that both rest on a guess. ``probes`` are the jobs that measure what cells need:
    before them no cell's job can be submitted.
    """

    settings: Slurm
    packs: list[Pack]
    singles: list[str]
    allocations: dict[str, Allocation]
    live: dict[str, SlurmJob]
    expected: float
    alone: float
    guessed: bool
    probes: list[str] = field(default_factory=list)

    def flags(self, name: str) -> list[str]:
        """What sbatch is given for the job of the pack or cell ``name``."""
        return self.allocations[name].flags(self.settings)

    def setup(self, name: str) -> list[str]:
        """Shell lines that the job runs first."""
        return self.allocations[name].request.setup or []

    @property
    def to_submit(self) -> list[str]:
        """The names of the packs and cells for which a job will be submitted; those of the probes, if there are any."""
        if self.probes:
            return self.probes
        names = [*(pack.name for pack in self.packs), *self.singles]
        return [name for name in names if name not in self.live or self.settings.live == "cancel"]


def mark(output: Path) -> str:
    """The comment of the job that makes ``output``."""
    return MARK + str(output.absolute())


def live_jobs(directory: Path) -> dict[Path, SlurmJob]:
    """The jobs in the queue that make something in ``directory``, by what they make; raises SlurmError."""
    inside = MARK + str(directory.absolute()) + "/"
    return {Path(job.comment[len(MARK) :]): job for job in my_jobs() if job.comment.startswith(inside)}


def plan_jobs(
    config: Config,
    directory: Path,
    cells: Sequence[Cell],
    states: Mapping[str, Assessment],
    share: Callable[[Cell], int],
    site: Request,
    probes: Mapping[str, Sequence[Cell]],
) -> SlurmPlan:
    """The jobs that bring the ``cells`` without a result to their end; ``directory`` is the sweep's, absolute.

    ``site`` is what is asked for where ``config`` says nothing. ``probes`` are the cells by which something is
    measured, by the name of the job that does it.

    Raises UserError when there is no Slurm, or when a cell asks for what no partition has.
    """
    require_slurm()
    partitions = {partition.name: partition for partition in read_partitions()}
    try:
        found = live_jobs(directory)
    except SlurmError as error:
        raise UserError(
            "--profile profiles/slurm", Verbatim(str(error)), "a cluster that answers `squeue`", "try again"
        ) from None
    asked = config.slurm.over(site)
    settings = config.slurm
    if settings.time and settings.time * 60 <= settings.grace:
        raise UserError(
            "slurm.time",
            f"{settings.time} min",
            f"more than `slurm.grace` ({settings.grace} s): jobs would be told to stop as they start",
            "give more time, or less grace",
        )
    waiting = [cell for cell in cells if not states[cell.id].handed_over]
    live, packs, singles = _adopt(directory, found, {cell.id for cell in waiting})
    if settings.live == "cancel":
        packs, singles = [], []
    adopted = {*singles, *(cell for pack in packs for cell in pack.cells)}
    left = [cell for cell in waiting if cell.id not in adopted]
    shares = {cell.id: share(cell) for cell in cells}
    estimates = estimate(cells, states)
    allocations: dict[str, Allocation] = {}
    by_id = {cell.id: cell for cell in cells}
    # Should an adopted job end too early, another is submitted for the rest.
    for name, ids in [*((pack.name, pack.cells) for pack in packs), *((cell, (cell,)) for cell in singles)]:
        known = [by_id[cell] for cell in ids if cell in by_id] or [cells[0]]
        lane = _lanes(config, asked, partitions, known, shares, estimates)[0]
        allocations[name] = lane.single(known[0], settings) if name in by_id else lane.pack(known, settings)
    for name, members in probes.items():
        lane = _lanes(config, asked, partitions, members, shares, estimates)[0]
        allocations[name] = lane.probe(settings)
    expected = 0.0
    wide = layouts(left)

    def gpus(cell: Cell) -> float:
        """Of a cell with a job of its own."""
        if cell.id in wide:
            return wide[cell.id].world_size
        return shares[cell.id] / WHOLE if settings.mode == "shard" else 1

    groups = ([cell for cell in left if cell.id in wide], [cell for cell in left if cell.id not in wide])
    for lane in [lane for group in groups for lane in _lanes(config, asked, partitions, group, shares, estimates)]:
        if settings.mode != "pack" or lane.cells[0].id in wide:
            singles += [cell.id for cell in lane.cells]
            allocations |= {cell.id: lane.single(cell, settings) for cell in lane.cells}
            expected += sum(gpus(cell) * estimates[cell.id].minutes for cell in lane.cells)
            continue
        largest = config.cells_per_job if isinstance(config.cells_per_job, int) else None
        for members, allocation in lane.gather(settings, largest):
            ids = tuple(cell.id for cell in members)
            packs.append(Pack(name_of(ids, states), ids))
            allocations[packs[-1].name] = allocation
            expected += allocation.expected * allocation.gpus
    return SlurmPlan(
        settings,
        packs,
        singles,
        allocations,
        live,
        expected,
        alone=sum(estimates[cell.id].minutes * (wide[cell.id].world_size if cell.id in wide else 1) for cell in left),
        guessed=any(not estimates[cell.id].known for cell in left),
        probes=list(probes),
    )


def check_requests(plan: SlurmPlan) -> None:
    """Ask Slurm whether it would take the jobs; raises UserError with its own words if not."""
    asked: dict[tuple[str, ...], str] = {}
    for name in plan.to_submit:
        # Time and CPUs may differ from job to job, but what is refused is nearly always the rest, or the largest.
        asked.setdefault(tuple(plan.flags(name)), name)
    for flags in list(asked)[:_TRIED]:
        words = refusal(flags)
        if words is not None:
            kind = refusal_of(words)
            if kind is Refusal.FULL:
                return  # of what is in the queue already, which says nothing about the request
            if kind is Refusal.BUSY:
                raise UserError(
                    "--profile profiles/slurm", Verbatim(words), "a cluster that answers `sbatch`", "try again"
                )
            key = key_of(words)
            raise UserError(
                key,
                Verbatim(f"sbatch {' '.join(flags)}"),
                "a job that Slurm takes",
                Verbatim(f"Slurm says: {words}. Change `{key}` (for some of the cells: the same under `resources`)"),
            )


def _adopt(
    directory: Path, found: Mapping[Path, SlurmJob], waiting: set[str]
) -> tuple[dict[str, SlurmJob], list[Pack], list[str]]:
    """What is in the queue already: the jobs by the name of their pack or cell, those packs, those cells."""
    live: dict[str, SlurmJob] = {}
    packs, singles = [], []
    for output, job in found.items():
        if output.parent == directory / "packs" and pack_file(directory, output.stem, "json").exists():
            packs.append(Pack.read(directory, output.stem))
            live[output.stem] = job
        elif output.parent.name in waiting:
            singles.append(output.parent.name)
            live[output.parent.name] = job
    return live, packs, singles


def _lanes(
    config: Config,
    asked: Request,
    partitions: Mapping[str, Partition],
    cells: Sequence[Cell],
    shares: Mapping[str, int],
    estimates: Mapping[str, Estimate],
) -> list[Lane]:
    groups: dict[str, tuple[Request, Partition, list[Cell]]] = {}
    for cell in cells:
        request = (cell.resources.slurm or Request()).over(asked)
        key = request.model_dump_json()
        if key not in groups:
            groups[key] = (request, _partition(request, partitions, config, cell.resources), [])
        _check_cell(config, cell, groups[key][1])
        groups[key][2].append(cell)
    return [
        Lane(request, partition, tuple(members), shares, estimates) for request, partition, members in groups.values()
    ]


def _partition(
    request: Request, partitions: Mapping[str, Partition], config: Config, resources: Resources
) -> Partition:
    """Where the jobs will run; raises UserError when there is no such partition, or it has not what is asked for."""
    own = resources.slurm
    place = f"{_entry(config, resources)}.slurm" if own and own.partition else "slurm"
    if request.partition is None:
        partition = next((found for found in partitions.values() if found.default), None)
        if partition is None:
            raise UserError(
                "slurm.partition", None, "a partition: this cluster has no default", did_you_mean("", partitions)
            )
    elif request.partition not in partitions:
        raise UserError(
            f"{place}.partition",
            request.partition,
            "a partition of this cluster",
            did_you_mean(request.partition, partitions),
        )
    else:
        partition = partitions[request.partition]
    if not partition.gpus:
        with_gpus = [found.name for found in partitions.values() if found.gpus]
        raise UserError(
            f"{place}.partition",
            partition.name,
            "a partition whose nodes have GPUs",
            f"choose another: {', '.join(with_gpus) or 'none of this cluster has any'}",
        )
    model = request.gpu_model
    if model and partition.models and model not in partition.models:
        where = f"{_entry(config, resources)}.slurm" if own and own.gpu_model else "slurm"
        raise UserError(
            f"{where}.gpu_model",
            model,
            f"a GPU of partition {partition.name}",
            did_you_mean(model, partition.models),
        )
    if config.slurm.mode == "pack" and config.slurm.pack.gpus > partition.gpus:
        raise UserError(
            "slurm.pack.gpus",
            config.slurm.pack.gpus,
            f"at most {partition.gpus}, what a node of partition {partition.name} has: a pack runs on one node",
            "lower it, or set `slurm.partition` to one with larger nodes",
        )
    if config.slurm.mode == "shard" and not partition.shards:
        raise UserError(
            "slurm.mode",
            "shard",
            f"a partition with shards, which {partition.name} has not (`sinfo -o %G`)",
            "use `mode: pack`, which needs none",
        )
    return partition


def _check_cell(config: Config, cell: Cell, partition: Partition) -> None:
    """Raises UserError when no node of ``partition`` has what ``cell`` needs."""
    resources = cell.resources
    place = _entry(config, resources)
    limit = math.inf if partition.minutes is None else partition.minutes
    lost = margin(config.slurm)
    if resources.runtime and resources.runtime + lost > limit:
        raise UserError(
            f"{place}.runtime",
            f"{resources.runtime} min",
            f"at most {max(0, limit - lost):.0f} min: partition {partition.name} allows {limit:.0f}, of which starting "
            f"and stopping (`slurm.grace`) may take {lost}",
            "lower it (a cell that is stopped goes on from its checkpoint), or choose another `slurm.partition`",
        )
    if resources.cpus > partition.cpus:
        raise UserError(
            f"{place}.cpus",
            resources.cpus,
            f"at most {partition.cpus}, what a node of {partition.name} has",
            "lower it",
        )
    layout = resources.layout(place)
    if layout:
        for key, asked, there in (
            ("gpus_per_node", layout.gpus_per_node, partition.gpus),
            ("nodes", layout.least_nodes, partition.nodes),
        ):
            if asked > there:
                what = "what a node has" if key == "gpus_per_node" else "all that there are"
                raise UserError(
                    f"{place}.{key}",
                    asked,
                    f"at most {there}, {what} in partition {partition.name}",
                    "lower it, or choose another `slurm.partition`",
                )
        if layout.gpus_per_node * resources.cpus > partition.cpus:
            raise UserError(
                f"{place}.cpus",
                resources.cpus,
                f"at most {partition.cpus // layout.gpus_per_node} for each of {layout.gpus_per_node} ranks: a node of "
                f"{partition.name} has {partition.cpus}",
                "lower it",
            )
    if (resources.mem or 0) > partition.memory:
        raise UserError(
            f"{place}.mem",
            f"{resources.mem} MB",
            f"at most the {partition.memory} MB of a node of {partition.name}",
            "lower it",
        )


def _entry(config: Config, resources: Resources) -> str:
    position = next((number for number, entry in enumerate(config.resources) if entry is resources), None)
    return "resources" if position is None else f"resources[{position}]"
