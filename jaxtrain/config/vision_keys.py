"""The keys of models with an encoder of pictures."""

from dataclasses import dataclass

from jaxtrain.config.families import ModelConfig
from jaxtrain.config.field_checks import derive, one_of, positive
from jaxtrain.errors import UserError

CHANNELS = 3


@dataclass(frozen=True)
class PictureConfig(ModelConfig):
    """A vision transformer over packed patches, beside whatever else the model has."""

    patch_size: int = 16  # side of a patch in pixels
    patches_per_side: int = 64  # the longest side of a picture in patches, each with a learned position
    picture_layers: int = 4  # transformer blocks of the encoder of pictures
    picture_embed_dim: int = 128  # its width
    picture_heads: int = 4  # its attention heads
    picture_mlp_dim: int = 0  # its MLP's width; 0: 4 x picture_embed_dim

    def __post_init__(self):
        super().__post_init__()
        positive(self, "model", "patch_size patches_per_side picture_layers picture_embed_dim picture_heads")
        if self.picture_embed_dim % self.picture_heads:
            raise UserError("model.picture_heads", f"{self.picture_heads} does not divide model.picture_embed_dim="
                            f"{self.picture_embed_dim}", "choose a divisor of it")
        derive(self, "picture_mlp_dim", 4 * self.picture_embed_dim)

    @property
    def patch_values(self) -> int:
        """How many values a patch has."""
        return self.patch_size**2 * CHANNELS


@dataclass(frozen=True)
class DualEncoderConfig(PictureConfig):
    """SigLIP and CLIP: an encoder of pictures and one of texts, whose shape the keys of every model say."""

    name: str = "siglip"
    joint_dim: int = 0  # width of what pictures and texts are compared by; 0: embed_dim
    pooling: str = "attention"  # from patches to a picture: "attention" or "mean"

    def __post_init__(self):
        super().__post_init__()
        one_of("model.pooling", self.pooling, ("attention", "mean"))
        derive(self, "joint_dim", self.embed_dim)
