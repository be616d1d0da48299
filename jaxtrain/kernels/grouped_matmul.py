"""Grouped matmuls: rows sorted by group, each times the matrix of its group, with all gradients.

On NVIDIA GPUs `lax.ragged_dot` multiplies all rows by all matrices and masks the results. There kernels compute only
the rows that exist: `mosaic_grouped_matmul` on H100 and H200, `triton_grouped_matmul` on all others since A100.
Elsewhere `lax.ragged_dot` does (TPUs have kernels of their own for it). `grouped_conformance` has what each of them
must compute.

Shape suffixes: R rows, G groups, K and N the dimensions of a weight.
"""

import importlib
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxtrain.base.triton_in_pallas import has_triton
from jaxtrain.errors import UserError
from jaxtrain.kernels.traced_once import traced_once
from jaxtrain.sharding import mesh_context

KERNELS = ("mosaic", "triton")  # of which auto chooses the first that can; each is a module, imported when it is used
INTERPRET: Any = None  # tests: parameters of Pallas's interpreter, with which Mosaic's kernels run anywhere
ROWS, DIMENSION = 128, 64  # what the number of rows and the dimensions of weights must be multiples of, for Mosaic's
BYTES = 128  # what the dimensions of weights in 8 bits must be multiples of


def grouped_matmul(rows_RK: jax.Array, weights_GKN: jax.Array, sizes_G: jax.Array, *, backend: str = "auto",
                   filled: int | None = None, dtype: DTypeLike | None = None) -> jax.Array:
    """Return each row times the matrix of its group; rows behind the last group become zeros, as do their gradients.

    Args:
        rows_RK: sorted by group.
        weights_GKN: one matrix for each group. Where the compiler splits arrays over devices by itself (outside of
            manual regions), it is always XLA that computes.
        sizes_G: the number of rows of each group, which may be 0; their sum is at most R.
        backend: "mosaic" (NVIDIA GPUs of compute capability 9), "triton" (those since 8; interpreted on CPUs, to check
            its numbers), "xla", or "auto": the first one that can run.
        filled: the number of rows that are usually in groups, if fewer than all; it only names kernels, so that
            profiles and `jaxtrain plan` know what they compute.
        dtype: of the result, where rows and weights are 8-bit floats, which have no gradient. Where the kernels do
            not take those, products of the same values in this dtype are computed.
    """
    filled = min(filled or len(rows_RK), len(rows_RK))
    if _in_8_bits(backend, rows_RK, *weights_GKN.shape[1:]):
        return _product(("mosaic", filled), rows_RK, weights_GKN.swapaxes(1, 2), sizes_G, True, dtype)
    rows_RK, weights_GKN = _wide(dtype, rows_RK, weights_GKN)
    backend = _backend(backend, rows_RK, *weights_GKN.shape[1:])
    if backend == "xla":
        return lax.ragged_dot(rows_RK, weights_GKN, sizes_G)
    return _by_kernels((backend, filled), rows_RK, weights_GKN, sizes_G)


def gradient_by_rows(weights_GKN: jax.Array, sizes_G: jax.Array, dy_RN: jax.Array, *, backend: str = "auto",
                     filled: int | None = None, dtype: DTypeLike | None = None) -> jax.Array:
    """Return the gradient of a grouped matmul by rows, for backward passes that are written by hand."""
    filled = min(filled or len(dy_RN), len(dy_RN))
    if _in_8_bits(backend, dy_RN, *weights_GKN.shape[1:]):
        return _product(("mosaic", filled), dy_RN, weights_GKN, sizes_G, True, dtype)
    weights_GKN, dy_RN = _wide(dtype, weights_GKN, dy_RN)
    if (backend := _backend(backend, dy_RN, *weights_GKN.shape[1:])) != "xla":
        return _product((backend, filled), dy_RN, weights_GKN, sizes_G, True)
    numbers = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
    return lax.ragged_dot_general(dy_RN, weights_GKN, sizes_G, numbers)


def gradient_by_weights(rows_RK: jax.Array, sizes_G: jax.Array, dy_RN: jax.Array, *, backend: str = "auto",
                        filled: int | None = None, dtype: DTypeLike | None = None) -> jax.Array:
    """Return the gradient of a grouped matmul by weights, likewise."""
    filled = min(filled or len(rows_RK), len(rows_RK))
    if _in_8_bits(backend, rows_RK, rows_RK.shape[1], dy_RN.shape[1]):
        return _products_of_groups(("mosaic", filled), rows_RK.T, dy_RN.T, sizes_G, True, dtype)
    rows_RK, dy_RN = _wide(dtype, rows_RK, dy_RN)
    if (backend := _backend(backend, rows_RK, rows_RK.shape[1], dy_RN.shape[1])) != "xla":
        return _products_of_groups((backend, filled), rows_RK, dy_RN, sizes_G, False)
    numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    return lax.ragged_dot_general(rows_RK, dy_RN, sizes_G, numbers)


