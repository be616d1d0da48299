"""The tables of parts: by kind and name, where each of jaxtrain's own is.

A further one is one file and one line here. The tables of families and of extensions are in `config/family.py` and
`extensions/__init__.py`. Other packages register theirs as entry points (docs/extend.md has an example of each kind).
"""

from jaxtrain.base.plug_ins import Kind

# Name -> where it is made, and the keys of its own that it reads; none for one without moments.
_OPTIMIZERS = {
    "adamw": ("jaxtrain.train_step.optimizers.from_optax:adamw", "b1 b2 eps"),
    "adafactor": ("jaxtrain.train_step.optimizers.adafactor:adafactor", ""),
    "lion": ("jaxtrain.train_step.optimizers.from_optax:lion", "b1 b2"),
    "sgd": ("jaxtrain.train_step.optimizers.from_optax:sgd", "b1"),
    "muon": ("jaxtrain.train_step.optimizers.muon:muon",
             "b1 b2 eps momentum orthogonal_dtype split_heads normalize_neurons"),
}
OPTIMIZER_KEYS = frozenset(key for _, keys in _OPTIMIZERS.values() for key in keys.split())
OPTIMIZERS = Kind("optimizer", "jaxtrain.optimizers", "optimizer.name",
                  {name: place for name, (place, _) in _OPTIMIZERS.items()})
SCHEDULES = Kind("schedule", "jaxtrain.schedules", "optimizer.schedule", {
    "cosine": "jaxtrain.train_step.optimizers.learning_rates:cosine",
    "linear": "jaxtrain.train_step.optimizers.learning_rates:linear",
    "wsd": "jaxtrain.train_step.optimizers.learning_rates:wsd",
    "constant": "jaxtrain.train_step.optimizers.learning_rates:constant",
})
# Those that `train.objective` names. objectives/__init__.py has those that other keys ask for.
OBJECTIVES = Kind("objective", "jaxtrain.objectives", "train.objective", {
    "next_token": "jaxtrain.objectives.next_token:NextToken",
}, accepts=lambda part: hasattr(part, "of"))
TRACKERS = Kind("tracker", "jaxtrain.trackers", "observe.trackers", {
    "tensorboard": "jaxtrain.observe.trackers.tensorboard:Service",
    "wandb": "jaxtrain.observe.trackers.wandb:Service",
    "mlflow": "jaxtrain.observe.trackers.mlflow:Service",
    "trackio": "jaxtrain.observe.trackers.trackio:Service",
}, accepts=lambda part: isinstance(part, type) and hasattr(part, "log") and hasattr(part, "imports"))
# Of reinforcement learning: what scores answers. `rl.reward` also takes what is no name.
ENVIRONMENTS = Kind("environment", "jaxtrain.environments", "rl.reward", reserved=("environment",),
                    alternative="write FILE.py:FUNCTION, model:WORKDIR or a URL")
# And what the model talks to over several turns, of the same group.
CONVERSATIONS = Kind("environment", "jaxtrain.environments", "rl.environment", reserved=("environment",),
                     accepts=lambda part: hasattr(part, "reset") and hasattr(part, "step"),
                     alternative="write FILE.py:CLASS, a URL, verifiers:NAME or openenv:NAME")


def moments_of(optimizer: str) -> list[str]:
    """Return the keys of moments that an optimizer reads; that of another package has options of its own."""
    return _OPTIMIZERS[optimizer][1].split() if optimizer in _OPTIMIZERS else []
