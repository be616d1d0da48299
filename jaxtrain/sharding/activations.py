"""The layout of arrays while a model computes: constrained, gathered and multiplied by their logical names."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxtrain.base.annotations import PyTree
from jaxtrain.sharding.axis_rules import (
    Names,
    SpecEntry,
    axes_of,
    check_divides,
    free_axes,
    without_trivial_axes,
)
from jaxtrain.sharding.mesh_context import current, is_explicit


def peak(x: jax.Array) -> jax.Array:
    """Return the largest magnitude in an array, on all devices; inside a pipeline on those of the stage."""
    mesh = jax.sharding.get_abstract_mesh()
    inside = set(mesh.axis_names) - {"stage", *free_axes(mesh)}  # a surrounding shard_map
    axes = tuple(axis for axis in mesh.axis_names if axis in inside and mesh.shape[axis] > 1)
    found = jnp.max(jnp.abs(x))
    # In float32, which holds every value that x has: of 16-bit ones, XLA for CPUs aborts in its AllReducePromotion.
    return jax.lax.pmax(found.astype(jnp.float32), axes).astype(x.dtype) if axes else found


def activation_spec(*names: str | None) -> P | None:
    """Return the spec of an activation here, or None without an explicit mesh."""
    here = current()
    if here is None or not is_explicit(here[0]):
        return None
    return without_trivial_axes(here[1].spec(names), here[0])


def split_by(name: str) -> SpecEntry:
    """Return the spec entry of a dimension with this name here, or None if nothing splits it."""
    return (activation_spec(name) or (None,))[0]


def axes_over(name: str) -> tuple[str, ...]:
    """Return the mesh axes that split a dimension with this name here, manual ones included.

    For collectives inside a `manual_region`.
    """
    here = current()
    if here is None or not is_explicit(here[0]):
        return ()
    mesh, rules = here
    return tuple(axis for axis in rules[name] if mesh.shape[axis] > 1)


def gathered_spec(*names: str | None) -> P:
    """Return the spec of a weight that `gather` has brought into use here."""
    here = current()
    assert here is not None
    return without_trivial_axes(here[1].spec(names, gathered=True), here[0])


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Lay `x` out by its logical names: a reshard on an explicit mesh, a constraint on an auto one."""
    here = current()
    if here is None:
        return x
    mesh, rules = here
    spec = without_trivial_axes(rules.spec(names), mesh)
    check_divides(names, x.shape, spec, mesh, "an activation")
    return jax.reshard(x, spec) if is_explicit(mesh) else jax.lax.with_sharding_constraint(x, spec)


def enter(x: jax.Array, names: Names, shared_by: tuple[str, ...]) -> jax.Array:
    """Apply `constrain(x, *names)` to an activation shared by several matmuls, with output dimensions `shared_by`.

    Where all of those are split, each device has a part of every matmul's gradient. The type records this (`reduced`),
    and one collective then sums what each matmul would otherwise sum separately.
    """
    here = current()
    if here is None or AxisType.Auto in here[0].axis_types or AxisType.Manual in here[0].axis_types:
        return constrain(x, *names)  # among manual axes JAX 0.10 cannot differentiate such a type
    spec, splits = activation_spec(*names) or P(), {axes_of(split_by(name)) for name in shared_by}
    return jax.reshard(x, P(*spec, reduced=set(*splits)) if len(splits) == 1 else spec)


def leave_reduced(x: jax.Array) -> jax.Array:
    """Undo what `enter` records of an activation's gradient, for a product whose output dimension is not split."""
    here = current()
    if here is None or not is_explicit(here[0]) or not (spec := jax.typeof(x).sharding.spec).reduced:
        return x
    return jax.reshard(x, P(*spec.partitions))


def manual_region(f: Callable, in_specs: PyTree, out_specs: PyTree) -> Callable:
    """Wrap `f` in a `shard_map` over every free axis: it runs on each device's part, with collectives by name."""
    mesh, _ = current() or (jax.sharding.get_abstract_mesh(), None)
    return jax.shard_map(f, in_specs=in_specs, out_specs=out_specs, axis_names=set(free_axes(mesh)), check_vma=False)


