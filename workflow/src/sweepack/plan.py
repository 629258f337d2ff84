"""The plan: which cells there are, how each stands, on which devices the rest will run, and what is wrong."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from sweepack.capacity import check_memory
from sweepack.config import Config
from sweepack.ddp.layout import Layout, check_machine
from sweepack.devices import Device, load_nvml, main_memory, visible_pool
from sweepack.errors import UserError, Verbatim
from sweepack.job import Launch
from sweepack.leases import WHOLE
from sweepack.loading import load_config
from sweepack.manifest import Manifest, ManifestCell
from sweepack.mps.config import check_shares
from sweepack.mps.daemon import require_usable
from sweepack.oom import grown
from sweepack.packs import Pack, cells_per_job, form
from sweepack.records import NEVER_RUN, Assessment, State, assess
from sweepack.sizing.jobs import cells_of, probe_jobs
from sweepack.sizing.sizes import Group, Sizes, batch_of, find_sizes
from sweepack.slurm.config import Request
from sweepack.slurm.plan import SlurmPlan, plan_jobs
from sweepack.sweep import Cell, Expansion, expand, layouts
from sweepack.task import Task

DEFAULT_CONFIG = Path("config/config.yaml")
CACHE = Path(".sweepack/imports")


@dataclass(frozen=True)
class Plan:
    """All that the rules and the reader need: nothing in it is computed twice, and making it writes nothing.

    ``probes`` are the jobs that must measure something before any cell can run.
    """

    config: Config
    task: Task
    expansion: Expansion
    directory: Path
    states: dict[str, Assessment]
    packs: list[Pack]
    configuration: list[str]
    slurm: SlurmPlan | None = None
    sizes: Sizes = field(default_factory=Sizes)
    probes: dict[str, list[Group]] = field(default_factory=dict)

    @property
    def cells(self) -> list[Cell]:
        return self.expansion.cells

    @cached_property
    def pending(self) -> list[Cell]:
        """The cells that will run."""
        return [cell for cell in self.cells if self.states[cell.id].state is not State.FINISHED]

    @cached_property
    def without_result(self) -> list[Cell]:
        """The cells that a job is to bring their result: those that will run, and finished ones that lack the file."""
        return [cell for cell in self.cells if not self.states[cell.id].handed_over]

    @property
    def singles(self) -> list[str]:
        """The cells that get a job of their own."""
        if self.slurm:
            return self.slurm.singles
        packed = {cell for pack in self.packs for cell in pack.cells}
        return [cell.id for cell in self.without_result if cell.id not in packed]

    @cached_property
    def layouts(self) -> dict[str, Layout]:
        """The cells that run on several devices, by id."""
        launcher = "srun" if self.slurm else "local"
        return {cell: layout.by(launcher) for cell, layout in layouts(self.cells).items()}

    def share(self, cell: Cell) -> int:
        """Thousandths of a device that ``cell`` takes."""
        return share_of(self.config, self.sizes, self.states, cell)

    def batch(self, cell: Cell) -> int | None:
        """What ``cell.batch`` is to be."""
        return batch_of(self.sizes, self.states[cell.id], cell)

    def threads(self, cell: Cell) -> int:
        """CPU threads that ``cell`` takes on this machine, those of all its ranks."""
        layout = self.layouts.get(cell.id)
        return cell.resources.cpus * (layout.gpus_per_node if layout else 1)

    def devices(self, cell: Cell, pool: Sequence[Device]) -> int:
        """How many devices of ``pool`` the cell takes."""
        layout = self.layouts.get(cell.id)
        return layout.devices_of(on_cpu=not pool or pool[0].kind == "cpu") if layout else 1

    def launch(self, cell: Cell) -> Launch:
        """How ``cell`` is to be started."""
        config = self.config
        return Launch(
            share=self.share(cell),
            threads=cell.resources.cpus,
            mem_mb=cell.resources.mem or 0,
            minutes=cell.resources.runtime,
            index=cell.index,
            devices=config.devices or 0,
            round_robin=config.placement == "round_robin",
            # The only cell of its allocation would be the only one to use a host.
            start="fresh" if self.slurm and self.config.slurm.mode != "pack" else config.start,
            timeout=config.lease_timeout,
            rejected=self.states[cell.id].rejected,
            mps=config.mps.model_dump() if config.mps else None,
            batch=self.batch(cell),
            memory=config.memory.model_dump(),
            # Of a shard of a GPU there is no more to be had in the job that was granted it; the next run asks for more.
            retry_oom=bool(config.retry.oom) and not (self.slurm and config.slurm.mode == "shard"),
            layout=self.layouts[cell.id].to_dict() if cell.id in self.layouts else None,
        )

    def manifest(self) -> Manifest:
        objective = self.config.objective
        return Manifest(
            sweep=self.config.sweep.name,
            task=self.task.reference,
            axes=self.expansion.varying,
            objective=objective.model_dump() if objective else None,
            cells=[ManifestCell(cell.id, cell.slug, cell.params) for cell in self.cells],
            configuration=self.configuration,
        )


def make_plan(
    root: Path, workflow: Path, config_files: Sequence[Path], overrides: Sequence[str], site: Request | None = None
) -> Plan:
    """Read the configuration seen from ``root`` and assess every cell; ``workflow`` is the folder of the Snakefile.

    ``site``: the cells will run on a Slurm cluster, which is asked what it has, and this is what its profile asks for.
    Raises UserError.
    """
    config, task = load_config(root / DEFAULT_CONFIG, config_files, overrides, root)
    if config.jobs_per_gpu and config.placement != "round_robin":
        raise UserError(
            "jobs_per_gpu",
            config.jobs_per_gpu,
            "`placement: round_robin` beside it; packing goes by each cell's `gpu:`",
            f"set `gpu: {1 / config.jobs_per_gpu:.3g}` under `resources`, or `placement: round_robin`",
        )
    if config.jobs_per_gpu and any(entry.layout() for entry in config.resources):
        raise UserError(
            "jobs_per_gpu", config.jobs_per_gpu, "no entry with `gpus_per_node`, whose cells share nothing", "remove it"
        )
    expansion = expand(config, task)
    directory = Path(config.results).expanduser() / config.sweep.name
    _require_writable(root / directory / "cells")
    states = _states(root / directory / "cells", expansion.cells)
    sizes = find_sizes(
        config, task.reference, task.digest(), expansion.cells, expansion.varying, states, root / directory, bool(site)
    )

    def share(cell: Cell) -> int:
        return share_of(config, sizes, states, cell)

    if config.mps:
        check_shares(min(share(cell) for cell in expansion.cells))
    if config.mps and site is not None and config.slurm.mode != "pack":
        raise UserError(
            "mps",
            True,
            f"`slurm.mode: pack`: with `{config.slurm.mode}` a job has one cell, and a daemon ends with its job",
            "set `slurm: {mode: pack}` or `mps: false`",
        )
    probes = probe_jobs(sizes, root / directory, bool(site))
    jobs = None
    if site is not None:
        jobs = plan_jobs(config, root / directory, expansion.cells, states, share, site, cells_of(probes))
    packs = jobs.packs if jobs else _packs(config, expansion.cells, states, share)
    chosen = [] if workflow == root else ["--snakefile", str(workflow / "Snakefile")]
    chosen += [*(["--configfile", *map(str, config_files)] if config_files else [])]
    chosen += ["--config", *overrides] if overrides else []
    return Plan(config, task, expansion, directory, states, packs, chosen, jobs, sizes, probes)


def _states(directory: Path, cells: Sequence[Cell]) -> dict[str, Assessment]:
    # A look at the folder spares two failing reads for each cell that has never run.
    known = set(os.listdir(directory)) if directory.exists() else set()  # noqa: PTH208 (names are all that is needed)
    return {cell.id: assess(directory / cell.id, cell.id) if cell.id in known else NEVER_RUN for cell in cells}


def _packs(
    config: Config, cells: Sequence[Cell], states: Mapping[str, Assessment], share: Callable[[Cell], int]
) -> list[Pack]:
    wide = layouts(cells)
    waiting = [cell for cell in cells if not states[cell.id].handed_over and cell.id not in wide]
    to_run = [cell for cell in waiting if states[cell.id].state is not State.FINISHED]
    size = cells_per_job(config.cells_per_job, [share(cell) for cell in to_run])
    return form([cell.id for cell in waiting], states, size) if size > 1 else []


def share_of(config: Config, sizes: Sizes, states: Mapping[str, Assessment], cell: Cell) -> int:
    """Thousandths of a device that ``cell`` takes; of one that was not measured yet, a whole device's."""
    found = states[cell.id]
    if config.jobs_per_gpu:
        share = WHOLE // config.jobs_per_gpu
    elif isinstance(cell.resources.gpu, int):
        share = cell.resources.gpu
    else:
        share = sizes.shares.get(cell.id) or (found.record.share if found.record else None) or WHOLE
    return grown(share, batch_of(sizes, found, cell), found.record) if config.retry.oom else share


