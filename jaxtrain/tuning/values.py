"""Values of answers, which the value head expects of them token by token, and advantages over these (PPO).

Generalized advantage estimation: Schulman et al. (arXiv 1506.02438). The reward of an answer comes with its last token,
the one that ends it included. Nothing follows, of an answer that was cut off neither: it was rewarded as it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxtrain.config.sections.tuning_keys import RLConfig
from jaxtrain.hub import scoring
from jaxtrain.hub.generate import Generated
from jaxtrain.train_step import partition
from jaxtrain.tuning.rewards import advantages_of, totals_of

if TYPE_CHECKING:
    from jaxtrain.run import Run
    from jaxtrain.train_step.state import TrainState


@dataclass(frozen=True)
class Valued(Generated):
    """An answer, and what its reward was expected to be before each of its tokens and before its end."""

    values: tuple[float, ...] = ()


def valued(run: "Run", state: "TrainState", prompts: Sequence[list[int]],
           answers: Sequence[Generated]) -> list[Generated]:
    """Return answers with their values by the state that made them. Every process makes the call."""
    params = partition.without(state.all_params, run.objective.frozen_axes)
    texts = [[*prompt, *answer.tokens, *(answer.end or ())[:1]]
             for prompt, answer in zip(prompts, answers, strict=True)]
    found = scoring.readouts(run, params, texts)
    return [Valued(**vars(answer), values=tuple(values_T[len(prompt) - 1:].tolist()))
            for prompt, answer, values_T in zip(prompts, answers, found, strict=True)]


def known_of(c: RLConfig, scores: np.ndarray,
             answers: Sequence[Generated]) -> list[dict[str, np.ndarray]]:
    """Return the advantages of the tokens of each answer; of one with values these too, and the returns they are to be.
    """
    if not c.value_head:
        return [{"advantages": one} for one in advantages_of(c, scores)]
    values = [np.array(answer.values) for answer in answers if isinstance(answer, Valued)]
    found = [_advantages(c, reward, each) for reward, each in zip(totals_of(c, scores), values, strict=True)]
    mean, spread = 0.0, 1.0
    if c.scale != "none":
        together = np.concatenate(found)
        mean, spread = together.mean(), np.sqrt(together.var(ddof=min(1, len(together) - 1)) + 1e-8)
    return [{"advantages": (own - mean) / spread, "returns": own + each, "values": each}
            for own, each in zip(found, values, strict=True)]


def _advantages(c: RLConfig, reward: float, values_T: np.ndarray) -> np.ndarray:
    """Return the advantage of each token of an answer."""
    errors_T = c.gamma * np.append(values_T[1:], 0) - values_T
    errors_T[-1] += reward
    found_T = np.zeros_like(errors_T)
    later = 0.0
    for t in reversed(range(len(errors_T))):
        found_T[t] = later = errors_T[t] + c.gamma * c.gae_lambda * later
    return found_T
