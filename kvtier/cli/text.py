"""Numbers as people read them."""

from __future__ import annotations

_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")


def size_text(size_bytes: int) -> str:
    """Bytes with a binary unit: `512 B`, `64 KiB`, `1.50 GiB`; rounded down, so never more than there is."""
    if size_bytes < 1024:
        return f"{size_bytes} B"
    unit = min((size_bytes.bit_length() - 1) // 10, len(_UNITS))
    scale = 1024**unit
    if size_bytes % scale == 0:
        return f"{size_bytes // scale} {_UNITS[unit - 1]}"
    hundredths = size_bytes * 100 // scale
    return f"{hundredths // 100}.{hundredths % 100:02d} {_UNITS[unit - 1]}"


def count_text(count: int) -> str:
    """A whole number with thousands separated: `1,048,576`."""
    return f"{count:,}"
