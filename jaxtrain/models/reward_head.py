"""A scalar read-out of the final activations in place of the output projection: what makes a decoder a reward model."""

from typing import Any

import jax
from flax import nnx

from jaxtrain.models.layers import param
from jaxtrain.sharding import rules as sharding

NAME = "reward_head"  # of the attribute of a decoder, and so the path of its parameters


class RewardHead(nnx.Module):
    """A linear read-out, computed in float32.

    Its weights begin with the deviation 1 / sqrt(dim + 1), as in Stiennon et al. (arXiv 2009.01325).
    """

    def __init__(self, dim: int, *, rngs: nnx.Rngs):
        self.kernel = param(rngs, (dim, 1), ("embed", None), (dim + 1) ** -0.5, compute_dtype="float32")

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Return the reward of each token's activation [B, T]."""
        y_BT1 = sharding.einsum("btd,dr->btr", x_BTD, self.kernel[...], ("embed", None), ("batch", "seq", None))
        return y_BT1[..., 0]


def is_reward_head(path: str) -> bool:
    """Return whether a parameter's path is that of the head."""
    return path.startswith(f"{NAME}/")


def without_head(params: Any) -> Any:
    """Return a nested dict of parameters without that of the head."""
    return {key: inner for key, inner in params.items() if key != NAME}
