"""KTO's loss over labelled answers in plain `jnp`, answer by answer, as the paper writes it (arXiv 2402.01306)."""

import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

from tests.numerics import reference
from tests.objectives.plain_preference import logps


def batch(step=0, rows=reference.BATCH, seq=reference.SEQ, vocab=reference.VOCAB):
    """Rows of answers of any lengths, and beside them prompts with other answers; then padding. One row is empty."""
    rng = np.random.default_rng(step)
    made = {f"{prefix}{name}": np.zeros((rows, seq), np.int32)
            for prefix in ("", "kl_") for name in ("tokens", "targets", "segments", "positions")}
    made |= {name: np.zeros((rows, seq), np.float32) for name in ("weights", "labels", "kl_weights")}
    for row in range(1, rows):
        for prefix in ("", "kl_"):
            at = segment = 0
            while True:
                prompt = rng.integers(1, 3)
                size = prompt + rng.integers(1, 4)
                if at + size > seq or (prefix and row == 2):  # of a row with one answer none is another's
                    break
                segment += 1
                here = (row, slice(at, at + size))
                text = rng.integers(vocab, size=size + 1)
                made[f"{prefix}tokens"][here], made[f"{prefix}targets"][here] = text[:-1], text[1:]
                made[f"{prefix}segments"][here], made[f"{prefix}positions"][here] = segment, np.arange(size)
                made[f"{prefix}weights"][here] = np.arange(size) >= prompt - 1
                if not prefix:
                    made["labels"][here] = made["weights"][here] * rng.integers(2)
                at += size
    return made


def masks(batch, prefix=""):
    """The tokens of each answer, as masks [A, B, T]."""
    segments = batch[f"{prefix}segments"]
    return np.array([(segments == segment) & (np.arange(len(segments)) == row)[:, None]
                     for row in range(len(segments)) for segment in range(1, segments[row].max() + 1)]
                    ) * batch[f"{prefix}weights"]


def loss(c, model, params, frozen, batch, parts=1):
    """The mean over answers, with experts' penalties by row, and metrics.

    `parts`: of the batch, each with a mean divergence of its own: its row n is in part n mod parts.
    """
    told, there = [], masks(batch)
    h = logps(model, params, batch, told) - logps(model, frozen, batch, [])
    others = {key.removeprefix("kl_"): x for key, x in batch.items() if key.startswith("kl_")}
    h_other = logps(model, params, others, []) - logps(model, frozen, others, [])
    other = masks(batch, "kl_")
    by_answer, by_other = (jnp.einsum("abt,bt->a", mask, x) for mask, x in ((there, h), (other, h_other)))
    part_of = lambda mask: mask.any(2).argmax(1) % parts  # noqa: E731
    z = jnp.array([jnp.maximum(0, by_other[part_of(other) == part].mean()) for part in range(parts)])
    z = jnp.asarray(z)[part_of(there)]
    good = (there * batch["labels"]).any((1, 2))
    found, divergence = of_answers(c, by_answer, z, good)
    penalties = sum((batch["segments"].max(1) * penalty).sum() for penalty, _ in told)
    rewards = [c.beta * by_answer[which].mean() for which in (good, ~good)]
    return found.mean() + penalties / len(found), {
        "kl": divergence, "reward_desirable": rewards[0], "reward_undesirable": rewards[1],
        "reward_margin": rewards[0] - rewards[1], "answers": len(found), "desirable": good.mean()}


def of_answers(c, h, z, good):
    """Each answer's loss, and the mean of z, which has no gradient."""
    z = stop_gradient(z)
    sigmoid = lambda x: 1 / (1 + jnp.exp(-x))  # noqa: E731
    value = jnp.where(good, sigmoid(c.beta * (h - z)), sigmoid(c.beta * (z - h)))
    return jnp.where(good, c.desirable_weight, c.undesirable_weight) * (1 - value), z.mean()
