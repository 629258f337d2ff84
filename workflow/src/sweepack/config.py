"""The configuration: its models, reading it, and errors that say what to type instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from sweepack.config_types import Megabytes, Minutes, Model
from sweepack.ddp.config import DERIVED, Ddp, Nodes
from sweepack.ddp.layout import Layout, layout_of
from sweepack.errors import UserError, Verbatim, did_you_mean
from sweepack.leases import WHOLE
from sweepack.mps.config import Mps, MpsSetting
from sweepack.sizing.config import BatchSetting, Memory, Retry, ShareSetting, Sizing
from sweepack.slurm.config import PackSettings, Request, Slurm

M = TypeVar("M", bound=BaseModel)


def _cells_per_job(value: Any) -> Any:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if value == "auto" or (whole and value >= 1):
        return value
    raise ValueError("`auto` or a whole number, 1 or more|write `auto`, `1` for a job a cell, or for example `100`")


class Resources(Model):
    """What the cells that match get. The first matching entry of the list wins."""

    match: dict[str, Any] = Field(
        default={},
        description="Parameters that a cell must have for this entry: a value, a list of values of which one must "
        'fit, or a comparison such as `">= 512"`. Without `match` the entry fits every cell.',
        examples=[{"model": "cnn"}],
    )
    nodes: Nodes | None = Field(
        default=None,
        description="Nodes of a cell that runs on several devices, 1 unless given; `2:4` for as many as there are, "
        "which torchrun can lose and go on.",
        examples=[2],
    )
    gpus_per_node: int | None = Field(
        default=None,
        ge=1,
        description="Devices on each node for a cell on several devices, with a rank (a process) on each. All else "
        "follows: tasks a node, the Trainer's `devices`, the world size. `cpus` is then that of a rank, `mem` that of "
        "a node. Such a cell shares no device.",
        examples=[4],
    )
    ddp: Ddp = Field(default=Ddp(), description="More about cells with `gpus_per_node`.")
    gpu: ShareSetting = Field(
        default=WHOLE,
        description="Share of one device, above 0 and up to 1: `0.25` lets four such cells run on it. "
        "`auto`: as many as the memory measured of such a cell allows.",
        examples=[0.25],
    )
    batch: BatchSetting = Field(
        default=None,
        description="What `cell.batch` is in the task, None unless given: a number, or `auto` for one measured "
        "to fit the cell's share of the device. It is recorded with each cell and changes no ids.",
        examples=["auto"],
    )
    cpus: int = Field(
        default=1,
        ge=1,
        description="CPU threads of the cell. They are pinned, since their number changes the last bits of results.",
    )
    mem: Megabytes | None = Field(
        default=None,
        description="Main memory, `2GB` or a number of megabytes. On a CPU each process of the cell is held to it (see "
        "`memory.limit_main`), the table's `peak_rss_gib` says what it took.",
        examples=["2GB"],
    )
    runtime: Minutes | None = Field(
        default=None,
        description="Upper bound of the run time, `30m`, `2h` or a number of minutes. The longest start first, and the "
        "plan tells how long the sweep will take; on this machine nothing is stopped for exceeding it.",
        examples=["30m"],
    )
    slurm: Request | None = Field(
        default=None,
        description="On Slurm: what these cells' jobs ask for, over the `slurm` of the whole sweep.",
        examples=[{"partition": "a100"}],
    )

    def layout(self, key: str = "resources") -> Layout | None:
        """How the cells lie on several devices, None where they have one. Raises UserError, naming ``key``."""
        share = self.gpu if "gpu" in self.model_fields_set and self.gpu != "auto" else None
        return layout_of(self.nodes, self.gpus_per_node, self.ddp.model_dump(exclude_unset=True), share, key)


class Sample(Model):
    """Keep a random part of the cells."""

    count: int = Field(ge=1, description="How many cells to keep. A larger count keeps the cells of a smaller one.")
    seed: int = Field(default=0, description="Seed of the choice.")


class Command(Model):
    """Any program as a task."""

    command: list[str] = Field(
        min_length=1,
        description="Program and arguments, run without a shell. `{params}`, `{metrics}` and `{dir}` are replaced by "
        "the paths of the parameters' JSON file, of the JSON file that the program must write its metrics to, and of "
        "the cell's directory.",
        examples=[["python", "examples/program.py", "{params}", "{metrics}"]],
    )


class Objective(Model):
    """Which metric is the one to look at."""

    metric: str = Field(description="Name of a metric that the task returns.")
    mode: Literal["max", "min"] = Field(description="Whether more or less of it is better.")


class Sweep(Model):
    """The cells: which task, with which parameters."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$",
        description="Name of the sweep: its results are written to `<results>/<name>`.",
    )
    task: str | Command = Field(
        description="What a cell runs: `path/to/file.py:function`, `module:function`, or `{command: [program, …]}`."
    )
    params: dict[str, Any] = Field(
        default={},
        description="Fixed parameters, name → value. A dotted name (`optim.lr`) sets a nested key. A list is a value.",
    )
    axes: dict[str, Any] = Field(
        default={},
        description="Parameters that vary, name → values; their product makes the cells, the last axis varying "
        "fastest. Values are a list, `{range: [start, stop, step]}` (as in Python), `{linspace: [start, stop, count]}` "
        "(both ends included), `{logspace: [start, stop, count]}` (exponents of ten, as in NumPy) or "
        "`{geomspace: [start, stop, count]}` (the end points themselves).",
    )
    zip: list[dict[str, Any]] = Field(
        default=[],
        description="Groups of axes of equal length that vary together; each group counts as one more axis, behind "
        "`axes`.",
    )
    include: list[dict[str, Any]] = Field(
        default=[],
        description="Single cells to add at the end: each entry's parameters over `params` and the task's defaults.",
    )
    exclude: list[dict[str, Any]] = Field(
        default=[], description="Cells of the product to leave out, matched as `resources[].match` does."
    )
    sample: Sample | None = Field(default=None, description="Keep a random part of the product.")


