"""Values of answers, which the value head expects of them token by token, and advantages over these (PPO).

Generalized advantage estimation: Schulman et al. (arXiv 1506.02438). The reward of an answer comes with its last token,
the one that ends it included. Nothing follows, of an answer that was cut off neither: it was rewarded as it is.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from jaxtrain.config.sections.tuning_keys import RLConfig
from jaxtrain.hub import scoring
from jaxtrain.hub.generate import Generated
from jaxtrain.train_step import partition
from jaxtrain.tuning.environments.conversation import Conversation, Valued
from jaxtrain.tuning.environments.turn_credit import by_turn, rewards_by_turn
from jaxtrain.tuning.rewards import advantages_of, totals_of

if TYPE_CHECKING:
    from jaxtrain.run import Run
    from jaxtrain.train_step.state import TrainState


def valued(run: "Run", state: "TrainState", prompts: Sequence[list[int]],
           answers: Sequence[Generated]) -> list[Generated]:
    """Return answers with their values by the state that made them. Every process makes the call."""
    params = partition.without(state.all_params, run.objective.frozen_axes)
    texts = [[*prompt, *answer.tokens, *(answer.end or ())[:1]]
             for prompt, answer in zip(prompts, answers, strict=True)]
    found = scoring.readouts(run, params, texts)
    return [replace(answer, values=values) if isinstance(answer, Valued) else Valued(**vars(answer), values=values)
            for prompt, answer, values_T in zip(prompts, answers, found, strict=True)
            for values in [tuple(values_T[len(prompt) - 1:].tolist())]]


def known_of(c: RLConfig, scores: np.ndarray,
             answers: Sequence[Generated]) -> list[dict[str, np.ndarray]]:
    """Return the advantages of the tokens of each answer; of one with values these too, and the returns they are to be.
    """
    if not c.value_head:
        if c.credit == "turn":
            return [{"advantages": one} for one in by_turn(c, totals_of(c, scores), answers)]
        return [{"advantages": one} for one in advantages_of(c, scores)]
    values = [np.array(answer.values) for answer in answers if isinstance(answer, Valued)]
    ours = [answer.numbers >= 0 if isinstance(answer, Conversation) else np.ones(len(each), bool)
            for answer, each in zip(answers, values, strict=True)]
    found = [_advantages(c, _rewards(c, reward, answer, mine), each[mine]) for reward, answer, each, mine in
             zip(totals_of(c, scores), answers, values, ours, strict=True)]
    mean, spread = 0.0, 1.0
    if c.scale != "none":
        together = np.concatenate(found)
        mean, spread = together.mean(), np.sqrt(together.var(ddof=min(1, len(together) - 1)) + 1e-8)
    return [{"advantages": _spread((own - mean) / spread, mine), "returns": _spread(own + each[mine], mine),
             "values": _spread(each[mine], mine)} for own, each, mine in zip(found, values, ours, strict=True)]


def _spread(of_sampled: np.ndarray, sampled_T: np.ndarray) -> np.ndarray:
    """Return numbers of the tokens that the model sampled as an array of all tokens."""
    found_T = np.zeros(len(sampled_T))
    found_T[sampled_T] = of_sampled
    return found_T


def _rewards(c: RLConfig, reward: float, answer: Generated, ours: np.ndarray) -> np.ndarray:
    """Return the reward that comes with each token that the model sampled: the last one, or the last of each turn."""
    found = np.zeros(int(ours.sum()))
    if c.credit == "turn" and isinstance(answer, Conversation):
        last = np.flatnonzero(np.diff(answer.numbers[ours], append=-1))
        found[last] = rewards_by_turn(answer, reward)
    else:
        found[-1] = reward
    return found


def _advantages(c: RLConfig, rewards_T: np.ndarray, values_T: np.ndarray) -> np.ndarray:
    """Return the advantage of each token that the model sampled; what others said takes no time."""
    errors_T = c.gamma * np.append(values_T[1:], 0) - values_T + rewards_T
    found_T = np.zeros_like(errors_T)
    later = 0.0
    for t in reversed(range(len(errors_T))):
        found_T[t] = later = errors_T[t] + c.gamma * c.gae_lambda * later
    return found_T
