"""Transcription of speech: the cross-entropy of each token of the transcript, and CTC's loss of the encoder alone.

Both are weighed as in Kim et al. (arXiv 1609.06773): (1 - w) x cross-entropy + w x CTC, each in nats per token.

Shape suffixes: B batch, M frames, S positions of the encoder, T tokens, N tokens of the longest transcript,
D embedding, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.base.annotations import PyTree
from jaxtrain.config.modality_families import WhisperConfig
from jaxtrain.config.schema import TrainConfig
from jaxtrain.data.loading.batch_spec import SEQ, Array, Declared
from jaxtrain.kernels.ctc import ctc_loss
from jaxtrain.models.modalities.speech_transformer import Whisper
from jaxtrain.objectives.next_token import NextToken, stacks
from jaxtrain.objectives.objective import of_sections
from jaxtrain.parallel.cut_rows import arrange, row_copies, whole_rows
from jaxtrain.parallel.pipeline.parts import Parts
from jaxtrain.sharding import activations
from jaxtrain.train_step import partition
from jaxtrain.train_step.state import Batch, Params, Skeleton

if TYPE_CHECKING:
    from jaxtrain.parallel.pipeline.stage_placement import Slots


@dataclass(frozen=True, kw_only=True)
class Transcription(NextToken):
    """The mean over the tokens of all transcripts, each with its end token and without what `model.prefix` gives."""

    audio: WhisperConfig
    evaluates: bool = False  # the loss is the cross-entropy; only without a decoder's loss is it CTC's

    @of_sections
    @classmethod
    def of(cls, skeleton: Skeleton, *, model: WhisperConfig, train: TrainConfig) -> "Transcription":
        """Return the objective that these sections of a config describe."""
        return cls(skeleton, train.loss_chunks, train.z_loss, audio=model, loss_kernel=train.loss_kernel)

    @property
    def batch_spec(self) -> Declared:
        """Log-mel frames and which there are, and the tokens of transcripts and which there are."""
        c = self.audio
        return {"features": Array(np.float16, (SEQ, c.mels)), "weights": np.float32,
                "target": Array(np.int32, (c.transcript,), below=c.vocab_size),
                "target_weights": Array(np.float32, (c.transcript,))}

    @property
    def pipeline_parts(self) -> Parts:
        """The parts for pipeline stages: the input of both stacks, their layers, the encoder's first, the losses."""
        return replace(super().pipeline_parts, stacks=stacks(self.model.params(), Whisper.STACKS),
                       shared=("encoder_norm",))

    @property
    def evaluation(self) -> "Transcription":
        """The cross-entropy alone, and CTC's loss beside it; or that alone, where nothing else is trained."""
        return replace(self, z_loss=0.0, evaluates=True)

    @property
    def evaluation_metrics(self) -> Sequence[str]:
        """The perplexity of a token, and CTC's loss."""
        share = self.audio.ctc_weight
        return ("perplexity",) * (share < 1) + ("ctc",) * (share > 0)

    def metrics(self, sums: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Return both losses in nats per token, and the exponential of the cross-entropy."""
        means = {name: sums[name] / jnp.maximum(sums["weight"], 1e-8) for name in ("cross_entropy", "ctc")
                 if name in sums}
        return means | {"perplexity": jnp.exp(means["cross_entropy"])}

    def prepare(self, params: Params, batch: Batch) -> tuple[Params, Batch]:
        """The model's own parameters; frames and tokens as the devices of a row share them, transcripts whole."""
        params = partition.like(params, self.model.params())
        model, batch = self.model.merge(params), {
            key: activations.constrain(x, "batch", *(None,) * (x.ndim - 1)) for key, x in batch.items()}
        tokens_BT, targets_BT, weights_BT = rows_of(batch, self.audio)
        positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
        rows = arrange({"tokens": tokens_BT, "targets": targets_BT, "weights": weights_BT, "positions": positions_BT})
        audio = model.windows(batch["features"].astype(model.norm.scale[...].dtype), batch["weights"])
        return params, rows | audio | {"spoken": batch["target"], "spoken_weights": batch["target_weights"]}

    def begin(self, params: Params, batch: Batch) -> PyTree:
        """The first activations of the encoder and of the decoder."""
        model = self.model.merge(params)
        return model.begin(batch), model.read(batch["tokens"], batch["positions"])

    def middle(self, params: Params, x: PyTree, batch: Batch,  # pyrefly: ignore[bad-override-param-name]
               slots: 'Mapping[str, Slots] | None' = None) -> tuple[PyTree, jax.Array, dict[str, jax.Array]]:
        """All layers that `params` holds -> activations of both stacks."""
        return self.model.merge(params).through(x, batch, slots), jnp.zeros(()), {}

    def end(self, params: Params, x: PyTree,  # pyrefly: ignore[bad-override-param-name]
            batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The summed loss of the decoder, and of the encoder where it has one, and the sums of the metrics."""
        model, share, (x_BSD, x_BTD) = self.model.merge(params), self.audio.ctc_weight, x
        loss, plain = self.head_loss(params, model.finish(x_BTD), model.head(), batch)
        if not share:
            return loss, {"cross_entropy": plain}
        counts_B, lengths_B = batch["spoken_weights"].sum(1).astype(jnp.int32), batch["heard"].sum(1)
        logits_BSV = whole_rows(ctc_logits(model, model.memory(x_BSD)), None)
        each_B = ctc_loss(logits_BSV, lengths_B, batch["spoken"], counts_B, self.audio.end)
        ctc = each_B.sum() / row_copies()
        share = float(share == 1) if self.evaluates else share
        return (1 - share) * loss + share * ctc, {"cross_entropy": plain, "ctc": ctc}


def rows_of(batch: Mapping[str, jax.Array], c: WhisperConfig) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the tokens that a decoder reads, those that follow each, and what each of these weighs, all [B, T].

    A row without audio, which only fills up a batch, weighs nothing.
    """
    spoken_BN, there_BN = batch["target"], batch["target_weights"]
    rows, first = spoken_BN.shape[0], len(c.prefix)
    prefix_BP = activations.constrain(jnp.broadcast_to(jnp.asarray(c.prefix, jnp.int32), (rows, first)), "batch", None)
    tokens_BT = jnp.concatenate([prefix_BP, spoken_BN], 1)
    # The end token comes where the transcript's own weight ends.
    ends_BT = jnp.arange(tokens_BT.shape[1])[None] == first - 1 + there_BN.sum(1, keepdims=True).astype(jnp.int32)
    following_BT = jnp.pad(tokens_BT[:, 1:], ((0, 0), (0, 1)))
    targets_BT = jnp.where(ends_BT, c.end, following_BT)
    weights_BT = jnp.pad(there_BN, ((0, 0), (first - 1, 1))) + ends_BT
    return tokens_BT, targets_BT, weights_BT * (batch["weights"][:, :1] > 0)


def ctc_logits(model: Any, memory_BSD: jax.Array) -> jax.Array:
    """Return float32 logits of each position of the encoder."""
    head_DV = activations.gather(model.ctc.head(), "embed", "vocab")
    return jnp.einsum("bsd,dv->bsv", memory_BSD, head_DV, preferred_element_type=jnp.float32,
                      out_sharding=activations.activation_spec("batch", "seq", "act_vocab"))
