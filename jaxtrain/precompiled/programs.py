"""The programs that a run needs before, or soon after, its first step: compiled for devices, and put into a run."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh

from jaxtrain.base.annotations import Json
from jaxtrain.checkpoint import fingerprint
from jaxtrain.checkpoint.trees import flatten
from jaxtrain.errors import UserError
from jaxtrain.resilience.corruption.device_hashes import lower_hashes
from jaxtrain.resilience.corruption.replicas import has_copies
from jaxtrain.run import INIT, REPLICAS, Run, identity, shapes_of
from jaxtrain.run.shapes import AbstractBatch, DeclaredShapes
from jaxtrain.train_step.compiler_options import compiled
from jaxtrain.train_step.sharded_step import on_mesh, program_key


@dataclass(frozen=True)
class Wanted:
    """A program that a run needs."""

    name: str
    batch: AbstractBatch | None  # None: it does not depend on one
    lower: Callable[[Mesh], jax.stages.Lowered]
    use: Callable[[jax.stages.Compiled], None]  # lets the run have it
    of_step: bool = True  # whether it is compiled with the step's options

    @property
    def shape(self) -> Json:
        """The arrays of the batch and their shapes, as JSON."""
        return {name: [f"{np.dtype(leaf.dtype)}", *leaf.shape] for name, leaf in sorted((self.batch or {}).items())}

    @property
    def title(self) -> str:
        """The name, with the shape of the batch."""
        return f"{self.name} of {_rows(self.shape)}" if self.batch else self.name


def wanted(run: Run, mesh: Mesh) -> list[Wanted]:
    """Return the programs that this run needs on a mesh, one step for each shape of batch that its config declares."""
    if identity.has_own_parts(run):
        raise UserError("--compiled", "the model, the objective, the optimizer or an extension is your own, and it is "
                        "not known whether their code is the same", "leave it out")
    if run.config.resilience.elastic:
        raise UserError("--compiled", "with resilience.elastic the run may change its mesh, and the programs are for "
                        "one", "leave out one of the two")
    shapes, sharded = shapes_of(run), run.sharded
    assert isinstance(shapes, DeclaredShapes)

    def of_batch(name: str, batch: AbstractBatch, lower: Callable[..., jax.stages.Lowered]) -> Wanted:
        return Wanted(name, batch, partial(lower, batch),
                      partial(sharded.programs.__setitem__, program_key(name, batch)))

    def of_state(name: str, lower: Callable[[Mesh], jax.stages.Lowered]) -> Wanted:
        return Wanted(name, None, lower, partial(sharded.programs.__setitem__, name), of_step=False)

    found = [of_state(INIT, run.lower_init),
             *(of_batch("step", batch, sharded.lower) for batch in shapes.declared())]
    if run.data is None:  # others have no evaluation split
        found.append(of_batch("evaluation", shapes.abstract(), sharded.lower_evaluation))
    here = jax.tree.map(lambda x: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=on_mesh(mesh, x.sharding)), run.abstract)
    if run.config.resilience.check_every and has_copies(here):
        found.append(of_state(REPLICAS, lambda mesh: lower_hashes(run.abstract, mesh, sharded.platforms)))
    flat = flatten(run.abstract)
    return [*found, Wanted("checkpoint sums", None, lambda mesh: fingerprint.lower(flat, mesh, sharded.platforms),
                           partial(fingerprint.use, flat), of_step=False)]


def compile_for(run: Run, mesh: Mesh) -> Iterator[tuple[Wanted, jax.stages.Compiled]]:
    """Compile the programs of a run on an abstract mesh for the devices of this one, which need not be here."""
    devices = list(mesh.devices.flat)
    for one in wanted(run, mesh):
        with run.sharded.context():
            options = run.sharded.options_on(devices) if one.of_step else {}
            try:
                made = compiled(one.lower(mesh), {**options, **untimed(devices)})
            except jax.errors.JaxRuntimeError as error:
                raise refused(one.title, f"{error}".splitlines()[0]) or error from None
            yield one, made


def refused(title: str, sentence: str) -> UserError | None:
    """Return what to say of a program that the compiler refuses for a reason that the user can change; None: it fails.
    """
    if "RESOURCE_EXHAUSTED" in sentence:
        return UserError("--target", f"the compiler reports that {title} does not fit ({sentence[:200]})",
                         "use more devices, or a layout that jaxtrain plan recommends")
    if "autotun" in sentence.lower() or "No cached config" in sentence or "Failed to get configs" in sentence:
        return UserError("XLA_FLAGS", f"XLA has no results of autotuning for {title} ({sentence[:200]})",
                         "give the file that a run on such a GPU dumped, or leave these flags out")
    return None


def untimed(devices: Sequence[jax.Device]) -> dict[str, str]:
    """Return the options for described GPUs, without which kernels cannot be chosen by their speed.

    XLA_FLAGS that say something of it are kept: they may name a file of results from such a GPU.
    """
    is_here = devices[0].platform != "gpu" or devices[0].client == jax.devices()[0].client
    return {} if is_here or "autotune" in os.environ.get("XLA_FLAGS", "") else {"xla_gpu_autotune_level": "0"}


def _rows(shape: Json) -> str:
    sizes: list[list[int]] = [leaf[1:] for leaf in shape.values()]
    return " x ".join(map(str, max(sizes, key=len)))
