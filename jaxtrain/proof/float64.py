"""A traced program in float64: every operation of a jaxpr again, with 16 digits in place of 7 (or of bfloat16's 3).

It is the judge of rounding: how far a float32 run is from this one is its rounding error, measured and not guessed. The
program is that of one device, so that sharding means nothing in it and collectives return what they are given.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.typing import ArrayLike, DTypeLike

from jaxtrain.base.annotations import PyTree
from jaxtrain.base.scan_parts import parts_of_scan

Values = jax.Array | list[jax.Array]
Rule = Callable[..., Values]  # an equation of a jaxpr and its arguments -> its results


class NoFloat64(Exception):
    """An operation of the program cannot be computed in float64, such as a kernel written for a device."""


def in_float64(closed: core.ClosedJaxpr) -> Callable[..., list[jax.Array]]:
    """Return the function that a jaxpr of one device stands for, whose floating-point numbers are all float64.

    It is to be compiled and called under `jax.enable_x64`. Bits of random numbers, and integers, are as they were.
    """
    def function(*args: jax.Array) -> list[jax.Array]:
        return _evaluate(closed.jaxpr, closed.consts, args)
    return function


def widened(tree: PyTree) -> PyTree:
    """Return arrays on the host with float64 for floating-point numbers."""
    return jax.tree.map(lambda x: np.asarray(x, _wide(np.asarray(x).dtype)), tree)


def _wide(dtype: DTypeLike) -> np.dtype:
    """Return float64 for a dtype of 16 or 32 floating-point bits, and complex128 for two of 32.

    Narrower ones stay, which are stored numbers.
    """
    dtype = np.dtype(dtype)
    if dtype == np.complex64:
        return np.dtype(np.complex128)
    return np.dtype(np.float64) if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize in (2, 4) else dtype


def widen(x: ArrayLike) -> jax.Array:
    """Return an array with float64 for floating-point numbers."""
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):  # keys of random numbers
        return x
    return x.astype(_wide(x.dtype))


def dtype_of(atom: core.Var | core.Literal) -> np.dtype:
    """Return the dtype that a variable or a literal of a jaxpr has."""
    return getattr(atom.aval, "dtype")  # noqa: B009 (of an array, as all are here)


def _evaluate(jaxpr: core.Jaxpr, consts: Sequence[ArrayLike], args: Sequence[jax.Array]) -> list[jax.Array]:
    known: dict[Any, Any] = dict(zip(jaxpr.constvars, map(widen, consts), strict=True))
    known |= zip(jaxpr.invars, args, strict=True)

    def read(atom: core.Var | core.Literal) -> jax.Array:
        return widen(np.asarray(atom.val, dtype_of(atom))) if isinstance(atom, core.Literal) else known[atom]

    for eqn in jaxpr.eqns:
        known |= zip(eqn.outvars, result_of(eqn, *map(read, eqn.invars)), strict=True)
    return [read(atom) for atom in jaxpr.outvars]


def result_of(eqn: core.JaxprEqn, *args: jax.Array) -> Sequence[jax.Array]:
    """Return what one equation computes of arguments in float64."""
    try:
        found = _RULES.get(eqn.primitive.name, _again)(eqn, *args)
    except (TypeError, ValueError) as error:  # its parameters name a narrower dtype
        raise NoFloat64(eqn.primitive.name) from error
    found = found if isinstance(found, list | tuple) else [found]
    if any(x.dtype != _wide(dtype_of(var)) for var, x in zip(eqn.outvars, found, strict=True)
           if jnp.issubdtype(dtype_of(var), jnp.inexact)):
        raise NoFloat64(eqn.primitive.name)
    return found


def _again(eqn: core.JaxprEqn, *args: jax.Array) -> Values:
    """Bind a primitive that is defined for any floating-point dtype."""
    if any(isinstance(value, core.Jaxpr | core.ClosedJaxpr) for value in jax.tree.leaves(eqn.params)) or (
            eqn.primitive.name in _OF_A_DEVICE):
        raise NoFloat64(eqn.primitive.name)
    return eqn.primitive.bind(*args, **{key: _param(value) for key, value in eqn.params.items()})


def _param(value: object) -> object:
    if isinstance(value, jax.sharding.Sharding):
        return None
    return _wide(value) if isinstance(value, np.dtype) else value


def _inner(eqn: core.JaxprEqn, *args: jax.Array) -> list[jax.Array]:
    """Evaluate what a primitive calls, such as a compiled function."""
    inner = next(eqn.params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in eqn.params)
    return _function(inner)(*args)


def _function(inner: core.ClosedJaxpr | core.Jaxpr) -> Callable[..., list[jax.Array]]:
    jaxpr, consts = (inner.jaxpr, inner.consts) if isinstance(inner, core.ClosedJaxpr) else (inner, ())
    return lambda *args: _evaluate(jaxpr, consts, args)


def _scan(eqn: core.JaxprEqn, *args: jax.Array) -> list[jax.Array]:
    p = eqn.params
    fixed, carried = parts_of_scan(eqn)
    consts, first, xs = args[:fixed], args[fixed:fixed + carried], args[fixed + carried:]

    def body(carry, x):
        found = _function(p["jaxpr"])(*consts, *carry, *x)
        return found[:carried], found[carried:]

    last, ys = lax.scan(body, list(first), list(xs), length=p["length"], reverse=p["reverse"])
    return [*last, *ys]


def _while(eqn: core.JaxprEqn, *args: jax.Array) -> list[jax.Array]:
    p = eqn.params
    conds, bodies = p["cond_nconsts"], p["body_nconsts"]
    of_cond, of_body, first = args[:conds], args[conds:conds + bodies], args[conds + bodies:]
    return lax.while_loop(lambda carry: _function(p["cond_jaxpr"])(*of_cond, *carry)[0],
                          lambda carry: _function(p["body_jaxpr"])(*of_body, *carry), list(first))


def _cond(eqn: core.JaxprEqn, index: jax.Array, *args: jax.Array) -> list[jax.Array]:
    return lax.switch(index, [_function(branch) for branch in eqn.params["branches"]], *args)


def _linear_solve(eqn: core.JaxprEqn, *args: jax.Array) -> list[jax.Array]:
    """Solve as the program does; its other functions are for derivatives, which are in the program by now."""
    counts = eqn.params["const_lengths"]
    before = counts.matvec + counts.vecmat
    right = sum(counts)
    return _function(eqn.params["jaxprs"].solve)(*args[before:before + counts.solve], *args[right:])


def _scatter(operation: Callable[..., jax.Array]) -> Rule:
    def scatter(eqn: core.JaxprEqn, operand: jax.Array, indices: jax.Array, updates: jax.Array) -> jax.Array:
        p = eqn.params
        return operation(operand, indices, updates, p["dimension_numbers"], unique_indices=p["unique_indices"],
                         indices_are_sorted=p["indices_are_sorted"], mode=p["mode"])
    return scatter


def _bits(eqn: core.JaxprEqn, x: jax.Array) -> jax.Array:
    """Reinterpret the bits that the number had; the result, if it is a number, goes on in float64."""
    return widen(eqn.primitive.bind(x.astype(dtype_of(eqn.invars[0])), **eqn.params))


def _same(eqn: core.JaxprEqn, *args: jax.Array) -> list[jax.Array]:
    return list(args)


def _permute(eqn: core.JaxprEqn, *args: jax.Array) -> list[jax.Array]:
    return list(args) if eqn.params["perm"] else [jnp.zeros_like(x) for x in args]


def _gathered(eqn: core.JaxprEqn, *args: jax.Array) -> list[jax.Array]:
    where = eqn.params["all_gather_dimension"]
    return list(args) if eqn.params["tiled"] else [jnp.expand_dims(x, where) for x in args]


def _scattered(eqn: core.JaxprEqn, *args: jax.Array) -> list[jax.Array]:
    where = eqn.params["scatter_dimension"]
    return list(args) if eqn.params["tiled"] else [jnp.squeeze(x, where) for x in args]


def _exchanged(eqn: core.JaxprEqn, *args: jax.Array) -> list[jax.Array]:
    p = eqn.params
    return list(args) if p["tiled"] else [jnp.expand_dims(jnp.squeeze(x, p["split_axis"]), p["concat_axis"])
                                          for x in args]


_OF_A_DEVICE = {"pallas_call", "ffi_call", "pure_callback", "io_callback", "custom_partitioning", "cudnn_fusion"}
_RULES: dict[str, Rule] = {
    **dict.fromkeys(("jit", "pjit", "closed_call", "core_call", "remat2", "remat", "checkpoint", "custom_jvp_call",
                     "custom_vjp_call", "custom_vjp_call_jaxpr", "shard_map"), _inner),
    # One device: whatever is summed, moved or laid out over mesh axes stays as it is.
    **dict.fromkeys(("reshard", "mesh_cast", "sharding_constraint", "pvary", "pcast", "pbroadcast", "psum", "psum2",
                     "psum_invariant", "pmax", "pmin", "stop_gradient", "optimization_barrier", "layout_constraint"),
                    _same),
    "axis_index": lambda eqn: jnp.zeros((), jnp.int32), "ppermute": _permute, "all_gather": _gathered,
    "all_gather_invariant": _gathered, "all_gather_reduced": _gathered, "reduce_scatter": _scattered,
    "all_to_all": _exchanged,
    "scan": _scan, "while": _while, "cond": _cond, "custom_linear_solve": _linear_solve,
    "bitcast_convert_type": _bits, "nextafter": _again,
    "scatter": _scatter(lax.scatter), "scatter-add": _scatter(lax.scatter_add), "scatter_add": _scatter(
        lax.scatter_add), "scatter-mul": _scatter(lax.scatter_mul), "scatter-min": _scatter(lax.scatter_min),
    "scatter-max": _scatter(lax.scatter_max),
}
