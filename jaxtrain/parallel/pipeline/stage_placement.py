"""The placement of layers on pipeline stages, and conversion between [layers, ...] and [stages, chunks, slots, ...]."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxtrain.parallel.schedules import Position
from jaxtrain.sharding.axis_rules import SpecEntry, axes_of


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """The layers that a stage, or one of its chunks, holds of a stack."""

    numbers: jax.Array  # the number of the layer in each slot; -1: the slot is empty
    full: bool = field(metadata={"static": True})  # whether no stage has an empty slot

    def of_chunk(self, chunk: jax.Array | int) -> "Slots":
        """Return the slots of one chunk."""
        return Slots(self.numbers[chunk], self.full)


@dataclass(frozen=True)
class Placement:
    """The placement of layers, for each stack: the layer in each slot of each chunk of each stage, or -1 (empty)."""

    layers: Mapping[str, np.ndarray]  # [stages, chunks, slots]

    @classmethod
    def of(cls, stacks: Mapping[str, int], position: Position) -> "Placement":
        """Place layers in order over the chunks, as evenly as possible; any remainder goes to middle chunks first."""
        place = np.array(position)
        parts, total = place.size, sum(stacks.values())
        sizes = np.full(parts, total // parts)
        spare = [*range(1, parts - 1), 0, parts - 1]
        sizes[spare[:total % parts]] += 1
        ends, found, first = np.cumsum(sizes), {}, 0
        for key, count in stacks.items():
            mine = [[layer - first for layer in range(end - size, end) if first <= layer < first + count]
                    for end, size in zip(ends, sizes, strict=True)]
            slots = max(map(len, mine))
            padded = np.array([layers + [-1] * (slots - len(layers)) for layers in mine])
            found[key], first = padded[place], first + count
        return cls(found)

    @property
    def even(self) -> bool:
        """Whether each stage holds what an even split of each stack's layers gives it."""
        return all((layers.reshape(-1) == np.arange(layers.size)).all() for layers in self.layers.values())

    def slots(self, stage: jax.Array) -> dict[str, Slots]:
        """Return the slots [chunks, slots] of a stage, for each stack."""
        return {key: Slots(jax.numpy.asarray(layers)[stage], bool((layers >= 0).all()))
                for key, layers in self.layers.items()}

    def to_stages(self, key: str, weight: jax.Array, in_use: P) -> jax.Array:
        """Convert a stacked weight from its layout at rest to [stages, chunks, slots, ...] in use."""
        slots, (over, *spec) = self.layers[key].shape, jax.typeof(weight).sharding.spec
        spec = [_without(entry, "data") for entry in spec]
        if self.even and "stage" in axes_of(over):  # nothing moves between stages
            weight = jax.reshard(weight, P("stage", *spec))
            weight = jax.lax.reshape(weight, (*slots, *weight.shape[1:]), out_sharding=P("stage", None, None, *spec))
        else:  # one exchange: from a part of each layer to each layer of a part
            weight = jax.reshard(weight, P(None, *spec))
            weight = weight.at[np.maximum(self.layers[key], 0)].get(out_sharding=P(None, None, None, *spec))
            weight = jax.reshard(weight, P("stage", None, None, *(_without(entry, "stage") for entry in spec)))
        return jax.reshard(weight, P("stage", None, None, *in_use))

    def from_stages(self, key: str, gradient: jax.Array, at_rest: P) -> jax.Array:
        """Convert a stacked array back to its layout at rest."""
        layers, spec = self.layers[key], jax.typeof(gradient).sharding.spec[3:]
        whole = (layers.size, *gradient.shape[3:])
        if self.even and "stage" in axes_of(at_rest[0]):
            return jax.reshard(jax.lax.reshape(gradient, whole, out_sharding=P("stage", *spec)), at_rest)
        spec = [_without(entry, "data") for entry in at_rest[1:]]
        gradient = jax.reshard(gradient, P("stage", None, None, *(_without(entry, "stage") for entry in spec)))
        gradient = jax.reshard(gradient, P(None, None, None, *spec))
        gradient = jax.lax.reshape(gradient, whole, out_sharding=P(None, *spec))
        slot_of = np.argsort(np.where(layers < 0, layers.size, layers), axis=None)[:layers.max() + 1]
        return jax.reshard(gradient.at[slot_of].get(out_sharding=P(None, *spec)), at_rest)


def _without(entry: SpecEntry, axis: str) -> SpecEntry:
    return tuple(other for other in axes_of(entry) if other != axis) or None
