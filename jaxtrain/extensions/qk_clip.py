"""QK-clip (`optimizer.qk_clip`; Kimi K2, arXiv 2507.20534): attention logits stay below a limit, by their weights.

After an update, each head whose largest logit S in the step's batch was above the limit has its query and key weights
scaled down, so that the same logit would be the limit: by sqrt(limit / S) each. Loss and gradients of the step are what
they are without; moments are left as they are.

Heads that share a key have factors of their own. Of the key's weights the root of the largest of these is taken, which
is 1 where one of the heads needs no clip, and of each query's the rest: no head changes by more than its own factor.
In latent attention the rotary key is shared by all heads and stays, so that the rotary query takes the whole factor.

Shape suffixes: L layers of a stack, H query heads, G key heads, R query heads of a key, K head width.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.base.annotations import PyTree
from jaxtrain.base.further_sums import LARGEST, NOTHING
from jaxtrain.errors import UserError
from jaxtrain.models.attention import head_logits
from jaxtrain.models.decoder import Decoder
from jaxtrain.objectives.next_token import NextToken
from jaxtrain.run import Extension, Parts
from jaxtrain.sharding import mesh_context
from jaxtrain.sharding.axis_rules import Axes, Names
from jaxtrain.train_step import partition
from jaxtrain.train_step.gradients import StateGradient
from jaxtrain.train_step.state import Extras, Layout, Params, Skeleton

KEY = "optimizer.qk_clip"
NAME = "attention_logits"  # in a state's extras: the largest of each head in the last step that was taken
METRIC = "max_attention_logit"
Path = tuple[str, ...]
_SCALED = ("layers", "every_layer", "heads", "kv_heads", "head_dim")  # dimensions that factors have


@dataclass(frozen=True)
class QKClip(Extension):
    """The limit, and where the attention of each stack, or of each layer of its groups, has its parameters."""

    limit: float
    heads: int
    head_dim: int  # in latent attention of the part without positions
    soft_cap: float  # of logits; 0: none
    attentions: Mapping[Path, Path]  # (stack,) or (stack, layer of a group) -> the path of the parameters
    axes: Axes  # of these
    layout: Layout
    state_words: ClassVar[str] = "largest attention logits"

    @classmethod
    def of(cls, parts: Parts) -> "QKClip":
        """Return it for the attention of a decoder; refuse what it cannot measure or clip."""
        c, objective, model = parts.config, type(parts.objective), parts.model
        if c.lora.rank:
            raise _refused("adapters (lora.rank) are trained, and the weights of queries and keys are frozen")
        if model is None or objective is not NextToken:
            raise _refused("logits are measured in next-token prediction by models of a config, and this is " + (
                "a model of your own" if model is None else f"{objective.__name__}"))
        found, cap = _attentions(model)
        for path in found.values():
            node: Any = parts.layout.axes
            for key in path:
                node = node.get(key, {})
            if "kernel" not in node.get("q", {}) or "kernel" not in node.get("kv", node.get("k", {})):
                raise _refused(f"queries or keys of {'/'.join(path)} are frozen", "leave it out, or train them")
        limit = c.optimizer.qk_clip
        if cap and limit >= cap:
            raise _refused(f"the model caps logits at {cap:g}, below {limit:g}",
                           f"leave it out, or set it below {cap:g}")
        chosen = _with(parts.layout.axes, found.values())
        return cls(limit, c.model.num_heads, c.model.head_dim, cap, found, chosen, parts.layout)

    def extra_state(self) -> Extras:
        """Return no logits."""
        def none(params: Params) -> PyTree:
            made: dict[str, Any] = {}
            for (stack, *layer), path in self.attentions.items():
                sizes = len(_at(params, path)["q"]["kernel"]), self.heads
                numbers = jnp.full(sizes, NOTHING, jnp.float32)
                if layer:
                    made.setdefault(stack, {})[layer[0]] = numbers
                else:
                    made[stack] = numbers
            return made
        return {NAME: none}

    def around_gradient(self, gradient: StateGradient) -> StateGradient:
        """Return the gradient, beside which each head's largest logit is measured."""
        def measured(state, batch):
            with head_logits.collected(begin=True):
                (total, weight, further), grads = gradient(state, batch)
            further = dict(further)
            largest = further.pop(LARGEST)
            top = jnp.stack([x.max() for x in jax.tree.leaves(largest)]).max()
            top = self.soft_cap * jnp.tanh(top / self.soft_cap) if self.soft_cap else top
            further["extras"] = further.get("extras", {}) | {NAME: largest}
            further["of_hooks"] = further.get("of_hooks", {}) | {METRIC: top}
            return (total, weight, further), grads
        return measured

    def after_update(self, params: Params, extras: dict[str, PyTree], taken: jax.Array,
                     step: jax.Array) -> tuple[Params, dict[str, PyTree]]:
        """Return the parameters with the heads scaled whose logits were above the limit."""
        clipped, where = self._clipped, partition.like(self.layout.state.params, self.axes)
        if mesh_context.is_explicit(self.layout.mesh):
            clipped = cast(Any, jax.sharding.auto_axes(clipped, out_sharding=jax.tree.map(
                lambda s: s.spec, where)))
        chosen = clipped(partition.like(params, self.axes), extras[NAME], taken)
        return partition.merge(partition.without(params, self.axes), chosen), extras

    def _clipped(self, params: Params, largest: PyTree, taken: jax.Array) -> Params:
        limit = self.soft_cap * math.atanh(self.limit / self.soft_cap) if self.soft_cap else self.limit
        done: Params = {}
        for stack, path in self.attentions.items():
            logits_LH = _at(largest, stack)
            gamma_LH = jnp.where(taken & (logits_LH > limit), limit / logits_LH, 1.0)
            own = _at(params, path)
            factors = _latent(gamma_LH, own, self.head_dim) if "kv" in own else _grouped(gamma_LH, own)
            names = _at(self.axes, path)
            scaled = {part: {key: (x * _laid_out(factors[part], names[part][key])).astype(x.dtype)
                             for key, x in own[part].items()} for part in factors}
            done = partition.merge(done, _nested(path, scaled))
        return partition.merge(partition.without(params, done), done)


