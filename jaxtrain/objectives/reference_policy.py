"""Objectives of each token's log-probability, and of a frozen copy of what is trained: the reference policy.

The reference stays as it was when the run began: a copy of all parameters, or with adapters of these alone. It runs
forward before the policy, on the same mesh. Under a pipeline every stage runs all of its layers on the batch of its
devices. With `preference.reference=precomputed` there is no copy: batches bring what it gave each answer.

Shape suffixes: B rows, T tokens, D embedding, S segments of a row.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxtrain.base.annotations import JsonMapping, JsonObject, PyTree
from jaxtrain.config.model_config import ModelConfig
from jaxtrain.config.schema import DataConfig, MeshConfig, TrainConfig
from jaxtrain.config.sections.tuning_keys import LoraConfig, PreferenceConfig
from jaxtrain.data.loading.batch_spec import Declared
from jaxtrain.kernels.loss_head.biased_heads import for_head
from jaxtrain.kernels.loss_head.token_cross_entropy import cross_entropy_and_entropy, token_cross_entropy
from jaxtrain.models.decoder import Compute, Decoder
from jaxtrain.models.heads.scalar_head import without_heads
from jaxtrain.models.make_model import make_model
from jaxtrain.models.trained_parameters import is_frozen
from jaxtrain.objectives.next_token import NextToken
from jaxtrain.parallel.cut_rows import arrange
from jaxtrain.sharding import activations, axis_rules
from jaxtrain.train_step import partition
from jaxtrain.train_step.state import Batch, Params, Skeleton

REFERENCE = "reference"  # the key of its parameters among the frozen ones, and of its log-probabilities in a batch


@dataclass(frozen=True, kw_only=True)
class WithReference(NextToken):
    """The base of losses that compare a policy with what it was."""

    reference: Skeleton | None  # the model as it computes the reference; None: the loss needs none
    trained: Any  # the axes of what is trained, which the reference has its own copy of
    precomputed: bool = False  # batches bring the reference's sums over answers, and there is no copy

    @staticmethod
    def fields_of(skeleton: Skeleton, reference: bool, *, model: ModelConfig, train: TrainConfig, data: DataConfig,
                  mesh: MeshConfig, lora: LoraConfig, preference: PreferenceConfig) -> dict[str, Any]:
        """Return the fields of this class, for a subclass that adds its own."""
        compared = None
        if reference:
            compute = replace(Compute.of(model, train, mesh), remat="none")
            compared = Skeleton.of(nnx.eval_shape(lambda: make_model(
                model, compute, lora, rngs=nnx.Rngs(params=jax.random.key(0)))))
        axes = skeleton.axes()
        trained, _ = partition.split(without_heads(axes), is_frozen(model, train, lora, axes))
        plain = replace(NextToken.of(skeleton, model=model, train=train, data=data), mtp_loss_weight=0.0)
        return {**vars(plain), "reference": compared, "trained": trained,
                "precomputed": preference.reference == "precomputed"}

    @property
    def batch_spec(self) -> Declared:
        """The arrays of next-token prediction, and the reference's sums over answers if there is no copy of it."""
        return {**super().batch_spec, **dict.fromkeys(map(self.sums_of, self.prefixes * self.precomputed), np.float32)}

    @property
    def prefixes(self) -> tuple[str, ...]:
        """The prefix of the column names of each kind of rows that the reference reads."""
        return ("",)

    @staticmethod
    def sums_of(prefix: str) -> str:
        """Return the name of the column with the sums of these rows, each at its answer's first token."""
        return f"{prefix}{REFERENCE}"

    def reference_sums(self, params: Params, batch: Batch) -> dict[str, jax.Array]:
        """Return the log-probability of each answer under these parameters, [rows, segments], by the column's name."""
        params, names, found = partition.like(params, self.model.params()), tuple(super().batch_spec), {}
        for prefix in self.prefixes:
            rows = arrange({name: batch[f"{prefix}{name}"] for name in names})
            logp_BT = rows["weights"] * self.computed_whole(params, rows)
            found[self.sums_of(prefix)] = sums_by_row(logp_BT, rows["segments"])
        return found

    def with_reference(self, params: Params, own: Params, batch: Batch) -> Batch:
        """Return the batch with the log-probabilities of the reference, if the loss needs them.

        Args:
            params: all parameters.
            own: the policy's among them.
        """
        if self.frozen_axes:
            batch = batch | {REFERENCE: self.computed_whole(self.reference_of(params, own), batch)}
        return batch

    def with_sums(self, params: Params, own: Params, batch: Batch) -> Batch:
        """Return the batch with what the reference gives to answers, so that it adds up to their log-probabilities."""
        batch = self.with_reference(params, own, batch)
        return batch | {REFERENCE: batch["answers"] * batch[REFERENCE]} if self.frozen_axes else batch

    def reference_of(self, params: Params, own: Params) -> Params:
        """Return the parameters of the reference model, among them those that are frozen in the policy too."""
        return partition.merge(params[REFERENCE], partition.without(own, params[REFERENCE]))

    def computed_whole(self, params: Params, batch: Batch) -> jax.Array:
        """Return the log-probability of each target, without gradients and on all stages of a pipeline."""
        assert self.reference is not None
        model = self.reference.merge(lax.stop_gradient(jax.tree.map(_on_all_stages, params)))
        x_BTD, _ = model.through(model.begin(batch["tokens"], batch["positions"]), batch["segments"],
                                 batch["positions"])
        return lax.stop_gradient(self.logprobs(model, x_BTD, batch))

    def logprobs(self, model: Decoder, x_BTD: jax.Array, batch: Batch) -> jax.Array:
        """Return the log-probability of each target."""
        return -token_cross_entropy(**self._head(model, x_BTD, batch))

    def logprobs_and_entropies(self, model: Decoder, x_BTD: jax.Array, batch: Batch, learnt: bool
                               ) -> tuple[jax.Array, jax.Array]:
        """Return the log-probability of each target, and the entropy of its prediction, `learnt` with a gradient."""
        cross_BT, entropy_BT = cross_entropy_and_entropy(**self._head(model, x_BTD, batch), learnt=learnt)
        return -cross_BT, entropy_BT

    def _head(self, model: Decoder, x_BTD: jax.Array, batch: Batch) -> dict[str, Any]:
        head_DV = model.head()
        x_BTD = for_head(model.finish(x_BTD), head_DV)
        if self.temperature != 1:
            x_BTD = (x_BTD / self.temperature).astype(x_BTD.dtype)
        return {"x_BTD": x_BTD, "head_DV": head_DV, "targets_BT": batch["targets"], "chunks": self.chunks,
                "cap": model.logit_cap / self.temperature, "kernel": self.loss_kernel}

    @property
    def temperature(self) -> float:
        """The temperature of policy and reference: the divisor of their logits."""
        return 1.0

    @property
    def frozen_axes(self) -> dict:
        """The reference's logical names. Its layers are not a stage's own: the policy's layers are."""
        if self.reference is None or self.precomputed:
            return {}
        return {REFERENCE: jax.tree.map(
            axis_rules.on_every_stage, self.trained, is_leaf=lambda x: isinstance(x, tuple))}

    def frozen_metadata(self, key: str) -> dict:
        """Return the metadata of what it is a copy of."""
        return {REFERENCE: partition.like(self.model.metadata(key, ""), self.trained)} if self.frozen_axes else {}

    def init_frozen(self, key: jax.Array, params: Params) -> dict:
        """Return a copy of the trained parameters."""
        return {REFERENCE: partition.like(params, self.trained)} if self.frozen_axes else {}

    def identity(self, recorded: JsonMapping) -> JsonObject:
        """Return nothing: the config says it all."""
        return {}


