"""Advantages of the answers of a conversation one by one, by the rewards of their turns (`rl.credit=turn`).

As in Zeng et al. (arXiv 2505.11821), answers are compared with those of the same turn of other conversations; here each
by all that was earned from its turn on.
"""

from collections.abc import Sequence

import numpy as np

from jaxtrain.config.sections.tuning_keys import RLConfig
from jaxtrain.hub.generate import Generated
from jaxtrain.tuning.environments.conversation import Conversation


def rewards_by_turn(answer: Generated, total: float) -> np.ndarray:
    """Return the rewards of a conversation's answers, which add up to the total: other rewards come with the last."""
    assert isinstance(answer, Conversation)
    found = np.array(answer.rewards)
    found[-1] += total - found.sum()
    return found


def by_turn(c: RLConfig, totals: np.ndarray, answers: Sequence[Generated]) -> list[np.ndarray]:
    """Return the advantages of each conversation's tokens."""
    rewards = [rewards_by_turn(answer, total) if answer.finish_reason != "error" else []
               for answer, total in zip(answers, totals, strict=True)]
    found = turn_advantages(rewards, c.group_size, c.baseline, c.scale)
    numbers = [answer.numbers for answer in answers if isinstance(answer, Conversation)]
    return [np.where(number >= 0, one[number], 0) if len(one) else np.zeros(len(number))
            for one, number in zip(found, numbers, strict=True)]


def turn_advantages(rewards: Sequence[Sequence[float] | np.ndarray], group_size: int, baseline: str,
                    scale: str) -> list[np.ndarray]:
    """Return the advantage of each answer of each conversation, by what was earned from it on.

    It is compared with what the group's other conversations earned from their answer of the same number on.
    """
    earned = [np.cumsum(one[::-1])[::-1] for one in rewards]
    found = [np.zeros(len(one)) for one in earned]
    for first in range(0, len(earned), group_size):
        group = range(first, first + group_size)
        for turn in range(max(len(earned[n]) for n in group)):
            there = [n for n in group if len(earned[n]) > turn]
            values = np.array([earned[n][turn] for n in there])
            if len(there) < 2:
                continue
            less = values.mean() if baseline == "mean" else (values.sum() - values) / (len(there) - 1)
            spread = values.std(ddof=1) + 1e-4 if scale == "group" else 1.0
            for n, advantage in zip(there, (values - less) / spread, strict=True):
                found[n][turn] = advantage
    if scale == "batch":
        together = np.concatenate(earned)
        spread = (together.std(ddof=1) if len(together) > 1 else 0.0) + 1e-4
        found = [one / spread for one in found]
    return found
