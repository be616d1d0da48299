"""Products of rows sorted by expert with the matrices of their experts: as they are, in narrow formats, with adapters.

Shape suffixes: R rows, L experts held here, K and N the dimensions of a matrix.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxtrain.base.annotations import PyTree
from jaxtrain.kernels.grouped_matmul import DIMENSION, grouped_matmul, grouped_matmul_gradients
from jaxtrain.parallel.expert_matrices import Adapted, How, InBlocks, Rows, Weight
from jaxtrain.sharding import mesh_context, products
from jaxtrain.sharding.products import Factor, Rounded


def product(how: How, x_RK: Factor, weight_LKN: Weight, at: Rows) -> jax.Array:
    """Return each row times the matrix of its expert; `how` as `grouped_matmul` takes it."""
    if isinstance(weight_LKN, InBlocks):
        from jaxtrain.parallel import expert_blocks  # which only these formats read

        return expert_blocks.product(how, products.plain(x_RK), weight_LKN, at)
    if isinstance(weight_LKN, Rounded):
        x_RK = products.rounded(x_RK, products.FORWARD)
        y_RN = grouped_matmul(x_RK.values, weight_LKN.values, at.sizes, dtype=x_RK.dtype, **how)
        return products.scaled(y_RN, x_RK, weight_LKN)
    if not isinstance(weight_LKN, Adapted):
        return grouped_matmul(products.plain(x_RK), weight_LKN, at.sizes, **how)
    y_RN, (down, up) = product(how, x_RK, weight_LKN.weight, at), _narrow(weight_LKN)
    return y_RN + product(how, product(how, x_RK, down, at), up, at) * weight_LKN.scale


def gradients(how: How, x_RK: Factor, weight_LKN: Weight, at: Rows,
              dy_RN: Factor) -> tuple[jax.Array, PyTree]:
    """Return the gradients of a product by rows and weights."""
    if isinstance(weight_LKN, InBlocks):
        from jaxtrain.parallel import expert_blocks

        dx_RK, dweight = expert_blocks.gradients(how, products.plain(x_RK), weight_LKN, at, products.plain(dy_RN))
        return dx_RK, replace(weight_LKN, weight=dweight)
    if isinstance(weight_LKN, Rounded):
        x_RK, dy_RN = products.rounded(x_RK, products.FORWARD), products.rounded(dy_RN, products.BACKWARD)
        dx_RK, dweight_LKN = grouped_matmul_gradients(x_RK.values, weight_LKN.values, at.sizes, dy_RN.values,
                                                      dtype=x_RK.dtype, **how)
        return (products.scaled(dx_RK, weight_LKN, dy_RN),
                products.gradient_of(weight_LKN, products.scaled(dweight_LKN, x_RK, dy_RN)))
    if not isinstance(weight_LKN, Adapted):
        return grouped_matmul_gradients(products.plain(x_RK), weight_LKN, at.sizes, products.plain(dy_RN), **how)
    dx_RK, dweight = gradients(how, x_RK, weight_LKN.weight, at, dy_RN)
    down, up = _narrow(weight_LKN)
    inner, dup = gradients(how, product(how, x_RK, down, at), up, at, products.plain(dy_RN) * weight_LKN.scale)
    more_RK, ddown = gradients(how, x_RK, down, at, inner)
    rank = weight_LKN.down.shape[-1]
    return dx_RK + more_RK, Adapted(dweight, ddown[..., :rank], dup[:, :rank], weight_LKN.scale)


def _narrow(weight: Adapted) -> tuple[jax.Array, jax.Array]:
    """Return both matrices of an adapter, with zeros up to a rank that the kernels of GPUs take."""
    more = -weight.down.shape[-1] % DIMENSION if mesh_context.platform() == "gpu" else 0
    return jnp.pad(weight.down, ((0, 0), (0, 0), (0, more))), jnp.pad(weight.up, ((0, 0), (0, more), (0, 0)))
