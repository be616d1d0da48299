"""Compile a config's programs for devices which need not be here, into a signed folder."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import jax

from jaxtrain.base.annotations import Json
from jaxtrain.builder import build, with_known_length
from jaxtrain.config.hybrid_mesh import with_hybrid_mesh
from jaxtrain.config.load import load_config
from jaxtrain.config.remat_policies import AUTO
from jaxtrain.config.schema import Config
from jaxtrain.errors import UserError
from jaxtrain.plan import compiler, targets
from jaxtrain.plan.targets import Target
from jaxtrain.precompiled import executables, programs, requirements, signed_folder
from jaxtrain.run import Run, for_run
from jaxtrain.sharding.mesh import AXES, make_mesh

Tell = Callable[[str, float, int], None]  # a program's title, the seconds that it took, and its bytes


def devices_of(text: str) -> tuple[Target, list[jax.Device]]:
    """Return the target that a text such as "h100x8" names, and its devices; "" and "cpu": those that are here."""
    if not text or (text == "cpu" and jax.default_backend() == "cpu"):
        return targets.here(), jax.devices()
    target, count = targets.parse(text)
    try:
        return target, compiler.devices_of(target, count)
    except UserError as error:  # its key is another command's flag
        raise UserError("--target", error.reason, error.fix) from error


def config_on(devices: list[jax.Device], name: str, overrides: dict[str, str]) -> Config:
    """Return the config as it is where these devices are: a config file may ask JAX for them."""
    kind = devices[0].platform
    with mock.patch.multiple(jax, default_backend=lambda: kind, device_count=lambda *_: len(devices),
                             devices=lambda *_: list(devices)):
        return load_config(name, overrides)


def compile_into(folder: Path, config: Config, target: Target, devices: list[jax.Device], *, overwrite: bool = False,
                 tell: Tell = lambda *_: None) -> None:
    """Compile what a run of this config needs on these devices of a target, and write the signed folder."""
    signed_folder.need_secret()
    run, mesh = run_on(config, target, devices)
    devices = list(mesh.devices.flat)
    about = {"made_for": requirements.of(run, devices), "xla_flags": requirements.xla_flags()}
    programs.wanted(run, mesh)  # refused before anything is written
    signed_folder.check_free(folder, overwrite)

    def made() -> Iterator[tuple[str, Json, bytes]]:
        began = time.perf_counter()
        for one, compiled in programs.compile_for(run, mesh):
            content = executables.serialized(compiled, devices)
            tell(one.title, time.perf_counter() - began, len(content))
            yield one.name, one.shape, content
            began = time.perf_counter()

    with compiler.capability(target.described):
        signed_folder.write(folder, about, made())


def run_on(config: Config, target: Target, devices: list[jax.Device]) -> tuple[Run, jax.sharding.Mesh]:
    """Return the run on an abstract mesh for these devices of a target, and the mesh that this one stands for."""
    for key, chosen in (("mesh.auto", config.mesh.auto), ("train.remat", config.train.remat == AUTO)):
        if chosen:
            raise UserError(key, "what is chosen at the start of a run is not known before it",
                            "set what jaxtrain plan shows for the target")
    config = with_hybrid_mesh(config, len(devices), target.links[0].devices)
    mesh = make_mesh(*(getattr(config.mesh, axis) for axis in AXES), devices=devices)
    assert isinstance(mesh, jax.sharding.Mesh)
    # As the planner does: on described GPUs, which have no host memory, concrete shardings would lose it.
    run = with_known_length(lambda config: for_run(build(config, mesh=mesh.abstract_mesh, platform=target.described)),
                            config)
    return run, mesh
