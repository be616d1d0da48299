"""NoLoCo (arXiv 2506.10911) in plain NumPy: islands in pairs, each with outer parameters and momentum of its own."""

import hashlib

import numpy as np


def pairs(number, islands):
    """Return the islands of a round in pairs, in the order of numbers drawn by a hash."""
    drawn = sorted(islands, key=lambda island: hashlib.sha256(f"{number} {island}".encode()).hexdigest())
    return [drawn[at:at + 2] for at in range(0, len(drawn), 2)]


def train(inner, start, *, rounds, rate, momentum, pull):
    """Return the islands' parameters after the last round.

    Args:
        inner: of (island, round, parameters): the parameters after an island's steps.
        start: those with which all begin, a vector.
        rounds: for each the islands that come to it.
        pull: of the paper, gamma.
    """
    count = 1 + max(max(came) for came in rounds)
    slow = [start.astype(np.float64)] * count
    fast, velocity = list(slow), [np.zeros_like(slow[0])] * count
    for number, came in enumerate(rounds, 1):
        fast = [inner(i, number - 1, fast[i]) for i in range(count)]
        after = list(slow)
        for pair in pairs(number, came):
            moved = sum(fast[i] - slow[i] for i in pair) / len(pair)
            middle = sum(slow[i] for i in pair) / len(pair)
            for i in pair:
                velocity[i] = momentum * velocity[i] + rate * moved - pull * (slow[i] - middle)
                after[i] = slow[i] + velocity[i]
        for i in came:
            fast[i] = slow[i] = after[i]
    return slow
