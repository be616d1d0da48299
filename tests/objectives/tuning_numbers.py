"""Log-probabilities and values of answers for which `tests/objectives/tuning_truth.py` computes TRL's losses."""

import numpy as np

PAIRS, LENGTH = 6, 9


def numbers(rows):
    """Log-probabilities [rows, LENGTH] of three policies and advantages; each row has an answer of its own length."""
    rng = np.random.default_rng(3)
    mask = np.arange(LENGTH) < rng.integers(2, LENGTH + 1, (rows, 1))
    policy, reference, sampled = (np.where(mask, rng.uniform(-1.2, -0.1, (rows, LENGTH)), 0) for _ in range(3))
    return mask, policy, reference, np.where(mask, policy + 0.4 * (sampled - policy), 0), rng.normal(size=rows)


def values(rows):
    """Return the values that a critic expected at each token of these answers, and those that it expects now."""
    mask, rng = numbers(rows)[0], np.random.default_rng(4)
    before, moved = (np.where(mask, rng.normal(0, size, mask.shape), 0) for size in (0.5, 0.3))
    return before, before + moved


def scores_of(groups, size):
    """Return two scores of each answer, one of them rarely other than 0 and spread more widely, and lengths."""
    rng = np.random.default_rng(6)
    count = groups * size
    return np.stack([rng.integers(0, 2, count) * 1.0, 10 * rng.normal(size=count)], 1), rng.integers(5, 21, count)
