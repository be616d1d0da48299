"""A plain train step of a GPT-2-style decoder in float32, as a careful person would write it by hand in JAX.

It has no framework, mesh or options, and uses the fastest formulation known on CPU (activations as matrices, gradients
of softmax, GELU and LayerNorm by hand, one product for queries, keys and values, layers stacked and unrolled, AdamW by
hand). `jaxtrain.bench --compare=plain` compares jaxtrain with it. Run as a program it only takes its first step:

    python jaxtrain/bench/reference/plain_jax.py 4 128 4 256 8     (layers, width, heads, context, sequences)
"""

import math
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class Shape(NamedTuple):
    layers: int
    width: int
    heads: int
    context: int
    vocab: int = 320


class Hyper(NamedTuple):
    steps: int
    learning_rate: float = 1e-3
    warmup_steps: int = 0
    final_fraction: float = 0.1
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8


MATRICES = {"wte", "wpe", "qkv_w", "out_w", "up_w", "down_w"}  # parameters with weight decay
EPS = 1e-5


def init(shape: Shape, seed: int = 0) -> dict[str, np.ndarray]:
    """Return stacked parameters, drawn by numpy so that nothing is compiled."""
    L, D, T, V = shape.layers, shape.width, shape.context, shape.vocab
    matrices = {"wte": (V, D), "wpe": (T, D), "qkv_w": (L, D, 3 * D), "out_w": (L, D, D), "up_w": (L, D, 4 * D),
                "down_w": (L, 4 * D, D)}
    ones = {"ln1_s": (L, D), "ln2_s": (L, D), "lnf_s": (D,)}
    zeros = {"ln1_b": (L, D), "ln2_b": (L, D), "lnf_b": (D,), "qkv_b": (L, 3 * D), "out_b": (L, D), "up_b": (L, 4 * D),
             "down_b": (L, D)}
    draw = np.random.default_rng(seed)
    return {**{name: 0.02 * draw.standard_normal(size, np.float32) for name, size in matrices.items()},
            **{name: np.ones(size, np.float32) for name, size in ones.items()},
            **{name: np.zeros(size, np.float32) for name, size in zeros.items()}}


def from_jaxtrain(tree: Any) -> dict[str, np.ndarray]:
    """Convert the same parameters (or gradients) from jaxtrain's nested dict."""
    tree = jax.tree.map(np.array, jax.device_get(tree))
    layer, attention = tree["blocks"]["layer"], tree["blocks"]["layer"]["attention"]
    L, D = layer["attention_norm"]["scale"].shape
    return {
        "wte": tree["embed"]["table"], "wpe": tree["positions"]["table"],
        "ln1_s": layer["attention_norm"]["scale"], "ln1_b": layer["attention_norm"]["bias"],
        "qkv_w": np.concatenate([attention[name]["kernel"].reshape(L, D, D) for name in "qkv"], -1),
        "qkv_b": np.concatenate([attention[name]["bias"].reshape(L, D) for name in "qkv"], -1),
        "out_w": attention["out"]["kernel"].reshape(L, D, D), "out_b": attention["out"]["bias"],
        "ln2_s": layer["mlp_norm"]["scale"], "ln2_b": layer["mlp_norm"]["bias"],
        "up_w": layer["mlp"]["up"]["kernel"], "up_b": layer["mlp"]["up"]["bias"],
        "down_w": layer["mlp"]["down"]["kernel"], "down_b": layer["mlp"]["down"]["bias"],
        "lnf_s": tree["norm"]["scale"], "lnf_b": tree["norm"]["bias"],
    }


@jax.custom_vjp
def softmax(s):
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return e * (1 / e.sum(-1, keepdims=True))


softmax.defvjp(lambda s: (softmax(s),) * 2, lambda p, dp: (p * (dp - (p * dp).sum(-1, keepdims=True)),))

LINEAR = -2 * math.sqrt(2 / math.pi)
CUBIC = LINEAR * 0.044715


@jax.custom_vjp
def gelu(x):
    return x / (1 + jnp.exp(x * (LINEAR + CUBIC * x * x)))


def _gelu_backward(x, dy):
    s = 1 / (1 + jnp.exp(x * (LINEAR + CUBIC * x * x)))
    return (dy * (s - x * s * (1 - s) * (LINEAR + 3 * CUBIC * x * x)),)


gelu.defvjp(lambda x: (gelu(x), x), _gelu_backward)


@jax.custom_vjp
def layer_norm(x, scale, bias):
    return _layer_norm_forward(x, scale, bias)[0]


def _layer_norm_forward(x, scale, bias):
    mean = x.mean(-1, keepdims=True)
    inverse = lax.rsqrt(jnp.square(x - mean).mean(-1, keepdims=True) + EPS)
    return (x - mean) * inverse * scale + bias, (x, mean, inverse, scale)


