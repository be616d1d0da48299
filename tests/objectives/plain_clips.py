"""Clips in plain float32 `jnp`, from scratch: an encoder that looks both ways, and the cross-entropy of labels."""

import jax.numpy as jnp
import numpy as np

import jaxtrain as jt
from tests.numerics import reference

ROWS, SEQ, LABELS = 16, 16, 10


def config(**keys) -> jt.Config:
    """Two narrow layers; keys as on a command line, `mesh__tensor=2`."""
    return jt.make_config({
        "model": dict(name="clips", labels=LABELS, num_layers=2, embed_dim=32, num_heads=8, num_kv_heads=4, mlp_dim=48,
                      max_seq_len=SEQ, rope_theta=100.0),
        "mesh": dict(data=1), "data": dict(packing="bucket", seq_len=SEQ, global_batch_size=ROWS),
        "optimizer": dict(learning_rate=1e-2, warmup_steps=0), "train": dict(steps=6),
    }, {key.replace("__", "."): value for key, value in keys.items()})


def batch(seed=0):
    """Clips of any number of frames, one of none."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, SEQ + 1, ROWS)
    lengths[3] = 0
    there = (np.arange(SEQ) < lengths[:, None]).astype(np.float32)
    frames = rng.normal(size=(ROWS, SEQ, 80)) * there[..., None]
    return {"features": frames.astype(np.float16), "weights": there,
            "label": rng.integers(0, LABELS, ROWS).astype(np.int32)}


def loss(c, p, b):
    """The mean cross-entropy."""
    return metrics(c, p, b)[0]


def metrics(c, p, b):
    """Means over the clips that have frames: of the cross-entropy, and of right guesses."""
    x = b["features"].astype(np.float32) @ p["project"]["kernel"] + p["project"]["bias"]
    positions, seen = np.arange(SEQ)[None], (b["weights"] > 0)[:, None, None]
    for layer in range(c.num_layers):
        w = reference.layer_of(c, p, layer)
        a, m = w["attention"], w["mlp"]
        q, k, v = (jnp.tensordot(reference.rms_norm(w["attention_norm"], x, c.norm_eps), a[n]["kernel"], 1)
                   for n in "qkv")
        q, k = (reference.rotate(y, positions, c.rope_theta ** -np.arange(0, 1, 2 / c.head_dim)) for y in (q, k))
        k, v = (jnp.repeat(y, c.num_heads // c.num_kv_heads, 2) for y in (k, v))
        scores = jnp.einsum("bihk,bjhk->bhij", q, k) / np.sqrt(c.head_dim)
        heads = jnp.einsum("bhij,bjhk->bihk", reference.softmax(jnp.where(seen, scores, -1e9)), v)
        x = x + jnp.tensordot(heads, a["out"]["kernel"], 2)
        h = reference.rms_norm(w["mlp_norm"], x, c.norm_eps)
        gate = h @ m["gate"]["kernel"]
        x = x + (gate / (1 + jnp.exp(-gate)) * (h @ m["up"]["kernel"])) @ m["down"]["kernel"]
    x = reference.rms_norm(p["norm"], x, c.norm_eps)
    mean = (x * b["weights"][..., None]).sum(1) / np.maximum(b["weights"].sum(1), 1)[:, None]
    logits, there = mean @ p["labels"], b["weights"][:, 0]
    chosen = jnp.take_along_axis(reference.softmax(logits), b["label"][:, None], 1)[:, 0]
    right = logits.argmax(1) == b["label"]
    return (-jnp.log(chosen) * there).sum() / there.sum(), (right * there).sum() / there.sum()