def check_pool(plan: Plan, environ: Mapping[str, str]) -> list[Device]:
    """The devices that the plan may use; raises UserError when this machine has less than it asks for."""
    memory = main_memory()
    for position, entry in enumerate(plan.config.resources):
        if entry.mem is not None and entry.mem > memory:
            raise UserError(
                f"resources[{position}].mem", f"{entry.mem} MB", f"at most the {memory} MB of this machine", "lower it"
            )
    pool = visible_pool(environ, load_nvml())
    wanted = plan.config.devices
    if wanted is not None and wanted > len(pool):
        raise UserError(
            "devices",
            wanted,
            f"at most {len(pool)}, the number of visible devices ({', '.join(device.label for device in pool)})",
            "lower it, remove it to use what there is, or make more visible (CUDA_VISIBLE_DEVICES)",
        )
    if any(plan.share(cell) < WHOLE for cell in plan.pending) and plan.config.mps:
        require_usable(pool[:wanted], environ)
    check_machine(plan.config.resources, pool[:wanted])
    check_memory(plan.config, plan.pending, plan.share, pool[:wanted], environ)
    return pool[:wanted]


def _require_writable(directory: Path) -> None:
    existing = next(folder for folder in (directory, *directory.parents) if folder.exists())
    try:
        # Tried and not asked for: root, read-only mounts and odd file systems all answer such questions wrongly.
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        trouble = f"{existing} is a file" if existing.is_file() else f"{existing}: {error.strerror}"
        raise UserError(
            "results",
            Verbatim(f"{directory} ({trouble})"),
            "a folder that can be written to",
            "set `results:` to another",
        ) from None
