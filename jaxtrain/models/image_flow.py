"""The family `image_flow`: a vision transformer that generates images of a label from noise, by flow matching."""

from typing import TYPE_CHECKING

from jaxtrain.config.family import Family
from jaxtrain.config.vision_keys import ImageFlowConfig
from jaxtrain.models.row_flops import INPUT, Need, attended

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute
    from jaxtrain.models.vision.flow_transformer import ImageFlow


def image_flow(c: ImageFlowConfig, compute: "Compute", *, rngs: "nnx.Rngs") -> "ImageFlow":
    """Build a transformer of patches."""
    from jaxtrain.models.vision.flow_transformer import ImageFlow

    return ImageFlow(c, compute, rngs=rngs)


def useful_flops(c: ImageFlowConfig, patches: int) -> Need:
    """Patches meet all but what an image's time goes through."""
    def met(path: str) -> float:
        room = path.split("/")[0]
        times = c.images_per_row if room in ("up", "down") else patches
        return INPUT * times if path in ("image/embed/kernel", "up/kernel") else times

    return met, attended(c.num_layers, c.embed_dim, patches**2 / c.images_per_row)


FAMILY = Family(ImageFlowConfig, image_flow, objective="jaxtrain.objectives.flow_matching:FlowMatching",
                useful_flops=useful_flops)
