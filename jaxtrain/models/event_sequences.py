"""The family `events`: a causal transformer that predicts the next event."""

from typing import TYPE_CHECKING

from jaxtrain.config.family import Family
from jaxtrain.config.modality_families import EventsConfig

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute, Decoder


def events(c: EventsConfig, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build a decoder of events."""
    from jaxtrain.models.modalities.event_transformer import event_transformer

    return event_transformer(c, compute, rngs=rngs)


FAMILY = Family(EventsConfig, events, objective="jaxtrain.objectives.next_event:NextEvent")
