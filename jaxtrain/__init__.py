"""jaxtrain: train large language models in JAX on any device mesh, with the numbers of one device.

    import jaxtrain as jt
    run = jt.build(jt.load_config("configs/gpt.py", {"mesh.tensor": 2}))
    state = run.init()
    for step in range(10):
        state, metrics = run.step(state, run.batch(step))

With a module and loss of your own: `jt.make_train_step`, or the whole loop around them,
`jt.train(jt.build(config, model=..., loss_fn=..., optimizer=..., data=...), workdir)`.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxtrain.build import Run, build
    from jaxtrain.cache import enable_compilation_cache
    from jaxtrain.checkpoint import Checkpoints
    from jaxtrain.config import Config
    from jaxtrain.config_file import load_config, make_config
    from jaxtrain.data.batch_function import BatchFunction
    from jaxtrain.data.batch_source import BatchSource
    from jaxtrain.errors import UserError
    from jaxtrain.loss import cross_entropy
    from jaxtrain.mesh import make_mesh
    from jaxtrain.models import make_model
    from jaxtrain.objectives import NextToken, Objective
    from jaxtrain.objectives.distillation import distillation
    from jaxtrain.observe import MetricsWriter
    from jaxtrain.observers import Observer
    from jaxtrain.plan import plan
    from jaxtrain.sample import sample
    from jaxtrain.sharding import Rules, constrain, rules
    from jaxtrain.standalone import TrainStep, Weighted, make_train_step
    from jaxtrain.state import TrainState
    from jaxtrain.train import train

_HOME = {
    "Run": "build", "build": "build", "enable_compilation_cache": "cache", "Config": "config",
    "load_config": "config_file", "make_config": "config_file", "UserError": "errors", "cross_entropy": "loss",
    "make_mesh": "mesh", "make_model": "models", "plan": "plan", "sample": "sample", "Rules": "sharding",
    "constrain": "sharding", "rules": "sharding", "TrainStep": "standalone", "Weighted": "standalone",
    "make_train_step": "standalone", "TrainState": "state", "train": "train", "BatchSource": "data.batch_source",
    "BatchFunction": "data.batch_function", "Checkpoints": "checkpoint", "MetricsWriter": "observe",
    "NextToken": "objectives", "Objective": "objectives", "Observer": "observers",
    "distillation": "objectives.distillation",
}

__all__ = [  # imported when first used, so that `import jaxtrain` is quick
    "BatchFunction", "BatchSource", "Checkpoints", "Config", "MetricsWriter", "NextToken", "Objective", "Observer",
    "Rules", "Run", "TrainState", "TrainStep", "UserError", "Weighted", "build", "constrain", "cross_entropy",
    "distillation", "enable_compilation_cache", "load_config", "make_config", "make_mesh", "make_model",
    "make_train_step", "plan", "rules", "sample", "train",
]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'jaxtrain' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"jaxtrain.{_HOME[name]}"), name)
    return value


def __dir__():
    return __all__


class _Package(ModuleType):
    def __setattr__(self, name, value):
        # Importing the module jaxtrain.build would otherwise put it in the place of the function jaxtrain.build.
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