def _layer_norm_backward(saved, dy):
    x, mean, inverse, scale = saved
    unit, ones = (x - mean) * inverse, jnp.ones((1, len(dy)))  # sums over rows as products are a little faster
    pull, dyu = dy * scale, dy * unit
    dx = inverse * (pull - pull.mean(-1, keepdims=True) - unit * (dyu * scale).mean(-1, keepdims=True))
    return dx, (ones @ dyu)[0], (ones @ dy)[0]


layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)


def loss(params: dict, batch: dict, shape: Shape) -> jax.Array:
    """Return the weighted mean cross-entropy of a packed batch."""
    D, H, (B, T) = shape.width, shape.heads, batch["tokens"].shape
    K, segments = D // H, batch["segments"]
    seen = np.tril(np.ones((T, T), bool)) & (segments[:, :, None] == segments[:, None, :])
    mask = jnp.where(seen, 0.0, -1e30)[:, None]
    x = params["wte"][batch["tokens"].reshape(-1)] + params["wpe"][batch["positions"].reshape(-1)]

    def block(x, p):
        h = layer_norm(x, p["ln1_s"], p["ln1_b"])
        q, k, v = (part.reshape(B, T, H, K).transpose(0, 2, 1, 3)
                   for part in jnp.split(h @ p["qkv_w"] + p["qkv_b"], 3, -1))
        weights = softmax(jnp.einsum("bhtk,bhsk->bhts", q * K**-0.5, k) + mask)
        h = jnp.einsum("bhts,bhsk->bhtk", weights, v).transpose(0, 2, 1, 3).reshape(B * T, D)
        x = x + h @ p["out_w"] + p["out_b"]
        h = gelu(layer_norm(x, p["ln2_s"], p["ln2_b"]) @ p["up_w"] + p["up_b"])
        return x + h @ p["down_w"] + p["down_b"], None

    outside = {"wte", "wpe", "lnf_s", "lnf_b"}
    layers = {name: value for name, value in params.items() if name not in outside}
    x = layer_norm(lax.scan(block, x, layers, unroll=shape.layers)[0], params["lnf_s"], params["lnf_b"])
    logits = lax.dot_general(x, params["wte"], (((1,), (1,)), ((), ())))
    targets, weights = batch["targets"].reshape(-1), batch["weights"].reshape(-1)
    nll = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, targets[:, None], 1)[:, 0]
    return (nll * weights).sum() / jnp.maximum(weights.sum(), 1e-8)


def learning_rate(hyper: Hyper, t: jax.Array) -> jax.Array:
    """Return the learning rate: linear warm-up, then a cosine down to `final_fraction`."""
    after = jnp.clip((t - hyper.warmup_steps) / max(1, hyper.steps - hyper.warmup_steps), 0, 1)
    cosine = (1 - hyper.final_fraction) * 0.5 * (1 + jnp.cos(jnp.pi * after)) + hyper.final_fraction
    return hyper.learning_rate * jnp.where(t < hyper.warmup_steps, (t + 1) / max(1, hyper.warmup_steps), cosine)


def start(params: dict) -> tuple:
    """Return the state at step 0: parameters, both moments, the step."""
    return (*(jax.tree.map(make, params) for make in (jnp.array, jnp.zeros_like, jnp.zeros_like)), jnp.int32(0))


def make_step(shape: Shape, hyper: Hyper):
    """Return `step(state, batch) -> (state, loss)`, compiled, with the state donated."""
    def step(state, batch):
        params, first, second, t = state
        value, grads = jax.value_and_grad(loss)(params, batch, shape)
        scale = hyper.clip_norm / jnp.maximum(jnp.sqrt(sum((g * g).sum() for g in grads.values())), hyper.clip_norm)
        rate, n = learning_rate(hyper, t.astype(jnp.float32)), t.astype(jnp.float32) + 1

        def update(name, p, m, v):
            g = grads[name] * scale
            m, v = hyper.b1 * m + (1 - hyper.b1) * g, hyper.b2 * v + (1 - hyper.b2) * g * g
            u = (m / (1 - hyper.b1**n)) / (jnp.sqrt(v / (1 - hyper.b2**n)) + hyper.eps)
            return p - rate * (u + hyper.weight_decay * p if name in MATRICES else u), m, v

        new = {name: update(name, params[name], first[name], second[name]) for name in params}
        return (*({name: value[i] for name, value in new.items()} for i in range(3)), t + 1), value

    return jax.jit(step, donate_argnums=0)


if __name__ == "__main__":
    layers, width, heads, context, sequences = map(int, sys.argv[1:])
    shape = Shape(layers, width, heads, context)
    tokens = np.random.default_rng(0).integers(0, 256, (sequences, context + 1), np.int32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segments": np.ones_like(tokens[:, 1:]),
             "positions": np.tile(np.arange(context, dtype=np.int32), (sequences, 1)),
             "weights": np.ones((sequences, context), np.float32)}
    state, value = make_step(shape, Hyper(100))(start(init(shape)), batch)
    print(float(value))
