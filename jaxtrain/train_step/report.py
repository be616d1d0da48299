"""A table of how the state is placed on the devices."""

import math
from collections.abc import Container

import jax

from jaxtrain.base.annotations import PyTree
from jaxtrain.config.schema import ModelConfig
from jaxtrain.sharding.axis_rules import SpecEntry
from jaxtrain.sharding.host_memory import HOST
from jaxtrain.train_step.optimizers.matrices import is_matrix
from jaxtrain.train_step.quantized_kernels import as_floats
from jaxtrain.train_step.state import Layout, TrainState

HEAD = ("parameter", "shape", "logical names", "partition spec", "bytes/device")


def report(abstract: TrainState, layout: Layout) -> str:
    """Return one line per parameter (path, shape, logical names, partition spec, bytes per device), then totals."""
    rows = [HEAD, *placements(abstract, layout)]
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = ["  ".join([*map(str.ljust, row[:4], widths), row[4].rjust(widths[4])]) for row in rows]
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join([*lines, *(f"{name}: {value}" for name, value in totals(abstract, layout).items())])


def placements(abstract: TrainState, layout: Layout) -> list[tuple[str, str, str, str, str]]:
    """Return for each parameter what HEAD names."""
    rows = []
    for tree, tree_axes, note in ((abstract.params, layout.axes, ""),
                                  (abstract.frozen, layout.frozen_axes, " (frozen)")):
        names = jax.tree.structure(tree).flatten_up_to(tree_axes)
        for (path, leaf), axes in zip(jax.tree_util.tree_flatten_with_path(tree)[0], names, strict=True):
            rows.append((
                jax.tree_util.keystr(path, simple=True, separator="/") + note, "x".join(map(str, leaf.shape)),
                ", ".join(str(name) for name in axes) if axes else "-",
                ", ".join(_entry(entry) for entry in leaf.sharding.spec) or "-", f"{bytes_per_device(leaf):,}"))
    return rows


def totals(abstract: TrainState, layout: Layout) -> dict[str, str]:
    """Return the mesh and the bytes on a device, in words."""
    mesh = " x ".join(f"{axis}={size}" for axis, size in layout.mesh.shape.items() if size > 1) or "one device"
    count, frozen = (sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(as_floats(tree)))
                     for tree in (abstract.params, abstract.frozen))
    hosts = in_hosts(abstract.opt_state)
    return {"mesh": mesh,
            "parameters": f"{count:,} in {len(jax.tree.leaves(abstract.params))} arrays, {total(abstract.params):,} "
            "bytes per device",
            **({"frozen": f"{frozen:,} parameters, {total(abstract.frozen):,} bytes per device"} if frozen else {}),
            "optimizer state": f"{total(abstract.opt_state):,} bytes per device" + (
                f", {hosts:,} of them in its host's memory" if hosts else ""),
            "whole state": f"{total(abstract):,} bytes per device"}


def bytes_per_device(leaf: jax.Array) -> int:
    """Return the bytes of one array on one device."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def total(tree: PyTree) -> int:
    """Return the bytes of all arrays in a tree on one device."""
    return sum(bytes_per_device(leaf) for leaf in jax.tree.leaves(tree))


def in_hosts(tree: PyTree) -> int:
    """Return the bytes among these that are in host memory."""
    return sum(bytes_per_device(leaf) for leaf in jax.tree.leaves(tree)
               if getattr(leaf.sharding, "memory_kind", None) == HOST)


def _entry(entry: SpecEntry) -> str:
    return "-" if entry is None else entry if isinstance(entry, str) else "+".join(entry)


def matmul_parameters(abstract: TrainState, layout: Layout, model: ModelConfig,
                      teachers: Container[str] = ()) -> float:
    """Return how many parameters each token is multiplied by: matrices, not lookups; a tied table counts once.

    Of a layer's experts only those that a token goes to count. Multi-token prediction uses the head again. A frozen
    matrix counts two thirds, since it has no gradient of its own; those under the keys `teachers` do not count.
    """
    def active(shape, axes):
        if "experts" not in axes:
            return math.prod(shape)
        return math.prod(shape) // shape[axes.index("experts")] * model.experts.per_token

    def multiplied(params, axes):
        params, axes = as_floats(params), as_floats(axes)
        names = jax.tree.structure(params).flatten_up_to(axes)
        return sum(active(leaf.shape, axes) for (path, leaf), axes in zip(
            jax.tree_util.tree_leaves_with_path(params), names, strict=True)
            if is_matrix(axes) and axes[0] not in lookups and axes[-1] is not None  # a read-out of few numbers
            and jax.tree_util.keystr(path, simple=True, separator="/") not in model.lookups)

    tied = model.ties_head and "reward_head" not in abstract.all_params  # a head in the output projection's place
    lookups = ("positions",) if tied else ("positions", "vocab")
    frozen = {key: (params, layout.frozen_axes[key]) for key, params in abstract.frozen.items() if key not in teachers}
    once = multiplied(abstract.params, layout.axes) + 2 / 3 * sum(multiplied(*one) for one in frozen.values())
    return once + model.multi_token_layers * model.embed_dim * model.vocabulary
