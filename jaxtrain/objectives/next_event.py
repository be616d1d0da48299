"""The next event of a sequence: the cross-entropy of one of its categories and, if asked for, the error of its time.

Shape suffixes: B users, T events, D embedding, V ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config.modality_families import EventsConfig
from jaxtrain.config.schema import TrainConfig
from jaxtrain.data.loading.batch_spec import Array, Declared
from jaxtrain.models.modalities.event_transformer import ELAPSED, log_time
from jaxtrain.objectives.next_token import NextToken
from jaxtrain.objectives.objective import of_sections
from jaxtrain.parallel.cut_rows import arrange
from jaxtrain.sharding import activations
from jaxtrain.train_step import partition
from jaxtrain.train_step.state import Batch, Params, Skeleton


@dataclass(frozen=True, kw_only=True)
class NextEvent(NextToken):
    """The mean over events but each user's first, given those before: of the cross-entropy, and of the time's error."""

    columns: EventsConfig
    evaluates: bool = False  # count how often the likeliest id is right; the time's error is a metric, and no loss

    @of_sections
    @classmethod
    def of(cls, skeleton: Skeleton, *, model: EventsConfig, train: TrainConfig) -> "NextEvent":
        """Return the objective that these sections of a config describe."""
        return cls(skeleton, train.loss_chunks, train.z_loss, columns=model, loss_kernel=train.loss_kernel)

    @property
    def batch_spec(self) -> Declared:
        """The columns that the model reads, and which events there are."""
        c = self.columns
        return {**{name: Array(np.int32, below=ids) for name, ids in c.categories.items()},
                **dict.fromkeys((ELAPSED, *c.numbers, "weights"), np.float32)}

    @property
    def evaluation(self) -> "NextEvent":
        """The cross-entropy alone, and the metrics."""
        return replace(self, z_loss=0.0, evaluates=True)

    @property
    def evaluation_metrics(self) -> Sequence[str]:
        """The accuracy of the most probable id, and the error of the time where it is predicted."""
        return ("accuracy", "perplexity", *["time_error"] * (self.columns.time_loss > 0))

    def metrics(self, sums: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Return means over events."""
        events = jnp.maximum(sums["weight"], 1e-8)
        means = {name: sums[name] / events for name in ("cross_entropy", "accuracy", "time_error") if name in sums}
        return means | {"perplexity": jnp.exp(means["cross_entropy"])}

    def prepare(self, params: Params, batch: Batch) -> tuple[Params, Batch]:
        """The model's own parameters; the batch with what follows each event, as its devices share it."""
        def following(x_BT):
            return jnp.concatenate([x_BT[:, 1:], jnp.zeros_like(x_BT[:, :1])], 1)

        there_BT = batch["weights"]
        positions_BT = jnp.broadcast_to(jnp.arange(there_BT.shape[1]), there_BT.shape)
        # Padding comes last, where no event sees it: it needs no mask.
        more = {"positions": positions_BT, "segments": there_BT > 0, "targets": following(batch[self.columns.predict]),
                "next_elapsed": following(batch[ELAPSED]), "weights": following(there_BT)}
        return partition.like(params, self.model.params()), arrange({**batch, **more})

    def begin(self, params: Params, batch: Batch) -> jax.Array:
        """Embeddings."""
        return self.model.merge(params).begin(batch, batch["positions"])

    def end(self, params: Params, x_BTD: jax.Array, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The summed loss, and the sums of the metrics."""
        model, weights_BT = self.model.merge(params), batch["weights"]
        x_BTD = model.finish(x_BTD)
        loss, plain = self.head_loss(params, x_BTD, head_DV := model.head(), batch)
        sums = {"cross_entropy": plain}
        if self.columns.time_loss:
            error_BT = jnp.square(model.value_head(x_BTD) - log_time(batch["next_elapsed"]))
            sums["time_error"] = (error_BT * weights_BT).sum()
            loss += 0 if self.evaluates else self.columns.time_loss * sums["time_error"]
        if self.evaluates:
            sums["accuracy"] = (_is_likeliest(x_BTD, head_DV, batch["targets"]) * weights_BT).sum()
        return loss, sums


def _is_likeliest(x_BTD: jax.Array, head_DV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """Return whether no other id has a higher logit than the target. All logits exist at once, as in no step."""
    logits_BTV = jnp.einsum("btd,dv->btv", x_BTD, activations.gather(head_DV, "embed", "vocab"),
                            preferred_element_type=jnp.float32,
                            out_sharding=activations.activation_spec("batch", "seq", "act_vocab"))
    hit_BTV = targets_BT[..., None] == jnp.arange(logits_BTV.shape[-1])
    return jnp.where(hit_BTV, logits_BTV, 0).sum(-1) >= logits_BTV.max(-1)
