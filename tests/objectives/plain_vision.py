"""Encoders of images and texts in plain float32 `jnp`: a row for each image or text alone, and the papers' losses.

Shape suffixes: N images, T patches of the largest one (or tokens of the longest text), D embedding.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

import jaxtrain as jt
from tests.numerics.reference import layer_norm, rms_norm, rotate, softmax

PATCH = 2
SHAPE = dict(num_layers=2, embed_dim=32, num_heads=8, max_seq_len=32, patch_size=PATCH, patches_per_side=6,
             images_per_row=3)
ENCODER = dict(image_layers=2, image_embed_dim=40, image_heads=8)
DUAL = SHAPE | ENCODER | dict(vocab_size=64, text_len=4, joint_dim=24)
PUBLISHED = {  # the parts of published models
    "siglip": dict(image_size=9, pooling="probe", projections="text", joint_dim=40, image_norm_eps=1e-3),
    "clip": dict(image_size=7, class_token=True, pooling="class", projections="unbiased", gelu="quick",
                 pixel_mean=[0.4, 0.5, 0.6], pixel_std=[0.2, 0.3, 0.4]),
    "vision_language": dict(image_size=8, class_token=True, gelu="exact", image_norm_eps=1e-3)}
MODELS = {"siglip": DUAL, "clip": DUAL | dict(pooling="mean"),
          "vision_language": SHAPE | ENCODER | dict(vocab_size=64, num_kv_heads=8, mlp_dim=48, tied_embeddings=False),
          "image_flow": SHAPE | dict(num_labels=5)}


def config(kind, data=None, model=None, **keys) -> jt.Config:
    """Narrow models, of "siglip" as of "siglip published"; keys as on a command line, `mesh__tensor=2`."""
    name, _, published = kind.partition(" ")
    shape = {"name": name} | MODELS[name] | (PUBLISHED[name] if published else {})
    return jt.make_config({
        "model": shape | (model or {}), "mesh": {"data": 1},
        "data": dict(seq_len=16, global_batch_size=8, packing="best_fit") | (data or {}),
        "train": {"steps": 8}}, {key.replace("__", "."): value for key, value in keys.items()})


def loss(c, p, batch):
    """The mean loss of a family."""
    if c.name in ("siglip", "clip"):
        return contrastive(c, p, batch)[0]
    return {"vision_language": captioning, "image_flow": flow}[c.name](c, p, batch)


def gelu(x):
    return 0.5 * x * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def linear(p, x, dims=1):
    return jnp.tensordot(x, p["kernel"], dims) + p["bias"]


def attended(q, k, v, mask_NTT):
    scores = jnp.einsum("nihk,njhk->nhij", q, k) / np.sqrt(q.shape[-1])
    return jnp.einsum("nhij,njhk->nihk", softmax(jnp.where(mask_NTT[:, None], scores, -1e30)), v)


GELUS = {"tanh": gelu, "quick": lambda x: x / (1 + jnp.exp(-1.702 * x)),
         "exact": lambda x: x * (1 + jax.scipy.special.erf(x / math.sqrt(2))) / 2}


def encoder(p, x_NTD, there_NT, eps, causal=False, kind="tanh"):
    mask_NTT = there_NT[:, None, :] & (np.tri(x_NTD.shape[1], dtype=bool) if causal else True)
    for number in range(len(jax.tree.leaves(p["blocks"])[0])):
        w = jax.tree.map(lambda a, number=number: a[number], p["blocks"]["layer"])
        h = layer_norm(w["attention_norm"], x_NTD, eps)
        q, k, v = (linear(w["attention"][name], h) for name in "qkv")
        x_NTD = x_NTD + linear(w["attention"]["out"], attended(q, k, v, mask_NTT), 2)
        h = layer_norm(w["mlp_norm"], x_NTD, eps)
        x_NTD = x_NTD + linear(w["mlp"]["down"], GELUS[kind](linear(w["mlp"]["up"], h)))
    return layer_norm(p["norm"], x_NTD, eps)


def begin(p, values, places):
    return linear(p["embed"], values) + p["down"]["table"][places[..., 0]] + p["across"]["table"][places[..., 1]]


def curve(at, size, side):
    """Return the weight of the at-th of `size` numbers in each of `side` drawn between them: cubic convolution."""
    weights, x = np.zeros(side), (at + 0.5) * side / size - 0.5
    for i in range(math.floor(x) - 1, math.floor(x) + 3):
        t, a = abs(x - i), -0.75
        weights[min(max(i, 0), side - 1)] += ((a + 2) * t**3 - (a + 3) * t**2 + 1 if t <= 1
                                              else a * t**3 - 5 * a * t**2 + 8 * a * t - 4 * a)
    return weights


def is_class(c, one):
    return one["there"] & (one["places"][..., 0] == c.patches_per_side)


def stretched(c, one):
    """Return the weight of each place of the table for each patch."""
    found = np.zeros((*one["there"].shape, c.grid**2 + c.class_token), np.float32)
    for n, t in np.argwhere(one["there"]):
        if is_class(c, one)[n, t]:
            found[n, t, 0] = 1
            continue
        size = one["places"][n][one["there"][n] & ~is_class(c, one)[n]].max(0) + 1
        down, across = (curve(one["places"][n, t, i], size[i], c.grid) for i in (0, 1))
        found[n, t, int(c.class_token):] = np.outer(down, across).reshape(-1)
    return found


def vit(c, p, one):
    values = (one["patches"] / 255 - np.tile(c.pixel_mean, PATCH**2)) / np.tile(c.pixel_std, PATCH**2)
    if not c.grid:
        x = begin(p, values.astype(np.float32), one["places"])
    else:
        x = jnp.tensordot(values.astype(np.float32), p["embed"]["kernel"], 1)
        x = (jnp.where(is_class(c, one)[..., None], p["token"], x) if c.class_token else x + p["embed"]["bias"])
        x = x + jnp.einsum("ntk,kd->ntd", stretched(c, one), p["grid"]["table"], precision="highest")
        x = layer_norm(p["first_norm"], x, c.image_norm_eps) if c.class_token else x
    return encoder(p["encoder"], x, one["there"], c.image_norm_eps, kind=c.gelu)


def attention_pool(c, p, x_NTD, there_NT):
    k, v, eps = linear(p["k"], x_NTD), linear(p["v"], x_NTD), c.image_norm_eps
    query = linear(p["q"], p["query"]) if c.pooling == "probe" else p["query"]
    scores = jnp.einsum("hk,njhk->nhj", query, k) / np.sqrt(k.shape[-1])
    weights = softmax(jnp.where(there_NT[:, None], scores, -1e30))
    y = linear(p["out"], jnp.einsum("nhj,njhk->nhk", weights, v), 2)
    return y + linear(p["mlp"]["down"], GELUS[c.gelu](linear(p["mlp"]["up"], layer_norm(p["norm"], y, eps))))


def head(c, p, x):
    """The map from an encoder to what images and texts are compared by."""
    return x if p is None else jnp.tensordot(x, p["kernel"], 1) if c.projections == "unbiased" else linear(p, x)


def unit(x):
    return x / jnp.sqrt((x**2).sum(-1, keepdims=True))


def alone(batch, numbers, names):
    """The images or texts that `numbers` counts in each row, each in a row of its own, and what of it is there."""
    found = [np.flatnonzero(row == number) + at * len(row) for at, row in enumerate(batch[numbers])
             for number in range(1, row.max() + 1)]
    at = np.zeros((len(found), max(map(len, found))), int)
    there = np.arange(at.shape[1]) < np.array([len(one) for one in found])[:, None]
    at[there] = np.concatenate(found)
    flat = {name: batch[name].reshape(-1, *batch[name].shape[2:]) for name in names}
    return {name: x[at] for name, x in flat.items()} | {"there": there}


def image(c, p, one):
    x, there = vit(c, p["image"], one), one["there"]
    if c.pooling in ("attention", "probe"):
        pooled = attention_pool(c, p["pool"], x, there)
    else:
        kept = is_class(c, one) if c.pooling == "class" else there
        pooled = (x * kept[..., None]).sum(1) / kept.sum(1, keepdims=True)
    return unit(head(c, p.get("image_head"), pooled))


def text(c, p, one):
    x = p["embed"]["table"][one["tokens"]] + p["positions"]["table"][:one["tokens"].shape[1]]
    x = encoder(p["text"], x, one["there"], c.norm_eps, c.name == "clip", c.gelu)
    return unit(head(c, p["text_head"], x[np.arange(len(x)), one["there"].sum(1) - 1]))


def contrastive(c, p, batch):
    """The mean loss over pairs, and how often an image is nearest to a text like its own."""
    texts = alone(batch, "segments", ["tokens"])
    x, y = image(c, p, alone(batch, "images", ["patches", "places"])), text(c, p, texts)
    logits = jnp.exp(p["scale"][0]) * x @ y.T + (p["bias"][0] if c.name == "siglip" else 0)
    words = np.where(texts["there"], texts["tokens"], -1)
    right = (words[:, None] == words[None]).all(-1)
    accuracy = jnp.take_along_axis(jnp.asarray(right), jnp.argmax(logits, 1)[:, None], 1).mean()
    if c.name == "siglip":
        return jnp.log(1 + jnp.exp(-(2 * jnp.eye(len(x)) - 1) * logits)).sum() / len(x), accuracy
    both = [jnp.log(jnp.exp(logits).sum(axis)) - jnp.diagonal(logits) for axis in (0, 1)]
    return (both[0] + both[1]).mean() / 2, accuracy


def captioning(c, p, batch):
    """The mean cross-entropy over tokens of texts."""
    one = alone(batch, "segments", list(batch))
    seen = one | {"there": (one["images"] > 0) & one["there"]}
    patches = vit(c, p["image"], seen)
    patches = linear(p["connector"]["down"], gelu(linear(p["connector"]["up"], patches)))
    x = jnp.where(seen["there"][..., None], patches, p["embed"]["table"][one["tokens"]])
    logits = llama(c, p, x)
    losses = jnp.log(jnp.exp(logits).sum(-1)) - jnp.take_along_axis(logits, one["targets"][..., None], -1)[..., 0]
    weights = one["weights"] * one["there"]
    return (losses * weights).sum() / weights.sum()


def llama(c, p, x):
    """Logits of what follows each embedding; padding is behind."""
    positions = np.broadcast_to(np.arange(x.shape[1]), x.shape[:2])
    mask = np.broadcast_to(np.tri(x.shape[1], dtype=bool), (len(x), x.shape[1], x.shape[1]))
    frequencies = c.rope_theta ** (-np.arange(0, c.head_dim, 2) / c.head_dim)
    for number in range(c.num_layers):
        w = jax.tree.map(lambda a, number=number: a[number], p["blocks"]["layer"])
        h = rms_norm(w["attention_norm"], x, c.norm_eps)
        q, k, v = (jnp.tensordot(h, w["attention"][name]["kernel"], 1) for name in "qkv")
        q, k = (rotate(a, positions, frequencies) for a in (q, k))
        k, v = (jnp.repeat(a, c.num_heads // c.num_kv_heads, axis=2) for a in (k, v))
        x = x + jnp.tensordot(attended(q, k, v, mask), w["attention"]["out"]["kernel"], 2)
        h, m = rms_norm(w["mlp_norm"], x, c.norm_eps), w["mlp"]
        gate = h @ m["gate"]["kernel"]
        x = x + (gate / (1 + jnp.exp(-gate)) * (h @ m["up"]["kernel"])) @ m["down"]["kernel"]
    head = p["embed"]["table"].T if c.tied_embeddings else p["output"]["kernel"]
    return rms_norm(p["norm"], x, c.norm_eps) @ head


def flow(c, p, batch):
    """The mean over patches of the squared error of the velocity."""
    one = alone(batch, "images", ["patches", "places", "draws"])
    chosen = np.arange(1, batch["times"].shape[1] + 1) <= batch["images"].max(1)[:, None]
    t, label = batch["times"][chosen][:, None], batch["labels"][chosen]
    frequencies = np.float32(np.exp(np.linspace(0, np.log(1000), 64)))
    x = one["patches"].astype(np.float32) / 127.5 - 1
    draws = jax.vmap(lambda draw: jax.random.normal(jax.random.key(draw), x.shape[2:]))(one["draws"].reshape(-1))
    noise = draws.reshape(x.shape)
    waves = linear(p["up"], jnp.concatenate([jnp.sin(t * frequencies), jnp.cos(t * frequencies)], -1))
    given = linear(p["down"], waves / (1 + jnp.exp(-waves))) + p["labels"][label]
    noisy = (1 - t[..., None]) * noise + t[..., None] * x
    h = begin(p["image"], noisy, one["places"]) + given[:, None]
    h = encoder(p["image"]["encoder"], h, one["there"], c.norm_eps)
    errors = ((linear(p["velocity"], h) - (x - noise)) ** 2).mean(-1)
    return (errors * one["there"]).sum() / one["there"].sum()


# ------------------------------------------------------------------------------------------------------- batches
def rows_of_images(rng, rows, length, most, class_at=None):
    """Rows of images of any shape, one of them empty except for padding; `class_at` as in ImageRows."""
    made = {"patches": rng.integers(0, 256, (rows, length, PATCH**2 * 3)).astype(np.uint8),
            "images": np.zeros((rows, length), np.int32), "places": np.zeros((rows, length, 2), np.int32)}
    for row in range(1, rows):
        at = 0
        for number in range(1, most + 1):
            high, wide = rng.integers(1, 4, 2)
            own = [[class_at, 0]] * (class_at is not None) + np.indices((high, wide)).reshape(2, -1).T.tolist()
            if at + len(own) > length:
                break
            here = slice(at, at + len(own))
            made["images"][row, here], made["places"][row, here] = number, own
            at += len(own)
    return made


def batch(kind, rows=8, length=16, most=3, text_len=4, vocab=64, labels=5, seed=0):
    """A batch of a family of models."""
    rng, (kind, _, published) = np.random.default_rng(seed), kind.partition(" ")
    with_class = published and PUBLISHED[kind].get("class_token")
    made = rows_of_images(rng, rows, length, most, SHAPE["patches_per_side"] if with_class else None)
    there = np.arange(1, most + 1) <= made["images"].max(1)[:, None]
    if kind == "image_flow":
        return made | {"labels": rng.integers(0, labels, (rows, most)).astype(np.int32),
                       "weights": there.astype(np.float32),
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
    """Sequences of an image and a text each, of which no two are in one place."""
    rows, length = made["images"].shape
    out = {name: np.zeros_like(x) for name, x in made.items()}
    out |= {name: np.zeros((rows, length), np.int32) for name in ("tokens", "targets", "segments", "positions")}
    out["weights"] = np.zeros((rows, length), np.float32)
    for row in range(rows):
        at = 0
        for number in range(1, made["images"][row].max() + 1):
            own = made["images"][row] == number
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
