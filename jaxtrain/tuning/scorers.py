"""The scorers of a run's answers: functions and services, asked by the first process, and a reward model on the mesh.

Several are added with weights (`rl.reward_weights`); each has a column of its own in the scores of answers.
"""

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxtrain.base.annotations import JsonMapping
from jaxtrain.config.sections.tuning_keys import ENVIRONMENT
from jaxtrain.data.tokenizers.tokenizer import Tokenizer
from jaxtrain.errors import UserError
from jaxtrain.storage import is_url
from jaxtrain.tuning.pending_rewards import Records
from jaxtrain.tuning.remote_rewards import RemoteRewards
from jaxtrain.tuning.reward_scores import PREFIX, RewardScores
from jaxtrain.tuning.rewards import KEY, Reward, load_reward, rewards_of

if TYPE_CHECKING:
    from jaxtrain.run import Run



class FromEnvironment:
    """Stands for what an environment gave during a conversation."""


Scorer = Reward | RewardScores | RemoteRewards | FromEnvironment


@dataclass(frozen=True)
class Scorers:
    """The scorers of a run and their names, in the order of `rl.reward`."""

    names: tuple[str, ...]
    scorers: tuple[Scorer, ...]

    def __post_init__(self):
        object.__setattr__(self, "_calling", threading.Lock())

    @classmethod
    def of(cls, run: "Run", tokenizer: Tokenizer, recorded: JsonMapping) -> "Scorers":
        """Return what a config names; `recorded`: the checkpoint of the reward model that the run began with."""
        rewards = run.config.rl.rewards
        if sum(one.startswith(PREFIX) for one in rewards) > 1:
            raise UserError(KEY, "it names several reward models, and a run holds one", "keep one of them")
        found: list[Scorer] = []
        for one in rewards:
            found.append(FromEnvironment() if one == ENVIRONMENT and run.config.rl.environment else
                         RewardScores.of(one, tokenizer, recorded) if one.startswith(PREFIX) else
                         RemoteRewards.of(run.config, one) if is_url(one) else
                         load_reward(one, run.config.plug_ins.get(one)))
        return cls(_names(rewards), tuple(found))

    @property
    def model(self) -> RewardScores | None:
        """The reward model, which every process calls and which needs the devices."""
        return next((one for one in self.scorers if isinstance(one, RewardScores)), None)

    @property
    def on_host(self) -> tuple[Reward | RemoteRewards, ...]:
        """The scorers that one process asks: they may depend on anything."""
        return tuple(one for one in self.scorers if not isinstance(one, RewardScores | FromEnvironment))

    def threads(self, staleness: int) -> int:
        """Return the answers of how many steps may be scored at once."""
        return max(1, staleness) if all(isinstance(one, RemoteRewards) for one in self.on_host) else 1

    def asked(self, answers: Sequence[str], records: Records) -> list[list[float]]:
        """Return the rewards of each scorer on the host; a function of the user's is never called twice at once."""
        found = []
        for one in self.on_host:
            if isinstance(one, RemoteRewards):
                found.append(one(answers, records))
            else:
                with self._calling:  # a thread that was left behind may still be in the function
                    found.append(rewards_of(one, answers, records))
        return found

    def in_order(self, answers: int, on_host: Sequence[Sequence[float]], by_model: Sequence[float],
                 by_environment: Sequence[float]) -> list[list[float]]:
        """Return for each answer the rewards of all scorers, in their order."""
        rest = iter(on_host)
        columns = [by_model if isinstance(one, RewardScores) else
                   by_environment if isinstance(one, FromEnvironment) else next(rest) for one in self.scorers]
        return [list(row) for row in zip(*columns, strict=True)] if columns else [[] for _ in range(answers)]


def _names(rewards: Sequence[str]) -> tuple[str, ...]:
    """Return what metrics call these rewards: a function's name, "model" or "url", numbered where two are equal."""
    short = ["model" if one.startswith(PREFIX) else "url" if is_url(one) else
             re.sub(r"[^A-Za-z0-9_]", "_", one.rpartition(":")[2]) for one in rewards]
    return tuple(name if short.count(name) == 1 else f"{name}_{short[:n + 1].count(name)}"
                 for n, name in enumerate(short))
