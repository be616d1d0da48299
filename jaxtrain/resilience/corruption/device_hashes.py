"""Hashes of what each device holds: one number per array, computed by the device from its own copy or piece."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.base.annotations import PyTree
from jaxtrain.sharding.bit_sums import device_sums


class DeviceHashes:
    """A compiled function from trees like a given one to hashes, as uint32 [devices, leaves].

    The tree may be abstract; its leaves carry shardings. Devices are in the order of `devices`, the same in every
    process.
    """

    def __init__(self, tree: PyTree, compiled: jax.stages.Compiled | None = None):
        """`compiled`: what `lower_hashes` returns for such a tree, if it was compiled before."""
        mesh = jax.tree.leaves(tree)[0].sharding.mesh
        self.devices: list[jax.Device] = list(mesh.devices.flat)
        self.paths = [jax.tree_util.keystr(path, simple=True, separator="/")
                      for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
        self._compiled = compiled or lower_hashes(tree).compile()

    def __call__(self, tree: PyTree) -> jax.Array:
        """Return the hashes, without waiting."""
        return self._compiled(tree)

    def named(self, wrong: np.ndarray) -> tuple[list[jax.Device], list[str]]:
        """Return the devices and the leaves that are wrong anywhere, given bools [devices, leaves]."""
        devices, leaves = np.flatnonzero(wrong.any(1)), np.flatnonzero(wrong.any(0))
        return [self.devices[i] for i in devices], [self.paths[i] for i in leaves]


def lower_hashes(tree: PyTree, on: Mesh | None = None, platforms: tuple[str, ...] | None = None) -> jax.stages.Lowered:
    """Return the function from trees like this one to hashes, traced and lowered.

    `on`, `platforms`: the devices to compile for, and their kind, where the mesh of the tree is abstract.
    """
    shardings = [leaf.sharding for leaf in jax.tree.leaves(tree)]
    mesh = shardings[0].mesh

    def hashes(tree):
        columns = [device_sums(x, where, 1) for x, where in zip(jax.tree.leaves(tree), shardings, strict=True)]
        return jax.shard_map(  # a single gather: XLA for CPU can deadlock in collectives that may run concurrently
            lambda rows: jax.lax.all_gather(rows, mesh.axis_names, tiled=True), mesh=mesh,
            in_specs=P(mesh.axis_names), out_specs=P(), check_vma=False)(jnp.concatenate(columns, 1))

    jitted = jax.jit(hashes, out_shardings=None if on is None else NamedSharding(on, P()))
    return jitted.trace(tree).lower(lowering_platforms=platforms)
