"""Do something with a module as soon as it is imported, be that only later."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def when_imported(name: str, act: Callable[[], object]) -> None:
    """Call ``act`` once the module ``name`` has been imported: at once, if it has been already."""
    if name in sys.modules:
        act()
        return
    sys.meta_path.insert(0, _Waiting(name, act))


class _Waiting(MetaPathFinder):
    """Finds nothing itself; what the others find, it has followed by the act."""

    def __init__(self, name: str, act: Callable[[], object]) -> None:
        self._name = name
        self._act = act
        self._searching = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self._name or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def and_act(module: ModuleType) -> None:
                execute(module)
                self._act()

            spec.loader.exec_module = and_act  # type: ignore[method-assign]
        return spec
