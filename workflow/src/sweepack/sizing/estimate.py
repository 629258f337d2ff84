"""Run a task on tensors that have a shape and no content, and follow how much memory they would take on a GPU.

torch's FakeTensorMode does the first, its MemTracker the second. What the task does with real data stays real: arrays,
data sets, loaders and samplers are the host's, as they are beside a GPU; a tensor becomes fake (and counts) when it
is moved to the cell's device or made by torch. What torch makes before the first module is called counts only if it is
moved too, or belongs to a module or an optimiser: until then it is the host's data.

Where a task reads a number out of a fake tensor it gets a placeholder. Optimisers are ``foreach``, as they are by
default on a GPU, and so is what dropout keeps. Not known here are the workspaces of libraries. On a CPU, ratios to the
real peak were 1.00 for layers of MLPs and transformers (with checkpointing too), 0.73 to 1.00 for convolutions, 0.26
for an LSTM; where gradients accumulate, the largest counts once more. Under autocast it is a CPU's list of operations
that counts, which keeps a few more in low precision. torch's allocator reserves more than tensors take, at least 22
MiB.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.weak import WeakIdKeyDictionary

from sweepack.sizing.steps import alive, optimizers

SOURCE = "FakeTensorMode, MemTracker"
_aten = torch.ops.aten
# Numbers that nobody computes, by which a program decides: most ask whether all is well.
_UNLIKELY = {_aten.any, _aten.isnan, _aten.isinf}
_LIKELY = {_aten.all, _aten.isfinite}
# Made by the host, for the host: indices, by which it goes through the data.
_ORDERS = {_aten.randperm}


class DeviceMemory(MemTracker):
    """The memory of a GPU, as if all that is tracked were there. ``peak`` is in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self._begun = False
        self._host: WeakIdKeyDictionary = WeakIdKeyDictionary()

    @property
    def peak(self) -> int:
        return self._peak_mem.get(torch.device("cpu"), 0)

    def begin(self, arguments: tuple[Any, ...] = ()) -> None:
        """From now on count all that is made. What there is already: modules, optimisers and ``arguments``."""
        if self._begun:
            return
        self._begun = True
        self.track_external(*alive(torch.nn.Module), *optimizers())
        for optimizer in optimizers():
            self.track_external(*[tensor for group in optimizer.param_groups for tensor in group["params"]])
        # A whole tensor, not a part of the data.
        self.track_external(*[leaf for leaf in tree_leaves(arguments) if _is_fake(leaf) and _fills(leaf)])

    def place(self, tensor: torch.Tensor) -> None:
        """The tensor is on the device from now on."""
        self._host.pop(tensor.untyped_storage(), None)
        self.track_external(tensor)

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage() in self._WINFO

    def _track(self, reftype: Any, t: torch.Tensor) -> None:
        storage = t.untyped_storage()
        if storage in self._WINFO or (self._begun and storage not in self._host):
            super()._track(reftype, t)
        else:
            self._host[storage] = True

    # What belongs to which module is of no interest here, and a module may be called as often as it likes.
    def _pre_fw_hook(self, module: Any, inputs: Any) -> None: ...
    def _post_fw_hook(self, module: Any, inputs: Any, outputs: Any) -> None: ...
    def _pre_bw_hook(self, module: Any, args: Any) -> None: ...
    def _post_bw_hook(self, module: Any, args: Any) -> None: ...


