"""The arrays that a chunk's forward pass leaves for its backward pass, which wait in slots.

`jax.vjp` returns a function that is a pytree of the arrays that a backward pass reads. Some of them are the weights,
which a stage holds anyway: those are not stored once more for each micro-batch.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import PartitionSpec as P

from jaxtrain.base.annotations import PyTree
from jaxtrain.base.scan_parts import parts_of_scan

Pull = Callable[..., Any]  # what `jax.vjp` returns
CALLS = {"jit", "pjit", "closed_call", "checkpoint", "remat2"}
UNREAD = -1  # what a branch that was not taken would have kept, in place of which JAX has an array without values


@dataclass(frozen=True)
class Residuals:
    """The arrays of a chunk's `jax.vjp` function: those that are stored, and which of B's own the others are."""

    structure: Any  # of the function, as a pytree; the same for every chunk and micro-batch
    at_hand: tuple[int | None, ...]  # for each array: which of those at hand it is; None: it is stored
    shapes: tuple[Any, ...]  # of the stored arrays: their types

    @classmethod
    def of(cls, pull_of: Callable[[PyTree, PyTree], Pull], at_hand: PyTree, x: PyTree) -> "Residuals":
        """Return the parts of what `pull_of(at_hand, x)` returns; `at_hand`: the arrays that B has anyway."""
        structures = []

        def arrays(at_hand, x):
            leaves, structure = jax.tree.flatten(pull_of(at_hand, x))
            structures.append(structure)
            return leaves

        jaxpr = jax.make_jaxpr(arrays)(at_hand, x).jaxpr
        count = len(jax.tree.leaves(at_hand))
        places = tuple(place if place is not None and 0 <= place < count else None for place in _passed(jaxpr))
        return cls(structures[0], places, tuple(
            v.aval for v, place in zip(jaxpr.outvars, places, strict=True) if place is None))

    def stored(self, pull: Pull) -> list[jax.Array]:
        """Return the arrays of a function that B does not have anyway."""
        return [array for array, place in zip(jax.tree.leaves(pull), self.at_hand, strict=True) if place is None]

    def restored(self, stored: Sequence[jax.Array], at_hand: PyTree) -> Pull:
        """Return the function again."""
        rest, known = iter(stored), jax.tree.leaves(at_hand)
        return jax.tree.unflatten(self.structure, [
            next(rest) if place is None else known[place] for place in self.at_hand])

    def empty(self) -> list[jax.Array]:
        """Return zeros in place of the stored arrays."""
        def zeros(aval: Any) -> jax.Array:
            if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
                return jnp.broadcast_to(jax.random.key(0), aval.shape)
            return jax.reshard(jnp.zeros(aval.shape, aval.dtype), getattr(aval.sharding, "spec", P()))
        return [zeros(aval) for aval in self.shapes]


def _copies(eqn: JaxprEqn) -> Iterator[tuple[int, Var]]:
    """Yield the results of an equation that are whole inputs of it, with that input."""
    for number, at in enumerate(_inputs(eqn)):
        if at is not None and isinstance(source := eqn.invars[at], Var):
            yield number, source


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
    fixed, carried = parts_of_scan(eqn)  # what follows these is of all iterations
    return [at if number >= carried and at is not None and at >= fixed + carried else None
            for number, at in enumerate(passed)]


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