def _grouped(gamma_LH: jax.Array, own: Params) -> dict[str, jax.Array]:
    """Return the factors [L, heads, 1] of queries and of keys, of which several queries may share one."""
    layers, heads = gamma_LH.shape
    gamma_LGR = gamma_LH.reshape(layers, own["k"]["kernel"].shape[-2], -1)
    shared_LG1 = jnp.sqrt(gamma_LGR.max(-1, keepdims=True))
    return {"q": (gamma_LGR / shared_LG1).reshape(layers, heads, 1), "k": shared_LG1}


def _latent(gamma_LH: jax.Array, own: Params, plain: int) -> dict[str, jax.Array]:
    """Return the factors [L, H, K] of what makes queries, and of what makes keys and values, of latents.

    `plain`: the width of the part of queries and keys without positions, which comes first.
    """
    q_K, kv_K = (jnp.arange(own[part]["kernel"].shape[-1]) < plain for part in ("q", "kv"))
    root_LH1 = jnp.sqrt(gamma_LH)[..., None]
    return {"q": jnp.where(q_K, root_LH1, gamma_LH[..., None]), "kv": jnp.where(kv_K, root_LH1, 1.0)}


def _laid_out(factor: jax.Array, names: Names) -> jax.Array:
    """Return factors [L, heads, width] with the dimensions of a parameter with these logical names."""
    sizes = iter(factor.shape)
    return factor.reshape([next(sizes) if name in _SCALED else 1 for name in names])


def _attentions(model: Skeleton) -> tuple[dict[Path, Path], float]:
    """Return where the attention of each stack and layer of a group has its parameters, and the soft cap of logits."""
    whole = model.merge(model.params())
    found, cap = dict[Path, Path](), 0.0
    for names, node in nnx.iter_graph(whole):
        if not hasattr(node, "unclippable"):
            continue
        path = tuple(map(str, names))
        if not isinstance(whole, Decoder) or path[0] not in Decoder.STACKS:
            raise _refused(f"{'/'.join(path)} is attention outside of a decoder's layers")
        if node.unclippable:
            raise _refused(f"of {'/'.join(path)}, {node.unclippable}")
        layer = tuple(key for key in path if key.startswith("layer_"))
        found[path[0], *layer], cap = path, getattr(node, "soft_cap", 0.0)
    if not found:
        raise _refused("no layer of the model has attention with queries and keys")
    return found, cap


def _refused(reason: str, fix: str = "leave it out") -> UserError:
    return UserError(KEY, reason, fix)


def _at(tree: PyTree, path: Path) -> PyTree:
    for key in path:
        tree = tree[key]
    return tree


def _nested(path: Path, tree: PyTree) -> Params:
    for key in reversed(path):
        tree = {key: tree}
    return tree


def _with(axes: Axes, paths: Iterable[Path]) -> Axes:
    """Return the part of a tree of trained parameters' names that attention at these paths has for its logits."""
    parts = []
    for path in paths:
        own = _at(axes, path)
        parts.append(_nested(path, {key: own[key] for key in ("q", "k", "kv") if key in own}))
    return partition.merge(*parts)
