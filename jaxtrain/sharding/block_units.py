"""Products in MXFP8 and NVFP4 on units that multiply blocks with scales: NVIDIA's Blackwell, by `jax.nn.scaled_matmul`.

The numbers are those of block_products.py, which computes them in bfloat16 elsewhere. Each device multiplies its parts
of both factors in their 8 or 4 bits, in a manual region, and what the sum over devices is comes after: weights are
gathered in these bits, and results are summed into the layout in which they are wanted.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxtrain.base.annotations import AnyArray
from jaxtrain.base.narrow_formats import BLOCKS
from jaxtrain.sharding import activations, block_formats, block_layout, mesh_context
from jaxtrain.sharding.axis_rules import SpecEntry, axes_of
from jaxtrain.sharding.block_formats import NV_BLOCK, Blocks
from jaxtrain.sharding.block_layout import Entries, entries_of, laid_out, merged
from jaxtrain.sharding.contractions import Contraction, Product, exact_sums

LEAD = 2  # dimensions of an input before those that a product sums over: rows and tokens
Noise = Callable[[str, jax.Array], jax.Array] | None  # a name and an array -> numbers in [0, 1) in its shape


def there() -> bool:
    """Return whether the devices that code is traced for have such units."""
    return mesh_context.platform() in ("gpu", "cuda") and int(mesh_context.compute_capability()) in (10, 11)


def of(product: Product, x: AnyArray, weight: AnyArray, kind: str) -> "Unit | None":
    """Return how units compute a product and its gradients, of which shapes are read; None where they cannot."""
    if not there() or not isinstance(product, Contraction):
        return None
    return _unit(product, x, weight, kind)


def _unit(product: Contraction, x: AnyArray, weight: AnyArray, kind: str) -> "Unit | None":
    """Return it where each device has whole blocks of all three dimensions that products sum over."""
    summed, block = x.ndim - LEAD, BLOCKS[kind]
    rest = entries_of(weight)
    used = tuple(activations.gathered_spec(*product.names)) if block_layout.on_mesh() else (None,) * weight.ndim
    narrow, wide = used[0], used[summed]
    taken = {*axes_of(narrow), *axes_of(wide)}
    if any(axes_of(entry) for d, entry in enumerate(used) if d not in (0, summed)):
        return None  # a dimension behind the first of several is split
    rows = tuple(tuple(a for a in axes_of(entry) if a not in taken) or None for entry in entries_of(x)[:LEAD])
    sizes = math.prod(weight.shape[:summed]), math.prod(weight.shape[summed:]), x.shape[1]
    if not all(block_layout.whole_blocks(size, entry, block) for size, entry in zip(
            sizes, (narrow, wide, rows[1]), strict=True)):
        return None
    spec = getattr(x.sharding, "spec", P()) if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x).sharding.spec
    reduced = spec.reduced
    if reduced and set(axes_of(wide)) != set(reduced):
        return None
    return Unit(product, kind, x.shape, entries_of(x), weight.shape, rest, rows, narrow, wide, frozenset(reduced),
                x.dtype)


@dataclass(frozen=True)
class Factor:
    """A factor of a product: free dimensions, then those that are summed over, the last of them in blocks."""

    blocks: Blocks  # [free..., summed..., blocks, block]
    free: int
    scale: jax.Array | None = None  # of the whole array

    def laid_out(self, *entries: SpecEntry) -> "Factor":
        """Return it with its dimensions in this layout, as narrow arrays."""
        narrow = _narrow(self.blocks)
        return replace(self, blocks=Blocks(*(laid_out(a, (*entries, None)) for a in (narrow.elements, narrow.scales))))


def _narrow(blocks: Blocks) -> Blocks:
    """Return blocks in the types that units take."""
    if blocks.scales.dtype == jnp.uint8:
        return Blocks(blocks.elements.astype(jnp.float8_e4m3fn),
                      lax.bitcast_convert_type(blocks.scales, jnp.float8_e8m0fnu))
    return Blocks(blocks.elements.astype(jnp.float4_e2m1fn), blocks.scales)


@dataclass(frozen=True)
class Unit:
    """A product of an input and a weight on units, by the layouts of both and of what is between them.

    An input is [rows, tokens, K] here, a weight [K, N].
    """

    product: Contraction
    kind: str
    x_shape: tuple[int, ...]
    x_entries: Entries
    weight_shape: tuple[int, ...]
    weight_entries: Entries  # at rest
    rows: Entries  # of rows and tokens, where a product is computed
    narrow: SpecEntry  # of the weight's dimensions in use
    wide: SpecEntry
    reduced: frozenset[str]  # axes over which the input's gradient is left unsummed
    dtype: DTypeLike = field(default=jnp.bfloat16)

    @property
    def block(self) -> int:
        """The values in a block."""
        return BLOCKS[self.kind]

    @property
    def summed(self) -> int:
        """Return how many dimensions an input and a weight share."""
        return len(self.x_shape) - LEAD

    # ------------------------------------------------------------------------------------------------------- products
    def output(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """Return the output, laid out as the contraction says."""
        one = self._along_features(x).laid_out(*self.rows, self.narrow)
        other = self._weight(weight, of_output=False).laid_out(self.wide, self.narrow)
        want = tuple(activations.activation_spec(*self.product.out) or ()) if block_layout.on_mesh() else ()
        want = (*want, *(None,) * (LEAD + len(self.weight_shape)))[:LEAD + len(self.weight_shape) - self.summed]
        y = self._multiply(one, other, (*self.rows, self.wide), (self.narrow,), want[:LEAD + 1])
        return laid_out(block_layout.split(y, LEAD, self.weight_shape[self.summed:]), want)

    def input_gradient(self, weight: jax.Array, dy: jax.Array, noise: Noise = None) -> jax.Array:
        """Return the gradient with respect to the input."""
        one = self._along_features(dy, noise).laid_out(*self.rows, self.wide)
        other = self._weight(weight, of_output=True).laid_out(self.narrow, self.wide)
        dx = self._multiply(one, other, (*self.rows, self.narrow), (self.wide,), self.x_entries[:LEAD + 1],
                            unsummed=self.reduced)
        return self._like_input(dx)

    def weight_gradient(self, x: jax.Array, dy: jax.Array, noise: Noise = None) -> jax.Array:
        """Return the gradient with respect to the weight."""
        one = self._along_tokens(x, self.narrow).laid_out(self.narrow, *self.rows)
        other = self._along_tokens(dy, self.wide, noise).laid_out(self.wide, *self.rows)
        want = self.weight_entries[0], self.weight_entries[self.summed]
        dw = self._multiply(one, other, (self.narrow, self.wide), self.rows, want)
        dw = block_layout.split(block_layout.split(dw, 1, self.weight_shape[self.summed:]), 0,
                                self.weight_shape[:self.summed])
        return laid_out(dw, self.weight_entries)

    def _like_input(self, dx: jax.Array) -> jax.Array:
        if not self.reduced:
            return laid_out(block_layout.split(dx, LEAD, self.x_shape[LEAD:]), self.x_entries)
        spec = P(*self.x_entries, unreduced=set(self.reduced))
        ones = jax.reshard(jnp.ones(len(dx), dx.dtype), P(tuple(sorted(self.reduced))))
        dx = jnp.einsum("p,pbtk->btk", ones, dx, out_sharding=P(*entries_of(dx)[1:], unreduced=set(self.reduced)))
        return lax.reshape(dx, self.x_shape, out_sharding=spec)

    # ------------------------------------------------------------------------------------------------------- factors
    def _along_features(self, x: jax.Array, noise: Noise = None) -> Factor:
        """Return an input or an output, of which blocks lie along the features."""
        drawn = None if noise is None or self.kind != "nvfp4" else noise("input", x)
        return self._rounded(merged(block_layout.plain(x), LEAD, x.ndim), LEAD, drawn)

    def _along_tokens(self, x: jax.Array, entry: SpecEntry, noise: Noise = None) -> Factor:
        """Return an input or an output as [features, rows, blocks, block], of which blocks lie along tokens."""
        drawn = None if noise is None or self.kind != "nvfp4" else noise("weight", x)
        x = laid_out(merged(block_layout.plain(x), LEAD, x.ndim), (*self.rows, entry))
        if self.kind == "nvfp4":
            matrix = jnp.asarray(block_formats.hadamard(), x.dtype)
            with exact_sums():
                x = merged(jnp.einsum("bntk,ts->bnsk", block_layout.cut(x, (1, 2), NV_BLOCK), matrix,
                                      preferred_element_type=jnp.float32), 1, 3)
        found = self._rounded(x, 1, drawn)
        return replace(found, free=1, blocks=Blocks(*(jnp.moveaxis(a, -1, 0) for a in (
            found.blocks.elements, found.blocks.scales))))

    def _rounded(self, x: jax.Array, dim: int, drawn: jax.Array | None) -> Factor:
        """Return an array [rows, tokens, features] in blocks along a dimension."""
        blocks = block_layout.cut(x, (dim, dim + 1), self.block)
        if self.kind == "mxfp8":
            return Factor(block_formats.mxfp8(blocks, (dim + 1,)), LEAD)
        scale = block_formats.nvfp4_scale(activations.peak(x))
        if drawn is not None:
            drawn = block_layout.cut(laid_out(merged(drawn, LEAD, drawn.ndim), entries_of(x)), (dim, dim + 1),
                                     self.block)
        return Factor(block_formats.nvfp4(blocks, (dim + 1,), scale, drawn), LEAD, scale)

    def _weight(self, weight: jax.Array, of_output: bool) -> Factor:
        """Return the weight as [N, blocks, block] for the output, or as [K, blocks, block] for the input's gradient."""
        weight_KN = merged(merged(block_layout.plain(weight), self.summed, weight.ndim), 0, self.summed)
        weight = weight_KN if of_output else weight_KN.T
        blocks = block_layout.cut(weight, (1, 2), self.block)
        if self.kind == "mxfp8":
            return Factor(block_formats.mxfp8(blocks, (2,)), 1)
        scale = block_formats.nvfp4_scale(activations.peak(weight))
        tiles = block_formats.nvfp4(block_layout.cut(blocks, (0, 1), NV_BLOCK), (1, 3), scale)
        shape, layout = (*tiles.elements.shape[:3], 1), P(*entries_of(tiles.elements)[:3], None)
        scales = lax.broadcast_in_dim(tiles.scales, shape, (0, 1, 2, 3),
                                      out_sharding=layout if block_layout.on_mesh() else None)
        return Factor(Blocks(merged(tiles.elements, 0, 2), merged(scales, 0, 2)), 1, scale)

    # ------------------------------------------------------------------------------------------------------- devices
    def _multiply(self, one: Factor, other: Factor, out: Entries, summed: Entries, want: Entries,
                  unsummed: frozenset[str] = frozenset()) -> jax.Array:
        """Return the product of two factors, summed over devices into a layout close to `want`.

        Args:
            one: its free dimensions come first in the result.
            other: its free dimensions come behind.
            out: how the result is split before sums over devices.
            summed: how the dimensions that are summed over are split.
            want: the layout that is wanted.
            unsummed: axes over which parts stay apart, in a first dimension of their own.
        """
        sums = [axis for entry in summed for axis in axes_of(entry) if axis not in unsummed]
        spread, result = [], [*out]
        for d, entry in enumerate(want):
            before, after = axes_of(out[d]), axes_of(entry)
            more = after[len(before):]
            if more and after[:len(before)] == before and set(more) <= set(sums):
                spread.append((d, more))
                result[d] = entry
                sums = [axis for axis in sums if axis not in more]

        def local(*arrays: jax.Array) -> jax.Array:
            y = _local(Blocks(*arrays[:2]), one.free, Blocks(*arrays[2:]), other.free, self.dtype)
            for d, axes in spread:
                y = lax.psum_scatter(y, axes, scatter_dimension=d, tiled=True)
            y = lax.psum(y, tuple(sums)) if sums else y
            return y[None] if unsummed else y

        arrays = one.blocks.elements, one.blocks.scales, other.blocks.elements, other.blocks.scales
        if block_layout.on_mesh():
            parts = [tuple(sorted(unsummed))] if unsummed else []
            local = activations.manual_region(local, tuple(P(*entries_of(a)) for a in arrays), P(*parts, *result))
        y = local(*arrays)
        if one.scale is None or other.scale is None:
            return y
        return (y.astype(jnp.float32) * (one.scale * other.scale)).astype(y.dtype)


def _local(one: Blocks, free: int, other: Blocks, others: int, dtype: DTypeLike) -> jax.Array:
    """Return the product of a device's parts of two factors."""
    shape = *one.elements.shape[:free], *other.elements.shape[:others]
    (a, a_scale), (b, b_scale) = (tuple(x.reshape(1, math.prod(f.elements.shape[:n]), -1) for x in (
        f.elements, f.scales)) for f, n in ((one, free), (other, others)))
    if mesh_context.platform() in ("gpu", "cuda"):
        return jax.nn.scaled_matmul(a, b, a_scale, b_scale, preferred_element_type=dtype)[0].reshape(shape)
    block = a.shape[-1] // a_scale.shape[-1]  # what units do, for tests on a CPU
    a, b = (x.astype(jnp.float32) * jnp.repeat(s.astype(jnp.float32), block, -1) for x, s in (
        (a, a_scale), (b, b_scale)))
    return jnp.einsum("zmk,znk->mn", a, b, precision="highest").astype(dtype).reshape(shape)
