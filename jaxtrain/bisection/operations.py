"""A traced step in float64, one operation at a time, with what is needed to compare it with another one.

Loops over layers are taken apart, so that an operation has the number of its layer. Of each value a few sums with
random signs are kept, by which values of two programs can be compared without keeping them: two that differ by a part
in a billion have sums that do.
"""

import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.typing import ArrayLike

from jaxtrain.base.annotations import AnyArray, JsonObject
from jaxtrain.base.scan_parts import parts_of_scan
from jaxtrain.proof import float64

SUMS = 4
LONG = 128  # rounds of a loop that is not taken apart
UNIT = 2.0**-52
_LIBRARIES = tuple(f"{Path(sysconfig.get_path('purelib')) / name}/" for name in ("jax", "jaxlib", "flax"))
_CALLS = {"jit", "pjit", "closed_call", "core_call", "remat2", "remat", "checkpoint", "custom_jvp_call",
          "custom_vjp_call", "custom_vjp_call_jaxpr", "shard_map"}
_PRODUCTS = {"dot_general", "conv_general_dilated"}
# Whose results may be far smaller than what is added up, so that rounding is a larger part of them, and those that put
# together large and small numbers.
_TOGETHER = {"add", "sub", "add_any", "reduce_sum", "cumsum", "scatter-add", "scatter_add", "scatter", "stack",
             "concatenate", "select_n", "dynamic_update_slice", "max", "min"}


@dataclass(eq=False)
class Value:
    """The numbers by which an array is known: sums that tell it from others, and how much of it is rounding."""

    size: int
    norm: float
    sums: np.ndarray
    rounding: float = UNIT  # relative to the norm
    maker: "Operation | None" = None  # None: an argument, or a constant

    def is_as(self, norm: float, sums: np.ndarray, rounding: float) -> bool:
        """Return whether another array has the same numbers, as far as rounding allows."""
        allowed = allowed_by(max(self.rounding, rounding))
        return bool(np.abs(self.sums - sums).max() <= 4 * allowed * max(self.norm, norm))


def allowed_by(rounding: float) -> float:
    """Return the relative difference that rounding explains; infinity for values that are little but rounding."""
    return max(1e-9, 100 * rounding) if rounding < 1e-5 else np.inf


@dataclass(eq=False)
class Operation:
    """One operation of a step: what it is, and where it was written."""

    name: str
    place: tuple[str, ...]  # of loops, such as "layer 1 of 12"
    stack: str  # of names, with what JAX has made of it, such as transpose(jvp(...))
    source: str  # FILE:LINE in FUNCTION
    constants: tuple[str, ...]
    inputs: list[Value]
    number: int  # its place in the order

    def __str__(self) -> str:
        constants = f" with {', '.join(self.constants)}" if self.constants else ""
        return f"{self.name}{constants}, {self.source}"

    @property
    def where(self) -> str:
        """The loops that it is in, and whether it is of the backward pass."""
        passed = "backward pass" if "transpose(" in self.stack else ""
        return ", ".join([*[passed] * bool(passed), *self.place])


@dataclass
class Trace:
    """All operations of a step, and the values that it returns, by name."""

    operations: list[tuple[Operation, list[Value]]] = field(default_factory=list)
    results: dict[str, Value] = field(default_factory=dict)
    given: list[Value] = field(default_factory=list)  # arguments and constants

    def __getstate__(self) -> JsonObject:
        """Return it without links: pickle would follow a long chain of them."""
        values = [*self.given, *(value for _, made in self.operations for value in made)]
        at = {id(value): n for n, value in enumerate(values)}
        return {"given": [replace(value, maker=None) for value in self.given],
                "results": {name: at[id(value)] for name, value in self.results.items()},
                "operations": [(replace(operation, inputs=[]), [at[id(value)] for value in operation.inputs],
                                [replace(value, maker=None) for value in made])
                               for operation, made in self.operations]}

    def __setstate__(self, state: JsonObject) -> None:
        """Link it again."""
        self.given, self.operations = state["given"], []
        values = [*self.given]
        for operation, inputs, made in state["operations"]:
            operation.inputs = [values[n] for n in inputs]
            for value in made:
                value.maker = operation
            values += made
            self.operations.append((operation, made))
        self.results = {name: values[n] for name, n in state["results"].items()}


