"""Sizes for which programs are compiled."""


def bucket(size: int) -> int:
    """Return the least power of two that is not smaller."""
    return 1 << max(0, size - 1).bit_length()
