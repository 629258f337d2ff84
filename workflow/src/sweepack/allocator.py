"""The options of torch's CUDA allocator in a cell's environment: the user's own, those of `memory`, and the cap.

Standard library only: this runs before every cell. torch reads two variables; where both are set, some of its versions
take some options from one and the others from the other. All of them read ``VARIABLE``, so that is what a cell has.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

from sweepack.errors import UserError, did_you_mean

VARIABLE, OTHER = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
FRACTION, SPLIT, EXPANDABLE = "per_process_memory_fraction", "max_split_size_mb", "expandable_segments"
# Older ones refuse to start with an option that they don't know.
_KNOWS_FRACTION = (2, 10)
# torch's own, in the version whose options these are; a newer one may have more.
_NAMES_OF = (2, 13)
_NAMES = frozenset(
    {FRACTION, SPLIT, EXPANDABLE, "backend", "garbage_collection_threshold", "graph_capture_record_stream_reuse"}
    | {"large_segment_size_mb", "max_non_split_rounding_mb", "pinned_free_catch_all", "pinned_max_cached_size_mb"}
    | {"pinned_max_round_threshold_mb", "pinned_num_register_threads", "pinned_reserve_segment_size_mb"}
    | {"pinned_use_background_threads", "pinned_use_cuda_host_register", "pinned_use_hip_host_register"}
    | {"release_lock_on_cudamalloc", "release_lock_on_hipmalloc", "roundup_power2_divisions", "throw_on_cudamalloc_oom"}
)
_OPTION = re.compile(r"([a-z0-9_]+):(\[[^\[\]]*\]|[^,:\[\]]+)(?:,|$)")
_SMALLEST_SPLIT = 20


def configure(environment: Mapping[str, str], settings: Mapping[str, Any], fraction: float | None) -> dict[str, str]:
    """``environment`` with the options that a cell's process gets in ``VARIABLE``, and ``OTHER`` unset.

    What either of them has is kept, option by option, unless ``settings`` (``sizing.config.Memory``) or the cap have
    it. ``fraction``: the part of the device that torch may reserve, None for no cap. Raises UserError, see ``check``.
    """
    options = check(environment, settings)
    if fraction is not None and knows_fraction():
        options[FRACTION] = f"{int(fraction * 10**6) / 10**6:.6f}"
    rest = {name: value for name, value in environment.items() if name not in (VARIABLE, OTHER)}
    return rest | ({VARIABLE: _text(options)} if options else {})


def check(environment: Mapping[str, str], settings: Mapping[str, Any]) -> dict[str, str]:
    """The options of both variables and ``settings``; raises UserError for what torch would not take, or would ignore.

    A build of torch without CUDA takes anything without a word, so a mistake would only be seen on the GPU.
    """
    # As torch has it, the older name counts before the newer one.
    options = _options(OTHER, environment.get(OTHER, "")) | _options(VARIABLE, environment.get(VARIABLE, ""))
    own = {SPLIT: settings.get(SPLIT), EXPANDABLE: settings.get(EXPANDABLE)}
    options |= {name: str(value) for name, value in own.items() if value is not None}
    if SPLIT in options and options.get(EXPANDABLE) == "True":
        where = [f"memory.{n}" if own[n] is not None else _where(environment, n) for n in (SPLIT, EXPANDABLE)]
        raise UserError(
            _where(environment, SPLIT if own[SPLIT] is None else EXPANDABLE),
            f"{SPLIT}:{options[SPLIT]},{EXPANDABLE}:True",
            f"one of the two: torch's allocator ignores the first beside the second ({where[0]}, {where[1]})",
            f"take one of them out, or set `memory: {{{EXPANDABLE}: false}}`",
        )
    return options


def without_cap(environment: Mapping[str, str]) -> Mapping[str, str]:
    """``environment`` less the cap: what cells have in common whose shares differ."""
    found = {name: _options(name, environment[name]) for name in (VARIABLE, OTHER) if name in environment}
    if not any(FRACTION in options for options in found.values()):
        return environment
    shared = dict(environment)
    for name, options in found.items():
        options.pop(FRACTION, None)
        shared[name] = _text(options)
        if not options:
            del shared[name]
    return shared


def knows_fraction() -> bool:
    """Whether the torch that is installed reads the cap from its environment."""
    return torch_version() >= _KNOWS_FRACTION


@functools.cache
def torch_version() -> tuple[int, ...]:
    """Major and minor number of the torch that is installed, without importing it; empty where there is none."""
    from importlib import metadata  # takes longer than all else here

    try:
        found = re.match(r"(\d+)\.(\d+)", metadata.version("torch"))
    except metadata.PackageNotFoundError:
        return ()
    return (int(found[1]), int(found[2])) if found else ()


def _options(variable: str, text: str) -> dict[str, str]:
    """The options in ``text``, the value of ``variable``; raises UserError."""
    bare = "".join(text.split())
    pairs = [(found[1], found[2]) for found in _OPTION.finditer(bare)]
    if _text(pairs) != bare.removesuffix(","):
        raise UserError(
            variable,
            text,
            "`option:value` pairs with commas between them, as torch's allocator reads them",
            f"for example `export {VARIABLE}=garbage_collection_threshold:0.8`, or `unset {variable}`",
        )
    for name, value in pairs:
        if name not in _NAMES and torch_version() <= _NAMES_OF:
            raise UserError(
                variable, text, f"options of torch's allocator; `{name}` is none", did_you_mean(name, _NAMES)
            )
        trouble = _trouble(name, value)
        if trouble:
            raise UserError(variable, text, f"{trouble}; `{name}:{value}` is not", f"change it, or `unset {variable}`")
    return dict(pairs)


def _trouble(name: str, value: str) -> str | None:
    if name == SPLIT and not (value.isdecimal() and int(value) >= _SMALLEST_SPLIT):
        return f"a whole number of megabytes for `{SPLIT}`, {_SMALLEST_SPLIT} or more"
    if name == EXPANDABLE and value not in ("True", "False"):
        return f"`True` or `False`, so written, for `{EXPANDABLE}`"
    if name == FRACTION and not re.fullmatch(r"0?\.\d+|0|1|1\.0+", value):
        return f"a number from 0 to 1 for `{FRACTION}`"
    return None


def _text(options: Mapping[str, str] | list[tuple[str, str]]) -> str:
    pairs = options if isinstance(options, list) else options.items()
    return ",".join(f"{name}:{value}" for name, value in pairs)


def _where(environment: Mapping[str, str], option: str) -> str:
    """The variable that has ``option``; the one to set where neither does."""
    return OTHER if option in environment.get(OTHER, "") and option not in environment.get(VARIABLE, "") else VARIABLE
