"""The devices that a run may use: what CUDA_VISIBLE_DEVICES allows, named so that a cell can be pinned to one.

Standard library at import, since a profile evaluates ``pool_limit``. CUDA hides devices without a word when the
variable is wrong; here each such case is an error.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal, Protocol

from sweepack.errors import UserError

CUDA = "CUDA_VISIBLE_DEVICES"
OURS = "SWEEPACK_DEVICES"
MIG = "MIG-"


@dataclass(frozen=True)
class Device:
    """One device of the pool. ``memory`` is the total in bytes.

    ``entry`` is what a process pinned to it gets as CUDA_VISIBLE_DEVICES (empty for ``cpu`` and ``sim``); ``key``
    names it in the node's leases: its UUID where that is known, else ``<SLURM_JOB_ID or host>:<index>``, since
    indices start again at 0 in each Slurm job. ``label`` is for people and counts as ``nvidia-smi`` does.
    """

    entry: str
    key: str
    kind: Literal["cuda", "cpu", "sim"]
    label: str
    model: str | None = None
    memory: int | None = None

    @property
    def is_instance(self) -> bool:
        """Whether it is a MIG instance, as far as its name tells."""
        return self.entry.startswith(MIG)


class Nvml(Protocol):
    """The part of ``pynvml`` that is used. Handles are opaque; a failing call raises ``NVMLError``."""

    @property
    def NVMLError(self) -> type[Exception]: ...
    @property
    def NVMLError_NotSupported(self) -> type[Exception]: ...

    def nvmlDeviceGetCount(self) -> int: ...
    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any: ...
    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any: ...
    def nvmlDeviceGetUUID(self, handle: Any) -> str: ...
    def nvmlDeviceGetName(self, handle: Any) -> str: ...
    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any: ...
    def nvmlDeviceGetMigMode(self, device: Any) -> list[int]: ...
    def nvmlDeviceGetMaxMigDeviceCount(self, device: Any) -> int: ...
    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: Any, index: int) -> Any: ...
    def nvmlDeviceGetGpuInstanceId(self, device: Any) -> int: ...
    def nvmlDeviceGetComputeInstanceId(self, device: Any) -> int: ...
    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any: ...
    def nvmlDeviceGetPowerUsage(self, handle: Any) -> int: ...
    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> list[Any]: ...
    def nvmlDeviceGetMPSComputeRunningProcesses(self, handle: Any) -> list[Any]: ...
    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: Any) -> list[Any]: ...


def load_nvml() -> Nvml | None:
    """NVML, initialised and answering, or None. Never raises."""
    try:
        import pynvml

        try:
            pynvml.nvmlDeviceGetCount()
        except pynvml.NVMLError:
            pynvml.nvmlInit()
            pynvml.nvmlDeviceGetCount()
    except Exception:
        return None
    return pynvml


def close_nvml() -> None:
    """Close what NVML has open, if it is loaded: a process forked from this one would find it broken."""
    if module := sys.modules.get("pynvml"):
        with contextlib.suppress(Exception):
            module.nvmlShutdown()


def processes_on(nvml: Nvml, handle: Any) -> dict[int, int | None]:
    """Bytes of GPU memory by process, of all kinds, None where it is not told; raises NVMLError."""
    listed = list(nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    for others in (nvml.nvmlDeviceGetMPSComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
        with contextlib.suppress(nvml.NVMLError):
            listed += others(handle)
    found: dict[int, int | None] = {}
    for process in listed:  # one that is in several lists has the same number in each
        found[process.pid] = process.usedGpuMemory if process.usedGpuMemory is not None else found.get(process.pid)
    return found


def visible_pool(environ: Mapping[str, str], nvml: Nvml | None) -> list[Device]:
    """The devices that ``environ`` allows, in its order; one ``cpu`` device when there is no GPU. Never empty.

    SWEEPACK_DEVICES is asked first (``cpu``, ``sim:N`` or a choice among what CUDA_VISIBLE_DEVICES shows), then
    CUDA_VISIBLE_DEVICES. Raises UserError for an entry that is unknown, ambiguous, malformed, given twice, of
    another kind than its neighbours, or that names a GPU which NVML cannot query.
    """
    ours = environ.get(OURS, "").strip()
    if simulated := re.fullmatch(r"sim:([1-9][0-9]{0,3})", ours):
        return [Device("", f"sim:{n}", "sim", f"sim:{n}") for n in range(int(simulated[1]))]
    slots = [] if ours == "cpu" else _visible(environ, nvml)
    if ours not in ("", "cpu"):
        slots = _select(OURS, ours, _split(ours), slots)
    return [slot.device for slot in slots if slot.device] or [Device("", "cpu", "cpu", "cpu")]


def pool_limit(environ: Mapping[str, str] = os.environ) -> int:
    """Thousandths of a device in the visible pool, for a profile. Never raises: 1000 when the pool is refused."""
    try:
        return 1000 * len(visible_pool(environ, load_nvml()))
    except Exception:
        return 1000


def main_memory(environ: Mapping[str, str] = os.environ) -> int:
    """Megabytes of main memory in this machine, or what a Slurm job was given of it."""
    given = int(environ.get("SLURM_MEM_PER_NODE") or 0)
    given = given or int(environ.get("SLURM_MEM_PER_CPU") or 0) * int(environ.get("SLURM_CPUS_ON_NODE") or 1)
    if given:
        return given
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 10**6


@dataclass(frozen=True)
class _Slot:
    """A device, or why it cannot be used, under all its full names. ``gpu`` is the name that its GPU is counted by."""

    gpu: str
    names: tuple[str, ...]
    device: Device | None
    mig: bool = False
    trouble: str = ""


_KINDS = {
    "an index": re.compile(r"[0-9]{1,99}"),
    "a GPU UUID": re.compile(r"GPU-[\w-]+", re.ASCII),
    "a MIG UUID": re.compile(r"MIG-[\w-]+(/\d+/\d+)?", re.ASCII),
}


def _kind(entry: str) -> str | None:
    return next((kind for kind, form in _KINDS.items() if form.fullmatch(entry)), None)


def _split(value: str) -> list[str]:
    return [entry.strip() for entry in value.split(",")]


def _visible(environ: Mapping[str, str], nvml: Nvml | None) -> list[_Slot]:
    """What CUDA_VISIBLE_DEVICES shows; when it is unset also the GPUs that cannot be used, with the reason."""
    value = environ.get(CUDA)
    slots = _inventory(nvml) if nvml else []
    if value is None:
        return slots
    # CUDA itself stops at -1, and scripts use that to hide the rest.
    entries = list(takewhile(lambda entry: entry != "-1", _split(value)))
    if not entries or entries in ([""], ["NoDevFiles"]):
        return []
    if nvml is None:
        slots = list(dict.fromkeys(_opaque(entry, environ) for entry in entries if _kind(entry)))
    elif _kind(entries[0]) == "an index":
        slots = _by_cuda_index(value, entries[0], environ, slots)
    return _select(CUDA, value, entries, slots)


def _inventory(nvml: Nvml) -> list[_Slot]:
    """Every GPU of the node in NVML's order, each in MIG mode replaced by its instances."""
    slots: list[_Slot] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        gpu, uuid = str(index), ""
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid, model = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
            memory = _memory(nvml, handle)
            if _mig_mode(nvml, handle):
                idle = _Slot(gpu, (gpu, uuid), None, mig=True, trouble="it is in MIG mode and has no instance")
                slots += _instances(nvml, handle, gpu, uuid) or [idle]
            else:
                device = Device(uuid, uuid, "cuda", f"cuda:{gpu} {model}", model, memory)
                slots.append(_Slot(gpu, (gpu, uuid), device))
        except nvml.NVMLError as error:
            slots.append(_Slot(gpu, (gpu, uuid), None, trouble=f"NVML cannot query it: {error}"))
    return slots