class Config(Model):
    """The whole configuration."""

    sweep: Sweep = Field(description="The cells.")
    resources: list[Resources] = Field(
        default=[Resources()],
        description="What cells get, first match wins; a cell that nothing matches gets `gpu: 1, cpus: 1`.",
    )
    objective: Objective | None = Field(
        default=None, description="The metric that `sweepack best` and the report rank by."
    )
    on_error: Literal["raise", "nan"] = Field(
        default="raise",
        description="What a cell's own error does after its last attempt. `raise`: the run fails. `nan`: the cell "
        "becomes a row without metrics, the run goes on and succeeds, and the next run tries the cell again. Cells "
        "that were interrupted (signals, time limits, a lost machine) always stay pending.",
    )
    placement: Literal["packed", "round_robin"] = Field(
        default="packed",
        description="`packed`: the fullest device that still has room. `round_robin`: device number = cell index "
        "modulo devices.",
    )
    jobs_per_gpu: int | None = Field(
        default=None,
        ge=1,
        le=WHOLE,
        description="Only with `placement: round_robin`: cells at once on a device, instead of the shares.",
    )
    start: Literal["auto", "fresh"] = Field(
        default="auto",
        description="How a cell's process starts. `auto`: forked, in milliseconds, from one that has imported the "
        "task; where that is unsafe (the import starts threads or uses a GPU, or the task's module says "
        '`START = "fresh"`) it starts fresh, and its log says why. `fresh`: always a new process.',
    )
    cells_per_job: Annotated[Literal["auto"] | int, BeforeValidator(_cells_per_job)] = Field(
        default="auto",
        description="How many cells one Snakemake job runs. With more than one, jobs are packs, which run their cells "
        "side by side as shares and cores allow; a cell keeps its own process, result, log and resume, and the "
        "setting may change half-way. `auto`: a job a cell, and packs where 256 or more cells that share a device are "
        "to run, since Snakemake's own work for a job would then cost more than the cells.",
        examples=[100],
    )
    devices: int | None = Field(
        default=None,
        ge=1,
        description="Use this many of the visible devices, the first ones. It is an error if there are fewer.",
    )
    mps: MpsSetting = Field(
        default=None,
        description="Let cells that share a GPU use it through NVIDIA's Multi-Process Service, which runs their work "
        "side by side where it would take turns: `true`, or a mapping of the settings below. A fatal GPU fault of one "
        "cell then strikes all on the device; those are run again outside MPS. It changes neither ids nor, with the "
        "defaults, numbers, and may be switched half-way.",
        examples=[True],
    )
    memory: Memory = Field(default=Memory(), description="More about the cap on a cell's memory.")
    sizing: Sizing = Field(default=Sizing(), description="How what is `auto` under `resources` is measured.")
    retry: Retry = Field(default=Retry(), description="What is tried again by itself, and how.")
    report: bool = Field(
        default=True, description="Write `report.html` beside the table. Drawing it takes a few seconds."
    )
    slurm: Slurm = Field(
        default=Slurm(), description="How cells run on a Slurm cluster (`snakemake --profile profiles/slurm`)."
    )
    results: str = Field(default="results", pattern=r"^[^{}\n\x00]+$", description="Folder of all results.")
    confirm_above: int = Field(
        default=10_000, ge=1, description="Refuse sweeps of more cells than this, in case an axis got out of hand."
    )
    lease_timeout: Minutes = Field(
        default=24 * 60,
        description="How long a cell may wait for its share of a device that others hold, `24h` or minutes.",
    )
    import_timeout: float = Field(
        default=120.0, gt=0, le=86_400, description="Seconds that importing the task may take when the plan is made."
    )


