"""One value for a cell from those of its ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def merged(metrics: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The metrics of a cell from those of its ranks: rank 0's, but the mean of numbers that differ between ranks.

    Only floats: each rank has computed them on its part of the data. What is equal stays as it is, bit for bit.
    """
    result = dict(metrics[0])
    for name, value in result.items():
        values = [other.get(name) for other in metrics]
        if all(isinstance(each, float) for each in values) and any(each != value for each in values):
            result[name] = math.fsum(values) / len(values)  # type: ignore[arg-type]
    return result
