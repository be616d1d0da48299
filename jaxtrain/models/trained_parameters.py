"""The selection of the parameters that a config trains."""

from collections.abc import Callable

from jaxtrain.config.model_config import ModelConfig
from jaxtrain.config.schema import TrainConfig
from jaxtrain.config.sections.tuning_keys import LoraConfig
from jaxtrain.models.heads.scalar_head import is_head
from jaxtrain.sharding.axis_rules import Axes
from jaxtrain.train_step import partition


def is_frozen(model: ModelConfig, train: TrainConfig, lora: LoraConfig, axes: Axes) -> Callable[[str], bool]:
    """Return the function that says of a parameter's path whether it is frozen.

    A head of rewards or values, which nothing was trained to read out before, is not by `lora` and `train.trainable`.
    """
    named = {*partition.frozen_paths(axes, train.freeze, train.trainable), *model.fixed}
    if not (lora.rank or train.trainable):
        return named.__contains__
    from jaxtrain.models.lora import is_adapter, is_start

    return lambda path: is_start(path) or (not (is_adapter(path) or is_head(path))
                                           and (not train.trainable or path in named))
