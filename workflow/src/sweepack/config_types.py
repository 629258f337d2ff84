"""What several models of the configuration use: their base, and how amounts are written."""

from __future__ import annotations

import math
from typing import Annotated, Any

import humanfriendly
from pydantic import BaseModel, BeforeValidator, ConfigDict

from sweepack.leases import WHOLE


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def share_of(value: Any) -> int:
    """Thousandths of a device from the fraction in the config."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("a number above 0 and up to 1|write it unquoted: `gpu: 0.25`")
    if not value <= 1:
        raise ValueError(
            "a number above 0 and up to 1|a cell gets a share of one device: `gpu: 0.25` packs four, `gpu: 1` gives "
            "it a device of its own. For several devices a cell write `gpus_per_node: 2` instead"
        )
    milli = math.floor(max(value, 0) * WHOLE + 1e-6)
    if not milli >= 1:
        raise ValueError("a number above 0 and up to 1|the smallest share is 0.001: `gpu: 0.25` packs four cells")
    return milli


def _memory(value: Any) -> int:
    """Megabytes from ``2GB``, ``500MB`` or a plain number of megabytes."""
    try:
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        if isinstance(value, str) and _has_unit(value):
            size = humanfriendly.parse_size(value) / 1e6
            if size >= 1:
                return math.ceil(size)
    except (humanfriendly.InvalidSize, OverflowError):
        pass
    raise ValueError("main memory as text with a unit, or megabytes as a number|write `mem: 2GB` or `mem: 2000`")


def _minutes(value: Any) -> int:
    """Minutes from ``10m``, ``2h``, ``1d`` or a plain number of minutes."""
    try:
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        if isinstance(value, str) and _has_unit(value):
            seconds = humanfriendly.parse_timespan(value)
            if seconds > 0:
                return math.ceil(seconds / 60)
    except (humanfriendly.InvalidTimespan, OverflowError):
        pass
    raise ValueError(
        "a time as text with a unit, or minutes as a number|write `30m`, `2h`, `1d` or a number of minutes"
    )


def _has_unit(text: str) -> bool:
    """Without one, ``"30"`` would be 30 seconds where ``30`` is 30 minutes."""
    return text.rstrip()[-1:].isalpha()


Megabytes = Annotated[int, BeforeValidator(_memory)]
Minutes = Annotated[int, BeforeValidator(_minutes)]
