"""Choose the next token of each row from its logits: temperature, top-k, top-p, min-p and a repetition penalty.

Shape suffixes: B batch, V vocabulary.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxtrain.errors import UserError
from jaxtrain.hub.batching.gumbel import gumbel, largest


@dataclass(frozen=True)
class Sampling:
    """The settings for choosing tokens; at temperature 0 the most probable one is always chosen."""

    temperature: float = 1.0
    top_k: int = 0  # sample from this many most probable tokens; 0: among all
    top_p: float = 1.0  # among the fewest tokens that together are at least so probable
    min_p: float = 0.0  # among tokens that are at least so probable compared with the most probable one
    repetition_penalty: float = 1.0  # divides positive logits of tokens that the row has, and multiplies negative ones

    def __post_init__(self):
        for key, value, good, range_ in (
                ("temperature", self.temperature, 0 <= self.temperature < float("inf"), "0 or more"),
                ("top_k", self.top_k, 0 <= self.top_k < 2**31, "0 or more, and less than 2^31"),
                ("top_p", self.top_p, 0 < self.top_p <= 1, "more than 0 and at most 1"),
                ("min_p", self.min_p, 0 <= self.min_p <= 1, "from 0 to 1"),
                ("repetition_penalty", self.repetition_penalty, 0 < self.repetition_penalty < float("inf"),
                 "more than 0, where 1 changes nothing")):
            if not good:
                raise UserError(key, f"{value} is out of range", f"give {range_}")

    @property
    def filters(self) -> bool:
        """Whether some tokens are excluded, for which logits are sorted."""
        return self.temperature > 0 and bool(self.top_k or self.top_p < 1 or self.min_p)

    @property
    def logprob_temperature(self) -> float:
        """The temperature of the log-probabilities that are reported."""
        return 1.0

    @property
    def penalizes(self) -> bool:
        """Whether the tokens that a row has count."""
        return self.repetition_penalty != 1

    def numbers(self) -> dict[str, jax.Array]:
        """Return what a compiled program is given, so that other values need no other program."""
        return {"temperature": jnp.float32(self.temperature), "top_k": jnp.int32(self.top_k or 2**31 - 1),
                "top_p": jnp.float32(self.top_p), "min_p": jnp.float32(self.min_p),
                "repetition_penalty": jnp.float32(self.repetition_penalty),
                "logprob_temperature": jnp.float32(self.logprob_temperature)}


@dataclass(frozen=True)
class Tempered(Sampling):
    """The same, with log-probabilities at the temperature at which tokens are drawn, unless that is 0."""

    @property
    def logprob_temperature(self) -> float:
        """The temperature of the log-probabilities that are reported."""
        return self.temperature or 1.0


def penalized(logits_BV: jax.Array, seen_BV: jax.Array, penalty: jax.Array) -> jax.Array:
    """Return the logits with those of tokens that a row has made less likely (CTRL, arXiv 1909.05858)."""
    return jnp.where(seen_BV, jnp.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty), logits_BV)


def choose(logits_BV: jax.Array, keys_B: jax.Array, numbers: dict[str, jax.Array], filters: bool) -> jax.Array:
    """Return a token per row, drawn with the row's key; a row's token depends on its own logits and key only."""
    temperature = numbers["temperature"]
    if not filters:
        noisy = lambda: logits_BV + temperature * gumbel(keys_B, logits_BV.shape[-1])  # noqa: E731
        return largest(jax.lax.cond(temperature > 0, noisy, lambda: logits_BV))
    noise_BV = gumbel(keys_B, logits_BV.shape[-1])
    order_BV = jnp.argsort(-logits_BV, axis=-1, stable=True)  # of equally probable tokens the first
    sorted_BV, noise_BV = (jnp.take_along_axis(x, order_BV, -1) for x in (logits_BV, noise_BV))
    scores_BV = sorted_BV / jnp.maximum(temperature, 1e-30)
    best_BV = jnp.argmax(jnp.where(kept(scores_BV, numbers), scores_BV + noise_BV, -jnp.inf), axis=-1, keepdims=True)
    return jnp.take_along_axis(order_BV, best_BV, -1)[:, 0].astype(jnp.int32)


def kept(scores_BV: jax.Array, numbers: dict[str, jax.Array]) -> jax.Array:
    """Return which tokens may be chosen, given log-probabilities (up to a constant) from the highest on.

    `top_k` applies first; `top_p` and `min_p` to the probabilities of what it leaves.
    """
    first_BV = jnp.arange(scores_BV.shape[-1]) < numbers["top_k"]
    probable_BV = jax.nn.softmax(jnp.where(first_BV, scores_BV, -jnp.inf), axis=-1)
    before_BV = jnp.cumsum(probable_BV, -1) - probable_BV
    # The most probable one is always kept, also where a rounding error makes `before` of it more than 0.
    inside_BV = (before_BV < numbers["top_p"]) | (jnp.arange(scores_BV.shape[-1]) == 0)
    return first_BV & inside_BV & (probable_BV >= numbers["min_p"] * probable_BV[:, :1])
