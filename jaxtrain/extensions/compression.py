"""Compressed gradients (`compression.method`): how they are made is in parallel/compression/compressed_gradients.py."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from jaxtrain.parallel.compression.compressed_gradients import NAME, CompressedGradients, refused
from jaxtrain.run import Extension, Parts
from jaxtrain.run.validation import Refusal
from jaxtrain.sharding.axis_rules import Shardings
from jaxtrain.train_step.gradients import StateGradient
from jaxtrain.train_step.state import Extras, Layout


@dataclass(frozen=True)
class Compression(Extension):
    """The gradient's sum over a slow axis in compressed messages, and what they lost."""

    compressed: CompressedGradients
    state_words: ClassVar[str] = "what compression lost"

    refusals = (
        Refusal("compression.axis", "compressed gradients over an axis that splits parameters, and in a pipeline",
                lambda a: refused(a.config.compression, a.mesh, a.rules),
                lambda a: (refused(a.config.compression, a.mesh, a.rules) or ("", ""))[0],
                lambda a: (refused(a.config.compression, a.mesh, a.rules) or ("", ""))[1],
                {"mesh.fsdp": 2, "compression.method": "int8", "compression.axis": "fsdp"},
                {"compression.axis": "data"}),
    )

    @classmethod
    def of(cls, parts: Parts) -> "Compression":
        """Return it for these parameters."""
        c = parts.config
        return cls(CompressedGradients(c.compression, c.optimizer.zero_stage, parts.layout, parts.abstract.params,
                                       parts.updates))

    def extra_state(self) -> Extras:
        """Return what is remembered at step 0."""
        return {NAME: self.compressed.begin}

    def extra_shardings(self, layout: Layout) -> Mapping[str, Shardings]:
        """Return the shardings of what is remembered by each peer."""
        return {NAME: self.compressed.shardings}

    def around_gradient(self, gradient: StateGradient) -> StateGradient:
        """Return the gradient whose sum over the axis is compressed."""
        return self.compressed.of(gradient)