def validate(data: Any, source: str) -> Config:
    """The configuration in ``data``, as read from ``source``. Raises UserError, one for each mistake at most.

    Of several mistakes the first is told: mending one often mends the others.
    """
    if not isinstance(data, Mapping):
        raise UserError(source, data, "a mapping with the key `sweep`", "start the file with `sweep:`")
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        raise _readable(error, source) from None
    for position, entry in enumerate(config.resources):
        if entry.layout(f"resources[{position}]") and not isinstance(config.sweep.task, str):
            raise UserError(
                f"resources[{position}].gpus_per_node",
                entry.gpus_per_node,
                "a task in Python: the ranks of a cell on several devices are started from it",
                "write `task: file.py:function`, or remove `gpus_per_node`",
            )
    return config


def validate_model(model: type[M], data: Mapping[str, Any], prefix: str) -> M:
    """A ``model`` of ``data`` that came by options whose names begin with ``prefix``. Raises UserError."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        expected, _, fix = str(first.get("ctx", {}).get("error", _expectation(first))).partition("|")
        raise UserError(
            f"{prefix}{_dotted(list(first['loc']))}", first["input"], expected, fix or "change it"
        ) from None


def _readable(error: ValidationError, source: str) -> UserError:
    # Unknown keys first: a misspelt key is also reported as a missing one.
    details = sorted(error.errors(), key=lambda entry: entry["type"] != "extra_forbidden")
    first = details[0]
    location = list(first["loc"])
    if location[:2] == ["sweep", "task"]:
        del location[2:3]  # which of the two kinds of task pydantic was trying
    key = _dotted(location)
    value = first["input"]
    if first["type"] == "extra_forbidden":
        known = _known_keys(location[:-1])
        name = str(location[-1])
        if name in DERIVED and location[0] == "resources":
            return UserError(key, value, "no such key, since it follows from others", DERIVED[name])
        return UserError(key, value, "a key that exists", did_you_mean(name, known))
    if first["type"] == "missing":
        return UserError(key, None, "a value; the key is required", f"add `{location[-1]}:`. {_describe(location)}")
    if first["type"] == "invalid_key" or location[-1:] == ["[key]"]:
        name = str(value)
        holder = [part for part in location if part != "[key]"][:-1]
        return UserError(_dotted(holder) or source, Verbatim(name), "text as the name of a key", f'quote it: "{name}":')
    if first["type"] == "value_error":
        expected, _, fix = str(first["ctx"]["error"]).partition("|")
        return UserError(key, value, expected, fix)
    if location == ["sweep", "task"] or location[:3] == ["sweep", "task", "command"]:
        return UserError(
            "sweep.task",
            value,
            "`path/to/file.py:function`, `module:function`, or `{command: [program, argument, …]}`",
            "for example `task: examples/digits.py:train`",
        )
    return UserError(key, value, _expectation(first), f"change it. What the key means: {_describe(location)}")


def _expectation(detail: Any) -> str:
    kinds = {
        "dict_type": "a mapping (`name: value` lines)",
        "list_type": "a list (`- ` lines or `[a, b]`)",
        "int_type": "a whole number",
        "float_type": "a number",
        "string_type": "text",
        "bool_type": "true or false",
        "model_type": "a mapping (`name: value` lines)",
    }
    if detail["type"] == "string_pattern_mismatch":
        return {
            "name": "a name of letters, digits, `_` and `-`, at most 64 of them",
            "results": "a path without braces",
            "gpu_model": "a name of letters, digits, `_`, `.` and `-`",
        }[detail["loc"][-1]]
    bounds = {"greater_than_equal": "{ge} or more", "less_than_equal": "{le} or less", "greater_than": "more than {gt}"}
    if detail["type"] in bounds:
        return bounds[detail["type"]].format(**detail["ctx"])
    message = str(detail["msg"]).removeprefix("Input should be ").removeprefix("a valid ")
    return kinds.get(detail["type"], message[:1].lower() + message[1:])


def _dotted(location: list[Any]) -> str:
    text = ""
    for part in location:
        name = part if part != "" else '""'
        text += f"[{name}]" if isinstance(part, int) else f".{name}" if text else str(name)
    return text


def _model_at(location: list[Any]) -> type[BaseModel]:
    models: dict[tuple[str, ...], type[BaseModel]] = {
        (): Config,
        ("sweep",): Sweep,
        ("sweep", "sample"): Sample,
        ("sweep", "task"): Command,
        ("resources",): Resources,
        ("resources", "slurm"): Request,
        ("resources", "ddp"): Ddp,
        ("objective",): Objective,
        ("mps",): Mps,
        ("memory",): Memory,
        ("sizing",): Sizing,
        ("retry",): Retry,
        ("slurm",): Slurm,
        ("slurm", "pack"): PackSettings,
    }
    return models[tuple(part for part in location if isinstance(part, str))]


def _known_keys(location: list[Any]) -> list[str]:
    return list(_model_at(location).model_fields)


def _describe(location: list[Any]) -> str:
    """The sentence that the documentation has for the key."""
    names = [part for part in location if isinstance(part, str)]
    for depth in range(len(names), 0, -1):
        try:
            field = _model_at(names[: depth - 1]).model_fields[names[depth - 1]]
        except KeyError:
            continue
        return field.description or ""
    return "see config/README.md"