class _Operations(TorchDispatchMode):
    """Does for real what concerns real tensors alone, and gives placeholders for numbers of fake ones."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = getattr(func, "overloadpacket", None)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if packet in _ORDERS or (tensors and not any(map(_is_fake, tensors))):
            with _disable_current_modes():
                return func(*args, **kwargs)
        if packet is _aten._local_scalar_dense:
            return _placeholder(args[0])
        result = func(*args, **kwargs)
        if packet in _UNLIKELY or packet in _LIKELY:
            result.likely = packet in _LIKELY
        return result


class _Functions(TorchFunctionMode):
    """Follows what is moved to the device, and reads fake tensors out into arrays and text."""

    def __init__(self, fake: FakeTensorMode, memory: DeviceMemory) -> None:
        super().__init__()
        self._fake = fake
        self._memory = memory

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.to and _names_device(args[1:], kwargs):
            return func(self._moved(args[0]), *args[1:], **kwargs)
        if func is torch.Tensor.__deepcopy__:
            return _copy(*args)
        if args and _is_fake(args[0]):
            if func in (torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.tolist):
                with _disable_current_modes():
                    content = torch.full(args[0].shape, _placeholder(args[0]), dtype=args[0].dtype)
                return func(content, *args[1:], **kwargs)
            if func is torch.Tensor.__format__ and args[0].ndim == 0:
                return format(args[0].item(), args[1])
        result = func(*args, **kwargs)
        if kwargs.get("device") is not None and _is_fake(result):
            self._memory.place(result)
        return result

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        if _is_fake(tensor) and self._memory.holds(tensor):
            return tensor
        if not _is_fake(tensor):
            tensor = self._fake.from_tensor(tensor)
        if not _fills(tensor):
            tensor = tensor.clone()
        self._memory.place(tensor)
        return tensor


@contextlib.contextmanager
def estimating() -> Iterator[DeviceMemory]:
    """Within the block torch computes nothing, and the memory that is yielded follows what it would take.

    It changes torch for the whole process, which is to be used for nothing else.
    """
    memory = DeviceMemory()
    _adapt_torch()
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, memory, _Operations(), _Functions(fake, memory):
        yield memory


def explain(error: BaseException) -> str:
    """Why a task could not be run without content, for people."""
    if isinstance(error, DynamicOutputShapeException):
        return f"{error.func} makes a tensor whose shape depends on what is computed"
    kind, _, text = f"{type(error).__name__}: {error}".strip().partition("\n")
    return kind.removesuffix(":") if not text else f"{kind} …"


def _adapt_torch() -> None:
    """Let torch choose as on a GPU, start no workers and write no checkpoints."""
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.optim.") and hasattr(module, "_default_to_fused_or_foreach"):
            setattr(module, "_default_to_fused_or_foreach", lambda *_, **__: (False, True))  # noqa: B010
    # A module that is moved swaps its tensors, which fake ones cannot.
    torch.utils.swap_tensors = lambda one, other: setattr(one, "data", other)
    torch.save = _write_nothing
    drop_as_gpus_do()

    iterate, proceed, fetch = DataLoader.__iter__, _BaseDataLoaderIter.__next__, _MapDatasetFetcher.fetch

    def __iter__(self: Any) -> Any:
        self.num_workers, self.timeout, self.pin_memory = 0, 0, False
        with _disable_current_modes():
            return iterate(self)

    def __next__(self: Any) -> Any:
        with _disable_current_modes():
            return proceed(self)

    def fetch_alike(self: Any, index: Any) -> Any:
        if self.auto_collation and any(map(_is_fake, tree_leaves(first := self.dataset[index[0]]))):
            return self.collate_fn([first] * len(index))  # a thousand fake samples take a second
        return fetch(self, index)

    DataLoader.__iter__ = __iter__  # type: ignore[method-assign]
    _BaseDataLoaderIter.__next__ = __next__  # type: ignore[method-assign]
    _MapDatasetFetcher.fetch = fetch_alike  # type: ignore[method-assign]


def drop_as_gpus_do() -> None:
    """Let dropout keep what it keeps on a GPU, a mask of a byte an element, and attention with dropout no weights.

    A CPU keeps four bytes an element, and has no fused attention with dropout. For the whole process.
    """
    dropout, attention = functional.dropout, functional.scaled_dot_product_attention

    def masked(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        if training and 0 < p < 1:
            return torch.native_dropout(input, p, True)[0]
        return dropout(input, p, training, inplace)

    def fused(*args: Any, **kwargs: Any) -> torch.Tensor:
        given = inspect.signature(_attention).bind(*args, **kwargs)
        given.arguments["dropout_p"] = 0.0
        return attention(*given.args, **given.kwargs)

    functional.dropout = masked
    functional.scaled_dot_product_attention = fused


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> None:
    """The parameters of torch's own, which tells none."""


def _write_nothing(obj: object, f: Any, *_: object, **__: object) -> None:
    if isinstance(f, str | Path):
        Path(f).touch()


def _is_fake(value: object) -> bool:
    return isinstance(value, FakeTensor)


def _fills(tensor: torch.Tensor) -> bool:
    """Whether there is no more to its storage than the tensor itself."""
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def _copy(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """A deep copy. torch would copy a real one past all operations, and of a fake one the whole fake mode."""
    if id(tensor) in memo:
        return memo[id(tensor)]
    if not _is_fake(tensor):
        with _disable_current_modes():
            return tensor.__deepcopy__(memo)
    twin = tensor.detach().clone()
    twin = torch.nn.Parameter(twin) if isinstance(tensor, torch.nn.Parameter) else twin
    memo[id(tensor)] = twin.requires_grad_(tensor.requires_grad)
    if tensor.grad is not None:
        twin.grad = _copy(tensor.grad, memo)
    return twin


def _names_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return kwargs.get("device") is not None or any(isinstance(arg, str | torch.device | torch.Tensor) for arg in args)


def _placeholder(tensor: torch.Tensor) -> Any:
    if tensor.dtype is torch.bool:
        return getattr(tensor, "likely", True)
    return 1 if not tensor.is_floating_point() else 1.0
