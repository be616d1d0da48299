"""DiLoCo and its streaming form, in plain JAX from the papers (arXiv 2311.08105, 2501.18512), on plain training."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.numerics import reference


def inner(config):
    """A plain step of AdamW: (params, m, v, n, batch) -> (params, m, v, loss)."""
    @jax.jit
    def step(p, m, v, rate, n, b):
        value, g = jax.value_and_grad(lambda p: reference.loss(config.model, p, b))(p)
        clip = config.optimizer.clip_norm
        g = jax.tree.map(lambda x: x * jnp.minimum(1, clip / reference.norm_of(g)), g) if clip else g
        return *reference.adamw(config.optimizer, p, g, m, v, rate, n), value
    return lambda p, m, v, n, b: step(p, m, v, jnp.float32(reference.learning_rate(config, n)), jnp.float32(n), b)


def train(step, start, batch, *, steps, islands, every, rate, momentum, masks=(1,), overlap=0, blend=0.5,
          arrives=lambda island, moved: moved):
    """Return the islands' parameters after the last step, the outer parameters, and the losses [step, island].

    Args:
        step: from `inner`.
        batch: of (step, island).
        masks: for each fragment a tree of arrays, or a number, that is 1 where a parameter is in it and 0 elsewhere.
        arrives: what of an island's progress arrives when it is sent.
    """
    def zip_map(f, *trees):
        return jax.tree.map(f, *trees)

    masks = [mask if isinstance(mask, dict) else zip_map(lambda p, mask=mask: mask, start) for mask in masks]
    zeros = zip_map(np.zeros_like, start)
    local = [(start, zeros, zeros)] * islands
    outer, speed, waiting, losses = start, zeros, [], []
    between = every // len(masks)
    for n in range(steps):
        now = []
        for i in range(islands):
            p, m, v, value = step(*local[i], n, batch(n, i))
            local[i] = p, m, v
            now.append(float(value))
        losses.append(now)
        if (n + 1) % between == 0:
            mask = masks[((n + 1) // between - 1) % len(masks)]
            moved = [arrives(i, zip_map(lambda o, p: o - p, outer, p)) for i, (p, _, _) in enumerate(local)]
            mean = zip_map(lambda *d: sum(d) / islands, *moved)
            new_speed = zip_map(lambda s, g: momentum * s + g, speed, mean)
            new_outer = zip_map(lambda o, g, s: o - rate * (g + momentum * s), outer, mean, new_speed)
            waiting.append((n + 1 + overlap, mask, new_outer, new_speed))
        if waiting and waiting[0][0] == n + 1:
            _, mask, new_outer, new_speed = waiting.pop(0)
            own = blend if overlap else 0
            outer = zip_map(lambda k, new, old: k * new + (1 - k) * old, mask, new_outer, outer)
            speed = zip_map(lambda k, new, old: k * new + (1 - k) * old, mask, new_speed, speed)
            local = [(zip_map(lambda k, o, p: k * (own * p + (1 - own) * o) + (1 - k) * p, mask, outer, p), m, v)
                     for p, m, v in local]
    return [p for p, _, _ in local], outer, np.array(losses)
