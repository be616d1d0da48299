"""The protocol of an objective: the loss, the batches it takes, and how a pipeline cuts it into stages."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import jax

from jaxtrain.base.annotations import JsonMapping, JsonObject
from jaxtrain.config.model_config import ModelConfig
from jaxtrain.config.schema import TrainConfig
from jaxtrain.data.loading.batch_spec import Declared
from jaxtrain.errors import UserError
from jaxtrain.observe.own_parts import describe
from jaxtrain.parallel.pipeline.parts import Parts
from jaxtrain.train_step.state import Batch, Params


class Objective(Protocol):
    """A loss that a step minimises, on any mesh."""

    @property
    def batch_spec(self) -> Declared:
        """The NumPy dtype of each array of a batch, by name, if it is [rows, tokens]; else its `batch_spec.Array`."""
        ...

    def loss(self, params: Params, batch: Batch) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """Return the summed loss, the weight to divide it by, and further sums for metrics.

        `params`: the trained and frozen parameters as one tree, in the dtypes in which they compute.
        """
        ...

    @property
    def pipeline_parts(self) -> Parts | None:
        """The loss cut in three for the stages of a pipeline; None if it cannot be cut."""
        ...

    @property
    def evaluation(self) -> "Objective":
        """The objective that evaluation reports, without what is there for training only, such as penalties."""
        ...

    def metrics(self, sums: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Return what metrics.jsonl says about the further sums of a whole batch."""
        ...

    @property
    def evaluation_metrics(self) -> Sequence[str]:
        """The entries of `metrics` that an evaluation reports; none if the loss is a cross-entropy per token."""
        ...

    @property
    def frozen_axes(self) -> dict:
        """The logical names of parameters beside the model's that the loss needs and nobody trains."""
        ...

    def frozen_metadata(self, key: str) -> dict:
        """Return one entry of the metadata of each of these parameters, "" where it has none."""
        ...

    def init_frozen(self, key: jax.Array, params: Params) -> dict:
        """Return these parameters at step 0; it is traced.

        `params`: the model's parameters at step 0, of which these may be a copy.
        """
        ...

    def identity(self, recorded: JsonMapping) -> JsonObject:
        """Return in plain JSON what makes this loss another one than others; a workdir is not resumed with another.

        `recorded`: what it was when the workdir's run began, {} for a new one. Where something is chosen at the start,
        such as the newest checkpoint of a teacher, the choice is to be taken from there.
        """
        ...

    def load_frozen(self, abstract: dict, identity: JsonMapping) -> dict | None:
        """Return these parameters from elsewhere, placed as `abstract` says; None: those of `init_frozen`.

        `identity`: what `identity` returned for this run.
        """
        ...


class OfTheModelAlone:
    """The part of the protocol about other parameters, for an objective that needs only the model's."""

    @property
    def frozen_axes(self) -> dict:
        """Empty: the loss needs no parameters but the model's."""
        return {}

    def frozen_metadata(self, key: str) -> dict:
        """Return no metadata: there are no parameters."""
        return {}

    def init_frozen(self, key: jax.Array, params: Params) -> dict:
        """Return no parameters."""
        return {}

    def identity(self, recorded: JsonMapping) -> JsonObject:
        """Return the class and its settings."""
        return describe(self)

    def load_frozen(self, abstract: dict, identity: JsonMapping) -> dict | None:
        """Return None: there is nothing to load."""
        return None


# It takes the model without its numbers, and the sections of a config that its keyword-only parameters name. One of the
# user's may take the whole config and the model instead (run/made_of_sections.py).
MakeObjective = Callable[..., Objective]
Made = TypeVar("Made", bound=Objective)


def of_sections(make: Callable[..., Made]) -> Callable[..., Made]:
    """Return the class method as it is; for type checkers, a subclass may read other sections than its base."""
    return make


def without_z_loss(model: ModelConfig, train: TrainConfig) -> None:
    """Refuse `train.z_loss` for an objective that does not read it."""
    if train.z_loss:
        raise UserError("train.z_loss", f"{model.name} has no cross-entropy per token", "leave it out")
