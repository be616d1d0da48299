"""Layers that differ, in a stack that is scanned: groups of them."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.base.annotations import PyTree
from jaxtrain.base.further_sums import LARGEST
from jaxtrain.models.attention import head_logits
from jaxtrain.models.attention.kv_cache import CACHE, Aux, Cache
from jaxtrain.models.gradient_order import gradients_first

PASSED_ON = "passed on"  # the auxiliary value of a layer that all layers after it in a group are given beside angles


class Group(nnx.Module):
    """Layers that differ, applied in turn: one entry of a stack, of a model whose layers repeat with a period."""

    def __init__(self, layers: Sequence[Callable[[nnx.Rngs], nnx.Module]], remat: Callable[[Callable], Callable],
                 rngs: nnx.Rngs):
        self.names, self.remat = tuple(f"layer_{number}" for number in range(len(layers))), remat
        for name, layer in zip(self.names, layers, strict=True):
            setattr(self, name, layer(rngs))

    def __call__(self, x_BTD: jax.Array, segments_BT: jax.Array | None, angles: PyTree,
                 cache: Cache | None = None) -> tuple[jax.Array, Aux]:
        reports, entries, largest = [], {}, {}
        graphdefs, weights = zip(*(nnx.split(getattr(self, name)) for name in self.names), strict=True)
        weights = [*weights]
        # Gradients that devices add up have the time of one more layer for it.
        behind = 1 if jax.sharding.get_abstract_mesh().shape.get("fsdp", 1) > 1 else 0
        for number, (name, graphdef) in enumerate(zip(self.names, graphdefs, strict=True)):
            for at in range(number + behind, min(number + behind + 1, len(weights))):
                x_BTD, weights[at] = gradients_first(x_BTD, weights[at])

            @self.remat
            def apply(x, weights, graphdef=graphdef, name=name, angles=angles):
                held = {} if cache is None else {"cache": cache.of(name)}
                with head_logits.collected() as found:
                    x, aux = nnx.merge(graphdef, weights)(x, segments_BT, angles, **held)
                return x, head_logits.reported(aux, found)

            x_BTD, aux = apply(x_BTD, weights[number])
            entries[name] = aux.pop(CACHE, None)
            if PASSED_ON in aux:
                angles = angles | aux.pop(PASSED_ON)
            largest |= {name: aux.pop(LARGEST)} if LARGEST in aux else {}
            reports += [aux] if aux else []
        more = {} if cache is None else {CACHE: entries}
        return x_BTD, _together(reports) | ({LARGEST: largest} if largest else {}) | more


def _together(reports: list[Aux]) -> Aux:
    """Return what the layers with experts report: penalties of rows summed, and other sums of each layer."""
    if len(reports) < 2:
        return dict(*reports)
    return {name: sum(each) if name == "penalty" else jnp.stack(each, 2)
            for name, each in ((name, [aux[name] for aux in reports]) for name in reports[0])}
