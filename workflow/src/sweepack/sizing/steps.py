"""In the process that is measured: count what its optimisers do, and say when enough has been done.

A task is not changed for it: torch calls whoever wants to know after each step of any optimiser, and before each
call of any module.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sweepack.late import when_imported

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

# The optimiser's state, which is there from the first step on, is there all through the second.
FULL = 2
# An optimiser that has not made its steps when another has made so many is not waited for.
PATIENCE = 16


class Steps:
    """Counts optimiser steps, from when torch is imported, and calls ``enough`` after the second of every optimiser.

    ``begin`` is called before the first module is called, with its arguments. ``made`` is the number of steps so far,
    ``rows`` the number of samples in the largest batch of a step: the first dimension of the first tensor that a module
    was given; None where that is not known.
    """

    def __init__(self, enough: Callable[[], object], begin: Callable[[tuple[Any, ...]], object] | None = None) -> None:
        self.made = 0
        self.rows: int | None = None
        self._enough = enough
        self._begin = begin
        self._process = os.getpid()
        self._counts: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._waiting: Any = None
        when_imported("torch", self._attach)

    def _attach(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(self._stepped)
        self._await_call()

    def _await_call(self) -> None:
        """Notice the next call of a module. Only the first of a step: code that torch compiles then sees no hook."""
        from torch.nn.modules.module import register_module_forward_pre_hook

        if self._waiting is None:
            self._waiting = register_module_forward_pre_hook(self._called)

    def _called(self, module: Module, arguments: tuple[Any, ...]) -> None:
        import torch

        # Not what is only looked at: a validation before the training may have larger batches.
        if not torch.is_grad_enabled() or os.getpid() != self._process:
            return
        if self._begin:
            begin, self._begin = self._begin, None
            begin(arguments)
        first = next((value for value in arguments if isinstance(value, torch.Tensor) and value.ndim), None)
        if first is not None:
            self.rows = max(self.rows or 0, first.shape[0])
            self._waiting.remove()
            self._waiting = None

    def _stepped(self, optimizer: Optimizer, _arguments: Any, _options: Any) -> None:
        if os.getpid() != self._process:
            return
        if self._begin:
            begin, self._begin = self._begin, None
            begin(())
        self.made += 1
        self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
        if self._counts[optimizer] >= FULL and (self._counts[optimizer] >= PATIENCE or self._all_full()):
            self._enough()
        self._await_call()

    def _all_full(self) -> bool:
        """Whether all that any optimiser is there for has been stepped often enough.

        By what they train: Lightning wraps an optimiser in another, which makes no steps itself.
        """
        full = {_trained(optimizer) for optimizer, count in self._counts.items() if count >= FULL}
        return all(_trained(optimizer) in full for optimizer in optimizers())


def _trained(optimizer: Optimizer) -> int | None:
    return next((id(parameter) for group in optimizer.param_groups for parameter in group["params"]), None)


def optimizers() -> list[Optimizer]:
    """All of torch's optimisers in this process."""
    from torch.optim import Optimizer

    return alive(Optimizer)


def alive(kind: type[Any]) -> list[Any]:
    """The objects of that class which the garbage collector knows."""
    # By `type`, since asking an object for its class runs code of lazy proxies.
    return [item for item in gc.get_objects() if issubclass(type(item), kind)]
