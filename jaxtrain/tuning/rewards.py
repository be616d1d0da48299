"""Rewards of answers: a function of the user's, and advantages of answers over others to the same prompt."""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.base.annotations import JsonMapping
from jaxtrain.config.part_tables import ENVIRONMENTS
from jaxtrain.config.sections.tuning_keys import RLConfig
from jaxtrain.errors import UserError

Reward = Callable[[str, Mapping[str, Any]], float]  # of an answer, given the prompt's record
KEY = "rl.reward"


def load_reward(named: str, options: Any = None) -> Reward:
    """Return the function that FILE.py:FUNCTION names, or the environment of another package with these options."""
    if ":" not in named and not named.endswith(".py"):
        return ENVIRONMENTS.made(named, options)
    file, _, name = named.rpartition(":")
    if not file.endswith(".py") or not name:
        raise UserError(KEY, f"{named!r} names no function of a file", "write FILE.py:FUNCTION, model:WORKDIR or a URL")
    if not Path(file).is_file():
        raise UserError(KEY, f"there is no file {file}", "check the name")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a user's own code
        raise UserError(KEY, f"{file} cannot be imported ({type(error).__name__}: {error})", "repair it") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise UserError(KEY, f"{file} has no function {name!r}", "check the name")
    return found


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


def advantages_of(c: RLConfig, rewards: Sequence[float]) -> np.ndarray:
    """Return how much better each answer is than others to its prompt; groups follow each other."""
    by_group = np.asarray(rewards, np.float64).reshape(-1, c.group_size)
    total = by_group.sum(1, keepdims=True)
    above = by_group - (total / c.group_size if c.baseline == "mean" else (total - by_group) / (c.group_size - 1))
    if c.scale == "none":
        return above.reshape(-1)
    spread = by_group.std(1, ddof=1, keepdims=True) if c.scale != "batch" else by_group.std(ddof=1)
    return (above / (spread + 1e-4)).reshape(-1)  # groups of equal rewards have no advantage
