"""Seeds of a cell, and the state of its random number generators, so that a resumed run draws as an unbroken one."""

from __future__ import annotations

import random
import sys
from typing import Any

from sweepack.late import when_imported


def seed_all(seed: int) -> None:
    """Seed Python, NumPy and torch, the latter two as soon as they are imported if that is yet to come."""
    random.seed(seed)
    # Also when a task imports them inside its function.
    when_imported("numpy", lambda: _seed_numpy(seed))
    when_imported("torch", lambda: _seed_torch(seed))


def _seed_numpy(seed: int) -> None:
    import numpy

    numpy.random.seed(seed % 2**32)


def _seed_torch(seed: int) -> None:
    import torch

    torch.manual_seed(seed % 2**64)


def capture() -> dict[str, Any]:
    """The state of every generator, in tensors and plain containers (``torch.load(weights_only=True)`` reads it)."""
    import torch

    state: dict[str, Any] = {"python": list(random.getstate()[1]), "torch": torch.get_rng_state()}
    state["python_gauss"] = random.getstate()[2]
    if "numpy" in sys.modules:
        import numpy

        _, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
        state["numpy"] = [[int(key) for key in keys], int(position), int(has_gauss), float(cached)]
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: dict[str, Any]) -> None:
    """Put every generator back to where ``capture`` found it."""
    import torch

    random.setstate((3, tuple(state["python"]), state["python_gauss"]))
    torch.set_rng_state(state["torch"].cpu())
    if "numpy" in state:
        import numpy

        keys, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state(("MT19937", numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
