"""The parts of the configuration that are about memory: caps, measured batch sizes and shares, what an OOM leads to."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from sweepack.config_types import Megabytes, Model, share_of


class Memory(Model):
    """The cap on a cell's memory, which follows from its share: (total - reserve - N * overhead) / N for N cells."""

    reserve: Megabytes = Field(
        default=300,
        description="Memory of a GPU that is left free for the device as a whole (driver, display): text with a unit, "
        "or megabytes.",
    )
    overhead: Megabytes = Field(
        default=600,
        description="GPU memory that a process takes beside what torch's allocator holds (the CUDA context, kernels): "
        "text with a unit, or megabytes.",
    )
    max_split_size_mb: int | None = Field(
        default=None,
        ge=20,
        description="torch's allocator: blocks larger than this are never split, which can lessen fragmentation. Not "
        "together with `expandable_segments`.",
        examples=[128],
    )
    expandable_segments: bool | None = Field(
        default=None,
        description="torch's allocator: let segments grow, which lessens fragmentation where sizes vary.",
        examples=[True],
    )
    limit_main: bool = Field(
        default=True,
        description="On a CPU: hold each process of a cell to the cell's `mem`, by the kernel (RLIMIT_DATA, which "
        "counts what is allocated, used or not; shared memory is left out). Asking for more is a MemoryError of that "
        "cell alone. Cells without `mem` have no limit, nor have cells on a GPU.",
    )

    @model_validator(mode="after")
    def _apart(self) -> Memory:
        if self.max_split_size_mb is not None and self.expandable_segments:
            raise ValueError(
                "`max_split_size_mb` or `expandable_segments`, since torch's allocator ignores the first beside the "
                "second|remove one of the two"
            )
        return self


class Sizing(Model):
    """How batch sizes and shares that are left to sweepack are found: `batch: auto`, `gpu: auto` under `resources`."""

    unpinned: Literal["refuse", "probe"] = Field(
        default="refuse",
        description="What a run does when a cell's size has not been measured yet. `refuse`: it says how to "
        "measure. `probe`: it measures and stops; the same command then makes a new plan.",
    )
    ignore: list[str] = Field(
        default=[],
        description="Parameters that change nothing about memory: cells that differ in these (or in `seed`) only share "
        "a measurement.",
        examples=[["lr"]],
    )
    largest_batch: int = Field(default=4096, ge=1, description="Measure no batch above this.")
    start: float = Field(
        default=0.8,
        gt=0,
        le=1,
        description="Part of the largest batch that was measured to fit which cells get: room for what comes "
        "later in a training.",
    )
    guess: float = Field(
        default=0.85,
        gt=0,
        le=1,
        description="The rule of thumb's F: part of a cell's memory that the first guess fills.",
    )
    margin: float = Field(
        default=0.1, ge=0, le=10, description="`gpu: auto`: memory added to the measured peak, as a part of it."
    )
    alone_above: float = Field(
        default=0.4,
        gt=0,
        le=1,
        description="`gpu: auto`: a cell that needs more than this part of a device gets one to itself. `1` packs "
        "whatever fits.",
    )
    device: str | None = Field(
        default=None,
        description="The model of GPU whose measurements count, as they name it; needed only where several were "
        "measured and the plan does not see the device (on Slurm).",
        examples=["NVIDIA A100-SXM4-80GB"],
    )
    timeout: float = Field(
        default=600.0, gt=0, le=86_400, description="Seconds that measuring one batch size may take."
    )


class Retry(Model):
    """What is tried again by itself, and how."""

    oom: Literal["next_share"] | None = Field(
        default=None,
        description="A cell that ran out of the memory of its share. `next_share`: it runs again at once with the next "
        "larger one (half as many cells on a device), up to a whole device; its batch stays the same. The table has "
        "the share that each cell ran with. Only for a GPU's memory: main memory (`mem`) does not come with a share.",
        examples=["next_share"],
    )


def _batch(value: Any) -> Any:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if value is None or value == "auto" or (whole and value >= 1):
        return value
    raise ValueError("`auto` or a whole number, 1 or more|write `batch: auto` to have it measured, or `batch: 64`")


def _share(value: Any) -> Any:
    return value if value == "auto" else share_of(value)


BatchSetting = Annotated[Literal["auto"] | int | None, BeforeValidator(_batch)]
ShareSetting = Annotated[Literal["auto"] | int, BeforeValidator(_share)]
