"""The shapes of models that read images: a dataclass for each with just the fields that it reads."""

import dataclasses
from dataclasses import dataclass

from jaxtrain.config.field_checks import at_most, choice, derive, number
from jaxtrain.config.model_config import ModelConfig
from jaxtrain.errors import UserError

CHANNELS = 3


@dataclass(frozen=True)
class PatchesConfig(ModelConfig):
    """Models whose sequences are patches of several images."""

    patch_size: int = at_most(16, 2**10, above=0)  # side length of a patch in pixels
    # the longest side of an image in patches; one position embedding is learned for each row and each column
    patches_per_side: int = at_most(64, 2**12, above=0)
    images_per_row: int = at_most(8, 2**16, above=0)  # the most images packed into one sequence
    rows_of = "images"
    images_with = "labels"  # what is beside the images of a row: "labels", "texts" or "captions"
    flops_known = False

    def __post_init__(self):
        super().__post_init__()
        if self.mup_base:
            raise UserError("model.mup_base", f"{self.name} has an image encoder, for which muP is not supported",
                            "leave it out")

    @property
    def class_at(self) -> int | None:
        """The number of the row that says of a place that it is a class token's; None: there are none."""
        return None

    @property
    def patch_values(self) -> int:
        """The number of values in a patch."""
        return self.patch_size**2 * CHANNELS


