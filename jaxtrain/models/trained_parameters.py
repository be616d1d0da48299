"""The selection of the parameters that a config trains."""

from collections.abc import Callable
from typing import Any

from jaxtrain.config.schema import Config
from jaxtrain.models.heads.scalar_head import is_head
from jaxtrain.train_step import partition


def is_frozen(config: Config, axes: Any) -> Callable[[str], bool]:
    """Return the function that says of a parameter's path whether it is frozen.

    A head of rewards or values, which nothing was trained to read out before, is not by `lora` and `train.trainable`.
    """
    lora, train = config.lora.rank > 0, config.train
    named = {*partition.frozen_paths(axes, train.freeze, train.trainable), *config.model.fixed}
    if not (lora or train.trainable):
        return named.__contains__
    from jaxtrain.models.lora import is_adapter, is_start

    return lambda path: is_start(path) or (not (is_adapter(path) or is_head(path))
                                           and (not train.trainable or path in named))
