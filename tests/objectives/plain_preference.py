"""Losses of preferences over pairs in plain `jnp`, pair by pair, as their papers write them."""

import jax.numpy as jnp
import numpy as np

from tests.numerics import plain_mup, reference


def batch(step=0, rows=reference.BATCH, seq=reference.SEQ, vocab=reference.VOCAB):
    """Rows of pairs of any lengths: prompts without weight in front of answers; then padding. One row is empty."""
    rng = np.random.default_rng(step)
    made = {name: np.zeros((rows, seq), np.int32) for name in ("tokens", "targets", "segments", "positions")}
    made["weights"] = np.zeros((rows, seq), np.float32)
    for row in range(1, rows):
        at = segment = 0
        while True:
            prompt = rng.integers(1, 3)
            sizes = prompt + rng.integers(1, 4, 2)
            if at + sizes.sum() > seq:
                break
            for size in sizes:
                segment += 1
                here = (row, slice(at, at + size))
                text = rng.integers(vocab, size=size + 1)
                made["tokens"][here], made["targets"][here] = text[:-1], text[1:]
                made["segments"][here], made["positions"][here] = segment, np.arange(size)
                made["weights"][here] = np.arange(size) >= prompt - 1
                at += size
    return made


def places(batch):
    """The tokens of the chosen and of the rejected answer of each pair, as masks [P, B, T]."""
    found = [[(batch["segments"] == segment) & (np.arange(len(batch["segments"])) == row)[:, None]
              for segment in (first, first + 1)]
             for row in range(len(batch["segments"])) for first in range(1, batch["segments"][row].max(), 2)]
    chosen, rejected = (np.array(masks) * batch["weights"] for masks in zip(*found, strict=True))
    return chosen, rejected


def logps(model, params, batch, told, temperature=1.0):
    """The log-probability of each target, by a model that is built from scratch; its penalties are added to `told`."""
    return of_targets(log_probabilities(model, params, batch, told, temperature), batch)


def log_probabilities(model, params, batch, told, temperature):
    """The same of every token of the vocabulary."""
    x = reference.last_norm(model, params, reference.through(model, params, batch, told))
    logits = x @ (params["embed"]["table"].T if model.tied_embeddings else params["output"]["kernel"])
    logits = logits * plain_mup.logits(model) / temperature
    top = logits.max(-1, keepdims=True)
    return logits - top - jnp.log(jnp.exp(logits - top).sum(-1, keepdims=True))


def of_targets(logits, batch):
    """The log-probabilities of the targets among them."""
    return (logits * (batch["targets"][..., None] == np.arange(logits.shape[-1]))).sum(-1)


def loss(c, model, params, frozen, batch):
    """The mean over pairs, with experts' penalties by row, and means of metrics."""
    masks, told, means = places(batch), [], {}
    if c.loss == "reward":
        by_pair, (chosen, rejected) = of_rewards(c, rewards(model, params, batch, masks, told))
    else:
        policy, old = logps(model, params, batch, told), logps(model, frozen, batch, [])
        sums, before = ([jnp.einsum("pbt,bt->p", mask, logp) for mask in masks] for logp in (policy, old))
        by_pair, (chosen, rejected) = of_pairs(c, sums, before, [mask.sum((1, 2)) for mask in masks])
        means = {f"logp_{name}": of.mean() for name, of in zip(("chosen", "rejected"), sums, strict=True)}
        if c.loss not in ("simpo", "orpo"):
            means["kl"] = (jnp.concatenate(sums) - jnp.concatenate(before)).mean()
    penalties = sum((batch["segments"].max(1) // 2 * penalty).sum() for penalty, _ in told)
    return by_pair.mean() + penalties / len(by_pair), {
        "reward_margin": (chosen - rejected).mean(), "reward_accuracy": (chosen > rejected).mean(),
        "reward_chosen": chosen.mean(), "reward_rejected": rejected.mean(), **means}


def rewards(model, params, batch, masks, told):
    """Return the rewards of both answers: the head's product with the activation that predicts their last token."""
    x = reference.last_norm(model, params, reference.through(model, params, batch, told))
    ends = [[max(zip(*np.nonzero(one), strict=True)) for one in mask] for mask in masks]
    return [jnp.array([x[end] @ params["reward_head"]["kernel"][:, 0] for end in some]) for some in ends]


def of_rewards(c, found):
    """Each pair's loss and rewards, by Bradley and Terry."""
    chosen, rejected = found
    likelihood = 1 / (1 + jnp.exp(-(chosen - rejected - c.margin)))
    return -jnp.log(likelihood) + c.center * (chosen + rejected) ** 2, found


def of_pairs(c, sums, before, sizes):
    """Each pair's loss and rewards, from sums over answers, chosen and rejected, of policy and reference."""
    (chosen, rejected), (old_chosen, old_rejected) = sums, before
    means = [total / size for total, size in zip(sums, sizes, strict=True)]
    h = chosen - rejected - (old_chosen - old_rejected)
    sigmoid = lambda x: 1 / (1 + jnp.exp(-x))  # noqa: E731
    e = c.label_smoothing
    match c.loss:
        case "dpo":
            found = -(1 - e) * jnp.log(sigmoid(c.beta * h)) - e * jnp.log(sigmoid(-c.beta * h))
        case "robust":
            found = (-(1 - e) * jnp.log(sigmoid(c.beta * h)) + e * jnp.log(sigmoid(-c.beta * h))) / (1 - 2 * e)
        case "ipo":
            found = ((chosen - old_chosen) / sizes[0] - (rejected - old_rejected) / sizes[1] - 0.5 / c.beta) ** 2
        case "hinge":
            found = jnp.maximum(0, 1 - c.beta * h)
        case "apo_zero":
            found = 1 - sigmoid(c.beta * (chosen - old_chosen)) + sigmoid(c.beta * (rejected - old_rejected))
        case "apo_down":
            found = sigmoid(c.beta * (chosen - old_chosen)) + 1 - sigmoid(c.beta * h)
        case "simpo":
            inner = c.beta * (means[0] - means[1]) - c.margin
            found = -(1 - e) * jnp.log(sigmoid(inner)) - e * jnp.log(sigmoid(-inner))
        case "orpo":
            odds = [jnp.exp(mean) / (1 - jnp.exp(mean)) for mean in means]
            found = -means[0] - c.beta * jnp.log(sigmoid(jnp.log(odds[0] / odds[1])))
    found -= c.rpo_alpha * means[0]
    ratios = chosen - old_chosen, rejected - old_rejected
    return found, [c.beta * each for each in (means if c.loss in ("simpo", "orpo") else ratios)]
