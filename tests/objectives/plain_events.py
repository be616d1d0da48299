"""Events in plain float32 `jnp`, from scratch: their embedding, the layers, and the losses of what and when is next."""

import jax.numpy as jnp
import numpy as np

import jaxtrain as jt
from tests.numerics import reference

ROWS, SEQ = 16, 16
IDS = {"item": 50, "shop": 3}


def config(**keys) -> jt.Config:
    """Two narrow layers over two categories and a number; keys as on a command line, `mesh__tensor=2`."""
    return jt.make_config({
        "model": dict(name="events", categories=IDS, numbers=["price"], time_loss=0.3, num_layers=2, embed_dim=32,
                      num_heads=8, num_kv_heads=4, mlp_dim=48, max_seq_len=SEQ, rope_theta=100.0),
        "mesh": dict(data=1), "data": dict(packing="bucket", seq_len=SEQ, global_batch_size=ROWS),
        "optimizer": dict(learning_rate=1e-2, warmup_steps=0), "train": dict(steps=6),
    }, {key.replace("__", "."): value for key, value in keys.items()})


def batch(seed=0, rows=ROWS, seq=SEQ):
    """Users with any number of events, of whom one has none and one a single one; what stands after those is any."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, seq + 1, rows)
    lengths[1:4] = 0, 1, seq
    there = np.arange(seq) < lengths[:, None]
    made = {name: rng.integers(ids, size=(rows, seq)).astype(np.int32) for name, ids in IDS.items()}
    made |= {"elapsed": rng.lognormal(3, 3, (rows, seq)).astype(np.float32),
             "price": rng.normal(0, 5, (rows, seq)).astype(np.float32)}
    return made | {"weights": there.astype(np.float32)}


def activations(c, p, b):
    """Return the activations that the head reads, after the last norm."""
    e, other = p["embed"], "shop" if c.predict == "item" else "item"
    x = e["table"][b[c.predict]] + e["category_0"]["table"][b[other]]
    numbers = [f(2 * np.pi * np.log1p(b["elapsed"]) / period) for f in (np.sin, np.cos)
               for period in (0.25, 0.5, 1, 2, 4, 8, 16, 32)] + [np.sign(b["price"]) * np.log1p(np.abs(b["price"]))]
    x = x + np.stack(numbers, -1).astype(np.float32) @ e["project"]["kernel"] + e["project"]["bias"]
    positions, users = np.arange(x.shape[1])[None], np.ones(x.shape[:2], int)
    for layer in range(c.num_layers):
        w = reference.layer_of(c, p, layer)
        a, m = w["attention"], w["mlp"]
        q, k, v = (jnp.tensordot(reference.rms_norm(w["attention_norm"], x, c.norm_eps), a[n]["kernel"], 1)
                   for n in "qkv")
        q, k = (reference.rotate(y, positions, c.rope_theta ** -np.arange(0, 1, 2 / c.head_dim)) for y in (q, k))
        x = x + jnp.tensordot(reference.attention(q, k, v, users, c.window), a["out"]["kernel"], 2)
        h = reference.rms_norm(w["mlp_norm"], x, c.norm_eps)
        gate = h @ m["gate"]["kernel"]
        x = x + (gate / (1 + jnp.exp(-gate)) * (h @ m["up"]["kernel"])) @ m["down"]["kernel"]
    return reference.rms_norm(p["norm"], x, c.norm_eps)


def metrics(c, p, b):
    """Means over all events but each user's first: of the cross-entropy, of right guesses, of the time's error."""
    x = activations(c, p, b)[:, :-1]
    logits = x @ (p["embed"]["table"].T if c.tied_embeddings else p["output"]["kernel"])
    follows = b["weights"][:, 1:]
    target = b[c.predict][:, 1:]
    chosen = jnp.take_along_axis(reference.softmax(logits), target[..., None], -1)[..., 0]
    found = {"cross_entropy": -jnp.log(chosen), "accuracy": logits.argmax(-1) == target}
    if c.time_loss:
        guess = (x @ p["value_head"]["kernel"])[..., 0]
        found["time_error"] = (guess - np.log1p(b["elapsed"][:, 1:])) ** 2
    return {name: (value * follows).sum() / follows.sum() for name, value in found.items()}


def loss(c, p, b):
    """Return the loss that training minimises."""
    found = metrics(c, p, b)
    return found["cross_entropy"] + c.time_loss * found.get("time_error", 0)
