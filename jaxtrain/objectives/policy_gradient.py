"""Policy gradients with clipped ratios: learn from advantages of the model's own answers (GRPO and its relatives).

Each segment of a row is one answer behind its prompt. A batch has, beside tokens: `weights`, 1 where a target belongs
to an answer; `advantages`, of each of these; `sampled`, the log-probability with which it was sampled; and `rewards`
and `answers`, the reward and 1 at an answer's first token. With a value head it also has `values`, what was expected
before each of these targets, and `returns`, what should have been.

DeepSeekMath (GRPO, arXiv 2402.03300), DAPO (2503.14476), Dr. GRPO (2503.20783), GSPO (2507.18071); proximal clipping:
Schulman et al. (1707.06347), with clipped values as in their implementation (Huang et al., 2403.17031).

A sampler in other programs, in another precision or of earlier weights draws from another distribution than the policy
that is trained. `rl.correction` weights the loss of a token by the ratio of the two: "truncate" lowers a ratio that is
too large to a bound (truncated importance sampling: Yao et al., "Your Efficient RL Framework Secretly Brings You
Off-Policy RL Training", 2025), "mask" leaves out tokens whose ratio is outside of bounds on either side (IcePop, arXiv
2510.18855).
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtrain.config.model_config import ModelConfig
from jaxtrain.config.schema import DataConfig, MeshConfig, TrainConfig
from jaxtrain.config.sections.tuning_keys import LoraConfig, PreferenceConfig, RLConfig
from jaxtrain.data.loading.batch_spec import Declared
from jaxtrain.models.decoder import Decoder
from jaxtrain.objectives.objective import of_sections
from jaxtrain.objectives.reference_policy import REFERENCE, Segments, WithReference, summed_over_rows
from jaxtrain.train_step.state import Batch, Params, Skeleton

ARRAYS = ("advantages", "sampled", "rewards", "answers")
VALUES = ("returns", "values")  # with a value head
METRICS = ("kl", "kl_sampled", "clipped", "logp", "entropy")  # means over tokens
VALUE_METRICS = ("value_loss", "value_clipped")  # likewise, with a value head
# Of the gaps between log-probabilities: buckets to a factor of 2, and the powers of 2 that they go from and to.
EACH, LEAST, MOST = 8, -24, 8


@dataclass(frozen=True, kw_only=True)
class PolicyGradient(WithReference):
    """The clipped policy-gradient loss of answers with advantages."""

    settings: RLConfig

    @of_sections
    @classmethod
    def of(cls, skeleton: Skeleton, *, model: ModelConfig, train: TrainConfig, data: DataConfig, mesh: MeshConfig,
           lora: LoraConfig, preference: PreferenceConfig, rl: RLConfig) -> "PolicyGradient":
        """Return the objective that these sections of a config describe."""
        return cls(**cls.fields_of(skeleton, rl.kl > 0, model=model, train=train, data=data, mesh=mesh,
                                   lora=lora, preference=preference), settings=rl)

    @property
    def batch_spec(self) -> Declared:
        """The arrays of next-token prediction, and what is known of the answers."""
        return {**super().batch_spec, **dict.fromkeys(self.arrays, np.float32)}

    @property
    def arrays(self) -> tuple[str, ...]:
        """The names of a batch's arrays about its answers."""
        return ARRAYS + VALUES if self.settings.value_head else ARRAYS

    @property
    def temperature(self) -> float:
        """The temperature at which answers were sampled."""
        return self.settings.temperature

    @property
    def evaluation(self) -> "PolicyGradient":
        """The same loss without penalties."""
        return replace(self, penalties=False)

    def prepare(self, params: Params, batch: Batch) -> tuple[Params, Batch]:
        """The policy's parameters; the batch with the reference's log-probabilities, weighted as the loss divides."""
        own, batch = super().prepare(params, batch)
        divisor_BT = batch["weights"] if self.settings.loss == "dapo" else batch["answers"]
        batch = batch | {"learnt": batch["weights"], "weights": divisor_BT}
        return own, self.with_reference(params, own, batch)

    def end(self, params: Params, x_BTD: jax.Array, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss and the metrics, summed."""
        model = self.model.merge(params)
        arrays = {key: batch[key] for key in ("learnt", "segments", *self.arrays, REFERENCE) if key in batch}
        if self.settings.mask_truncated:
            arrays["positions"] = batch["positions"]
        arrays |= self.predicted(model, x_BTD, batch)
        if model.value_head is not None:
            arrays["expected"] = model.value_head(model.finish(x_BTD))
        return summed_over_rows(self.of_rows, arrays)

    def predicted(self, model: Decoder, x_BTD: jax.Array, batch: Batch) -> Batch:
        """The log-probability of each target, and the entropy of its prediction."""
        policy_BT, entropy_BT = self.logprobs_and_entropies(model, x_BTD, batch, learnt=self.settings.entropy > 0)
        return {"policy": policy_BT, "entropy": entropy_BT}

    def of_rows(self, batch: Batch, segments: Segments) -> tuple[jax.Array, dict[str, jax.Array]]:
        """One device's share of the loss and of the metrics, summed over its tokens."""
        return _of_rows(self.settings, batch, segments)

    def metrics(self, sums: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Return the mean reward, the mean length of answers, and means over the tokens that are trained on.

        `kl_sampled`: the divergence of the policy from the one that sampled; `sampler_mismatch`: how far their
        log-probabilities are apart; `clipped`: the share of tokens whose ratio had no gradient, or was cut by CISPO or
        by `rl.correction`; `entropy`: that of the policy's prediction of a token, in nats, at the
        temperature of sampling. `explained_variance`: 1 where values are the returns, 0 where a constant
        is as good.
        """
        answers, tokens = (jnp.maximum(sums[name], 1e-8) for name in ("answers", "tokens_learnt"))
        found = {name: sums[name] / tokens for name in (*METRICS, *VALUE_METRICS)
                 if name in sums and (name != "kl" or self.reference is not None)}
        if "value_loss" in sums:
            left, all_of_it = (sums[f"{name}_squared"] / tokens - jnp.square(sums[name] / tokens)
                               for name in ("value_error", "returns"))
            found["explained_variance"] = 1 - left / jnp.maximum(all_of_it, 1e-8)
        found |= _mismatch_metrics(sums, tokens)
        generated = sums.get("tokens_generated", sums["tokens_learnt"])
        return {"reward": sums["rewards"] / answers, "answer_tokens": generated / answers, **found,
                **self.router_metrics(sums)}


def _of_rows(c: RLConfig, batch: Batch, segments: Segments) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return one device's share of the loss and of the metrics, summed over its tokens."""
    learnt_BT, advantages_BT = batch["learnt"], batch["advantages"]
    log_ratio_BT = jnp.where(learnt_BT > 0, batch["policy"] - batch["sampled"], 0)
    lengths_BT = jnp.maximum(segments.spread(segments.sums(learnt_BT)), 1)
    if c.ratio == "sequence":
        log_ratio_BT = segments.spread(segments.sums(log_ratio_BT * learnt_BT)) / lengths_BT
    log_ratio_BT, weight_BT, out_BT = _corrected(c, log_ratio_BT)
    loss_BT, stuck_BT = SURROGATES[c.surrogate](c, jnp.exp(log_ratio_BT), advantages_BT, batch["policy"])
    loss_BT, stuck_BT = weight_BT * loss_BT, stuck_BT | out_BT
    kl_BT = jnp.zeros_like(loss_BT)
    if REFERENCE in batch:
        kl_BT = _divergence(jnp.where(learnt_BT > 0, batch[REFERENCE] - batch["policy"], 0))
        loss_BT += c.kl * kl_BT
    if c.entropy:
        loss_BT -= c.entropy * batch["entropy"]
    found = {}
    if c.value_head:
        value_BT, found = _value_loss(c, batch)
        loss_BT += c.value_loss * value_BT
    share_BT = {"dapo": learnt_BT, "grpo": learnt_BT / lengths_BT, "dr_grpo": learnt_BT / c.max_new_tokens}[c.loss]
    sampled_kl_BT = _divergence(jnp.where(learnt_BT > 0, batch["policy"] - batch["sampled"], 0))
    found |= {"kl": kl_BT, "kl_sampled": sampled_kl_BT, "clipped": stuck_BT, "logp": batch["policy"],
              "entropy": batch["entropy"]}
    sums = {name: (learnt_BT * x_BT).sum() for name, x_BT in found.items()}
    sums |= {name: batch[name].sum() for name in ("rewards", "answers")} | {"tokens_learnt": learnt_BT.sum()}
    sums |= _mismatch_sums(batch["policy"] - batch["sampled"], learnt_BT)
    if c.mask_truncated:
        sums["tokens_generated"] = _generated(batch, segments).sum()
    return (share_BT * loss_BT).sum(), lax.stop_gradient(sums)


def _ppo(c: RLConfig, ratio_BT: jax.Array, advantages_BT: jax.Array,
         policy_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return each token's loss, without a gradient where the ratio has moved too far, and whether it has none."""
    clipped_BT = jnp.clip(ratio_BT, 1 - c.clip, 1 + (c.clip_high or c.clip))
    loss_BT = -jnp.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)
    return loss_BT, clipped_BT * advantages_BT < ratio_BT * advantages_BT


def _cispo(c: RLConfig, ratio_BT: jax.Array, advantages_BT: jax.Array,
           policy_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return each token's loss, whose gradient is that of its log-probability times the ratio, and whether that is cut.

    MiniMax-M1 (arXiv 2506.13585); ratios are bounded from above only.
    """
    most = 1 + (c.clip_high or c.clip)
    weight_BT = lax.stop_gradient(jnp.minimum(ratio_BT, most))
    return -weight_BT * advantages_BT * policy_BT, ratio_BT > most


SURROGATES = {"ppo": _ppo, "cispo": _cispo}


def _corrected(c: RLConfig, log_ratio_BT: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the log-ratio for the surrogate, the weight of each token's loss, and whether its ratio was out of bounds.

    Without a correction the surrogate has the ratio to the sampler, which its own clipping bounds. With one, it has the
    ratio to the policy before the step, which is 1 but has the gradient.
    """
    if not c.correction:
        return log_ratio_BT, jnp.ones_like(log_ratio_BT), jnp.zeros_like(log_ratio_BT, bool)
    before_BT = lax.stop_gradient(log_ratio_BT)
    ratio_BT = jnp.exp(before_BT)
    out_BT = ratio_BT > c.correction_high
    if c.correction == "mask":
        out_BT |= ratio_BT < c.correction_low
    weight_BT = jnp.where(out_BT, c.correction_high if c.correction == "truncate" else 0.0, ratio_BT)
    return log_ratio_BT - before_BT, weight_BT, out_BT


def _mismatch_sums(gap_BT: jax.Array, learnt_BT: jax.Array) -> dict[str, jax.Array]:
    """Return the sum of absolute gaps of log-probabilities, and the number of tokens by the size of their gaps.

    Sums over devices and micro-batches are all that a loss can report: the largest gap is read off the counts.
    """
    gap_BT = jnp.abs(gap_BT) * learnt_BT
    places = jnp.floor(EACH * (jnp.log2(jnp.maximum(gap_BT, 2.0**LEAST)) - LEAST)).astype(jnp.int32)
    places, size = jnp.where(gap_BT > 0, places + 1, 0), EACH * (MOST - LEAST) + 1  # bucket 0: equal to the last bit
    counts = jax.ops.segment_sum(learnt_BT.reshape(-1), jnp.minimum(places, size - 1).reshape(-1), size)
    return {"sampler_mismatch": gap_BT.sum(), "sampler_mismatch_counts": counts}


def _mismatch_metrics(sums: dict[str, jax.Array], tokens: jax.Array) -> dict[str, jax.Array]:
    """Return the mean of the gaps of all tokens and the largest, which is rounded up to 2 to the power of n / 8."""
    counts = sums["sampler_mismatch_counts"]
    top = jnp.max(jnp.where(counts > 0, jnp.arange(len(counts)), 0))
    largest = jnp.where(top > 0, jnp.exp2(top / EACH + LEAST), 0.0)
    return {"sampler_mismatch": sums["sampler_mismatch"] / tokens, "sampler_mismatch_max": largest}


def _generated(batch: Batch, segments: Segments) -> jax.Array:
    """Return whether each target belongs to an answer, whether or not it is trained on: an answer ends its segment."""
    counted_BT = batch["positions"] + 1
    first_BT = segments.spread(segments.sums(batch["answers"] * counted_BT))
    return ((first_BT > 0) & (counted_BT >= first_BT)).astype(jnp.float32)


def _value_loss(c: RLConfig, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return half the squared error of each token's value, and what is measured of it."""
    returns_BT, moved_BT = batch["returns"], batch["expected"] - batch["values"]
    error_BT, near_BT = batch["expected"] - returns_BT, jnp.clip(moved_BT, -c.value_clip, c.value_clip)
    loss_BT, clipped_BT = (jnp.square(x_BT) / 2 for x_BT in (error_BT, batch["values"] + near_BT - returns_BT))
    stuck_BT = (near_BT != moved_BT) & (clipped_BT > loss_BT) & (c.value_clip > 0)
    loss_BT = jnp.where(stuck_BT, clipped_BT, loss_BT)
    return loss_BT, {"value_loss": loss_BT, "value_clipped": stuck_BT,
                     "value_error": error_BT, "value_error_squared": jnp.square(error_BT),
                     "returns": returns_BT, "returns_squared": jnp.square(returns_BT)}


def _divergence(log_ratio_BT: jax.Array) -> jax.Array:
    """Return an estimate of the divergence KL(p, q) from log(q / p) of samples of p: unbiased, and never negative.

    Schulman, "Approximating KL Divergence" (2020), the third of three.
    """
    return jnp.expm1(log_ratio_BT) - log_ratio_BT