def _on_all_stages(weight: jax.Array) -> jax.Array:
    """Gather a weight over the stages of a pipeline."""
    if activations.activation_spec() is None:
        return weight
    spec = jax.typeof(weight).sharding.spec
    kept = [tuple(axis for axis in axis_rules.axes_of(entry) if axis != "stage") or None for entry in spec]
    return jax.reshard(weight, P(*kept))


# ------------------------------------------------------------------------------------------------ sums over segments
@dataclass(frozen=True)
class Segments:
    """The segments of some rows, of which this device may hold a part of the tokens."""

    numbers_BT: jax.Array
    axes: tuple[str, ...]  # the mesh axes over which rows are cut

    @property
    def devices(self) -> int:
        """The number of devices that share each row."""
        return lax.psum(1, self.axes) if self.axes else 1

    def sums(self, x_BT: jax.Array) -> jax.Array:
        """Return the sum of each segment [B, S], on all devices that share the row; segment 0 is padding."""
        most = self.numbers_BT.shape[1] * self.devices + 1
        x_BS = jax.vmap(lambda x_T, s_T: jax.ops.segment_sum(x_T, s_T, most + most % 2 + 1))(x_BT, self.numbers_BT)
        return lax.psum(x_BS, self.axes) if self.axes else x_BS

    def last(self, there_BT: jax.Array, positions_BT: jax.Array) -> jax.Array:
        """Return whether each token is the last one of its segment among those that are `there`."""
        most = self.numbers_BT.shape[1] * self.devices + 1
        at_BT = jnp.where(there_BT, positions_BT, -1)
        last_BS = jax.vmap(lambda x_T, s_T: jax.ops.segment_max(x_T, s_T, most))(at_BT, self.numbers_BT)
        last_BS = lax.pmax(last_BS, self.axes) if self.axes else last_BS
        return there_BT & (at_BT == self.spread(last_BS))

    def spread(self, x_BS: jax.Array) -> jax.Array:
        """Return for each token the value of its segment."""
        return jax.vmap(lambda x_S, s_T: x_S[s_T])(x_BS, self.numbers_BT)


def sums_by_row(x_BT: jax.Array, segments_BT: jax.Array) -> jax.Array:
    """Return the sum of each segment [B, S], whole on every device."""
    if activations.activation_spec() is None:
        return Segments(segments_BT, ()).sums(x_BT)
    rows, tokens = activations.split_by("batch"), activations.split_by("seq")
    local = activations.manual_region(lambda x, s: Segments(s, activations.axes_over("seq")).sums(x),
                                   in_specs=P(rows, tokens), out_specs=P(rows, None))
    return activations.constrain(local(x_BT, segments_BT), None, None)


def summed_over_rows(f: Callable[..., PyTree], batch: Mapping[str, jax.Array]) -> PyTree:
    """Apply `f` to arrays [B, T] and to their segments, and sum what it returns over devices.

    `f` returns its device's share: devices that share rows each give an equal part of what is said of whole segments.
    In a pipeline the sum is that of its device's part of the batch, as of every loss there.
    """
    if activations.activation_spec() is None:
        return f(batch, Segments(batch["segments"], ()))
    rows, tokens = activations.split_by("batch"), activations.split_by("seq")
    free = axis_rules.axes_of(rows) + axis_rules.axes_of(tokens)

    def local(batch):
        sums = f(batch, Segments(batch["segments"], activations.axes_over("seq")))
        return jax.tree.map(lambda x: lax.psum(x, free) if free else x, sums)

    return activations.manual_region(local, in_specs=(P(rows, tokens),), out_specs=P())(dict(batch))