def _memory(nvml: Nvml, handle: Any) -> int | None:
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    except nvml.NVMLError_NotSupported:  # GPUs that share the memory of the host
        return None


def _mig_mode(nvml: Nvml, handle: Any) -> bool:
    try:
        return nvml.nvmlDeviceGetMigMode(handle)[0] == 1
    except nvml.NVMLError:  # a model or a driver without MIG
        return False


def _instances(nvml: Nvml, parent: Any, gpu: str, parent_uuid: str) -> list[_Slot]:
    slots = []
    for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(parent)):
        try:
            handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(parent, number)
            uuid, model = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
            ids = (nvml.nvmlDeviceGetGpuInstanceId(handle), nvml.nvmlDeviceGetComputeInstanceId(handle))
            memory = _memory(nvml, handle)
        except nvml.NVMLError:  # the numbering has holes
            continue
        profile = model.partition(" MIG ")[2] or "instance"
        device = Device(uuid, uuid, "cuda", f"MIG {profile} of cuda:{gpu}", model, memory)
        old_style = f"MIG-{parent_uuid}/{ids[0]}/{ids[1]}"
        slots.append(_Slot(gpu, (gpu, parent_uuid, uuid, old_style), device, mig=True))
    return slots


def _opaque(entry: str, environ: Mapping[str, str]) -> _Slot:
    """A device of which nothing is known but what it is called."""
    if not entry.isdigit():
        return _Slot(entry, (entry,), Device(entry, entry, "cuda", entry))
    index = str(int(entry))
    key = f"{environ.get('SLURM_JOB_ID') or 'host'}:{index}"
    return _Slot(index, (index,), Device(index, key, "cuda", f"cuda:{index}"))


