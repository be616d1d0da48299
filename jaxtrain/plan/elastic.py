"""Another mesh for another number of devices, with the same batch and the same results."""

import dataclasses
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxtrain.config.schema import Config
from jaxtrain.errors import UserError, say
from jaxtrain.sharding.mesh import AXES, axis_sizes

Sizes = tuple[int, ...]  # of the axes, in order
FULL = "JAXTRAIN_FULL_PROCESSES"  # how many processes the run has when none is lost


def choose(config: Config, devices: int, full: int = 0) -> Config:
    """Return the config for `devices` devices: itself if its mesh fits them, else with the first mesh that does.

    The global batch stays; `train.accumulation` is as small as possible without more rows at a time on a device than
    with the declared mesh.

    Args:
        full: the devices that the run has when none is lost; needed only if the declared mesh has a -1.

    Raises:
        UserError: no mesh fits.
    """
    declared = sizes_of(config)
    if config.mesh.auto:  # decided when the devices are known; for now any mesh will do
        return _possible(config, devices)
    if -1 in declared:
        declared = axis_sizes(declared, full or devices)
    if math.prod(declared) == devices:
        _build(config, devices)
        return config
    parallel = batch_shards(config, declared) * config.train.accumulation  # least number of parts of the batch
    refused: UserError | None = None
    for sizes in _preferences(config, declared, devices):
        try:
            return _accumulated(_with_mesh(config, sizes), devices, parallel)
        except UserError as error:
            refused = refused or error
    reason = f" ({refused})" if refused else ""
    raise UserError("resilience.meshes" if config.resilience.meshes else "mesh",
                    f"no substitute for {words(declared)} fits {devices} devices{reason}",
                    "list a mesh that does in resilience.meshes")


def words(sizes: Sizes) -> str:
    """Format sizes as in `resilience.meshes`."""
    return ",".join(f"{axis}={size}" for axis, size in zip(AXES, sizes, strict=True) if size != 1) or "data=1"


def parse(text: str) -> Sizes:
    """Parse sizes such as "data=4,tensor=2"; axes that are not named are 1.

    Raises:
        ValueError: the text is not a list of axis=size.
    """
    sizes = dict.fromkeys(AXES, 1)
    for part in text.split(","):
        axis, _, size = part.strip().partition("=")
        if axis not in sizes:
            raise ValueError(f"there is no axis {axis!r}")
        sizes[axis] = int(size)
    return tuple(sizes.values())


def here(config: Config, workdir: Path) -> Config:
    """Return the config for the available devices; a changed mesh is reported and recorded."""
    import jax

    from jaxtrain.observe.events import record

    devices, processes = jax.device_count(), jax.process_count()
    full = max(processes, int(os.environ.get(FULL, processes)))
    chosen = choose(config, devices, devices * full // processes)
    if chosen != config and jax.process_index() == 0:
        change = (f"{words(sizes_of(config))} was configured, but there are {devices} devices: the run continues with "
                  f"{words(sizes_of(chosen))} and train.accumulation={chosen.train.accumulation}")
        say(f"elastic: {change}; batch, data and losses stay the same")
        workdir.mkdir(parents=True, exist_ok=True)
        record(workdir, "elastic", devices=devices, processes=processes, mesh=words(sizes_of(chosen)),
               declared=words(sizes_of(config)), accumulation=chosen.train.accumulation)
    return chosen


def _possible(config: Config, devices: int) -> Config:
    """Return the config itself, if any mesh of this many devices works with it."""
    from jaxtrain.plan.search import meshes
    from jaxtrain.plan.targets import TARGETS

    fixed = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, auto=False))
    refused: UserError | None = None
    for sizes in meshes(config, TARGETS["cpu"], devices):
        try:
            _accumulated(_with_mesh(fixed, tuple(sizes[f"mesh.{axis}"] for axis in AXES)), devices, 1)
            return config
        except UserError as error:
            refused = refused or error
    raise refused or UserError("mesh", f"nothing works on {devices} devices", "use another number of them")


def _preferences(config: Config, declared: Sizes, devices: int) -> Iterator[Sizes]:
    """Yield substitutes for the declared mesh, best first: those listed, or else other sizes of data and fsdp."""
    if config.resilience.meshes:
        for text in config.resilience.meshes:
            sizes = parse(text)
            product = math.prod(size for size in sizes if size != -1)
            if devices % product == 0 and (-1 in sizes or product == devices):
                yield axis_sizes(sizes, devices)
        return
    _, fsdp, *others = declared
    rest, remainder = divmod(devices, math.prod(others))
    if remainder:
        return
    # More shards than declared need less memory on a device, fewer need more: so first upwards, then downwards.
    divisors = [n for n in range(1, rest + 1) if rest % n == 0]
    above, below = [n for n in divisors if n >= fsdp], [n for n in divisors if n < fsdp]
    for size in [1] if fsdp == 1 else [*above, *reversed(below)]:
        yield (rest // size, size, *others)


def _accumulated(config: Config, devices: int, parallel: int) -> Config:
    """Return the config with the fewest micro-batches such that no device has more rows than with `parallel` parts."""
    batch, shards = config.data.global_batch_size, batch_shards(config, sizes_of(config))
    refused: UserError | None = None
    for accumulation in range(max(1, -(-parallel // shards)), max(1, batch // shards) + 1):
        if batch % (accumulation * shards):
            continue
        candidate = dataclasses.replace(config, train=dataclasses.replace(config.train, accumulation=accumulation))
        try:
            _build(candidate, devices)
            return candidate
        except UserError as error:
            refused = refused or error
    raise refused or UserError("data.global_batch_size", f"{batch} does not divide over {shards} batch shards",
                               f"make it a multiple of {shards}")


def _build(config: Config, devices: int) -> None:
    """Raise a UserError if a config does not work; allocates nothing, and ignores cuDNN, which needs devices."""
    from jaxtrain.builder import build

    build(dataclasses.replace(config, train=dataclasses.replace(config.train, attention="auto")), devices=devices)


def batch_shards(config: Config, sizes: Sizes) -> int:
    """Return into how many parts these axes cut a batch."""
    from jaxtrain.sharding import axis_rules
    from jaxtrain.sharding.mesh import make_mesh

    rules = axis_rules.rules(config.mesh.rules, **config.mesh.overrides)
    return axis_rules.shards(rules.batch, make_mesh(*sizes, devices=math.prod(sizes)))


def sizes_of(config: Config) -> Sizes:
    """Return the sizes of the mesh that a config declares, in the order of the axes."""
    return tuple(getattr(config.mesh, axis) for axis in AXES)


def _with_mesh(config: Config, sizes: Sizes) -> Config:
    axes: dict[str, Any] = dict(zip(AXES, sizes, strict=True))
    return dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, **axes))
