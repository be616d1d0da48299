"""The family `clips`: a classifier of audio clips."""

from typing import TYPE_CHECKING

from jaxtrain.config.family import Family
from jaxtrain.config.modality_families import ClipsConfig

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute
    from jaxtrain.models.modalities.clip_encoder import ClipEncoder


def clips(c: ClipsConfig, compute: "Compute", *, rngs: "nnx.Rngs") -> "ClipEncoder":
    """Build an encoder of clips."""
    from jaxtrain.models.modalities.clip_encoder import ClipEncoder

    return ClipEncoder(c, compute, rngs=rngs)


FAMILY = Family(ClipsConfig, clips, objective="jaxtrain.objectives.clip_label:ClipLabel")
