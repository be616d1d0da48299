"""The FLOPs of the parts of a row that a family's own count is made of."""

from collections.abc import Callable

INPUT = 2 / 3  # of a matrix's FLOPs, forward and backward: what it reads has no gradient
# How many vectors of a row meet the matrix at a path, and the FLOPs of attention.
Need = tuple[Callable[[str], float], float]


def attended(layers: int, width: int, pairs: float) -> float:
    """Return the FLOPs of layers whose queries attend to this many keys in all: of scores and values."""
    return 6 * layers * 2 * width * pairs
