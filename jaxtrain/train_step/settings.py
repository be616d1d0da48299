"""The settings of a train step: all that it is made of besides its loss and its parameters."""

from dataclasses import dataclass, field

import optax

from jaxtrain.sharding.axis_rules import AnyMesh, Rules
from jaxtrain.train_step.compiler_options import Options


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """All that a step is made of besides its loss; `make_train_step` and a config both end in this."""

    optimizer: optax.GradientTransformation
    mesh: AnyMesh
    rules: Rules  # by which the traced code resolves logical names
    schedule: optax.Schedule | None = None  # of the learning rate, where it is known
    precision: str = "float32"  # in which the loss computes
    wide_layers: tuple[int, int] = (0, 0)  # at the start and the end: their products are not narrow
    accumulation: int = 1  # micro-batches
    clip_norm: float = 0.0  # the norm above which the gradient is scaled down; 0: never
    zero_stage: int = 0
    seed: int | None = None  # of the key that the loss takes; None: it takes none
    platform: str = ""  # that an abstract mesh stands for; "": the one here
    compiler_options: Options = field(default_factory=dict)  # beside the preset for the platform
    deterministic: bool = False
    hang_limit: float = 0.0  # the seconds after which the watchdog has ended any process that hangs; 0: there is none
