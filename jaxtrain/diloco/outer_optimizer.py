"""The arithmetic of outer updates, in NumPy's float32: the same bits on every island, whatever its devices.

DiLoCo (arXiv 2311.08105): how far the islands came is a gradient, on which SGD with Nesterov's momentum makes a step.
As updates arrive one by one, momentum takes the mean of as many as there are islands, and is applied then (delayed
Nesterov, arXiv 2401.09135): arrivals of equal age make together the step that they make at once.

Of gossip (NoLoCo, arXiv 2506.10911) momentum has two parts: the mean progress of two islands, and how far the island's
outer parameters are from the mean of theirs. Between islands that are paired at random, the difference that noise
makes stays bounded while the pull is below 2 (1 - momentum^2), and is smallest at half of that (docs/diloco.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Vectors = dict[str, np.ndarray]  # of one fragment: params, and what else is kept for each of them


@dataclass(frozen=True)
class OuterOptimizer:
    """Nesterov's momentum over the progress of islands."""

    learning_rate: float
    momentum: float
    count: int  # islands
    age_decay: float = 0.0
    pull: float = 0.0  # of gossip; 0: 1 - momentum^2

    def together(self, old: Vectors, came: Sequence[np.ndarray], weights: Sequence[float], exact: bool) -> Vectors:
        """Return the vectors after an update of all contributions at once.

        Args:
            old: the vectors before it.
            came: what each island contributed: its parameters if `exact`, or else how far it came, old - new.
            weights: what each counts.
            exact: with a learning rate of 1 and no momentum, the update is the mean of parameters without a rounding.
        """
        mean = _weighted(came, [weight / sum(weights) for weight in weights])
        if exact and self.learning_rate == 1 and not self.momentum:
            return {"params": mean}
        gradient = old["params"] - mean if exact else mean
        if not self.momentum:
            return {"params": old["params"] - _f32(self.learning_rate) * gradient}
        momentum = _f32(self.momentum) * old["momentum"] + gradient
        ahead = gradient + _f32(self.momentum) * momentum
        return {"params": old["params"] - _f32(self.learning_rate) * ahead, "momentum": momentum}

    def paired(self, old: Vectors, came: Sequence[np.ndarray], slow: Sequence[np.ndarray],
               weights: Sequence[float]) -> Vectors:
        """Return the vectors of one island after its update with another one, or alone.

        Args:
            old: the vectors before it.
            came: how far each of them came, old - new.
            slow: the outer parameters from which each of them came, as they are in `old` of each.
            weights: what the progress of each counts; of the outer parameters, both count the same.
        """
        gradient = _weighted(came, [weight / sum(weights) for weight in weights])
        apart = old["params"] - _weighted(slow, [1 / len(slow)] * len(slow))
        step = -_f32(self.learning_rate) * gradient - _f32(self.pull or 1 - self.momentum**2) * apart
        if not self.momentum:
            return {"params": old["params"] + step}
        momentum = _f32(self.momentum) * old["momentum"] + step
        return {"params": old["params"] + momentum, "momentum": momentum}

    def arrived(self, old: Vectors, came: np.ndarray, number: int, age: int) -> Vectors:
        """Return the vectors after entry `number`, the progress of one island that is `age` entries old."""
        late = max(0, age + 1 - self.count) / self.count  # rounds behind an island of equal speed
        gradient = _f32((1 + late) ** -self.age_decay / self.count) * came
        params = old["params"] - _f32(self.learning_rate) * gradient
        if not self.momentum:
            return {"params": params}
        buffer, momentum = old["arrived"] + gradient, old["momentum"]
        if number % self.count == 0:
            momentum = _f32(self.momentum) * momentum + buffer
            params = params - _f32(self.learning_rate * self.momentum) * momentum
            buffer = np.zeros_like(buffer)
        return {"params": params, "momentum": momentum, "arrived": buffer}


def _weighted(vectors: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    total = _f32(weights[0]) * vectors[0]
    for weight, vector in zip(weights[1:], vectors[1:], strict=True):
        total = total + _f32(weight) * vector
    return total


def _f32(value: float) -> np.float32:
    return np.float32(value)
