"""Rewards of answers: a function of the user's, and advantages of answers over others to the same prompt."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.base.annotations import JsonMapping
from jaxtrain.base.user_files import defined_in
from jaxtrain.config.part_tables import ENVIRONMENTS
from jaxtrain.config.schema import Config
from jaxtrain.config.sections.tuning_keys import RLConfig
from jaxtrain.errors import UserError

Reward = Callable[[str, Mapping[str, Any]], float]  # of an answer, given the prompt's record
KEY = "rl.reward"


def load_reward(named: str, options: Any = None) -> Reward:
    """Return the function that FILE.py:FUNCTION names, or the environment of another package with these options."""
    if ":" not in named and not named.endswith(".py"):
        if hasattr(found := ENVIRONMENTS.made(named, options), "step"):
            raise UserError(KEY, f"the environment {named!r} is one of several turns", f"set rl.environment={named}")
        return found
    return defined_in(named, KEY, "function", "write FILE.py:FUNCTION, model:WORKDIR or a URL")


def rewards_of(reward: Reward, answers: Sequence[str], records: Sequence[JsonMapping]) -> list[float]:
    """Return the reward of each answer."""
    found = []
    for answer, record in zip(answers, records, strict=True):
        try:
            value = float(reward(answer, record))
        except Exception as error:  # a user's own code
            raise UserError(KEY, f"it fails on the answer {answer[:40]!r} ({type(error).__name__}: {error})",
                            "let it return a number for any text") from error
        if not abs(value) < 1e30:  # nor infinite in float32
            raise UserError(KEY, f"it gives {value} for the answer {answer[:40]!r}", "let it return numbers below 1e30")
        found.append(value)
    return found


def with_lengths(c: RLConfig, scores: Sequence[Sequence[float]], lengths: Sequence[int]) -> np.ndarray:
    """Return the scores of answers [answers, rewards], with the penalty for their lengths as a further column.

    It falls from 0 to -1 over the last `rl.overlong_buffer` tokens: DAPO (arXiv 2503.14476), equation 13.
    """
    found = np.asarray(scores, np.float64)
    if not c.overlong_buffer:
        return found
    beyond = np.asarray(lengths) - (c.max_new_tokens - c.overlong_buffer)
    return np.column_stack([found, -np.clip(beyond / c.overlong_buffer, 0, 1)])


def totals_of(c: RLConfig, scores: np.ndarray) -> np.ndarray:
    """Return the reward of each answer: the weighted sum of its scores."""
    return _columns(scores) @ _weights(c)


def advantages_of(c: RLConfig, scores: np.ndarray) -> np.ndarray:
    """Return how much better each answer is than others to its prompt; groups follow each other."""
    if not _columns(scores).size:  # a teacher's advantages only
        return np.zeros(len(scores))
    if c.combine == "normalize":
        return _normalized_apart(c, _columns(scores))
    by_group = totals_of(c, scores).reshape(-1, c.group_size)
    total = by_group.sum(1, keepdims=True)
    above = by_group - (total / c.group_size if c.baseline == "mean" else (total - by_group) / (c.group_size - 1))
    if c.scale == "none":
        return above.reshape(-1)
    spread = by_group.std(1, ddof=1, keepdims=True) if c.scale != "batch" else by_group.std(ddof=1)
    return (above / (spread + _LEAST)).reshape(-1)  # groups of equal rewards have no advantage


def equal_groups(c: RLConfig, scores: np.ndarray) -> np.ndarray:
    """Return of each group whether all its answers have the same rewards, so that it teaches nothing."""
    by_group = _columns(scores) if c.combine == "normalize" else totals_of(c, scores)[:, None]
    by_group = by_group.reshape(-1, c.group_size, by_group.shape[1])
    return (np.ptp(by_group, axis=1) <= ROUNDING * np.maximum(1, np.abs(by_group).max(1))).all(1)


ROUNDING = 1e-9  # sums of other parts are never further apart where they are meant to be equal
_LEAST = 1e-4  # of a standard deviation by which is divided


def _normalized_apart(c: RLConfig, scores: np.ndarray) -> np.ndarray:
    """Return advantages to which every reward contributes by its weight, however widely it spreads.

    Each reward is normalized in its group; their sum is normalized over the batch: GDPO (arXiv 2601.05242).
    """
    by_group = scores.reshape(-1, c.group_size, scores.shape[1])
    apart = (by_group - by_group.mean(1, keepdims=True)) / (by_group.std(1, ddof=1, keepdims=True) + _LEAST)
    total = apart.reshape(scores.shape) @ _weights(c)
    return (total - total.mean()) / (total.std(ddof=1) + _LEAST)


def _columns(scores: np.ndarray) -> np.ndarray:
    """Return scores of one reward as those of several: [answers, rewards]."""
    found = np.asarray(scores, np.float64)
    return found if found.ndim > 1 else found[:, None]


def _weights(c: RLConfig) -> np.ndarray:
    return np.array([*(c.reward_weights or (1.0,) * len(c.rewards)), *[c.overlong_penalty] * bool(c.overlong_buffer)])


def answers_of_step(config: Config) -> int:
    """Return the number of answers to `rl.prompts` that a step is made of: a row has one, or a pair of a group."""
    return config.data.global_batch_size * (config.rl.group_size if config.preference.loss else 1)
