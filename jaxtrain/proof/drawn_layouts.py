"""Layouts drawn at random: products of mesh axes, and the keys of how a step is made that must not change its numbers.

Both `jaxtrain prove` and tests/composition/fuzz.py draw from here.
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from jaxtrain.base.annotations import Json, JsonMapping, JsonObject
from jaxtrain.config.schema import AXES, Config, MeshConfig

# The values of each key, the usual one first: it is drawn half of the time.
ACCUMULATION, UNROLL, LOSS_CHUNKS, MICROBATCHES = (1, 2, 4), (1, 0, 2), (0, 2), (0, 1, 2, 4)
REMAT = ("none", "full", "dots", "attention", "attention_and_dots")
RULES = ("fsdp_tp", "fsdp_tp", "fsdp")
# Of these each is as likely as any other.
STRATEGIES = ("auto", "ring", "gather", "ulysses")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v")
ZERO_STAGES = (0, 0, 1, 2, 3)


def often(rng: random.Random, usual: Json, *others: Json) -> Json:
    """Return the usual value half of the time."""
    return usual if rng.random() < 0.5 else rng.choice(others)


def mesh_sizes(rng: random.Random, devices: int, axes: tuple[str, ...] = AXES) -> dict[str, int]:
    """Return the sizes of all axes, of which the product is this power of two."""
    sizes = dict.fromkeys(AXES, 1)
    left = devices
    while left > 1:
        sizes[rng.choice(axes)] *= 2
        left //= 2
    return sizes


@dataclass(frozen=True)
class Layout:
    """A mesh, and how the step on it is made: keys of a config with their values, those that differ from one device."""

    keys: JsonMapping = field(default_factory=dict)

    @property
    def sizes(self) -> dict[str, int]:
        """The axes of more than one device."""
        return {axis: self.keys[f"mesh.{axis}"] for axis in AXES if self.keys.get(f"mesh.{axis}", 1) > 1}

    @property
    def devices(self) -> int:
        """The devices that it takes."""
        product = 1
        for size in self.sizes.values():
            product *= size
        return product

    @property
    def options(self) -> JsonObject:
        """The keys that are not sizes of axes."""
        return {key: value for key, value in self.keys.items() if key.removeprefix("mesh.") not in AXES}

    def __str__(self) -> str:
        return " ".join([*(f"{axis}={size}" for axis, size in self.sizes.items()),
                         *(f"{key}={value}" for key, value in self.options.items())]) or "one device"

    def __hash__(self) -> int:
        return hash(str(self))

    def applied(self) -> JsonObject:
        """Return the keys of a config that give this layout; one without keys is one device."""
        return {f"mesh.{axis}": 1 for axis in AXES} | {"mesh.auto": False, "mesh.hsdp": False} | ONE_DEVICE | dict(
            self.keys)

    def single(self) -> Iterator["Layout"]:
        """Yield the layouts that have one axis of two devices, or one option, of those that this one has."""
        for axis in self.sizes:
            yield Layout({f"mesh.{axis}": 2, **self._of_axis(axis)})
        for key, value in self._of_step.items():
            yield Layout({key: value})

    def smaller(self) -> Iterator["Layout"]:
        """Yield layouts that have less, those with the least first: without an option or an axis, or with half of it.
        """
        if self.sizes and self._of_step:
            yield Layout({key: value for key, value in self.keys.items() if key not in self._of_step})
            yield Layout(self._of_step)
        if len(self.keys) > 1:
            for key in self.keys:
                gone = {key, *(self._of_axis(key.removeprefix("mesh.")))}
                yield Layout({name: value for name, value in self.keys.items() if name not in gone})
        for axis, size in self.sizes.items():
            if size > 2:
                yield Layout({**self.keys, f"mesh.{axis}": size // 2})
        if (parts := self.keys.get("train.accumulation", 1)) > 2:
            yield Layout({**self.keys, "train.accumulation": parts // 2})

    @property
    def _of_step(self) -> JsonObject:
        """The options that a mesh does not come with."""
        return {key: value for key, value in self.options.items() if not key.startswith(("mesh.", "pipeline."))}

    def _of_axis(self, axis: str) -> JsonObject:
        """Return the options that mean something with this axis only."""
        prefix = {"stage": "pipeline.", "context": "mesh.context_strategy"}.get(axis)
        return {key: value for key, value in self.keys.items() if prefix and key.startswith(prefix)}

    def has(self, other: "Layout") -> bool:
        """Return whether all that another layout has is in this one too."""
        return all(self.sizes.get(axis, 1) >= size for axis, size in other.sizes.items()) and all(
            self.keys.get(key) == value or (key == "train.accumulation" and self.keys.get(key, 1) >= value)
            for key, value in other.options.items())


ONE_DEVICE = {"train.accumulation": 1, "optimizer.zero_stage": 0}  # what the run that all are compared with has


def of_config(rng: random.Random, config: Config, devices: int, *, own: bool, fixed_accumulation: bool) -> Layout:
    """Return the config's own layout, its axes halved until so many devices are enough; nothing is drawn."""
    sizes = {axis: size for axis in AXES if (size := getattr(config.mesh, axis)) > 1}
    sizes = {axis: 2 ** min(size.bit_length() - 1, 3) for axis, size in sizes.items()}
    while sizes and Layout({f"mesh.{axis}": size for axis, size in sizes.items()}).devices > devices:
        axis = max(sizes, key=lambda axis: sizes[axis])
        sizes[axis] //= 2
    sizes = {axis: size for axis, size in sizes.items() if size > 1} or {"data": 2}
    keys: JsonObject = {f"mesh.{axis}": size for axis, size in sizes.items()}
    if config.optimizer.zero_stage:
        keys["optimizer.zero_stage"] = config.optimizer.zero_stage
    if config.train.accumulation > 1 and not fixed_accumulation:
        keys["train.accumulation"] = 2
    return Layout(keys if own else keys | _own_strategy(config.mesh, sizes))


