"""Make the model that a config describes: its family's, with the adapters and heads that are asked for."""

from typing import Any

from flax import nnx

from jaxtrain.base import arguments
from jaxtrain.config.family import family
from jaxtrain.config.model_config import ModelConfig
from jaxtrain.config.sections.tuning_keys import LoraConfig
from jaxtrain.errors import UserError
from jaxtrain.models.decoder import Compute
from jaxtrain.models.heads.scalar_head import REWARD, ScalarHead
from jaxtrain.train_step.optimizers import mup


def make_model(config: ModelConfig, compute: Compute | None = None, lora: LoraConfig | None = None, *,
               scalar_head: str = "", rngs: nnx.Rngs) -> Any:
    """Return the initialized model that `config` describes; a decoder is callable eagerly as `model(tokens)`.

    `scalar_head`: it has a "reward_head" in place of the output projection, or a "value_head" beside it.
    """
    if not hasattr(config, "name"):
        raise UserError("config", f"it is {arguments.kind(config)}, not a model section", "give config.model, as in "
                        'jt.load_config("configs/gpt.py").model')
    with mup.growing(config.growth):
        model = family(config.name).build(config, compute or Compute(), rngs=rngs)
        if lora is not None and lora.rank:
            from jaxtrain.models.lora import adapt

            adapt(model, config, lora, rngs)
        if scalar_head:
            setattr(model, scalar_head, ScalarHead(scalar_head, config.embed_dim, rngs=rngs))
            model.output = None if scalar_head == REWARD else model.output
    _set_multipliers(model, config)
    return model


def _set_multipliers(model: Any, config: ModelConfig) -> None:
    """Set what a model that is wider than its `mup_base` multiplies logits and attention's scores by."""
    growth = config.growth
    if config.ties_head and growth:
        model.logit_factor /= growth["embed"]
    for _, node in nnx.iter_graph(model) if growth else ():
        if hasattr(node, "score_factor"):
            node.score_factor *= growth["head_dim"] ** -0.5
