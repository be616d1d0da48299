"""Which of a model's parameters a config trains."""

from collections.abc import Callable
from typing import Any

from jaxtrain.config.schema import Config
from jaxtrain.models.lora import is_adapter
from jaxtrain.models.reward_head import is_reward_head
from jaxtrain.train_step import partition


def is_frozen(config: Config, axes: Any) -> Callable[[str], bool]:
    """Return the function that says of a parameter's path whether it is frozen."""
    if config.lora.rank:
        beside = partition.frozen_paths(axes, (), config.train.trainable) if config.train.trainable else None
        return lambda path: not (is_adapter(path) or is_reward_head(path)) and (beside is None or path in beside)
    return partition.frozen_paths(axes, config.train.freeze, config.train.trainable).__contains__
