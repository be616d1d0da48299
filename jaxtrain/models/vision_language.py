"""A Llama decoder that reads images among text, through an encoder and a connector (LLaVA, arXiv 2310.03744)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxtrain.config.family import Family
from jaxtrain.config.vision_keys import ImageConfig
from jaxtrain.errors import UserError
from jaxtrain.hf import decoder_tensors
from jaxtrain.models.llama import LlamaConfig, biased_layer, llama

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute, Decoder


@dataclass(frozen=True)
class VisionLanguageConfig(ImageConfig, LlamaConfig):
    """A vision-language model: a Llama decoder of text and images, with an image encoder and a connector."""

    name: str = "vision_language"
    text = False
    late_window = False
    images_with = "captions"

    def __post_init__(self):
        super().__post_init__()
        if self.mtp_loss_weight:
            raise UserError("model.mtp_loss_weight", "it is not supported with images",
                            "leave it out")

    def attentions(self, seq_len: int) -> list[tuple[int, int, int, bool]]:
        """Return that of images, and that of the decoder."""
        return [*super().attentions(seq_len), (seq_len, 0, self.head_dim, True)]


def vision_language(c: VisionLanguageConfig, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build a Llama decoder with an encoder of images."""
    from jaxtrain.models.vision.connector import with_images

    return with_images(llama(c, compute, rngs=rngs), c, compute, rngs=rngs)


# There is no published format of the whole; the decoder may begin with that of a published Llama.
FAMILY = Family(VisionLanguageConfig, vision_language, objective="jaxtrain.objectives.captioning:Captioning",
                tensors=decoder_tensors.decoder(biased_layer))