def trace(closed: core.ClosedJaxpr, args: Sequence[AnyArray], names: Sequence[str], layers: int = 0,
          accumulation: int = 1) -> Trace:
    """Return the operations of a jaxpr of one device, computed in float64.

    Args:
        closed: the jaxpr.
        args: its arguments on the host.
        names: of its results.
        layers: of the model, whose loops have as many rounds.
        accumulation: the number of micro-batches.
    """
    with jax.enable_x64(True):
        made = _Evaluation(layers, accumulation)
        given = [made.given(x) for x in float64.widened(list(args))]
        results = made.evaluate(closed.jaxpr, closed.consts, given, ())
    made.trace.results = dict(zip(names, (value for _, value in results), strict=True))
    return made.trace


Pair = tuple[jax.Array, Value]


class _Evaluation:
    def __init__(self, layers: int, accumulation: int):
        self.trace, self.layers, self.accumulation = Trace(), layers, accumulation
        self.source = ""  # of the call that is evaluated: what JAX's own functions compute says only that

    def given(self, x: AnyArray) -> Pair:
        """Take an argument or a constant."""
        value = _value(x)
        self.trace.given.append(value)
        return x if isinstance(x, jax.Array) else jnp.asarray(x), value

    def evaluate(self, jaxpr: core.Jaxpr, consts: Sequence[ArrayLike], args: Sequence[Pair],
                 place: tuple[str, ...]) -> list[Pair]:
        known: dict[Any, Pair] = {var: self.given(float64.widen(x)) for var, x in zip(
            jaxpr.constvars, consts, strict=True)}
        known |= zip(jaxpr.invars, args, strict=True)
        last = _last_uses(jaxpr)

        def read(atom: core.Var | core.Literal) -> Pair:
            if isinstance(atom, core.Literal):
                return self.given(float64.widen(np.asarray(atom.val, float64.dtype_of(atom))))
            return known[atom]

        for at, eqn in enumerate(jaxpr.eqns):
            found = self._equation(eqn, [read(atom) for atom in eqn.invars], place)
            known |= zip(eqn.outvars, found, strict=True)
            for var in last.get(at, ()):  # memory
                known.pop(var, None)
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(self, eqn: core.JaxprEqn, args: list[Pair], place: tuple[str, ...]) -> list[Pair]:
        name = eqn.primitive.name
        if name in _CALLS:
            inner = next(eqn.params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in eqn.params)
            jaxpr, consts = (inner.jaxpr, inner.consts) if isinstance(inner, core.ClosedJaxpr) else (inner, ())
            outer, self.source = self.source, source_of(eqn) or self.source
            found = self.evaluate(jaxpr, consts, args, place)
            self.source = outer
            return found
        if name == "scan" and eqn.params["length"] <= LONG:
            return self._scan(eqn, args, place)
        if name == "cond":
            branch = eqn.params["branches"][int(args[0][0])]
            return self.evaluate(branch.jaxpr, branch.consts, args[1:], place)
        found = float64.result_of(eqn, *(x for x, _ in args))
        return self._made(eqn, name, args, found, place)

    def _made(self, eqn: core.JaxprEqn, name: str, args: list[Pair], found: Sequence[jax.Array],
              place: tuple[str, ...], constants: tuple[str, ...] | None = None) -> list[Pair]:
        operation = Operation(name, place, f"{eqn.source_info.name_stack}",
                              source_of(eqn) or self.source or "a library",
                              _constants(eqn) if constants is None else constants, [value for _, value in args],
                              len(self.trace.operations))
        values = [_value(x, operation) for x in found]
        self.trace.operations.append((operation, values))
        return [*zip(found, values, strict=True)]

    def _scan(self, eqn: core.JaxprEqn, args: list[Pair], place: tuple[str, ...]) -> list[Pair]:
        p, body = eqn.params, eqn.params["jaxpr"]
        fixed, carried = parts_of_scan(eqn)
        consts, carry, xs = args[:fixed], args[fixed:fixed + carried], args[fixed + carried:]
        rounds = range(p["length"])
        stacks: list[list[Pair]] = []
        word = ("micro-batch" if not place and p["length"] == self.accumulation else
                "layer" if p["length"] == self.layers else "round")
        for n in reversed(rounds) if p["reverse"] else rounds:
            here = (*place, f"{word} {n + 1} of {p['length']}") if p["length"] > 1 else place
            parts = [self._made(eqn, "slice", [pair], [pair[0][n]], here, (f"{n}",))[0] for pair in xs]
            found = self.evaluate(body.jaxpr, body.consts, [*consts, *carry, *parts], here)
            carry = found[:carried]
            stacks.append(found[carried:])
        if p["reverse"]:
            stacks.reverse()
        return [*carry, *(self._made(eqn, "stack", [*column], [jnp.stack([x for x, _ in column])], place, ())[0]
                          for column in zip(*stacks, strict=True))]


