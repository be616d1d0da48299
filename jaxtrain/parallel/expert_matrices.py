"""The matrices of experts, by how their products are computed (parallel/expert_products.py), and what those read."""

from dataclasses import dataclass, field
from typing import Any, Protocol

import jax

from jaxtrain.base.annotations import PyTree
from jaxtrain.sharding.products import Factor

How = dict[str, Any]  # what `grouped_matmul` is told


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class InBlocks:
    """The matrices of experts, whose products round them in blocks (parallel/expert_blocks.py)."""

    weight: jax.Array
    kind: str = field(metadata={"static": True})  # of base.narrow_formats.BLOCKS
    name: str = field(metadata={"static": True})  # for random numbers of its own
    split: tuple[str, ...] = field(default=(), metadata={"static": True})  # the mesh axes over which outputs are split


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adapted:
    """The matrices of experts with an adapter each: a row times weight + scale x down up."""

    weight: Factor | InBlocks
    down: jax.Array
    up: jax.Array
    scale: float = field(metadata={"static": True})


Weight = Factor | InBlocks | Adapted


class Rows(Protocol):
    """The rows of a pass, as products read them."""

    @property
    def sizes(self) -> jax.Array:
        """The number of rows of each expert."""
        ...

    @property
    def experts(self) -> jax.Array:
        """The expert of each row; one that is not there behind the last."""
        ...

    @property
    def marks(self) -> PyTree:
        """The marks that products in blocks read of each row (parallel/expert_blocks.py)."""
        ...
