"""The options of cells on several devices, as the configuration has them."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from sweepack.config_types import Model
from sweepack.ddp.layout import node_range

# What follows from the layout, under the names that it has elsewhere.
DERIVED = {
    **dict.fromkeys(("tasks", "ntasks", "world_size"), "it is nodes × gpus_per_node"),
    **dict.fromkeys(("tasks_per_node", "ntasks_per_node", "devices"), "it is gpus_per_node"),
    "num_nodes": "write `nodes`",
    "cpus_per_task": "write `cpus`: for each rank",
    "launcher": "write `ddp: {launcher: …}`",
    "strategy": "write `ddp: {strategy: …}`",
}


def _nodes(value: Any) -> int | str:
    # YAML 1.1 would read 1:2 as 62, ours reads text.
    node_range(value)
    assert isinstance(value, int | str)
    return value


def _seconds(value: Any) -> int:
    if isinstance(value, str) and (found := re.fullmatch(r"(\d+)\s*(s|m)", value.strip())):
        value = int(found[1]) * (60 if found[2] == "m" else 1)
    if isinstance(value, int) and not isinstance(value, bool) and 5 <= value <= 3600:
        return value
    raise ValueError("a time from 5 s to 60 m|write `120s`, `2m` or a number of seconds")


Nodes = Annotated[int | str, BeforeValidator(_nodes)]


class Ddp(Model):
    """More about cells with `gpus_per_node`."""

    launcher: Literal["auto", "torchrun"] = Field(
        default="auto",
        description="Who starts the ranks. `auto`: srun on Slurm, and on this machine sweepack itself; with a range of "
        "`nodes`, torchrun. `torchrun`: it, with c10d rendezvous; one agent a node.",
    )
    strategy: Literal["ddp", "ddp_find_unused_parameters_true", "fsdp"] = Field(
        default="ddp",
        description="Lightning's strategy. `fsdp` shards parameters and optimizer over the ranks (GPUs only); its "
        "checkpoints are whole ones, as those of `ddp`.",
    )
    restarts: int = Field(
        default=0,
        ge=0,
        le=1000,
        description="Only with torchrun: how often the ranks are started anew, within one job, after one has failed or "
        "a node was lost. They go on from the last checkpoint, with a range of `nodes` on those that are left.",
    )
    start_seconds: Annotated[int, BeforeValidator(_seconds)] = Field(
        default=120,
        description="How long a rank may take to appear, before torch is imported; then the cell fails and says which "
        "one is missing.",
    )
