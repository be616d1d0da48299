"""Rows of a batch that mesh axis `context` cuts: which tokens a device holds, and how rows are made whole again.

Where nothing cuts rows, this is all that a model imports of context parallelism (context.py).
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxtrain.sharding import activations, axis_rules, mesh_context

AXIS = "context"


def size() -> int:
    """Return over how many devices the code being traced shards a sequence.

    Taken from the mesh, since specs omit manual axes.
    """
    here = mesh_context.current()
    if here is None or not mesh_context.is_explicit(here[0]) or AXIS not in here[1]["seq"]:
        return 1
    return here[0].shape[AXIS]


def arrange(batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Put arrays [B, T, ...] into balanced order, sharded over `context`; batches arrive whole, so nothing is sent."""
    n = size()
    if n == 1:
        return {key: activations.constrain(x, "batch", "seq", *(None,) * (x.ndim - 2)) for key, x in batch.items()}

    def own(x_BT):
        chunks, i = x_BT.reshape(len(x_BT), 2 * n, -1, *x_BT.shape[2:]), lax.axis_index(AXIS)
        return jnp.concatenate([chunks[:, i], chunks[:, 2 * n - 1 - i]], 1)

    rows = activations.split_by("batch")
    held = activations.manual_region(own, in_specs=P(rows, None), out_specs=P(rows, activations.split_by("seq")))
    return {key: held(activations.constrain(x, "batch", *(None,) * (x.ndim - 1))) for key, x in batch.items()}


def balanced_order(device: jax.Array | int, n: int, tokens: int) -> jax.Array:
    """Return the positions in the sequence of the tokens that one device of n holds."""
    chunk = jnp.arange(tokens // 2)
    return jnp.concatenate([device * len(chunk) + chunk, (2 * n - 1 - device) * len(chunk) + chunk])


def whole_rows(x: jax.Array, *names: str | None) -> jax.Array:
    """Gather an array [B, T, ...] over the devices that share a row; `names` are those of its further dimensions."""
    if inside := _around():  # manual over the others, too: JAX 0.10 cannot lower its gradient among them
        spec = jax.typeof(x).sharding.spec
        x = activations.manual_region(lambda x: lax.all_gather(x, inside, axis=1, tiled=True), spec, spec)(x)
    return activations.constrain(x, "batch", None, *names)


def row_copies() -> int:
    """Return how many devices of a surrounding pipeline compute alike what is computed of whole rows."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[axis] for axis in _around())


def _around() -> tuple[str, ...]:
    """Return the axes that split a row and that a surrounding pipeline has made manual."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(axis for axis in activations.axes_over("seq") if axis not in axis_rules.free_axes(mesh))
