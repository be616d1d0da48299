"""A scalar read-out of the final activations: rewards in place of the output projection, or values beside it."""

from collections.abc import Sequence

import jax
from flax import nnx

from jaxtrain.models.layers import param
from jaxtrain.sharding import activations
from jaxtrain.train_step.optimizers import mup
from jaxtrain.train_step.state import Params

REWARD, VALUE = HEADS = "reward_head", "value_head"  # attributes of a decoder, and so the paths of their parameters


class ScalarHead(nnx.Module):
    """A linear read-out, computed in float32.

    The weights of a reward head begin with the deviation 1 / sqrt(dim + 1), as in Stiennon et al. (arXiv 2009.01325);
    those of a value head begin at 0, so that nothing is expected at first.
    """

    def __init__(self, kind: str, dim: int, *, rngs: nnx.Rngs):
        base = dim * mup.initial_factor(("embed", None))  # the width of the model that this one is relative to
        std = (base + 1) ** -0.5 if kind == REWARD else 0.0
        self.kernel = param(rngs, (dim, 1), ("embed", None), std, compute_dtype="float32")

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Return a number for each token's activation [B, T]."""
        y_BT1 = activations.einsum("btd,dr->btr", x_BTD, self.kernel[...], ("embed", None), ("batch", "seq", None))
        return y_BT1[..., 0]


def is_head(path: str) -> bool:
    """Return whether a parameter's path is that of a head."""
    return path.partition("/")[0] in HEADS


def without_heads(params: Params, but: Sequence[str] = ()) -> Params:
    """Return a nested dict of parameters without those of heads, except for some."""
    return {key: inner for key, inner in params.items() if key not in HEADS or key in but}
