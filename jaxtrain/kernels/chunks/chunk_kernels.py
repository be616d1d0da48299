"""Functions of matrices in fast memory as Pallas kernels, one call for each chunk of tokens and each head.

A function gets one matrix of each of its arrays, and what it computes on the way from these to its results never
reaches the device's memory. The kernel of the backward pass is made of the same function, by JAX's derivative inside
the kernel, which computes the way again.

Arrays are [N, B, H, rows, columns]: N chunks, B batch, H heads. They may be of groups of heads, or 1 for all of them.
Where a call is for a group of heads, H is the groups, and arrays of each head are [N, B, H, heads, rows, columns].
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.config.model_config import ModelConfig
from jaxtrain.errors import UserError
from jaxtrain.kernels.chunks.chunk_matrices import F32, GPUS, Result, products
from jaxtrain.sharding import mesh_context

INTERPRET = ""  # tests: "tpu" or "gpu", whose kernels Pallas's interpreter runs anywhere


class Chunks(NamedTuple):
    """A function of a chunk's matrices, which returns a tuple of matrices."""

    function: Callable[..., tuple[jax.Array, ...]]
    results: Callable[..., Sequence[Result]]  # their sides and dtypes, from those of the arguments
    name: str  # of its kernels, in profiles and compiled programs
    # Results that the derivative takes as argument `known` of the function, instead of computing them again.
    known: tuple[int, ...] = ()
    # The same function and its gradients in tiles, for GPUs, given references to arguments and results.
    tiled: Callable[[], tuple[Callable[..., None], Callable[..., None]]] | None = None


Backend = Literal["xla", "whole", "tiles"]  # of kernels that hold whole matrices, or tiles of them


def choose_backend(asked: str) -> Backend:
    """Return the backend that `train.recurrent_kernel` selects here; raises UserError if it cannot do this.

    What traces a program once for several platforms has to know it: the platform is not a part of JAX's key of a trace.
    """
    if asked != "pallas":
        return "xla"  # also for "auto": no device has run the kernels yet
    platform = mesh_context.platform()
    if platform in GPUS and mesh_context.compute_capability() < 8:
        platform = "a GPU of compute capability below 8 (A100)"
    if not INTERPRET and platform not in ("tpu", *GPUS):
        raise UserError("train.recurrent_kernel", f"pallas runs on TPUs and NVIDIA GPUs only, and this is for "
                        f"{platform}", "use 'auto' or 'xla'")
    return "tiles" if (INTERPRET or platform) in GPUS else "whole"


def check(model: ModelConfig) -> None:
    """Raise a UserError if `train.recurrent_kernel=pallas` means nothing to a model, or cannot be here."""
    if not model.chunk_kernels:
        raise UserError("train.recurrent_kernel", f"{model.name} has no Gated DeltaNet, Kimi delta attention or "
                        "Mamba-2, which the pallas kernels are for", "use 'auto' or 'xla'")
    choose_backend("pallas")


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def by_chunk(chunks: Chunks, backend: Backend, heads: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Return the function's results for all chunks and heads; no gradient passes to integers."""
    results, name = chunks.results(*arrays), f"recurrent_{chunks.name}"
    if backend == "tiles":
        return tuple(_tiled(chunks, 0, results, name, heads, arrays))
    return tuple(_call(chunks.function, results, name, heads, arrays))


def _forward(chunks, backend, heads, *arrays):
    results = by_chunk(chunks, backend, heads, *arrays)
    return results, (arrays, tuple(results[i] for i in chunks.known))


def _backward(chunks, backend, heads, saved, gradients):
    arrays, known = saved
    real = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating)]

    def derivative(*blocks):
        given, (known_, pulls) = list(blocks[:len(arrays)]), _split(blocks[len(arrays):], len(known))

        def f(*varied):
            for i, x in zip(real, varied, strict=True):
                given[i] = x
            return chunks.function(*given, **({"known": known_} if known_ else {}))

        return jax.vjp(f, *(given[i].astype(F32) for i in real))[1](tuple(x.astype(F32) for x in pulls))

    # Of what heads share, each has its own gradient first.
    kinds = [(arrays[i].shape[3:], arrays[i].dtype if arrays[i].shape[2] == heads else F32) for i in real]
    name, given = f"recurrent_{chunks.name}_gradients", (*arrays, *known, *gradients)
    found = _tiled(chunks, 1, kinds, name, heads, given) if backend == "tiles" else _call(
        derivative, kinds, name, heads, given)
    whole: list[jax.Array | None] = [None] * len(arrays)
    for i, x in zip(real, found, strict=True):
        groups = arrays[i].shape[2]
        whole[i] = x if groups == heads else x.reshape(*x.shape[:2], groups, -1, *x.shape[3:]).sum(3).astype(
            arrays[i].dtype)
    return tuple(whole)


by_chunk.defvjp(_forward, _backward)


def _tiled(chunks, which, results, name, heads, arrays):
    from jaxtrain.kernels.chunks import chunk_tiles  # what imports Triton

    return chunk_tiles.call(chunks.tiled()[which], results, name, heads, arrays, interpret=bool(INTERPRET))


def _split(blocks, count):
    return blocks[:count], blocks[count:]


def _call(f: Callable[..., Sequence[jax.Array]], results: Sequence[Result], name: str, heads: int,
          arrays: tuple[jax.Array, ...]) -> Sequence[jax.Array]:
    from jax.experimental import pallas as pl

    grid = *arrays[0].shape[:2], heads
    outs = [jax.ShapeDtypeStruct((*grid, *sides), dtype) for sides, dtype in results]

    def kernel(*refs):
        given, found = _split(refs, len(arrays))
        for ref, x in zip(found, f(*(ref[...] for ref in given)), strict=True):
            ref[...] = x.astype(ref.dtype)

    def block(x):
        shared = heads // x.shape[2]
        return pl.BlockSpec((None, None, None, *x.shape[3:]),
                            lambda n, b, h: (n, b, lax.div(h, shared), *[0] * (x.ndim - 3)))

    of_one = jax.make_jaxpr(f)(*(jax.ShapeDtypeStruct(x.shape[3:], x.dtype) for x in arrays))
    cost = pl.CostEstimate(flops=math.prod(grid) * products(of_one.jaxpr), transcendentals=0,
                           bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*arrays, *outs)))
    return pl.pallas_call(kernel, grid=grid, in_specs=[block(x) for x in arrays], out_specs=[block(x) for x in outs],
                          out_shape=outs, name=name, cost_estimate=cost, interpret=bool(INTERPRET))(*arrays)