def _own_strategy(mesh: MeshConfig, sizes: Mapping[str, int]) -> JsonObject:
    chosen = "context" in sizes and mesh.context_strategy != "auto"
    return {"mesh.context_strategy": mesh.context_strategy} if chosen else {}


def draw(rng: random.Random, config: Config, devices: int, *, own: bool, fixed_accumulation: bool) -> Layout:
    """Return a layout of two devices or more.

    Args:
        own: the model is one of the user's, for which few keys count.
        fixed_accumulation: random numbers of the loss follow from the micro-batch, so that their number is not drawn.
    """
    many = often(rng, devices, *(2 ** n for n in range(1, devices.bit_length())))
    axes = tuple(axis for axis in AXES if axis != "stage") if own else AXES
    sizes = mesh_sizes(rng, many, axes)
    keys: JsonObject = {f"mesh.{axis}": size for axis, size in sizes.items() if size > 1}
    drawn: JsonObject = {"optimizer.zero_stage": rng.choice(ZERO_STAGES)}
    if not fixed_accumulation:
        drawn["train.accumulation"] = often(rng, *ACCUMULATION)
    if not own:
        unroll = UNROLL if config.train.unroll != 1 else (1, 1, 2)  # else it is of many layers
        drawn |= {"train.remat": often(rng, *REMAT), "train.unroll": often(rng, *unroll),
                  "train.loss_chunks": often(rng, *LOSS_CHUNKS)}
        if sizes["context"] > 1:
            drawn["mesh.context_strategy"] = rng.choice(STRATEGIES)
        if sizes["tensor"] == 1 and config.mesh.rules == "fsdp_tp" and not config.mesh.overrides:
            drawn["mesh.rules"] = often(rng, *RULES)
        if sizes["stage"] > 1:
            schedule = rng.choice(SCHEDULES)
            drawn |= {"pipeline.schedule": schedule, "pipeline.microbatches": often(rng, *MICROBATCHES),
                      "pipeline.chunks": 0, "pipeline.table": "", "pipeline.overlap": rng.random() < 0.3,
                      "pipeline.recompute": "@host" in drawn.get("train.remat", "") or rng.random() < 0.5}
    return Layout(keys | {key: value for key, value in drawn.items() if value != value_in(config, key)})


def value_in(config: Config, key: str) -> Json:
    """Return what a key is on one device: what `ONE_DEVICE` says, or the config."""
    section, _, name = key.partition(".")
    return ONE_DEVICE[key] if key in ONE_DEVICE else getattr(getattr(config, section), name)
