"""Amounts of memory and what pins say, in words for people.

Standard library only.
"""

from __future__ import annotations

from sweepack.sizing.pins import Pin

_LIMITS = {
    "memory": "limited by memory",
    "data": "limited by the data, which has no more samples",
    "largest_batch": "limited by `sizing.largest_batch`",
    "error": "larger ones fail",
}


def amount(size: float) -> str:
    """Bytes as text: ``13.6 GiB``, ``41.0 MiB``, ``512 B``."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(size) >= unit:
            return f"{size / unit:.3g} {name}" if abs(size) < 1000 * unit else f"{size / unit:.0f} {name}"
    return f"{size:.0f} B"


def straight_line(static: float | None, sample: float | None) -> str:
    """M_static and M_sample as one text; empty where they are not known."""
    if static is None or sample is None:
        return ""
    if sample <= 0 or static < 0:
        return "which the batch hardly changes" if sample <= 0 else f"{amount(sample)} a sample"
    return f"{amount(static)} + {amount(sample)} a sample"


def findings(pin: Pin) -> str:
    """The largest batch and what limits it, the peak, and its line; or why nothing fits."""
    if pin.trouble or pin.peak is None:
        return f"{pin.trouble}"
    of = f" of {amount(pin.cap)}" if pin.cap else ""
    parts = [f"peak {amount(pin.peak)}{of}", straight_line(pin.static, pin.sample)]
    if pin.largest is not None and pin.limited_by is not None:
        parts.insert(0, f"largest {pin.largest} ({_LIMITS[pin.limited_by]})")
    return ", ".join(filter(None, parts))


def found(pin: Pin) -> str:
    """What was found, on one line with the batch and the device."""
    if pin.trouble:
        return f"{pin.trouble} (on {pin.device})"
    batch = "" if pin.batch is None else f"batch {pin.batch}, "
    return f"{batch}{findings(pin)}, on {pin.device}"
