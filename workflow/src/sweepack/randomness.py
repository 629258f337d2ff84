"""Seeds of a cell, and the state of its random number generators, so that a resumed run draws as an unbroken one."""

from __future__ import annotations

import importlib.util
import random
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def seed_all(seed: int) -> None:
    """Seed Python, NumPy and torch, the latter two as soon as they are imported if that is yet to come."""
    random.seed(seed)
    for name, sow in _SEEDERS.items():
        if name in sys.modules:
            sow(seed)
    sys.meta_path.insert(0, _SeedOnImport(seed))


def _seed_numpy(seed: int) -> None:
    import numpy

    numpy.random.seed(seed % 2**32)


def _seed_torch(seed: int) -> None:
    import torch

    torch.manual_seed(seed % 2**64)


_SEEDERS = {"numpy": _seed_numpy, "torch": _seed_torch}


class _SeedOnImport(MetaPathFinder):
    """Seeds NumPy and torch when a task imports them inside its function."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._searching = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in _SEEDERS or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def and_seed(module: ModuleType) -> None:
                execute(module)
                _SEEDERS[name](self._seed)

            spec.loader.exec_module = and_seed  # type: ignore[method-assign]
        return spec


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