def gather(weight: jax.Array, *names: str | None) -> jax.Array:
    """Bring a weight from its layout at rest to its layout in use (an all-gather, whose transpose reduces)."""
    here = current()
    if here is None or not is_explicit(here[0]):
        return weight
    return jax.reshard(weight, gathered_spec(*names))


def einsum(equation: str, x: jax.Array, weight: jax.Array, names: Names, out: Names,
           bias: jax.Array | None = None) -> jax.Array:
    """Multiply `x` by a weight with logical `names`, add `bias`, and lay the result out as `out`.

    x and the result begin with batch, sequence. Where only the batch is split this is one product of two matrices,
    [batch x sequence, ...] by [..., ...]: XLA on CPU is up to 1.2 times as fast with it as with separate dimensions,
    whose gradients need transposes.
    """
    if any(map(_splits_a_product, (*names, *out[1:]))):
        y = jnp.einsum(equation, x, gather(weight, *names), out_sharding=activation_spec(*out))
        return with_bias(y, bias)
    left, right = equation.split("->")[0].split(",")
    summed = sum(letter in right for letter in left)  # dimensions: last of x, first of the weight
    assert left[2:] == right[:summed] and equation.endswith(f"->{left[:2]}{right[summed:]}"), equation
    matrix, new = _matrix(weight, summed, names), weight.shape[summed:]

    def product(x):
        y = x.reshape(-1, len(matrix)) @ matrix
        return with_bias(y, None if bias is None else bias.reshape(-1)).reshape(-1, *new)

    return by_row(product, x)


def with_bias(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Add a bias whose gradient is then summed in float32, whatever y is."""
    return y if bias is None else (y + bias.astype(jnp.float32)).astype(y.dtype)


def _matrix(weight: jax.Array, summed: int, names: Names) -> jax.Array:
    """Bring a weight into use as a matrix, of its first `summed` dimensions by the others.

    Where possible it becomes a matrix before it is gathered: then the gradient is summed in the shape that is split,
    by a reduce-scatter, where XLA would otherwise sum it on all devices and take a slice.
    """
    parts = slice(None, summed), slice(summed, None)
    shape = [math.prod(weight.shape[part]) for part in parts]
    here = current()
    if here is None or not is_explicit(here[0]):
        return weight.reshape(shape)
    at_rest = jax.typeof(weight).sharding.spec
    splits = [[(math.prod(weight.shape[part][:d]), entry) for d, entry in enumerate(at_rest[part]) if entry]
              for part in parts]
    if any(gathered_spec(*names)) or any(len(split) > 1 or split[0][0] > 1 for split in splits if split):
        return gather(weight, *names).reshape(shape)
    merged = jax.lax.reshape(weight, shape, out_sharding=P(*(split[0][1] if split else None for split in splits)))
    return jax.reshard(merged, P(None, None))


def _splits_a_product(name: str | None) -> bool:
    """Return whether a dimension of this name is split here over an axis that does not split the batch."""
    here = current()
    return here is not None and name is not None and any(
        axis not in here[1].batch for axis in axes_of(split_by(name)))


def by_row(f: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Apply `f` to x with batch and sequence merged, which is faster, or to x itself if the sequence is split."""
    here = current()
    if here is None or not is_explicit(here[0]):
        y = f(x.reshape(-1, *x.shape[2:]))
        return y.reshape(*x.shape[:2], *y.shape[1:])
    spec = jax.typeof(x).sharding.spec
    if any(spec[1:]) or spec.reduced:
        return f(x)
    y = f(jax.lax.reshape(x, (x.shape[0] * x.shape[1], *x.shape[2:]), out_sharding=P(spec[0], *spec[2:])))
    return jax.lax.reshape(y, (*x.shape[:2], *y.shape[1:]), out_sharding=P(spec[0], *[None] * y.ndim))


def micro_batches(x: jax.Array, parts: int) -> jax.Array:
    """Reshape [B, ...] to [parts, B / parts, ...], part a being rows a, a + parts, ..., so each device splits its own.
    """
    shape = (x.shape[0] // parts, parts, *x.shape[1:])
    here = current()
    if here is None or not is_explicit(here[0]):
        return jnp.moveaxis(x.reshape(shape), 1, 0)
    batch, *rest = jax.typeof(x).sharding.spec
    return jnp.moveaxis(jax.lax.reshape(x, shape, out_sharding=P(batch, None, *rest)), 1, 0)