@dataclass(frozen=True)
class ImageConfig(PatchesConfig):
    """An image encoder beside a model of text."""

    image_layers: int = at_most(4, 10_000, above=0)  # number of transformer blocks in the image encoder
    image_embed_dim: int = at_most(128, 2**20, above=0)  # hidden size of the image encoder
    image_heads: int = at_most(4, 2**16, above=0)  # number of attention heads in the image encoder
    image_mlp_dim: int = at_most(0, 2**22)  # MLP width of the image encoder; 0: 4 x image_embed_dim
    image_norm_eps: float = number(0.0, least=0)  # epsilon of the image encoder's norms; 0: norm_eps
    # side length in pixels of the square images for which the image encoder learns one position embedding per patch, as
    # in published encoders; images of other shapes get interpolated ones. 0: the position embedding of a patch is the
    # sum of one for its row and one for its column
    image_size: int = at_most(0, 2**20, least=0)
    # a class token before the patches of each image, a norm before the first block and no bias in the patch embedding,
    # as in CLIP
    class_token: bool = False
    # activation of the encoders' MLPs: "tanh" or "exact" GELU, or "quick", which is x sigmoid(1.702 x)
    gelu: str = choice("tanh", "tanh", "exact", "quick")
    # mean of each colour channel, subtracted from pixel values between 0 and 1
    pixel_mean: list[float] = dataclasses.field(default_factory=lambda: [0.5] * CHANNELS, hash=False)
    # standard deviation of each colour channel, by which pixel values are divided
    pixel_std: list[float] = dataclasses.field(default_factory=lambda: [0.5] * CHANNELS, hash=False)

    def __post_init__(self):
        super().__post_init__()
        if 0 < self.image_size < self.patch_size:
            raise UserError("model.image_size", f"{self.image_size} has no whole patch of {self.patch_size} pixels",
                            "give the side of an image, such as 224")
        if self.class_token and not self.image_size:
            raise UserError("model.class_token", "it is read with model.image_size only", "set that, too")
        for key in ("pixel_mean", "pixel_std"):
            value = getattr(self, key)
            if len(value) != CHANNELS or (key == "pixel_std" and min(value) <= 0):
                raise UserError(f"model.{key}", f"{value} does not have {'a positive' if key == 'pixel_std' else 'a'} "
                                f"number for each of {CHANNELS} channels", "give one such as [0.5, 0.5, 0.5]")
        if self.image_embed_dim % self.image_heads:
            raise UserError("model.image_heads", f"{self.image_heads} does not divide model.image_embed_dim="
                            f"{self.image_embed_dim}", "choose a divisor of it")
        derive(self, "image_mlp_dim", 4 * self.image_embed_dim)
        derive(self, "image_norm_eps", self.norm_eps)

    @property
    def grid(self) -> int:
        """The side of the table of learned positions; 0: there is no table."""
        return self.image_size // self.patch_size

    @property
    def class_at(self) -> int | None:
        """The number of the row that says of a place that it is a class token's; None: there are none."""
        return self.patches_per_side if self.class_token else None

    @property
    def rough_size(self) -> int:
        """A number of parameters of the order of those of both models."""
        return super().rough_size + self.image_layers * self.image_embed_dim * (
            self.image_embed_dim + self.image_mlp_dim)

    def attentions(self, seq_len: int) -> list[tuple[int, int, int, bool]]:
        """Return that of patches, which see all of their image."""
        return [(seq_len, 0, self.image_embed_dim // self.image_heads, False)]


@dataclass(frozen=True)
class DualEncoderConfig(ImageConfig):
    """SigLIP and CLIP: an image encoder and a text encoder; the keys of all families set the text encoder's shape."""

    name: str = "siglip"
    images_with = "texts"
    compares_rows = True
    # size of the text embedding table: at least the size of the tokenizer's vocabulary
    vocab_size: int = at_most(320, 2**24, above=0)
    text_len: int = at_most(64, 2**20, above=0)  # the longest text in tokens
    # width of the space in which image and text embeddings are compared; 0: embed_dim
    joint_dim: int = at_most(0, 2**20)
    # how the patches of an image become one embedding: "attention" with a learned query; "probe", the same with a
    # projected query (as in SigLIP); "mean"; or "class", the output of the class token (needs class_token)
    pooling: str = choice("attention", "attention", "probe", "mean", "class")
    # linear projections to joint_dim: "both" encoders, with biases; "text" only (as in SigLIP); "unbiased": both,
    # without biases (as in CLIP)
    projections: str = choice("both", "both", "text", "unbiased")
    text_begin: int = -1  # token placed before each text; -1: none
    text_end: int = -1  # token placed after each text; -1: none
    # padding token to fill texts to text_len (the encoder attends to it, as in SigLIP); -1: no padding
    text_pad: int = -1

    def __post_init__(self):
        super().__post_init__()
        derive(self, "joint_dim", self.embed_dim)
        if (self.pooling == "class") != self.class_token:
            raise UserError("model.pooling", f"{self.pooling!r} does not go with model.class_token={self.class_token}",
                            "set pooling=class with class_token, and another one without")
        if self.projections == "text" and self.joint_dim != self.image_embed_dim:
            raise UserError("model.joint_dim", f"{self.joint_dim} differs from model.image_embed_dim="
                            f"{self.image_embed_dim}, and model.projections=text maps no images", "set it to that")
        for key in ("text_begin", "text_end", "text_pad"):
            if not -1 <= getattr(self, key) < self.vocab_size:
                raise UserError(f"model.{key}", f"{getattr(self, key)} is not a token below model.vocab_size="
                                f"{self.vocab_size}", "give an id of the tokenizer, or -1")
        if self.text_len <= (self.text_begin >= 0) + (self.text_end >= 0):
            raise UserError("model.text_len", f"{self.text_len} leaves no room for a text", "raise it")

    @property
    def vocabulary(self) -> int:
        """The number of rows of the embedding table of texts."""
        return self.vocab_size

    @property
    def staged_layers(self) -> int:
        """The number of layers that pipeline stages share: the longer encoder's, as both are computed together."""
        return max(self.image_layers, self.num_layers)

    def other_rows(self, seq_len: int) -> list[tuple[str, int, str, bool]]:
        """Return the places of texts."""
        count = self.images_per_row
        return [("model.text_len", count * self.text_len, f"places for {count} texts of a row", self.name == "clip")]

    def attentions(self, seq_len: int) -> list[tuple[int, int, int, bool]]:
        """Return that of images and that of texts."""
        texts = self.images_per_row * self.text_len
        return [*super().attentions(seq_len), (texts, 0, self.head_dim, self.name == "clip")]


@dataclass(frozen=True)
class ImageFlowConfig(PatchesConfig):
    """Flow matching: a vision transformer that generates images of a given label from noise."""

    name: str = "image_flow"
    num_labels: int = at_most(10, 2**24, above=0)  # number of labels (classes) of images
    causal = False
    rows_cut = True
    # The encoder of images is the whole model, so that the keys of every model say its shape. It has no table of
    # positions and no class token.
    grid = 0
    class_token = False
    gelu = "tanh"
    pixel_mean = pixel_std = (0.5,) * CHANNELS
    image_layers = property(lambda self: self.num_layers)
    image_embed_dim = property(lambda self: self.embed_dim)
    image_heads = property(lambda self: self.num_heads)
    image_mlp_dim = property(lambda self: self.mlp_dim)
    image_norm_eps = property(lambda self: self.norm_eps)

