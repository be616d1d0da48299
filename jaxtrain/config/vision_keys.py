"""The shapes of models that read pictures: a dataclass for each with just the fields that it reads."""

from dataclasses import dataclass

from jaxtrain.config.field_checks import derive, one_of, positive
from jaxtrain.config.model_config import ModelConfig
from jaxtrain.errors import UserError

CHANNELS = 3


@dataclass(frozen=True)
class PatchesConfig(ModelConfig):
    """Rows of patches of several pictures."""

    patch_size: int = 16  # side of a patch in pixels
    patches_per_side: int = 64  # the longest side of a picture in patches, each with a learned position
    pictures_per_row: int = 8  # the most that share a row
    rows_of = "pictures"
    flops_known = False

    def __post_init__(self):
        super().__post_init__()
        positive(self, "model", "patch_size patches_per_side pictures_per_row")
        if self.mup_base:
            raise UserError("model.mup_base", f"{self.name} has an encoder of pictures, which it does not scale",
                            "leave it out")

    @property
    def patch_values(self) -> int:
        """How many values a patch has."""
        return self.patch_size**2 * CHANNELS


@dataclass(frozen=True)
class PictureConfig(PatchesConfig):
    """An encoder of pictures beside a model of text."""

    picture_layers: int = 4  # transformer blocks of the encoder of pictures
    picture_embed_dim: int = 128  # its width
    picture_heads: int = 4  # its attention heads
    picture_mlp_dim: int = 0  # its MLP's width; 0: 4 x picture_embed_dim

    def __post_init__(self):
        super().__post_init__()
        positive(self, "model", "picture_layers picture_embed_dim picture_heads")
        if self.picture_embed_dim % self.picture_heads:
            raise UserError("model.picture_heads", f"{self.picture_heads} does not divide model.picture_embed_dim="
                            f"{self.picture_embed_dim}", "choose a divisor of it")
        derive(self, "picture_mlp_dim", 4 * self.picture_embed_dim)


@dataclass(frozen=True)
class DualEncoderConfig(PictureConfig):
    """SigLIP and CLIP: an encoder of pictures, and one of texts, whose shape the keys of every model say."""

    name: str = "siglip"
    # pyrefly: ignore[bad-override]
    vocab_size: int = 320  # rows of the table of texts' tokens: at least the tokenizer's
    text_len: int = 64  # the longest text in tokens
    joint_dim: int = 0  # width of what pictures and texts are compared by; 0: embed_dim
    pooling: str = "attention"  # from patches to a picture: "attention" or "mean"

    def __post_init__(self):
        super().__post_init__()
        positive(self, "model", "vocab_size text_len")
        one_of("model.pooling", self.pooling, ("attention", "mean"))
        derive(self, "joint_dim", self.embed_dim)


@dataclass(frozen=True)
class PictureFlowConfig(PatchesConfig):
    """Flow matching: a vision transformer that turns noise into pictures of a label."""

    name: str = "picture_flow"
    num_labels: int = 10  # labels of pictures
    # The encoder of pictures is the whole model, so that the keys of every model say its shape.
    picture_layers = property(lambda self: self.num_layers)
    picture_embed_dim = property(lambda self: self.embed_dim)
    picture_heads = property(lambda self: self.num_heads)
    picture_mlp_dim = property(lambda self: self.mlp_dim)

    def __post_init__(self):
        super().__post_init__()
        positive(self, "model", "num_labels")