def _by_cuda_index(value: str, first: str, environ: Mapping[str, str], slots: list[_Slot]) -> list[_Slot]:
    """``slots`` as CUDA's indices name them: NVML's order where that is CUDA's too, else by index alone."""
    models = {slot.device.model.partition(" MIG ")[0] for slot in slots if slot.device and slot.device.model}
    ordered = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len(models) < 2
    modes = {(slot.mig, slot.device is None) for slot in slots if slot.mig or slot.device}
    if ordered and len(modes) < 2:
        return slots
    if any(slot.mig for slot in slots):
        problem = (
            f"`{first}` is uncertain: with MIG on some GPUs or on several models CUDA numbers otherwise than "
            "nvidia-smi, and would silently show another device"
        )
        raise _refusal(CUDA, value, problem, slots, [])
    return [_opaque(slot.gpu, environ) for slot in slots]


def _find(entry: str, slots: list[_Slot]) -> list[_Slot]:
    """The slots that ``entry`` may mean; of a GPU in MIG mode the first instance, which is the one that CUDA shows."""
    index = _kind(entry) == "an index"
    name = str(int(entry)) if index else entry
    if index or "/" in name:
        found = [slot for slot in slots if name in slot.names]
    else:
        found = [slot for slot in slots if any(known.startswith(name) for known in slot.names)]
    if name.startswith("MIG-"):
        return found
    return list({slot.gpu: slot for slot in reversed(found)}.values())


def _select(variable: str, value: str, entries: list[str], slots: list[_Slot]) -> list[_Slot]:
    """The slots that ``entries`` name, in that order; raises UserError about the first entry that is wrong."""
    chosen: dict[str, _Slot] = {}
    problem = ""
    for entry in entries:
        kind, found = _kind(entry), _find(entry, slots)
        earlier = next((known for known, slot in chosen.items() if found == [slot]), None)
        cuda = f"CUDA would silently stop there, with {len(chosen)} device{'s' * (len(chosen) != 1)} visible"
        if kind is None:
            wrong = f"`{entry}` is neither an index nor a UUID" if entry else "an entry is empty"
            if digits := re.match(r"[0-9]+", entry):
                cuda = f"CUDA would silently read {digits[0]}"
        elif variable == CUDA and kind != _kind(entries[0]):
            wrong = f"`{entry}` is {kind} in a list that starts with `{entries[0]}`"
        elif not found:
            wrong = f"`{entry}` names none of the devices below"
        elif len(found) > 1:
            wrong = f"`{entry}` fits {len(found)} devices"
        elif found[0].device is None:
            wrong = f"`{entry}` cannot be used: {found[0].trouble}"
            cuda = "CUDA would fail, or number the others without it"
        elif earlier is not None:
            same = f"`{earlier}` and `{entry}` are the same device"
            wrong = f"`{entry}` is given twice" if entry == earlier else same
            cuda = "CUDA would silently show no device at all"
        else:
            chosen[entry] = found[0]
            continue
        problem = problem or (f"{wrong}; {cuda}" if variable == CUDA else wrong)
    if problem:
        raise _refusal(variable, value, problem, slots, list(chosen))
    return list(chosen.values())


def _refusal(variable: str, value: str, problem: str, slots: list[_Slot], usable: list[str]) -> UserError:
    """The error about ``problem``, with what there is and what to type: the ``usable`` entries, or all there are."""
    here = [
        f"not usable: cuda:{slot.gpu}, {slot.trouble}"
        if slot.device is None
        else f"here: {slot.device.label}" + (f" = {slot.device.entry}" if slot.device.model else "")
        for slot in slots
    ]
    usable = usable or [slot.device.entry for slot in slots if slot.device]
    if variable == OURS:
        spellings = f"`cpu`, `sim:N` (N simulated devices, from 1), or some of those that {CUDA} shows"
        fix = f"export {OURS}={'sim:2' if value.startswith('sim') else ','.join(usable) or 'cpu'}"
    else:
        spellings = "indices, GPU UUIDs or MIG UUIDs of this machine, all of one kind, each once"
        lists = [",".join(entry for entry in usable if _kind(entry) == kind) for kind in _KINDS]
        fix = "\nor: ".join(f"export {CUDA}={entries}" for entries in lists if entries) or f"unset {CUDA}"
    here = here or ["here: no GPU that NVML shows"]
    return UserError(variable, value, "\n".join([spellings, problem, *here]), fix)
