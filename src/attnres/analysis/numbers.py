"""How numbers are written, the same in the terminal, in Markdown and in the report.

A number that cannot be given is a dash, never a zero.
"""

import math

DASH = "\u2013"
"""Stands for a number that cannot be given."""

MINUS = "\u2212"
"""A minus sign as wide as a plus sign."""


def decimal(value: float | None, digits: int = 4) -> str:
    """Write a number with a fixed count of digits, or a dash."""
    return DASH if value is None else f"{value:.{digits}f}".replace("-", MINUS)


def signed(value: float, digits: int = 4) -> str:
    """Write a number with its sign, minus as wide as plus."""
    return f"{value:+.{digits}f}".replace("-", MINUS)


def whole(value: float | None) -> str:
    """Write a count with thousands separated, or a dash."""
    return DASH if value is None else (f"{value:,.0f}" if math.isfinite(value) else str(value))


def memory(size: int | None) -> str:
    """Write a size in bytes in MiB or GiB, or a dash."""
    if size is None:
        return DASH
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def duration(seconds: float) -> str:
    """Write a time in the unit that suits it."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.2f} h"


def exact_duration(seconds: float) -> str:
    """Write a time in seconds, and in the unit that suits it if that is another."""
    return f"{seconds:,.1f} s" + ("" if seconds < 120 else f" ({duration(seconds)})")
