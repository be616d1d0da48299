"""Speech in plain float32 `jnp`, from scratch: convolutions, both stacks of layers, cross-entropy, and CTC as a sum."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

import jaxtrain as jt

ROWS, FRAMES, MELS, VOCAB, TOKENS = 16, 16, 6, 64, 8


def config(**keys) -> jt.Config:
    """Two narrow layers of each stack; keys as on a command line, `mesh__tensor=2`."""
    return jt.make_config({
        "model": dict(name="whisper", vocab_size=VOCAB, num_layers=2, encoder_layers=1, embed_dim=32, num_heads=4,
                      mlp_dim=48, max_seq_len=TOKENS, audio_positions=FRAMES // 2, mels=MELS, prefix=[1, 2], end=3,
                      ctc_weight=0.3),
        "mesh": dict(data=1), "data": dict(packing="bucket", seq_len=FRAMES, global_batch_size=ROWS),
        "optimizer": dict(learning_rate=1e-2, warmup_steps=0), "train": dict(steps=6),
    }, {key.replace("__", "."): value for key, value in keys.items()})


def batch(seed=0, rows=ROWS):
    """Clips of any length with transcripts of any length, and padding after both; one row is empty, some texts long."""
    rng = np.random.default_rng(seed)
    frames, said = rng.integers(3, FRAMES + 1, rows), rng.integers(0, TOKENS - 1, rows)
    frames[:3], said[:3] = (0, FRAMES, 7), (0, 3, 6)  # the third has no room for CTC
    target = rng.integers(4, 9, (rows, TOKENS - 2))  # few tokens, so that some follow themselves
    there = {"weights": np.arange(FRAMES) < frames[:, None], "target_weights": np.arange(TOKENS - 2) < said[:, None]}
    features = rng.normal(0, 1, (rows, FRAMES, MELS)).astype(np.float16)  # padding is not 0
    return {"features": features, "target": np.where(there["target_weights"], target, 0).astype(np.int32),
            **{name: x.astype(np.float32) for name, x in there.items()}}


def norm(w, x):
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * w["scale"] + w["bias"]


def gelu(x):
    return x * (1 + jax.lax.erf(x / np.sqrt(2))) / 2


def linear(w, x, dims=1):
    return jnp.tensordot(x, w["kernel"], dims) + w.get("bias", 0)


def convolution(w, x, stride):
    """Each output is the sum over its three neighbours, one position after the other."""
    zero = jnp.zeros_like(x[:, :1])
    wide = jnp.concatenate([zero, x, zero], 1)
    found = [sum(wide[:, at + n] @ w["linear"]["kernel"][n] for n in range(3)) for at in range(0, x.shape[1], stride)]
    return gelu(jnp.stack(found, 1) + w["linear"]["bias"])


def attention(w, x, memory, mask):
    q, k, v = linear(w["q"], x), linear(w["k"], memory), linear(w["v"], memory)
    scores = jnp.einsum("bthk,bshk->bhts", q, k) / np.sqrt(q.shape[-1])
    scores = jnp.where(mask[:, None], jnp.exp(scores - scores.max(-1, keepdims=True)), 0)
    out = jnp.einsum("bhts,bshk->bthk", scores / jnp.maximum(scores.sum(-1, keepdims=True), 1e-30), v)
    return linear(w["out"], out, 2)


def mlp(w, x):
    return linear(w["mlp"]["down"], gelu(linear(w["mlp"]["up"], norm(w["mlp_norm"], x))))


def encoded(c, p, b):
    there = b["weights"]
    heard = there[:, ::2] > 0
    x = b["features"].astype(np.float32) * there[..., None]
    if not c.mask_padding:  # then it is silence
        loudest = jnp.where(there[..., None] > 0, x, -jnp.inf).max((1, 2))[:, None, None]
        x = jnp.where(there[..., None] > 0, x, jnp.where(loudest > -jnp.inf, jnp.maximum(loudest - 2, -1.5), 0))
        there = jnp.ones_like(there)
    x = convolution(p["second"], convolution(p["first"], x, 1) * there[..., None], 2) + p["audio_positions"]
    at = np.arange(x.shape[1]) // (c.audio_chunk or len(x[0]))
    back = at[:, None] - at
    mask = (there[:, None, ::2] > 0) & (back >= 0) & (back <= (c.audio_chunks_back or 99))
    for n in range(c.encoder_layers):
        w = jax.tree.map(lambda a, n=n: a[n], p["encoder_blocks"]["layer"])
        h = norm(w["attention_norm"], x)
        x = x + attention(w["attention"], h, h, mask)
        x = x + mlp(w, x)
    return norm(p["encoder_norm"], x), there[:, ::2] > 0, heard


def hidden(c, p, tokens, memory, there):
    x = p["embed"]["table"][tokens] + p["positions"]["table"]
    causal = np.tril(np.ones((TOKENS, TOKENS), bool))[None]
    for n in range(c.num_layers):
        w = jax.tree.map(lambda a, n=n: a[n], p["blocks"]["layer"])
        h = norm(w["attention_norm"], x)
        x = x + attention(w["attention"], h, h, causal)
        x = x + attention(w["memory"], norm(w["memory_norm"], x), memory, there[:, None])
        x = x + mlp(w, x)
    return norm(p["norm"], x)


def ctc(probabilities, tokens, blank):
    """The probability of a text, as the sum of those of its beginnings at each time; None: it has no room."""
    ways = [blank, *(id for token in tokens for id in (token, blank))]
    if len(tokens) + sum(a == b for a, b in itertools.pairwise(tokens)) > len(probabilities):
        return None
    alpha = [probabilities[0, id] if n < 2 else 0.0 for n, id in enumerate(ways)]
    for now in probabilities[1:]:
        alpha = [(alpha[n] + (alpha[n - 1] if n else 0) + (
            alpha[n - 2] if n > 1 and id not in (blank, ways[n - 2]) else 0)) * now[id] for n, id in enumerate(ways)]
    return sum(alpha[-2:])


def loss(c, p, b):
    """The mean over tokens of both losses."""
    memory, there, heard = encoded(c, p, b)
    counts = b["target_weights"].sum(1).astype(int)
    rows, entropy = [n for n, there_T in enumerate(b["weights"]) if there_T[0]], 0.0
    tokens = np.zeros((len(b["weights"]), TOKENS), int)
    tokens[:, 0], tokens[:, 1], tokens[:, 2:] = *c.prefix, b["target"]
    x = hidden(c, p, tokens, memory, there)
    logp = jax.nn.log_softmax(x @ p["embed"]["table"].T)
    for n in rows:
        said = [*b["target"][n, :counts[n]], c.end]
        entropy -= sum(logp[n, 1 + at, token] for at, token in enumerate(said))
    total = sum(counts[n] + 1 for n in rows)
    if not c.ctc_weight:
        return entropy / total
    probabilities = jax.nn.softmax(memory @ p["ctc"]["kernel"])
    found = [ctc(probabilities[n, :heard[n].sum()], b["target"][n, :counts[n]].tolist(), c.end) for n in rows]
    likelihood = sum(jnp.log(one) for one in found if one is not None)
    return ((1 - c.ctc_weight) * entropy - c.ctc_weight * likelihood) / total


