"""What a chunk's forward pass leaves for its backward pass, as arrays that wait in slots.

`jax.vjp` returns a function that is a pytree of the arrays that a backward pass reads. Some of them are the weights,
or slices of them, which a stage holds anyway: those are not stored once more for each micro-batch.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import PartitionSpec as P

from jaxtrain.base.annotations import PyTree

Pull = Callable[..., Any]  # what `jax.vjp` returns
CALLS = {"jit", "pjit", "closed_call", "checkpoint", "remat2"}
UNREAD = -1  # what a branch that was not taken would have kept, in place of which JAX has an array without values
VIEWS = {"slice", "squeeze", "reshape", "transpose", "dynamic_slice", "reshard", "sharding_constraint"}


@dataclass(frozen=True)
class Residuals:
    """The arrays of a chunk's `jax.vjp` function: those that are stored, and how B finds the others."""

    structure: Any  # of the function, as a pytree; the same for every chunk and micro-batch
    program: ClosedJaxpr  # of what B has anyway, and the chunk's input, to all arrays
    sources: dict[Var, Var]  # the variables of the program that are another one, such as a scan's copy of a weight
    found: tuple[bool, ...]  # for each array: whether B finds it

    @classmethod
    def of(cls, pull_of: Callable[[PyTree, PyTree], Pull], at_hand: PyTree, x: PyTree) -> "Residuals":
        """Return the parts of what `pull_of(at_hand, x)` returns; `at_hand`: the arrays that B has anyway."""
        structures = []

        def arrays(at_hand, x):
            leaves, structure = jax.tree.flatten(pull_of(at_hand, x))
            structures.append(structure)
            return leaves

        program = jax.make_jaxpr(arrays)(at_hand, x)
        jaxpr, sources = program.jaxpr, {}
        held = set(jaxpr.invars[:len(jax.tree.leaves(at_hand))]) | set(jaxpr.constvars)
        for eqn in jaxpr.eqns:
            for number, source in _copies(eqn):
                sources[eqn.outvars[number]] = source
                held |= {eqn.outvars[number]} if source in held else set()
            if eqn.primitive.name in VIEWS and all(isinstance(v, Literal) or v in held for v in eqn.invars):
                held |= set(eqn.outvars)
        return cls(structures[0], program, sources, tuple(
            isinstance(v, Literal) or v in held for v in jaxpr.outvars))

    def stored(self, pull: Pull) -> list[jax.Array]:
        """Return the arrays of a function that B does not find."""
        return [array for array, found in zip(jax.tree.leaves(pull), self.found, strict=True) if not found]

    def restored(self, stored: Sequence[jax.Array], at_hand: PyTree) -> Pull:
        """Return the function again."""
        jaxpr = self.program.jaxpr
        known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*self.program.consts, *jax.tree.leaves(at_hand)),
                         strict=False))  # the chunk's input is missing
        made = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}

        def value(v: Var | Literal) -> Any:
            if isinstance(v, Literal):
                return v.val
            if v not in known:
                eqn = made[v]
                known[v] = value(self.sources[v]) if v in self.sources else eqn.primitive.bind(
                    *map(value, eqn.invars), **eqn.params)
            return known[v]

        rest = iter(stored)
        return jax.tree.unflatten(self.structure, [
            value(v) if found else next(rest) for v, found in zip(jaxpr.outvars, self.found, strict=True)])

    def empty(self) -> list[jax.Array]:
        """Return zeros in place of the stored arrays."""
        def zeros(aval: Any) -> jax.Array:
            if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
                return jnp.broadcast_to(jax.random.key(0), aval.shape)
            return jax.reshard(jnp.zeros(aval.shape, aval.dtype), getattr(aval.sharding, "spec", P()))
        return [zeros(v.aval) for v, found in zip(self.program.jaxpr.outvars, self.found, strict=True) if not found]


def _copies(eqn: JaxprEqn) -> Iterator[tuple[int, Var]]:
    """Yield the results of an equation that are whole inputs of it, with that input."""
    for number, at in enumerate(_inputs(eqn)):
        if at is not None and isinstance(eqn.invars[at], Var):
            yield number, eqn.invars[at]


def _inputs(eqn: JaxprEqn) -> Sequence[int | None]:
    """Return for each result of an equation which of its inputs it is, or None."""
    if eqn.primitive.name == "cond":  # the first input chooses the branch
        branches = [_passed(branch.jaxpr) for branch in eqn.params["branches"]]
        return [at.pop() + 1 if len(at := {*choices} - {UNREAD}) == 1 and None not in at else None
                for choices in zip(*branches, strict=True)]
    if eqn.primitive.name not in ("scan", *CALLS):
        return ()
    inner = eqn.params["call_jaxpr" if eqn.primitive.name == "closed_call" else "jaxpr"]
    passed = [None if at == UNREAD else at for at in _passed(inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner)]
    if eqn.primitive.name in CALLS:
        return passed
    carried = eqn.params["num_carry"]  # what follows is of all iterations, and so are the last inputs
    begin = eqn.params["num_consts"] + carried
    return [at if number >= carried and at is not None and at >= begin else None for number, at in enumerate(passed)]


def _passed(jaxpr: Jaxpr) -> list[int | None]:
    """Return for each result which of the inputs it is, `UNREAD`, or None."""
    sources: dict[Var, int] = {v: at for at, v in enumerate(jaxpr.invars)}
    for eqn in jaxpr.eqns:
        operand = eqn.invars[0] if eqn.primitive.name == "broadcast_in_dim" else None
        if eqn.primitive.name.startswith("empty") or (isinstance(operand, Var) and sources.get(operand) == UNREAD):
            sources[eqn.outvars[0]] = UNREAD
        for number, source in _copies(eqn):
            if source in sources:
                sources[eqn.outvars[number]] = sources[source]
    return [None if isinstance(v, Literal) else sources.get(v) for v in jaxpr.outvars]