def grouped_matmul_gradients(rows_RK: jax.Array, weights_GKN: jax.Array, sizes_G: jax.Array, dy_RN: jax.Array, *,
                             backend: str = "auto", filled: int | None = None,
                             dtype: DTypeLike | None = None) -> tuple[jax.Array, jax.Array]:
    """Return both gradients."""
    return (gradient_by_rows(weights_GKN, sizes_G, dy_RN, backend=backend, filled=filled, dtype=dtype),
            gradient_by_weights(rows_RK, sizes_G, dy_RN, backend=backend, filled=filled, dtype=dtype))


def _in_8_bits(asked: str, rows: jax.Array, *dimensions: int) -> bool:
    """Return whether the kernels multiply these 8-bit floats as they are."""
    return rows.dtype.itemsize == 1 and _backend(asked, rows, *dimensions) == "mosaic" and all(
        size % BYTES == 0 for size in dimensions)


def _wide(dtype: DTypeLike | None, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    return arrays if dtype is None else tuple(a.astype(dtype) for a in arrays)


def _backend(asked: str, rows: jax.Array, *dimensions: int) -> str:
    mesh = jax.sharding.get_abstract_mesh()
    split = any(size > 1 and axis not in mesh.manual_axes for axis, size in mesh.shape.items())  # by the compiler
    return choose_backend("xla" if split else asked, rows.dtype, len(rows), *dimensions)


def choose_backend(asked: str, dtype: jnp.dtype, rows: int, *dimensions: int) -> str:
    """Return the backend that `train.grouped_matmul` selects here; raises UserError if it cannot do this."""
    if asked == "auto":
        here = mesh_context.platform() in ("gpu", "cuda")
        able = (name for name in KERNELS if (here or (INTERPRET and name == "mosaic")) and not refusal(
            name, dtype, rows, dimensions))
        return next(able, "xla")
    if reason := refusal(asked, dtype, rows, dimensions):
        raise UserError("train.grouped_matmul", f"the {asked} backend cannot do this: {reason}", "use 'auto' or 'xla'")
    return asked


def refusal(backend: str, dtype: jnp.dtype, rows: int = 0, dimensions: tuple[int, ...] = ()) -> str:
    """Return why a backend cannot multiply so many rows by weights of these dimensions; "" if it can."""
    capability, interpreted = mesh_context.compute_capability(), INTERPRET
    if backend == "triton":
        interpreted = mesh_context.platform() == "cpu"
    odd = next((size for size in dimensions if size % DIMENSION), 0)
    wide = f"it computes in bfloat16 or float16, not {dtype}"
    is_wide = not interpreted and dtype.itemsize > 1 and dtype not in (jnp.bfloat16, jnp.float16)
    reasons = {
        "mosaic": {
            "it runs on NVIDIA GPUs of compute capability 9 (H100, H200) only":
                not interpreted and not 9 <= capability < 10,
            f"it needs JAX 0.11 or newer, and this is {jax.__version__}": jax.__version_info__ < (0, 11),
            wide: is_wide,
            f"{rows} rows of a device are not a multiple of {ROWS}": rows % ROWS,
            f"the width {odd} is not a multiple of {DIMENSION}": odd},
        "triton": {
            "it runs on NVIDIA GPUs since compute capability 8 (A100) only": not interpreted and capability < 8,
            f"JAX {jax.__version__} has no Triton in Pallas": not has_triton(),
            wide: is_wide}}
    return next((reason for reason, applies in reasons.get(backend, {}).items() if applies), "")


# ------------------------------------------------------------------------------------- the three products, with kernels
How = tuple[str, int]  # the backend, and the rows that are usually in groups


def _kernels(how: How) -> tuple[ModuleType, dict[str, Any]]:
    """Return the module of a backend, which imports Pallas, and what its functions are told."""
    backend, filled = how
    interpret = mesh_context.platform() == "cpu" if backend == "triton" else INTERPRET
    return (importlib.import_module(f"jaxtrain.kernels.{backend}_grouped_matmul"),
            {"name": f"grouped_matmul_{filled}_rows", "interpret": interpret})


def _product(how: How, rows_RK: jax.Array, weights: jax.Array, sizes_G: jax.Array, transposed: bool,
             dtype: DTypeLike | None = None) -> jax.Array:
    kernels, told = _kernels(how)
    return traced_once(kernels.product, rows_RK, weights, sizes_G, transposed=transposed, dtype=dtype, **told)


def _products_of_groups(how: How, rows: jax.Array, others: jax.Array, sizes_G: jax.Array, transposed: bool,
                        dtype: DTypeLike | None = None) -> jax.Array:
    kernels, told = _kernels(how)
    return traced_once(kernels.products_of_groups, rows, others, sizes_G, transposed=transposed, dtype=dtype, **told)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _by_kernels(how, rows_RK, weights_GKN, sizes_G):
    return _product(how, rows_RK, weights_GKN, sizes_G, False)


def _forward(how, rows_RK, weights_GKN, sizes_G):
    return _by_kernels(how, rows_RK, weights_GKN, sizes_G), (rows_RK, weights_GKN, sizes_G)


def _backward(how, saved, dy_RN):
    rows_RK, weights_GKN, sizes_G = saved
    return (_product(how, dy_RN, weights_GKN, sizes_G, True),
            _products_of_groups(how, rows_RK, dy_RN, sizes_G, False), None)


_by_kernels.defvjp(_forward, _backward)