def _last_uses(jaxpr: core.Jaxpr) -> dict[int, list[core.Var]]:
    """Return the variables that no equation after this one reads, by its number."""
    last: dict[core.Var, int] = {}
    for at, eqn in enumerate(jaxpr.eqns):
        last |= {atom: at for atom in eqn.invars if not isinstance(atom, core.Literal)}
    found: dict[int, list[core.Var]] = {}
    for var, at in last.items():
        if var not in jaxpr.outvars:
            found.setdefault(at, []).append(var)
    return found


def _value(x: AnyArray, maker: Operation | None = None) -> Value:
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        x = jax.random.key_data(x)
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag])
    flat = np.nan_to_num(np.asarray(x).astype(np.float64).ravel(), nan=1.7e30, posinf=2.3e30, neginf=-3.1e30)
    norm = float(np.sqrt(flat @ flat))
    rounding = UNIT if maker is None else _rounding(maker, norm, flat.size)
    return Value(flat.size, norm, _signs(flat.size) @ flat, rounding, maker)


def _rounding(made: Operation, norm: float, size: int) -> float:
    """Return how large a part of a result rounding is expected to be: more where what is added up cancels."""
    inputs = made.inputs
    if not inputs or not norm:
        return UNIT
    if made.name in _PRODUCTS:
        terms = (inputs[0].size * inputs[1].size / size) ** 0.5
        expected = inputs[0].norm * inputs[1].norm / max(terms, 1.0) ** 0.5
        return min(1.0, max(UNIT, inputs[0].rounding, inputs[1].rounding) * max(1.0, expected / norm))
    if made.name in _TOGETHER:
        parts = sum((max(UNIT, value.rounding) * value.norm) ** 2 for value in inputs) ** 0.5
        return min(1.0, max(UNIT, parts / norm))
    return max(UNIT, *(value.rounding for value in inputs if value.norm), UNIT)


@lru_cache(64)
def _signs(size: int) -> np.ndarray:
    drawn = np.random.default_rng(size).integers(0, 2, (SUMS, size), np.int8)
    return drawn.astype(np.float64) * 2 - 1 if size < 2**16 else drawn * np.int8(2) - np.int8(1)


def _constants(eqn: core.JaxprEqn) -> tuple[str, ...]:
    """Return the numbers that are written into an operation."""
    return tuple(f"{np.asarray(atom.val):.10g}" for atom in eqn.invars
                 if isinstance(atom, core.Literal) and np.ndim(atom.val) == 0 and np.asarray(atom.val).dtype != bool)


def source_of(eqn: core.JaxprEqn) -> str:
    """Return where an operation was written: the innermost line that is not of JAX or Flax; "": it is not known."""
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback else ():
        if not frame.file_name.startswith((*_LIBRARIES, "<")):
            return f"{_short(frame.file_name)}:{frame.line_num} in {frame.function_name}"
    return ""


def _short(path: str) -> str:
    for part in ("/site-packages/", "/jaxtrain/"):
        if part in path:
            return ("jaxtrain/" if part == "/jaxtrain/" else "") + path.rpartition(part)[2]
    return path
