"""Rounding of a matrix to 4 bits in groups: to the nearest number, or so that later columns make up for earlier errors.

The second is GPTQ (arXiv 2210.17323): columns are rounded in turn, and the error of each is spread over those that are
left by the inverse of the inputs' second moments, so that what the matrix makes of these inputs changes least.
"""

import numpy as np

MOST, LEAST = 7, -8  # of numbers in 4 bits
DAMPING = 0.01  # of the moments' mean, added to each, so that the inverse exists


def rounded(matrix: np.ndarray, group: int, moments: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers, int8 from -8 to 7, of a matrix [out, in], and the float32 scales of its groups [out, groups].

    Args:
        matrix: the weights.
        group: how many neighbours along the inputs have one scale; it divides them.
        moments: the sum over inputs x of x x^T; None rounds to the nearest.
    """
    matrix = matrix.astype(np.float32)
    if moments is None:
        groups = matrix.reshape(len(matrix), -1, group)
        scales = _scales(groups)
        return _numbers(groups, scales[..., None]).reshape(matrix.shape).astype(np.int8), scales
    left, factor = matrix.copy(), _factor(moments)
    numbers, scales = np.empty(matrix.shape, np.int8), np.empty((len(matrix), matrix.shape[1] // group), np.float32)
    for begin in range(0, matrix.shape[1], group):
        end = begin + group
        scales[:, begin // group] = scale = _scales(left[:, begin:end])
        errors = np.empty((len(matrix), group), np.float32)
        for at in range(begin, end):
            column = left[:, at]
            number = _numbers(column, scale)
            numbers[:, at] = number
            errors[:, at - begin] = error = (column - number * scale) / factor[at, at]
            left[:, at:end] -= np.outer(error, factor[at, at:end])
        left[:, end:] -= errors @ factor[begin:end, end:]
    return numbers, scales


def _factor(moments: np.ndarray) -> np.ndarray:
    """Return the upper triangular factor of the moments' inverse."""
    moments = moments.astype(np.float64)
    damped = moments + np.eye(len(moments)) * max(DAMPING * np.diag(moments).mean(), 1e-12)
    return np.linalg.cholesky(np.linalg.inv(damped)).T.astype(np.float32)


def _scales(x: np.ndarray) -> np.ndarray:
    """Return scales in bfloat16's numbers, in which they are written; 1 for a group of zeros."""
    import ml_dtypes

    scales = (np.abs(x).max(-1) / MOST).astype(ml_dtypes.bfloat16).astype(np.float32)
    return np.where(scales == 0, 1, scales)


def _numbers(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(x / scale), LEAST, MOST)
