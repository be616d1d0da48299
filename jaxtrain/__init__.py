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
    from jaxtrain.api import build, plan, show
    from jaxtrain.bisection.bisect import Parting, bisect
    from jaxtrain.checkpoint import CheckpointManager
    from jaxtrain.compile_cache import enable_compilation_cache
    from jaxtrain.config.load import load_config, make_config
    from jaxtrain.config.schema import Config
    from jaxtrain.data.loading.batch_function import BatchFunction
    from jaxtrain.data.loading.batch_source import BatchSource
    from jaxtrain.errors import UserError
    from jaxtrain.hub.generate import Generated, generate, sample
    from jaxtrain.hub.trained_model import load_model, with_adapters
    from jaxtrain.kernels.loss_head.cross_entropy import cross_entropy
    from jaxtrain.models.make_model import make_model
    from jaxtrain.objectives import Objective
    from jaxtrain.objectives.next_token import NextToken
    from jaxtrain.observe import MetricsWriter
    from jaxtrain.observe.trackers.tracker import Tracker
    from jaxtrain.proof.prove import Proof, prove
    from jaxtrain.run import Extension, Run
    from jaxtrain.runs.report.figures import plot
    from jaxtrain.sharding.activations import constrain
    from jaxtrain.sharding.axis_rules import Rules, rules
    from jaxtrain.sharding.mesh import make_mesh
    from jaxtrain.train_step.standalone import TrainStep, Weighted, make_train_step
    from jaxtrain.train_step.state import TrainState
    from jaxtrain.trainer.loop import train
    from jaxtrain.trainer.observers import Observer
    from jaxtrain.tuning.teacher import distillation

_NAMES = {  # module: what it gives
    "api": ["build", "plan", "show"],
    "bisection.bisect": ["Parting", "bisect"],
    "checkpoint": ["CheckpointManager"],
    "compile_cache": ["enable_compilation_cache"],
    "config.load": ["load_config", "make_config"],
    "config.schema": ["Config"],
    "data.loading.batch_function": ["BatchFunction"],
    "data.loading.batch_source": ["BatchSource"],
    "errors": ["UserError"],
    "hub.generate": ["Generated", "generate", "sample"],
    "hub.trained_model": ["load_model", "with_adapters"],
    "kernels.loss_head.cross_entropy": ["cross_entropy"],
    "models.make_model": ["make_model"],
    "objectives": ["Objective"],
    "objectives.next_token": ["NextToken"],
    "observe": ["MetricsWriter"],
    "observe.trackers.tracker": ["Tracker"],
    "proof.prove": ["Proof", "prove"],
    "run": ["Extension", "Run"],
    "runs.report.figures": ["plot"],
    "sharding.activations": ["constrain"],
    "sharding.axis_rules": ["Rules", "rules"],
    "sharding.mesh": ["make_mesh"],
    "train_step.standalone": ["TrainStep", "Weighted", "make_train_step"],
    "train_step.state": ["TrainState"],
    "trainer.loop": ["train"],
    "trainer.observers": ["Observer"],
    "tuning.teacher": ["distillation"],
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [  # imported when first used, so that `import jaxtrain` is quick
    "BatchFunction", "BatchSource", "CheckpointManager", "Config", "Extension", "Generated", "MetricsWriter",
    "NextToken", "Objective", "Observer", "Parting", "Proof", "Rules", "Run", "Tracker", "TrainState", "TrainStep",
    "UserError", "Weighted", "bisect", "build", "constrain", "cross_entropy", "distillation",
    "enable_compilation_cache", "generate", "load_config", "load_model", "make_config", "make_mesh", "make_model",
    "make_train_step", "plan", "plot", "prove", "rules", "sample", "show", "train", "with_adapters",
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
        # Importing the package jaxtrain.plan would otherwise put it in the place of the function jaxtrain.plan.
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
