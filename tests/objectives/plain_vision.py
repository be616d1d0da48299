"""Encoders of pictures and texts in plain float32 `jnp`: one picture, or one text, at a time, and the papers' losses."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from tests.numerics.reference import layer_norm, rms_norm, rotate, softmax

SIDE, PATCH = 6, 2


def gelu(x):
    return 0.5 * x * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def linear(p, x, dims=1):
    return jnp.tensordot(x, p["kernel"], dims) + p["bias"]


def encoder(p, x, eps, causal=False):
    """[n, D] of one segment."""
    layers = len(jax.tree.leaves(p["blocks"])[0])
    for number in range(layers):
        w = jax.tree.map(lambda a, number=number: a[number], p["blocks"]["layer"])
        h = layer_norm(w["attention_norm"], x, eps)
        q, k, v = (linear(w["attention"][name], h) for name in "qkv")
        scores = jnp.einsum("ihk,jhk->hij", q, k) / np.sqrt(q.shape[-1])
        if causal:
            scores = jnp.where(np.tri(len(x), dtype=bool), scores, -jnp.inf)
        x = x + linear(w["attention"]["out"], jnp.einsum("hij,jhk->ihk", softmax(scores), v), 2)
        h = layer_norm(w["mlp_norm"], x, eps)
        x = x + linear(w["mlp"]["down"], gelu(linear(w["mlp"]["up"], h)))
    return layer_norm(p["norm"], x, eps)


def begin(p, values, places):
    return linear(p["embed"], values) + p["down"]["table"][places[:, 0]] + p["across"]["table"][places[:, 1]]


def vit(p, patches, places, eps):
    return encoder(p["encoder"], begin(p, patches.astype(np.float32) / 127.5 - 1, places), eps)


def attention_pool(p, x, eps):
    k, v = linear(p["k"], x), linear(p["v"], x)
    weights = softmax((jnp.einsum("hk,jhk->hj", p["query"], k)) / np.sqrt(k.shape[-1]))
    y = linear(p["out"], jnp.einsum("hj,jhk->hk", weights, v), 2)
    return y + linear(p["mlp"]["down"], gelu(linear(p["mlp"]["up"], layer_norm(p["norm"], y, eps))))


def unit(x):
    return x / jnp.sqrt((x**2).sum())


def picture(c, p, patches, places):
    x = vit(p["picture"], patches, places, c.norm_eps)
    pooled = attention_pool(p["pool"], x, c.norm_eps) if c.pooling == "attention" else x.mean(0)
    return unit(linear(p["picture_head"], pooled))


def text(c, p, tokens):
    x = p["embed"]["table"][tokens] + p["positions"]["table"][:len(tokens)]
    return unit(linear(p["text_head"], encoder(p["text"], x, c.norm_eps, c.name == "clip")[-1]))


def pairs(batch):
    """The patches, places and tokens of each pair, row by row."""
    for row in range(len(batch["pictures"])):
        for number in range(1, batch["weights"].shape[1] + 1):
            if batch["weights"][row, number - 1]:
                here, there = batch["pictures"][row] == number, batch["segments"][row] == number
                yield batch["patches"][row, here], batch["places"][row, here], batch["tokens"][row, there]


def contrastive(c, p, batch):
    """The mean loss over pairs, and how often a picture is nearest to a text like its own."""
    found = list(pairs(batch))
    x = jnp.stack([picture(c, p, patches, places) for patches, places, _ in found])
    y = jnp.stack([text(c, p, tokens) for *_, tokens in found])
    logits = jnp.exp(p["scale"][0]) * x @ y.T + (p["bias"][0] if c.name == "siglip" else 0)
    right = np.array([[np.array_equal(a, b) for *_, b in found] for *_, a in found])
    near = jnp.argmax(logits, 1)
    accuracy = jnp.take_along_axis(jnp.asarray(right), near[:, None], 1).mean()
    if c.name == "siglip":
        return jnp.log(1 + jnp.exp(-(2 * jnp.eye(len(found)) - 1) * logits)).sum() / len(found), accuracy
    both = [jnp.log(jnp.exp(logits).sum(axis)) - jnp.diagonal(logits) for axis in (0, 1)]
    return (both[0] + both[1]).mean() / 2, accuracy


def captioning(c, p, batch):
    """The mean cross-entropy over tokens of texts, sequence by sequence."""
    total, count = 0.0, 0.0
    for row in range(len(batch["tokens"])):
        for number in range(1, batch["segments"][row].max() + 1):
            one = {key: x[row][batch["segments"][row] == number] for key, x in batch.items()}
            seen = one["pictures"] > 0
            patches = vit(p["picture"], one["patches"][seen], one["places"][seen], c.norm_eps)
            patches = linear(p["connector"]["down"], gelu(linear(p["connector"]["up"], patches)))
            x = jnp.concatenate([patches, p["embed"]["table"][one["tokens"][~seen]]])
            logits = llama(c, p, x)
            losses = jnp.log(jnp.exp(logits).sum(-1)) - logits[np.arange(len(x)), one["targets"]]
            total, count = total + (losses * one["weights"]).sum(), count + one["weights"].sum()
    return total / count


def llama(c, p, x):
    """Logits [n, V] of one sequence of embeddings."""
    positions = np.arange(len(x))[None]
    frequencies = c.rope_theta ** (-np.arange(0, c.head_dim, 2) / c.head_dim)
    for number in range(c.num_layers):
        w = jax.tree.map(lambda a, number=number: a[number], p["blocks"]["layer"])
        h = rms_norm(w["attention_norm"], x, c.norm_eps)
        q, k, v = (jnp.tensordot(h, w["attention"][name]["kernel"], 1) for name in "qkv")
        q, k = (rotate(a[None], positions, frequencies)[0] for a in (q, k))
        k, v = (jnp.repeat(a, c.num_heads // c.num_kv_heads, axis=1) for a in (k, v))
        scores = jnp.einsum("ihk,jhk->hij", q, k) / np.sqrt(c.head_dim)
        scores = jnp.where(np.tri(len(x), dtype=bool), scores, -jnp.inf)
        x = x + jnp.tensordot(jnp.einsum("hij,jhk->ihk", softmax(scores), v), w["attention"]["out"]["kernel"], 2)
        h, m = rms_norm(w["mlp_norm"], x, c.norm_eps), w["mlp"]
        gate = h @ m["gate"]["kernel"]
        x = x + (gate / (1 + jnp.exp(-gate)) * (h @ m["up"]["kernel"])) @ m["down"]["kernel"]
    head = p["embed"]["table"].T if c.tied_embeddings else p["output"]["kernel"]
    return rms_norm(p["norm"], x, c.norm_eps) @ head


def flow(c, p, batch):
    """The mean over patches of the squared error of the velocity, picture by picture."""
    total, count = 0.0, 0
    frequencies = np.exp(np.linspace(0, np.log(1000), 64))
    for row in range(len(batch["pictures"])):
        for number in range(1, batch["pictures"][row].max() + 1):
            here = batch["pictures"][row] == number
            x = batch["patches"][row, here].astype(np.float32) / 127.5 - 1
            noise = jnp.stack([jax.random.normal(jax.random.key(draw), x.shape[1:]) for draw in batch["draws"][row, here]])
            t, label = batch["times"][row, number - 1], batch["labels"][row, number - 1]
            waves = linear(p["up"], jnp.concatenate([jnp.sin(t * frequencies), jnp.cos(t * frequencies)]))
            given = linear(p["down"], waves / (1 + jnp.exp(-waves))) + p["labels"][label]
            h = begin(p["picture"], (1 - t) * noise + t * x, batch["places"][row, here]) + given
            found = linear(p["velocity"], encoder(p["picture"]["encoder"], h, c.norm_eps))
            total, count = total + ((found - (x - noise)) ** 2).mean(-1).sum(), count + here.sum()
    return total / count


# ---------------------------------------------------------------------------------------------------------------- batches
def rows_of_pictures(rng, rows, length, most):
    """Rows of pictures of any shape, one of them empty but for padding."""
    made = {"patches": rng.integers(0, 256, (rows, length, PATCH**2 * 3)).astype(np.uint8),
            "pictures": np.zeros((rows, length), np.int32), "places": np.zeros((rows, length, 2), np.int32)}
    for row in range(1, rows):
        at = 0
        for number in range(1, most + 1):
            high, wide = rng.integers(1, 4, 2)
            if at + high * wide > length:
                break
            here = slice(at, at + high * wide)
            made["pictures"][row, here] = number
            made["places"][row, here] = np.indices((high, wide)).reshape(2, -1).T
            at += high * wide
    return made


def batch(kind, rows=8, length=16, most=3, text_len=4, vocab=64, labels=5):
    """A batch of a family of models."""
    rng = np.random.default_rng(0)
    made = rows_of_pictures(rng, rows, length, most)
    there = np.arange(1, most + 1) <= made["pictures"].max(1)[:, None]
    if kind == "picture_flow":
        return made | {"labels": rng.integers(0, labels, (rows, most)).astype(np.int32), "weights": there.astype(np.float32),
                       "times": rng.random((rows, most), np.float32),
                       "draws": rng.integers(0, 2**32, (rows, length), np.uint32)}
    if kind == "vision_language":
        return captions(made, rng, vocab)
    sizes = rng.integers(1, text_len + 1, (rows, most, 1)) * there[..., None]
    places = np.broadcast_to(np.arange(text_len), (rows, most, text_len))
    inside = places < sizes
    flat = lambda x: x.reshape(rows, -1).astype(np.int32)  # noqa: E731
    tokens = rng.integers(0, vocab, (rows, most, text_len))
    tokens[2], sizes[2] = tokens[3], sizes[3]  # texts that are met twice
    return made | {"tokens": flat(tokens), "segments": flat(inside * np.arange(1, most + 1)[:, None]),
                   "positions": flat(places * inside), "weights": there.astype(np.float32)}


def captions(made, rng, vocab):
    """Sequences of a picture and a text each, of which no two are in one place."""
    rows, length = made["pictures"].shape
    out = {name: np.zeros_like(x) for name, x in made.items()}
    out |= {name: np.zeros((rows, length), np.int32) for name in ("tokens", "targets", "segments", "positions")}
    out["weights"] = np.zeros((rows, length), np.float32)
    for row in range(rows):
        at = 0
        for number in range(1, made["pictures"][row].max() + 1):
            own = made["pictures"][row] == number
            patches, words = own.sum(), rng.integers(1, 4)
            if at + patches + words > length:
                break
            seen, whole, said = (slice(at, at + patches), slice(at, at + patches + words),
                                 slice(at + patches - 1, at + patches + words))
            for name in made:
                out[name][row, seen] = made[name][row, own]
            ids = rng.integers(0, vocab, words + 1)
            out["segments"][row, whole], out["positions"][row, whole] = number, np.arange(patches + words)
            out["tokens"][row, at + patches:at + patches + words], out["targets"][row, said] = ids[:-1], ids
            out["weights"][row, said] = 1
            at += patches + words
    return out
