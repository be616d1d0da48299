"""The model families, by `model.name`; a new model is one file with a function like these, and one line here."""

from collections.abc import Callable
from typing import Any

from flax import nnx

from jaxtrain.base import arguments
from jaxtrain.config.families import ModelConfig
from jaxtrain.config.sections.tuning_keys import LoraConfig
from jaxtrain.errors import UserError, nearest
from jaxtrain.models.attention.mla import LatentAttention
from jaxtrain.models.attention.self_attention import Attention
from jaxtrain.models.decoder import Compute, Decoder
from jaxtrain.models.deepseek_v3 import deepseek_v3
from jaxtrain.models.gemma3 import gemma3
from jaxtrain.models.gpt2 import gpt2
from jaxtrain.models.gpt_oss import gpt_oss
from jaxtrain.models.heads.scalar_head import REWARD, ScalarHead
from jaxtrain.models.llama import llama
from jaxtrain.models.lora import adapt
from jaxtrain.models.modalities.clip_encoder import ClipEncoder
from jaxtrain.models.modalities.event_transformer import event_transformer
from jaxtrain.models.modalities.whisper import whisper
from jaxtrain.models.qwen2 import qwen2
from jaxtrain.models.qwen3 import qwen3
from jaxtrain.models.vision.dual_encoder import DualEncoder
from jaxtrain.models.vision.picture_flow import PictureFlow
from jaxtrain.models.vision.vision_language import vision_language
from jaxtrain.train_step.optimizers import mup

FAMILIES: dict[str, Callable[..., Any]] = {"gpt2": gpt2, "llama": llama, "qwen2": qwen2, "qwen3": qwen3,
    "gemma3": gemma3, "mixtral": llama, "qwen3_moe": qwen3, "deepseek_v3": deepseek_v3, "gpt_oss": gpt_oss,
    "events": event_transformer, "clips": ClipEncoder, "siglip": DualEncoder, "clip": DualEncoder,
    "vision_language": vision_language, "picture_flow": PictureFlow, "whisper": whisper}


def make_model(config: ModelConfig, compute: Compute | None = None, lora: LoraConfig | None = None, *,
               scalar_head: str = "", rngs: nnx.Rngs) -> Any:
    """Return the initialized model that `config` describes; a decoder is callable eagerly as `model(tokens)`.

    `scalar_head`: it has a "reward_head" in place of the output projection, or a "value_head" beside it.
    """
    if not hasattr(config, "name"):
        raise UserError("config", f"it is {arguments.kind(config)}, not a model section", "give config.model, as in "
                        'jt.load_config("configs/gpt.py").model')
    if config.name not in FAMILIES:
        raise UserError("model.name", f"there is no model {config.name!r}", nearest(config.name, FAMILIES))
    with mup.growing(config.growth):
        model = FAMILIES[config.name](config, compute or Compute(), rngs=rngs)
        if lora is not None and lora.rank:
            adapt(model, lora, rngs)
        if scalar_head:
            setattr(model, scalar_head, ScalarHead(scalar_head, config.embed_dim, rngs=rngs))
            model.output = None if scalar_head == REWARD else model.output
    _set_multipliers(model, config)
    return model


def _set_multipliers(model: Any, config: ModelConfig) -> None:
    """Set what a model that is wider than its `mup_base` multiplies logits and attention's scores by."""
    growth = config.growth
    if config.tied_embeddings and growth:
        model.logit_factor = 1 / growth["embed"]
    for _, node in nnx.iter_graph(model):
        if isinstance(node, Attention | LatentAttention) and growth:
            node.score_factor *= growth["head_dim"] ** -0.5


__all__ = ["FAMILIES", "Compute", "Decoder", "make_model"]
