"""Newton-Schulz iterations that make matrices orthogonal, each on one device of the mesh.

A stack of matrices is laid out by its first dimension over the mesh, one matrix a device at a time, so that nothing is
exchanged within the iterations: a stack crosses the network once before them and once after. The polynomial is that of
Jordan et al. (kellerjordan.github.io/posts/muon); coefficients and number of steps are theirs.

Shape suffixes: N matrices, R rows, C columns (R <= C).
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from jax.typing import DTypeLike

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5


def orthogonalized(stacks: Sequence[jax.Array], eps: float, dtype: DTypeLike) -> list[jax.Array]:
    """Return the nearest orthogonal matrices, roughly: singular values between 0.7 and 1.2.

    Sums within products are in float32, and so is the norm by which each matrix is divided first.

    Args:
        stacks: [N, rows, columns] each. Those of one shape, or of its transpose, are laid out together where that gives
            devices fewer rounds.
        dtype: of the products.
    """
    wide, found = [_wide(_normed(x, eps).astype(dtype)) for x in stacks], dict[int, jax.Array]()
    for group in grouped([x.shape for x in wide]):
        if len(group) == 1:
            found[group[0]] = _in_rounds(wide[group[0]])
            continue
        joined, counts = _in_rounds(jnp.concatenate([wide[i] for i in group])), [len(wide[i]) for i in group]
        found |= zip(group, jnp.split(joined, list(itertools.accumulate(counts))[:-1]), strict=True)
    return [found[i].mT if _is_tall(x) else found[i] for i, x in enumerate(stacks)]


def grouped(shapes: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Return which wide stacks of these shapes are laid out together: those of equal matrices, if they save a round."""
    alike = defaultdict[tuple[int, ...], list[int]](list)
    for i, (_, *sides) in enumerate(shapes):
        alike[tuple(sides)].append(i)
    counts = {i: shape[0] for i, shape in enumerate(shapes)}
    return [part for group in alike.values() for part in (
        [group] if rounds(sum(counts[i] for i in group)) < sum(rounds(counts[i]) for i in group)
        else [[i] for i in group])]


def _normed(x_NRC: jax.Array, eps: float) -> jax.Array:
    norm_N11 = jnp.sqrt(jnp.sum(jnp.square(x_NRC.astype(jnp.float32)), (1, 2), keepdims=True))
    return x_NRC / (norm_N11 + eps)


def _is_tall(x_NRC: jax.Array) -> bool:
    return x_NRC.shape[1] > x_NRC.shape[2]


def _wide(x_NRC: jax.Array) -> jax.Array:
    return x_NRC.mT if _is_tall(x_NRC) else x_NRC


def rounds(matrices: int) -> int:
    """Return how many rounds of one matrix on each device there are."""
    return -(-matrices // math.prod(size for _, size in spread_over(matrices)))


def _in_rounds(x_NRC: jax.Array) -> jax.Array:
    """Return the orthogonal matrices: what a round holds is bounded, however many there are."""
    axes = spread_over(len(x_NRC))
    if len(x_NRC) == 1:
        return _on_devices(axes, x_NRC)
    devices, times, rest = math.prod(size for _, size in axes), rounds(len(x_NRC)), x_NRC.shape[1:]
    padded = jnp.pad(x_NRC, ((0, times * devices - len(x_NRC)), (0, 0), (0, 0)))
    # Here, or the compiler would exchange the matrices of all rounds in each of them. Were a device's own neighbours in
    # the stack, it would exchange the momentum itself, in float32 and more than once.
    found = lax.map(partial(_on_devices, axes), _moved(padded.reshape(times, devices, *rest), axes))
    return _moved(found, axes, back=True).reshape(-1, *rest)[:len(x_NRC)]


def _moved(x: jax.Array, axes: tuple[tuple[str, int], ...], back: bool = False) -> jax.Array:
    """Return [rounds, devices, ...] laid out over mesh axes, or left so that it may be laid out otherwise.

    Axis by axis: the compiler exchanges parts over one, and over several at once it would make arrays whole everywhere.
    """
    if not _has_auto_axes():
        return x
    free = PartitionSpec.UNCONSTRAINED
    steps = [PartitionSpec(None, tuple(name for name, _ in axes[:n]), free, free) for n in range(1, len(axes))]
    for spec in steps[::-1] if back else [*steps, _places(axes, None)]:
        x = lax.with_sharding_constraint(x, spec)
    return x


def _iterated(x_NRC: jax.Array) -> jax.Array:
    a, b, c = map(jnp.float32, COEFFICIENTS)  # in bfloat16 they would be off by up to 0.2 %, the same way each time
    for _ in range(STEPS):
        gram_NRR = _product("nrc,nsc->nrs", x_NRC, x_NRC)
        # With `a` on its diagonal one product is the whole step: no pass over the wide matrix adds `a` times it.
        turned_NRR = a * jnp.eye(x_NRC.shape[1]) + b * gram_NRR + c * _product("nrs,nst->nrt", gram_NRR, gram_NRR)
        x_NRC = _product("nrs,nsc->nrc", turned_NRR.astype(x_NRC.dtype), x_NRC)
    return x_NRC


def _product(sides: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return products in the dtype of `x`; matrix units and libraries sum those of bfloat16 in float32."""
    exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(sides, x, y, precision=exact, preferred_element_type=x.dtype)


def spread_over(matrices: int) -> tuple[tuple[str, int], ...]:
    """Return the mesh axes, with their sizes, over which as many matrices are laid out, one a device.

    Where there are fewer matrices than devices, these are as few axes as give each matrix a device of its own; the
    devices along the others compute the same.
    """
    if not _has_auto_axes():
        return ()
    mesh = jax.sharding.get_abstract_mesh()
    axes = [(name, size) for name, size in mesh.shape.items() if size > 1]
    subsets = [some for count in range(len(axes) + 1) for some in itertools.combinations(axes, count)]
    sizes = {some: math.prod(size for _, size in some) for some in subsets}
    enough = [some for some in subsets if sizes[some] >= matrices]
    return min(enough, key=lambda some: sizes[some]) if enough else tuple(axes)


def _has_auto_axes() -> bool:
    """Return whether the compiler lays out arrays over a mesh here, so that layouts can be asked of it."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and all(kind == AxisType.Auto for kind in mesh.axis_types)


def _places(axes: tuple[tuple[str, int], ...], *lead: None) -> PartitionSpec:
    """Return the layout of matrices over these axes, behind further dimensions."""
    return PartitionSpec(*lead, tuple(name for name, _ in axes) or None, None, None)


def _on_devices(axes: tuple[tuple[str, int], ...], x_NRC: jax.Array) -> jax.Array:
    """Return the orthogonal matrices, of which each device computes those that these mesh axes give it.

    Without axes every device of a mesh computes all of them.
    """
    if not _has_auto_axes():
        return _iterated(x_NRC)
    # A region of its own: left to itself, the compiler would split products once more and exchange their sums.
    places = _places(axes)
    return jax.shard_map(_iterated, in_specs=places, out_specs=places, check_vma=False)(x_NRC)
