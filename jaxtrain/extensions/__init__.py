"""The table of extensions: which key of a config asks for which, imported only then (docs/extend.md adds one).

A package outside of jaxtrain registers a class under the entry points of group `jaxtrain.extensions`, which a section
of its name asks for. `jt.build(config, extensions=[...])` takes objects.
"""

import importlib
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import TypeVar

from jaxtrain.base.plug_ins import points
from jaxtrain.config.schema import Config
from jaxtrain.config.sections import plug_in_sections
from jaxtrain.run import Extension, Parts, Run

# The key of a config, which asks by another value than its default -> where the extension is. What is listed later acts
# later: around the gradient of those before, and after their updates.
EXTENSIONS = {
    "": "jaxtrain.extensions.anomaly_history:AnomalyHistory",  # of every run
    "optimizer.offload": "jaxtrain.extensions.update_by_layer:UpdateByLayer",
    "optimizer.moment_dtype": "jaxtrain.extensions.update_by_layer:UpdateByLayer",
    "compression.method": "jaxtrain.extensions.compression:Compression",
    "optimizer.qk_clip": "jaxtrain.extensions.qk_clip:QKClip",
    "sparsity.targets": "jaxtrain.extensions.sparsity:StructuredSparsity",
    "train.ema_decay": "jaxtrain.extensions.ema:AveragedParameters",
    "lora.dropout": "jaxtrain.extensions.noise:TrainingNoise",
    "train.neftune_noise_alpha": "jaxtrain.extensions.noise:TrainingNoise",
    "train.precision": "jaxtrain.extensions.noise:TrainingNoise",
    "lora.quantize": "jaxtrain.extensions.frozen_kernels:QuantizedKernels",
    "lora.init": "jaxtrain.hub.initial_params:InitialParams",
    "train.init_from": "jaxtrain.hub.initial_params:InitialParams",
    "train.init_encoder_from": "jaxtrain.hub.initial_params:InitialParams",
    "preference.reference": "jaxtrain.tuning.reference_sums:PrecomputedReference",
    "rl.prompts": "jaxtrain.tuning.own_answers:OwnAnswers",
    "diloco.count": "jaxtrain.diloco.joining:Joining",
}
Kind = TypeVar("Kind", bound=Extension)


def asked(config: Config) -> list[type[Extension]]:
    """Return the classes of the extensions that a config asks for."""
    default = Config()
    places = [place for key, place in EXTENSIONS.items()
              if not key or attrgetter(key)(config) != attrgetter(key)(default)]
    registered = plug_in_sections.EXTENSIONS
    return [*map(_loaded, dict.fromkeys(places)),
            *(registered.load(name) for name in config.plug_ins if name in points(registered.group))]


def made(classes: Iterable[type[Extension]], parts: Parts) -> tuple[Extension, ...]:
    """Return the extensions of a run that is made of these parts."""
    named = {type(options): options for options in parts.config.plug_ins.values()}  # some are extensions themselves
    found = (named[one] if one in named else one.of(parts) for one in classes)
    return tuple(extension for extension in found if extension is not None)


def every() -> Iterator[type[Extension]]:
    """Yield every class of the table, in its order."""
    yield from map(_loaded, dict.fromkeys(EXTENSIONS.values()))


def of_kind(run: Run, kind: type[Kind]) -> Kind | None:
    """Return a run's extension of this class; None if it has none."""
    return next((extension for extension in run.extensions if isinstance(extension, kind)), None)


def _loaded(place: str) -> type[Extension]:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)
