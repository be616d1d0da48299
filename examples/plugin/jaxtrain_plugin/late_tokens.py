"""An objective: next-token prediction in which the first tokens of a document, which lack a context, weigh less."""

from dataclasses import dataclass, replace
from typing import ClassVar

import jax.numpy as jnp

import jaxtrain as jt


@dataclass(frozen=True)
class LateTokensConfig:
    """Late tokens: the first tokens of each document weigh less."""

    first: int = 8  # how many tokens weigh less
    weight: float = 0.1  # what they weigh


@dataclass(frozen=True)
class LateTokens(jt.NextToken):
    """The cross-entropy with weights by the position in the document."""

    section: ClassVar = LateTokensConfig
    options: LateTokensConfig = LateTokensConfig()

    @property
    def evaluation(self):
        """Next-token prediction with equal weights."""
        return replace(super().evaluation, options=LateTokensConfig(first=0))

    def prepare(self, params, batch):
        """Return the parameters, and the batch with other weights."""
        params, batch = super().prepare(params, batch)
        early = batch["positions"] < self.options.first
        return params, batch | {"weights": batch["weights"] * jnp.where(early, self.options.weight, 1.0)}
