"""Policy gradients in plain `jnp`, answer by answer, as their papers write them."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.numerics import reference
from tests.objectives import plain_preference


def batch(values=False, **sizes):
    """Answers behind prompts, several in a row, sampled by a policy a little different; one row is empty.

    `values`: it has what a value head expected of them, and what it should have.
    """
    made = plain_preference.batch(**sizes)
    rng = np.random.default_rng(5)
    learnt, shape = made["weights"], made["weights"].shape
    by_answer = rng.normal(size=(*shape[:1], made["segments"].max() + 1)).astype(np.float32)
    made["advantages"] = np.take_along_axis(by_answer, made["segments"], 1) * learnt
    made["sampled"] = (rng.normal(-4.2, 0.4, shape) * learnt).astype(np.float32)
    first = learnt * (np.cumsum(learnt, 1) == 1)
    for row in range(shape[0]):
        for segment in range(1, made["segments"][row].max() + 1):
            mine = (made["segments"][row] == segment) & (learnt[row] > 0)
            first[row, mine] = np.arange(mine.sum()) == 0
    made["answers"] = first.astype(np.float32)
    made["rewards"] = (first * np.abs(made["advantages"])).astype(np.float32)
    if values:
        made |= {name: (rng.normal(0, 0.3, shape) * learnt).astype(np.float32) for name in ("values", "returns")}
    return made


def loss(c, model, params, frozen, batch):
    """The mean as the loss's paper takes it, with experts' penalties weighted likewise; and means over tokens."""
    told, each, kls, values = [], [], [], []
    every = plain_preference.log_probabilities(model, params, batch, told, c.temperature)
    new, entropy = plain_preference.of_targets(every, batch), -(jnp.exp(every) * every).sum(-1)
    old = plain_preference.logps(model, frozen, batch, [], c.temperature)
    if c.baseline == "value":
        x = reference.last_norm(model, params, reference.through(model, params, batch, []))
        expected = x @ params["value_head"]["kernel"][:, 0]
    for row in range(len(batch["segments"])):
        for segment in range(1, batch["segments"][row].max() + 1):
            at = np.flatnonzero((batch["segments"][row] == segment) & (batch["weights"][row] > 0))
            log_ratio = new[row, at] - batch["sampled"][row, at]
            if c.ratio == "sequence":
                log_ratio = jnp.full(len(at), log_ratio.mean())
            advantage, weight = batch["advantages"][row, at], 1.0
            if c.correction:  # the ratio is to the policy before the step
                sampler = jax.lax.stop_gradient(jnp.exp(log_ratio))
                weight = jnp.minimum(sampler, c.correction_high) if c.correction == "truncate" else (
                    sampler * ((c.correction_low <= sampler) & (sampler <= c.correction_high)))
                log_ratio -= jax.lax.stop_gradient(log_ratio)
            ratio = jnp.exp(log_ratio)
            clipped = jnp.clip(ratio, 1 - c.clip, 1 + (c.clip_high or c.clip))
            kl = jnp.exp(old[row, at] - new[row, at]) - (old[row, at] - new[row, at]) - 1
            by_token = -weight * jnp.minimum(ratio * advantage, clipped * advantage) + c.kl * kl
            if c.surrogate == "cispo":
                weight *= jax.lax.stop_gradient(jnp.minimum(ratio, 1 + c.clip_high))
                by_token = -weight * advantage * new[row, at] + c.kl * kl
            if c.baseline == "value":
                values.append(squares(c, expected[row, at], batch["values"][row, at], batch["returns"][row, at]))
                by_token += c.value_loss * values[-1] / 2
            by_token -= c.entropy * entropy[row, at]
            each.append({"dapo": by_token.sum(), "grpo": by_token.mean(),
                         "dr_grpo": by_token.sum() / c.max_new_tokens}[c.loss])
            kls.append(kl.sum())
    weights = batch["weights"] if c.loss == "dapo" else batch["answers"]
    penalties = sum((weights.sum(1) * penalty).sum() for penalty, _ in told)
    gaps = jnp.abs(new - batch["sampled"]) * (batch["weights"] > 0)
    means = {"kl": sum(kls) / batch["weights"].sum(), "gap": gaps.sum() / batch["weights"].sum(), "most": gaps.max(),
             "entropy": (entropy * batch["weights"]).sum() / batch["weights"].sum()}
    if values:
        means["value_loss"] = sum(map(jnp.sum, values)) / 2 / batch["weights"].sum()
    return (sum(each) + penalties) / weights.sum(), means


def squares(c, expected, before, returns):
    """The larger of the squared errors of values and of these kept near what they were."""
    plain = (expected - returns) ** 2
    if not c.value_clip:
        return plain
    near = jnp.minimum(jnp.maximum(expected, before - c.value_clip), before + c.value_clip)
    return jnp.maximum(plain, (near - returns) ** 2)
