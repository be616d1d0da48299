"""Mixed precision: compute dtypes over float32 master weights, and the loss scale that float16 needs."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxtrain.base.annotations import PyTree
from jaxtrain.base.narrow_formats import NARROW

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


def dtype_of(precision: str) -> jnp.dtype:
    """Return the dtype of parameters and activations, of which only products may have fewer bits."""
    return jnp.dtype(DTYPES["bfloat16" if precision in NARROW else precision])


def resolve(precision: str, platform: str) -> str:
    """Return the precision that "auto" means here: bfloat16 on accelerators, float32 on CPU."""
    return ("float32" if platform == "cpu" else "bfloat16") if precision == "auto" else precision


def wide(x: jax.Array) -> jnp.dtype:
    """Return the dtype in which gradients like this array are summed: complex numbers keep their imaginary part."""
    return jnp.dtype(jnp.complex64 if jnp.issubdtype(x.dtype, jnp.complexfloating) else jnp.float32)


def cast(params: PyTree, precision: str, own: PyTree = None) -> PyTree:
    """Cast parameters to their compute dtype: `precision`, or what the matching tree `own` names for some."""
    def one(p, own=""):
        return p.astype(dtype_of(own or precision)) if jnp.issubdtype(p.dtype, jnp.floating) else p
    return jax.tree.map(one, params) if own is None else jax.tree.map(one, params, own)


def frozen_dtype(frozen: PyTree, name: str, own: PyTree) -> PyTree:
    """Return frozen parameters, abstract or not, in the dtype in which they rest.

    Args:
        name: that dtype; "" leaves all as they are.
        own: says which have a dtype of their own, and keep it.
    """
    def one(x, own):
        if not name or own or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        to = DTYPES[name]
        return jax.ShapeDtypeStruct(x.shape, to) if isinstance(x, jax.ShapeDtypeStruct) else x.astype(to)
    return jax.tree.map(one, frozen, own)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossScale:
    """Dynamic loss scaling: halve when gradients overflow, double after `PATIENCE` good steps."""

    scale: jax.Array
    good_steps: jax.Array

    PATIENCE = 200

    @classmethod
    def initial(cls) -> "LossScale":
        """Return the customary initial scale, 2^15."""
        return cls(jnp.asarray(2.0**15, jnp.float32), jnp.asarray(0, jnp.int32))

    def update(self, finite: jax.Array) -> "LossScale":
        """Return the scale for the next step."""
        good = jnp.where(finite, self.good_steps + 1, 0)
        grow = good >= self.PATIENCE
        scale = jnp.where(finite, jnp.where(grow, self.scale * 2, self.scale), self.scale / 2)
        return LossScale(jnp.clip(scale, 1.0, 2.0**24), jnp.where(grow, 0, good))
