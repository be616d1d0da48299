"""2:4 structured sparsity (`sparsity.targets`): of four neighbouring inputs of a kernel, the two largest are not zero.

What is trained are dense weights, in a state's `extras`; its parameters are these times their masks, so that
evaluation, checkpoints and exports have exactly sparse kernels without knowing of it. The gradient by a sparse kernel
is applied to the dense one, as if there were no mask (straight-through), so that a weight may come back when masks are
chosen again. With `decay` (SR-STE, arXiv 2102.04010) masked weights are drawn to zero besides.

Masks are all ones until step `start`; they are chosen then, every `every` steps up to `stop`, and stay from then on.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from jaxtrain.base.annotations import PyTree
from jaxtrain.config.sections.sparsity_keys import SparsityConfig
from jaxtrain.errors import UserError, nearest
from jaxtrain.models.experts.moe import MATRICES, MoE
from jaxtrain.models.layers import Linear
from jaxtrain.run import Extension, Parts
from jaxtrain.sharding import activations, axis_rules
from jaxtrain.sharding.axis_rules import Shardings
from jaxtrain.train_step import partition
from jaxtrain.train_step.state import Extras, Layout, Params, Skeleton, TrainState

NAME = "sparsity"  # in a state's extras
GROUP = 4  # neighbouring inputs, of which half are kept


@dataclass(frozen=True)
class StructuredSparsity(Extension):
    """The kernels that become sparse, and the step at which they do."""

    config: SparsityConfig
    inputs: Any  # of each kernel that does: the dimension along which four are neighbours; a part of the parameters
    state_words: ClassVar[str] = "dense weights and masks"

    @classmethod
    def of(cls, parts: Parts) -> "StructuredSparsity":
        """Return it with the trained kernels of the linear layers that `sparsity.targets` names."""
        c = parts.config.sparsity
        assert parts.model is not None
        known = _kernels(parts.model)
        inputs: dict[str, Any] = {}
        for pattern in c.targets:
            chosen = [path for path in known if fnmatchcase(path, pattern)]
            if not chosen:
                raise UserError("sparsity.targets", f"no linear layer's path matches {pattern!r}",
                                nearest(pattern, known))
            for path in chosen:
                *parents, last = known[path][0].split("/")
                node, leaf, where = inputs, parts.abstract.params, parts.layout.state.params
                for key in parents:
                    node = node.setdefault(key, {})
                    leaf, where = leaf.get(key, {}), where.get(key, {})
                if last not in leaf:
                    raise UserError("sparsity.targets", f"{path} is not trained", "leave it out")
                node[last] = known[path][1]
                _check(path, leaf[last].shape, known[path][1], where[last])
        return cls(c, inputs)

    def extra_state(self) -> Extras:
        """Return dense weights, and masks that leave them so."""
        def begin(params: Params) -> dict[str, PyTree]:
            chosen = partition.like(params, self.inputs)
            return {"weights": jax.tree.map(jnp.copy, chosen),
                    "masks": jax.tree.map(lambda p: jnp.ones(p.shape, bool), chosen)}
        return {NAME: begin}

    def extra_shardings(self, layout: Layout) -> Mapping[str, Shardings]:
        """Return the shardings of the kernels for both."""
        return {NAME: dict.fromkeys(("weights", "masks"), partition.like(layout.state.params, self.inputs))}

    def before_update(self, state: TrainState, params: Params, grads: Params) -> tuple[Params, Params]:
        """Return the parameters as they are trained, dense, and the gradients of these."""
        weights, masks = (state.extras[NAME][key] for key in ("weights", "masks"))
        params = partition.merge(partition.without(params, self.inputs), weights)
        c = self.config
        if not c.decay:
            return params, grads

        def one(g, weight, mask):
            return g + jnp.where(mask, 0, c.decay * weight).astype(g.dtype)
        chosen = jax.tree.map(one, partition.like(grads, self.inputs), weights, masks)
        return params, partition.merge(partition.without(grads, self.inputs), chosen)

    def after_update(self, params: Params, extras: dict[str, PyTree], taken: jax.Array,
                     step: jax.Array) -> tuple[Params, dict[str, PyTree]]:
        """Return the parameters as they compute, sparse, and the extras with the dense ones."""
        c, step = self.config, step + 1
        weights, masks = partition.like(params, self.inputs), extras[NAME]["masks"]
        due = (step >= c.start) & (step <= (c.stop or c.start)) & ((step - c.start) % c.every == 0)
        masks = jax.lax.cond(due, lambda w, _: jax.tree.map(_on_devices(largest), w, self.inputs), lambda _, m: m,
                             weights, masks)
        pruned = jax.tree.map(lambda w, mask: jnp.where(mask, w, 0), weights, masks)
        return (partition.merge(partition.without(params, self.inputs), pruned),
                extras | {NAME: {"weights": weights, "masks": masks}})


def _kernels(model: Skeleton) -> dict[str, tuple[str, int]]:
    """Return by path of each linear layer, or matrix of experts, its parameter's path and the dimension of inputs."""
    found = {}
    for names, node in nnx.iter_graph(model.merge(model.params())):
        path = "/".join(map(str, names))
        if isinstance(node, Linear):
            given, weight, _ = node.equation.replace("->", ",").split(",")
            stacked = len(node.kernel.get_value().shape) - len(weight)
            found[path] = f"{path}/kernel", stacked + sum(letter in given for letter in weight) - 1
        elif isinstance(node, MoE):
            found |= {f"{path}/{name}": (f"{path}/{name}", len(getattr(node, name).get_value().shape) - 2)
                      for name in MATRICES}
    return dict(sorted(found.items()))


def _check(path: str, shape: tuple[int, ...], dimension: int, where: NamedSharding) -> None:
    """Refuse a kernel whose neighbouring inputs are not together on one device."""
    spec = (*where.spec, *(None,) * (len(shape) - len(where.spec)))
    pieces = axis_rules.shards(spec[dimension], where.mesh)
    if shape[dimension] // pieces % GROUP:
        over = f", split over {'+'.join(axis_rules.axes_of(spec[dimension]))}," if pieces > 1 else ""
        raise UserError("sparsity.targets", f"the {shape[dimension]} inputs of {path}{over} are not groups of {GROUP} "
                        f"on {'each device' if pieces > 1 else 'a device'}", "leave it out, or change its size or the "
                        "mesh")


def largest(x: jax.Array, dimension: int) -> jax.Array:
    """Return a mask of the two largest magnitudes in each four neighbours along a dimension; of equals, the first."""
    shape = x.shape
    groups = jnp.abs(x).reshape(*shape[:dimension], -1, GROUP, *shape[dimension + 1:])
    a = [jnp.take(groups, i, dimension + 1) for i in range(GROUP)]
    larger = [sum(((a[j] >= a[i]) if j < i else (a[j] > a[i])).astype(jnp.int8) for j in range(GROUP) if j != i)
              for i in range(GROUP)]
    return (jnp.stack(larger, dimension + 1) < GROUP // 2).reshape(shape)


def _on_devices(f: Callable[[jax.Array, int], jax.Array]) -> Callable[[jax.Array, int], jax.Array]:
    """Return `f` of what each device holds of an array."""
    def of(x, dimension):
        if activations.activation_spec() is None:
            return f(x, dimension)
        spec = jax.typeof(x).sharding.spec
        return activations.manual_region(lambda x: f(x, dimension), spec, spec)(x)
    return of
