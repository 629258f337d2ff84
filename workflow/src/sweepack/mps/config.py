"""The part of the configuration that is about MPS, and what the plan says about it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from sweepack.config_types import Model
from sweepack.errors import UserError
from sweepack.leases import WHOLE

# Clients that a device's server takes: 48 since Volta (newer drivers take a few more, older GPUs 16).
MOST_CLIENTS = 48


class Mps(Model):
    """How cells that share a GPU use NVIDIA's Multi-Process Service."""

    pinned_memory: bool = Field(
        default=True,
        description="Let MPS refuse a cell more GPU memory than its share, whatever library asks for it. The cap on "
        "torch's memory is lower and holds in any case.",
    )
    thread_percentage: int | None = Field(
        default=None,
        ge=1,
        le=100,
        description="Part of the GPU's threads, in percent, that one cell may use at a time. It can change the numbers "
        "that a cell computes, as another model of GPU can; without it each may use them all.",
        examples=[50],
    )


def _setting(value: Any) -> Any:
    if isinstance(value, bool):
        return Mps() if value else None
    if value is None or isinstance(value, dict | Mps):
        return value
    raise ValueError("true, false or a mapping of its settings|write `mps: true` or `mps: {thread_percentage: 50}`")


MpsSetting = Annotated[Mps | None, BeforeValidator(_setting)]


def describe(settings: Mps, sharing: int) -> str:
    """What the plan says where ``sharing`` of the cells to run have a part of a device."""
    if not sharing:
        return "not used: no cell shares a device"
    limits = ["memory limited to the share"] if settings.pinned_memory else []
    if settings.thread_percentage is not None:
        limits.append(f"{settings.thread_percentage} % of the threads each, which can change numbers")
    noun = "cell that shares" if sharing == 1 else "cells that share"
    return f"one daemon a device, for {sharing} {noun} one" + (f" ({', '.join(limits)})" if limits else "")


def check_shares(smallest: int) -> None:
    """Raise UserError when more cells fit on a device than its server takes; ``smallest`` share in thousandths."""
    if WHOLE // smallest > MOST_CLIENTS:
        raise UserError(
            "mps",
            True,
            f"at most {MOST_CLIENTS} cells on a device; {WHOLE // smallest} cells of `gpu: {smallest / WHOLE:g}` fit",
            f"give each cell `gpu: {(WHOLE // MOST_CLIENTS + 1) / WHOLE:g}` or more, or set `mps: false`",
        )
