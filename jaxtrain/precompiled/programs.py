"""The programs that a run needs before, or soon after, its first step: compiled for devices, and put into a run."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jaxtrain.base.annotations import Json
from jaxtrain.errors import UserError
from jaxtrain.run import INIT, Run, identity, shapes_of
from jaxtrain.run.shapes import AbstractBatch, DeclaredShapes
from jaxtrain.train_step.compiler_options import compiled
from jaxtrain.train_step.sharded_step import program_key


@dataclass(frozen=True)
class Wanted:
    """A program that a run needs."""

    name: str
    batch: AbstractBatch | None  # None: it does not depend on one
    key: Hashable  # in `ShardedStep.programs`
    lower: Callable[[], jax.stages.Lowered]

    @property
    def shape(self) -> Json:
        """The arrays of the batch and their shapes, as JSON."""
        return {name: [f"{np.dtype(leaf.dtype)}", *leaf.shape] for name, leaf in sorted((self.batch or {}).items())}

    @property
    def title(self) -> str:
        """The name, with the shape of the batch."""
        return f"{self.name} of {_rows(self.shape)}" if self.batch else self.name


def wanted(run: Run) -> list[Wanted]:
    """Return the programs that this run needs, one step for each shape of batch that its config declares."""
    if identity.has_own_parts(run):
        raise UserError("--compiled", "the model, the objective, the optimizer or an extension is your own, and it is "
                        "not known whether their code is the same", "leave it out")
    shapes, sharded = shapes_of(run), run.sharded
    assert isinstance(shapes, DeclaredShapes)
    evaluated = shapes.abstract()
    return [Wanted("init", None, INIT, run.lower_init),
            *(Wanted("step", batch, program_key("step", batch), lambda batch=batch: sharded.lower(batch))
              for batch in shapes.declared()),
            *([Wanted("evaluation", evaluated, program_key("evaluation", evaluated),
                      lambda: sharded.lower_evaluation(evaluated))] if run.data is None else [])]


def compile_for(run: Run, devices: Sequence[jax.Device]) -> Iterator[tuple[Wanted, jax.stages.Compiled]]:
    """Compile the programs of a run on an abstract mesh for these devices, which need not be here."""
    for one in wanted(run):
        with run.sharded.context():
            options = run.sharded.options_on(devices) if one.batch else {}  # as at the start of a run
            if devices[0].platform == "gpu" and jax.default_backend() == "cpu":
                options["xla_gpu_autotune_level"] = "0"  # to choose kernels by their speed takes the GPU
            yield one, compiled(one.lower(), options, devices)


def _rows(shape: Json) -> str:
    rows = max((sizes[1:] for sizes in shape.values()), key=len)
    return " x ".join(map(str, rows))
