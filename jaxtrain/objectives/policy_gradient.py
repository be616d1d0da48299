"""Policy gradients with clipped ratios: learn from advantages of the model's own answers (GRPO and its relatives).

Each segment of a row is one answer behind its prompt. A batch has, beside tokens: `weights`, 1 where a target belongs
to an answer; `advantages`, of each of these; `sampled`, the log-probability with which it was sampled; and `rewards`
and `answers`, the reward and 1 at an answer's first token.

DeepSeekMath (GRPO, arXiv 2402.03300), DAPO (2503.14476), Dr. GRPO (2503.20783), GSPO (2507.18071); proximal clipping:
Schulman et al. (1707.06347).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtrain.config.schema import Config
from jaxtrain.config.tuning_keys import ReinforceConfig
from jaxtrain.objectives.reference_policy import REFERENCE, Segments, WithReference, summed_over_rows
from jaxtrain.train_step.state import Skeleton

ARRAYS = ("advantages", "sampled", "rewards", "answers")
METRICS = ("kl", "kl_sampled", "clipped", "logp")  # means over tokens


@dataclass(frozen=True, kw_only=True)
class PolicyGradient(WithReference):
    """The clipped policy-gradient loss of answers with advantages."""

    settings: ReinforceConfig

    @classmethod
    def of(cls, config: Config, model: Skeleton) -> "PolicyGradient":
        """As a config describes it."""
        return cls(**cls.fields_of(config, model, config.reinforce.kl > 0), settings=config.reinforce)

    @property
    def batch_spec(self) -> Mapping[str, Any]:
        """Those of next-token prediction, and what is known of the answers."""
        return {**super().batch_spec, **dict.fromkeys(ARRAYS, np.float32)}

    @property
    def evaluation(self) -> "PolicyGradient":
        """The same loss without penalties."""
        return replace(self, penalties=False)

    def prepare(self, params: Any, batch: Any) -> tuple[Any, Any]:
        """The policy's parameters; the batch with the reference's log-probabilities, weighted as the loss divides."""
        own, batch = super().prepare(params, batch)
        divisor_BT = batch["weights"] if self.settings.loss == "dapo" else batch["answers"]
        batch = batch | {"learnt": batch["weights"], "weights": divisor_BT}
        return own, self.with_reference(params, own, batch)

    def end(self, params: Any, x_BTD: jax.Array, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss and the metrics, summed."""
        logp_BT = self.logprobs(self.model.merge(params), x_BTD, batch)
        arrays = {key: batch[key] for key in ("learnt", "segments", *ARRAYS, REFERENCE) if key in batch}
        return summed_over_rows(partial(_of_rows, self.settings), arrays | {"policy": logp_BT})

    def metrics(self, sums: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Return the mean reward, the mean length of answers, and means over their tokens.

        `kl_sampled`: the divergence of the policy from the one that sampled; `clipped`: the share of tokens whose ratio
        had no gradient.
        """
        answers, tokens = (jnp.maximum(sums[name], 1e-8) for name in ("answers", "tokens_learnt"))
        found = {name: sums[name] / tokens for name in METRICS if name != "kl" or self.reference is not None}
        return {"reward": sums["rewards"] / answers, "answer_tokens": sums["tokens_learnt"] / answers,
                **found, **self.router_metrics(sums)}


def _of_rows(c: ReinforceConfig, batch: Any, segments: Segments) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return one device's share of the loss and of the metrics, summed over its tokens."""
    learnt_BT, advantages_BT = batch["learnt"], batch["advantages"]
    log_ratio_BT = jnp.where(learnt_BT > 0, batch["policy"] - batch["sampled"], 0)
    lengths_BT = jnp.maximum(segments.spread(segments.sums(learnt_BT)), 1)
    if c.ratio == "sequence":
        log_ratio_BT = segments.spread(segments.sums(log_ratio_BT * learnt_BT)) / lengths_BT
    ratio_BT = jnp.exp(log_ratio_BT)
    clipped_BT = jnp.clip(ratio_BT, 1 - c.clip, 1 + (c.clip_high or c.clip))
    loss_BT = -jnp.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)
    kl_BT = jnp.zeros_like(loss_BT)
    if REFERENCE in batch:
        kl_BT = _divergence(jnp.where(learnt_BT > 0, batch[REFERENCE] - batch["policy"], 0))
        loss_BT += c.kl * kl_BT
    share_BT = {"dapo": learnt_BT, "grpo": learnt_BT / lengths_BT, "dr_grpo": learnt_BT / c.max_new_tokens}[c.loss]
    stuck_BT = clipped_BT * advantages_BT < ratio_BT * advantages_BT
    sampled_kl_BT = _divergence(jnp.where(learnt_BT > 0, batch["policy"] - batch["sampled"], 0))
    found = {"kl": kl_BT, "kl_sampled": sampled_kl_BT, "clipped": stuck_BT, "logp": batch["policy"]}
    sums = {name: (learnt_BT * x_BT).sum() for name, x_BT in found.items()}
    sums |= {name: batch[name].sum() for name in ("rewards", "answers")} | {"tokens_learnt": learnt_BT.sum()}
    return (share_BT * loss_BT).sum(), lax.stop_gradient(sums)


def _divergence(log_ratio_BT: jax.Array) -> jax.Array:
    """Return an estimate of the divergence KL(p, q) from log(q / p) of samples of p: unbiased, and never negative.

    Schulman, "Approximating KL Divergence" (2020), the third of three.
    """
    return jnp.expm1(log_ratio_BT) - log_ratio_BT
