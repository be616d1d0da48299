"""Text for terminals: aligned tables, sizes and ages in words, and escaping of untrusted text."""

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each row, with columns below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def plain(text: object) -> str:
    """Return text that others may have written without what would move the cursor or break the line."""
    return "".join(letter if letter.isprintable() else "?" for letter in f"{text}")


def in_bytes(size: float) -> str:
    """Return a size in words, such as 1.25 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:  # what is more has four digits
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB" if size < 999.5 else f"{size:,.0f} TB"


def age(seconds: float) -> str:
    """Return how long ago something was, such as 3 h."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
