"""2:4 structured sparsity: of each four neighbouring inputs of a kernel, the two of largest magnitude are not zero.

What is trained are dense weights, in a state's `extras`; its parameters are these times their masks, so that
evaluation, checkpoints and exports have exactly sparse kernels without knowing of it. The gradient by a sparse kernel
is applied to the dense one, as if there were no mask (straight-through), so that a weight may come back when masks are
chosen again. With `decay` (SR-STE, arXiv 2102.04010) masked weights are drawn to zero besides.

Masks are all ones until step `start`; they are chosen then, every `every` steps up to `stop`, and stay from then on.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.sharding import rules as sharding
from jaxtrain.train_step import partition

NAME = "sparsity"  # in a state's extras
GROUP = 4  # neighbouring inputs, of which half are kept


@dataclass(frozen=True)
class Sparsity:
    """The kernels that become sparse, and the step at which they do."""

    inputs: Any  # of each kernel that does: the dimension along which four are neighbours; a part of the parameters
    start: int
    every: int
    stop: int
    decay: float = 0.0

    def begin(self, params: Any) -> dict[str, Any]:
        """Return dense weights, and masks that leave them so."""
        chosen = partition.like(params, self.inputs)
        return {"weights": jax.tree.map(jnp.copy, chosen),
                "masks": jax.tree.map(lambda p: jnp.ones(p.shape, bool), chosen)}

    def dense(self, params: Any, extras: dict[str, Any]) -> Any:
        """Return the parameters as they are trained."""
        return partition.merge(partition.without(params, self.inputs), extras[NAME]["weights"])

    def gradient(self, grads: Any, extras: dict[str, Any]) -> Any:
        """Return the gradients of the dense weights."""
        if not self.decay:
            return grads

        def one(g, weight, mask):
            return g + jnp.where(mask, 0, self.decay * weight).astype(g.dtype)
        chosen = jax.tree.map(one, partition.like(grads, self.inputs), *(extras[NAME][key] for key in (
            "weights", "masks")))
        return partition.merge(partition.without(grads, self.inputs), chosen)

    def sparse(self, dense: Any, extras: dict[str, Any], step: Any) -> tuple[Any, dict[str, Any]]:
        """Return the parameters behind this step as they compute, and the next extras, of dense ones."""
        weights, masks = partition.like(dense, self.inputs), extras[NAME]["masks"]
        due = (step >= self.start) & (step <= self.stop) & ((step - self.start) % self.every == 0)
        masks = jax.lax.cond(due, lambda w, _: jax.tree.map(_on_devices(largest), w, self.inputs), lambda _, m: m,
                             weights, masks)
        pruned = jax.tree.map(lambda w, mask: jnp.where(mask, w, 0), weights, masks)
        return (partition.merge(partition.without(dense, self.inputs), pruned),
                extras | {NAME: {"weights": weights, "masks": masks}})


def largest(x: Any, dimension: int) -> Any:
    """Return a mask of the two largest magnitudes in each four neighbours along a dimension; of equals, the first."""
    shape = x.shape
    groups = jnp.abs(x).reshape(*shape[:dimension], -1, GROUP, *shape[dimension + 1:])
    a = [jnp.take(groups, i, dimension + 1) for i in range(GROUP)]
    larger = [sum(((a[j] >= a[i]) if j < i else (a[j] > a[i])).astype(jnp.int8) for j in range(GROUP) if j != i)
              for i in range(GROUP)]
    return (jnp.stack(larger, dimension + 1) < GROUP // 2).reshape(shape)


def _on_devices(f: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
    """Return `f` of what each device holds of an array."""
    def of(x, dimension):
        if sharding.activation_spec() is None:
            return f(x, dimension)
        spec = jax.typeof(x).sharding.spec
        return sharding.manual_region(lambda x: f(x, dimension), spec, spec)(x)
    return of
