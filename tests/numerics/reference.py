"""The right numbers: GPT-2, Llama, Qwen3, experts, loss, clipping, AdamW, in plain float32 `jnp` from scratch.

Nothing of jaxtrain computes here; only its names of parameters are used. And the tiny runs that tests compare with it.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.proof.hard_batches import text_batch
from jaxtrain.sharding.mesh import AXES
from jaxtrain.train_step import partition
from jaxtrain.train_step.hooks import extras_of
from jaxtrain.train_step.state import TrainState
from tests.numerics import plain_experts, plain_mixers, plain_mup, plain_rotary

VOCAB, SEQ, BATCH, STEPS, LAYERS = 64, 16, 32, 20, 2
TOLERANCE = 1e-5
# Little effort is spent on machine code, and none on dividing it among threads, of which each part has its own costs.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}
EIGHT = [(d, f, 8 // d // f) for d in (8, 4, 2, 1) for f in (1, 2, 4, 8) if d * f in (1, 2, 4, 8)]  # data, fsdp, tensor

# Everything that a mesh of 8 cuts divides by 8; heads and mlp are not multiples of each other, so no size is met twice.
FAMILIES = {
    "gpt2": dict(name="gpt2", num_heads=8),
    "llama": dict(name="llama", num_heads=16, num_kv_heads=8, head_dim=4, mlp_dim=48, tied_embeddings=False,
                  rope_theta=100.0),
    "qwen3": dict(name="qwen3", num_heads=16, num_kv_heads=8, head_dim=4, mlp_dim=48, window=5),
    "qwen2": dict(name="qwen2", num_heads=16, num_kv_heads=8, head_dim=4, mlp_dim=48, rope_theta=100.0, window=5,
                  global_first=1),
    "gemma3": dict(name="gemma3", num_heads=16, num_kv_heads=8, head_dim=4, mlp_dim=48, window=5, global_every=2,
                   rope_theta=400.0, local_rope_theta=50.0, rope_factor=2.0, query_scale=9),
    "olmo2": dict(name="olmo2", num_heads=16, num_kv_heads=8, head_dim=4, mlp_dim=48, tied_embeddings=False,
                  rope_theta=100.0),
    "gpt2_untied": dict(name="gpt2", num_heads=8, tied_embeddings=False, window=6),
}

_EXPERTS = dict(num_heads=8, num_experts=8, expert_mlp_dim=24, tied_embeddings=False, rope_theta=100.0)
EXPERTS = {
    "mixtral": dict(name="mixtral", num_kv_heads=8, head_dim=4, experts_per_token=2, balance_loss=0.02,
                    router_z_loss=0.003) | _EXPERTS,
    "qwen3_moe": dict(name="qwen3_moe", num_kv_heads=8, head_dim=4, experts_per_token=3, normalize_router=False,
                      shared_experts=2, dense_layers=1, mlp_dim=48, capacity_factor=0.75) | _EXPERTS,
    "deepseek_v3": dict(name="deepseek_v3", num_layers=3, dense_layers=1, mlp_dim=48, head_dim=4, rope_head_dim=2,
                        value_head_dim=6, q_rank=16, kv_rank=24, experts_per_token=2, shared_experts=1,
                        router="sigmoid", router_scale=2.5, expert_groups=4, expert_groups_used=2,
                        router_bias_rate=0.01, balance_loss=0.01) | _EXPERTS,
    "gpt_oss": _EXPERTS | dict(name="gpt_oss", num_layers=3, num_heads=16, num_kv_heads=8, head_dim=4, window=5,
                               experts_per_token=3, swiglu_limit=0.1, swiglu_alpha=1.3, balance_loss=0.01),
    "alternating": dict(name="qwen3_moe", num_layers=7, dense_layers=1, experts_every=3, num_kv_heads=8, head_dim=4,
                        experts_per_token=2, mlp_dim=48, router_bias_rate=0.003, balance_loss=0.01) | _EXPERTS,
}
# Layers with states among others. A larger epsilon: norms of small states enlarge the rounding of float32.
HYBRIDS = {
    "qwen3_5": dict(name="qwen3_5", num_heads=16, num_kv_heads=8, head_dim=8, mlp_dim=48, rotary_part=0.5,
                    rope_theta=100.0, norm_eps=1e-2, layer_pattern="DA", state_heads=16, state_key_heads=8,
                    state_key_dim=12, state_value_dim=8, conv_width=3),
    "kimi_linear": dict(
        name="kimi_linear", num_layers=3, dense_layers=1, mlp_dim=48, head_dim=4, rope_head_dim=2, value_head_dim=6,
        kv_rank=24, experts_per_token=2, shared_experts=1, router="sigmoid", router_scale=2.5, balance_loss=0.01,
        norm_eps=1e-2, layer_pattern="DDA", state_heads=8, state_key_heads=8, state_key_dim=8, state_value_dim=8,
        conv_width=3) | _EXPERTS,
    "bamba": dict(name="bamba", num_heads=16, num_kv_heads=8, head_dim=4, mlp_dim=48, rotary_part=0.5, norm_eps=1e-2,
                  rope_theta=100.0, layer_pattern="MA", state_heads=16, state_head_dim=4, state_groups=4, state_dim=12,
                  conv_width=3),
}


def tiny(family: str = "gpt2", **keys) -> jt.Config:
    """A config of two narrow layers; keys as on a command line, `mesh__tensor=2`, override it."""
    return jt.make_config({
        "model": dict(vocab_size=VOCAB, num_layers=LAYERS, embed_dim=32, max_seq_len=SEQ)
                 | (FAMILIES | EXPERTS | HYBRIDS)[family],
        "mesh": dict(data=1), "data": dict(seq_len=SEQ, global_batch_size=BATCH),
        "optimizer": dict(learning_rate=1e-2, warmup_steps=4, weight_decay=0.1, clip_norm=0.7, schedule="linear"),
        "train": dict(steps=STEPS),
    }, {key.replace("__", "."): value for key, value in keys.items()})


def layers_key(layers: int) -> dict[str, int]:
    """The key for a number of layers; 0: the family's own."""
    return {"model__num_layers": layers} if layers else {}


def build(family: str = "gpt2", mesh: tuple[int, int, int] = (1, 1, 1), **keys) -> jt.Run:
    """A run on data x fsdp x tensor devices, times those of other axes among the keys, as `mesh__stage=2`."""
    data, fsdp, tensor = mesh
    config = tiny(family, **(dict(mesh__data=data, mesh__fsdp=fsdp, mesh__tensor=tensor) | keys))
    return jt.build(config, devices=jax.local_devices()[: math.prod(getattr(config.mesh, axis) for axis in AXES)])


def with_biases(params):
    """The same parameters with biases that are not zero, and sinks that matter.

    Those behind experts are small: a token that goes to another expert in bfloat16 is not to change much.
    """
    rng = np.random.default_rng(0)

    def one(path, leaf):
        name = jax.tree_util.keystr(path)
        scale = 0.003 if name.endswith("down_bias']") else 0.1 if name.endswith(("bias']", "sinks']")) else 0
        return (leaf + rng.normal(size=leaf.shape, scale=scale)).astype(np.float32) if scale else leaf

    return jax.tree_util.tree_map_with_path(one, params)


def compiled(run: jt.Run):
    """The run's step as it is, but with little effort spent on machine code: it compiles in half the time."""
    return run.lower().compile(compiler_options=QUICKLY)


@functools.cache
def initial(family: str = "gpt2", layers: int = 0):
    """The parameters at step 0, on the host, as one device makes them; with so many layers (0: the family's own)."""
    run = build(family, **layers_key(layers))
    seed = np.int64(run.config.train.seed)
    return jax.device_get(run._jitted_init.lower(seed).compile(compiler_options=QUICKLY)(seed).params)


def start(run: jt.Run, family: str = "gpt2"):
    """The state at step 0 on the run's mesh, without compiling its own initialisation (which has a test of its own)."""
    return start_from(run, initial(family, run.config.model.num_layers))


def start_from(run: jt.Run, params):
    """The state around these parameters, trained and frozen."""
    trained, frozen = partition.like(params, run.layout.axes), partition.without(params, run.layout.axes)
    opt_state = jax.tree.map(np.array, jax.jit(run.sharded.settings.optimizer.init)(trained))
    state = TrainState(np.int32(0), trained, opt_state, np.int32(0), run.abstract.loss_scale and _scale(),
                       {name: make(trained) for name, make in extras_of(run.sharded.hooks).items()}, frozen)
    return jax.tree.map(lambda x, s: jax.device_put(np.asarray(x), s), state, run.layout.state)


def _scale():
    from jaxtrain.train_step.precision import LossScale
    return jax.tree.map(np.asarray, LossScale.initial())


def batch(step: int, rows: int = BATCH, seq: int = SEQ, vocab: int = VOCAB) -> dict[str, np.ndarray]:
    """A packed batch of text that can be learnt, so that 20 steps take the loss down, with rows of unequal weight."""
    return text_batch(step, rows, seq, vocab)


# ------------------------------------------------------------------------------------------------------- plain models

def softmax(x):
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def layer_norm(p, x, eps):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + eps) * p["scale"] + p["bias"]


def rms_norm(p, x, eps):
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + eps) * p["scale"]


def rotate(x, positions, frequencies, factor=1.0):
    """x [B, T, H, K]: the pair (i, i + K/2) turns by position x frequency, and is multiplied by the factor."""
    half = x.shape[-1] // 2
    angle = positions[:, :, None, None] * np.float32(frequencies)
    a, b = x[..., :half], x[..., half:]
    return factor * jnp.concatenate(
        [a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)], -1)


def attention(q, k, v, segments, window=0, sinks=None):
    """A mask written out, scores of all pairs; each group of query heads has its own copy of its key head.

    A sink is one more score of every query, whose weight is dropped.
    """
    T, repeat = q.shape[1], q.shape[2] // k.shape[2]
    i, j = np.arange(T)[:, None], np.arange(T)[None, :]
    mask = (j <= i) & ((i - j < window) if window else True)
    mask = (mask & (segments[:, :, None] == segments[:, None, :]))[:, None]
    k, v = (jnp.repeat(x, repeat, axis=2) for x in (k, v))
    scores = jnp.einsum("bihk,bjhk->bhij", q, k) / np.sqrt(q.shape[-1])
    scores = jnp.where(mask, scores, -jnp.inf)
    if sinks is not None:
        sink = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, sink], -1)
    return jnp.einsum("bhij,bjhk->bihk", softmax(scores)[..., :T], v)


def through(c, p, b, told):
    """Activations after the last layer; `c` is the model's section of the config."""
    x = p["embed"]["table"][b["tokens"]]
    if c.name == "gpt2":
        x = x + p["positions"]["table"][b["positions"]]
    if c.name == "gemma3":
        x = x * np.float32(np.sqrt(c.mup_base.get("embed_dim", c.embed_dim)))
    for layer in range(c.num_layers):
        w = layer_of(c, p, layer)
        kind = c.layer_kinds[layer] if hasattr(c, "layer_kinds") else "A"
        x = (gemma3_block(c, w, x, b, layer) if c.name == "gemma3"
             else block(c, w, x, b, told, window_of(c, layer), kind))
    return x


def window_of(c, layer):
    """The window of a layer: in gpt-oss the last of every `global_every` has none, in Qwen2 the first ones."""
    everywhere = (layer + 1) % c.global_every == 0 if c.name == "gpt_oss" else layer < getattr(c, "global_first", 0)
    return 0 if everywhere else c.window


def layer_of(c, p, layer):
    """The parameters of a layer; those after the first are stacked in groups, of which every n-th has experts."""
    e = c.experts
    number, within = divmod(layer - e.dense_layers, c.period)
    w = p["first_blocks" if number < 0 else "blocks"]["layer"]
    w = w[f"layer_{within}"] if c.period > 1 and number >= 0 else w
    assert ("router" in w["mlp"]) == (e.num > 0 and number >= 0 and (within + 1) % e.every == 0)
    return jax.tree.map(lambda a: a[layer if number < 0 else number], w)


def router(c, p):
    """The parameters of all routers but that of the layer that looks ahead, stacked over the layers with experts."""
    w = p["blocks"]["layer"]
    return (w[f"layer_{c.experts.every - 1}"] if c.experts.every > 1 else w)["mlp"]["router"]


def block(c, w, x, b, told, window, kind="A"):
    """One layer; one with experts appends to `told` each row's penalty, and its excess of load per expert."""
    gpt2, eps, a, m = c.name == "gpt2", c.norm_eps, w["attention"], w["mlp"]
    norm, behind = NORMS.get(c.name, rms_norm), c.name == "olmo2"
    h = x if behind else norm(w["attention_norm"], x, eps)
    y = (plain_mixers.delta_net(c, a, h, b["segments"], rms_norm) if kind == "D"
         else plain_mixers.mamba2(c, a, h, b["segments"]) if kind == "M" else attended(c, a, h, b, window))
    x = x + (norm(w["attention_norm"], y, eps) if behind else y)
    h = x if behind else norm(w["mlp_norm"], x, eps)
    if gpt2:
        u = h @ m["up"]["kernel"] + m["up"]["bias"]
        u = 0.5 * u * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))
        return x + u @ m["down"]["kernel"] + m["down"]["bias"]
    if "router" in m:
        y, *tells = plain_experts.experts(c, m, h, b["segments"])
        told.append(tells)
        return x + y
    y = plain_experts.silu_mlp(*(m[n]["kernel"] for n in ("gate", "up", "down")), h)
    return x + (norm(w["mlp_norm"], y, eps) if behind else y)


def attended(c, a, h, b, window):
    """The output of attention for a normalized activation."""
    eps, gpt2, behind, latent = c.norm_eps, c.name == "gpt2", c.name == "olmo2", c.latent_attention
    if latent:
        q, k, v = plain_experts.latent_qkv(c, a, h, b["positions"], rms_norm, rotate)
    else:
        q, k, v = (jnp.tensordot(h, a[n]["kernel"], 1) + a[n].get("bias", 0) for n in "qkv")
    if c.name in ("qwen3", "qwen3_moe", "qwen3_5"):
        norm = NORMS.get(c.name, rms_norm)
        q, k = norm(a["q_norm"], q, eps), norm(a["k_norm"], k, eps)
    if behind:
        q, k = all_heads_norm(a["q_norm"], q, eps), all_heads_norm(a["k_norm"], k, eps)
    if not gpt2 and not latent:
        width = c.rotary_width
        q, k = (jnp.concatenate([rotate(y[..., :width], b["positions"], *plain_rotary.frequencies(c, width)),
                                 y[..., width:]], -1) for y in (q, k))
    heads = attention(q * plain_mup.scores(c), k, v, b["segments"], window, a.get("sinks"))
    if "gate" in a:
        heads = heads * plain_mixers.sigmoid(jnp.tensordot(h, a["gate"]["kernel"], 1))
    return jnp.tensordot(heads, a["out"]["kernel"], 2) + a["out"].get("bias", 0)


def all_heads_norm(p, x, eps):
    """x [B, T, H, K]: all heads of a token are normalised together."""
    return rms_norm({"scale": p["scale"].reshape(-1)}, x.reshape(*x.shape[:2], -1), eps).reshape(x.shape)


def gemma3_norm(p, x, eps):
    return rms_norm({"scale": 1 + p["scale"]}, x, eps)


def gemma3_block(c, w, x, b, layer):
    """One layer; the last of every `global_every` sees all that came before, the others a window of it."""
    eps, a, m, local = c.norm_eps, w["attention"], w["mlp"], (layer + 1) % c.global_every
    q, k, v = (jnp.tensordot(gemma3_norm(w["attention_norm"], x, eps), a[n]["kernel"], 1) for n in "qkv")
    turn = dict(positions=b["positions"] if local else b["positions"] / c.rope_factor,
                frequencies=(c.local_rope_theta if local else c.rope_theta) ** (-np.arange(0, 1, 2 / c.head_dim)))
    q, k = rotate(gemma3_norm(a["q_norm"], q, eps), **turn), rotate(gemma3_norm(a["k_norm"], k, eps), **turn)
    # `attention` divides by the root of the width.
    scaled = q / math.sqrt(c.query_scale) * math.sqrt(c.head_dim) * plain_mup.scores(c)
    y = jnp.tensordot(attention(scaled, k, v, b["segments"], c.window if local else 0), a["out"]["kernel"], 2)
    x = x + gemma3_norm(w["attention_out_norm"], y, eps)
    h = gemma3_norm(w["mlp_norm"], x, eps)
    g = h @ m["gate"]["kernel"]
    g = 0.5 * g * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)))
    return x + gemma3_norm(w["mlp_out_norm"], (g * (h @ m["up"]["kernel"])) @ m["down"]["kernel"], eps)


def ahead(c, p, b, x, told):
    """Yield each further layer's activations, and its targets and weights, further to the right in a document."""
    w, T, targets = p["ahead"], x.shape[1], b["targets"]
    x = last_norm(c, p, x) if c.mtp_after_norm else x
    for places in range(1, c.mtp_layers + 1):
        following = p["embed"]["table"][targets]
        inputs = rms_norm(w["norm_this"], x, c.norm_eps), rms_norm(w["norm_next"], following, c.norm_eps)
        both = jnp.concatenate(inputs, -1)
        x = block(c, w["block"], both @ jnp.concatenate([w["this"]["kernel"], w["next"]["kernel"]]), b, told, c.window)
        y = rms_norm(w["norm"], x, c.norm_eps)
        right, stays = np.minimum(np.arange(T) + places, T - 1), np.arange(T) < T - places
        targets = jnp.where(stays, b["targets"][:, right], 0)
        yield y, targets, b["weights"][:, right] * (b["segments"] == b["segments"][:, right]) * stays
        x, w = y if c.mtp_after_norm else x, w.get("later")


def last_norm(c, p, x):
    return NORMS.get(c.name, rms_norm)(p["norm"], x, c.norm_eps)


NORMS = {"gpt2": layer_norm, "gemma3": gemma3_norm, "qwen3_5": gemma3_norm}  # of families that have others


def entropy(c, p, x, targets, weights, z_loss=0.0):
    """The sum over tokens of weight x (cross-entropy + z-loss)."""
    logits = x @ (p["embed"]["table"].T if c.tied_embeddings else p["output"]["kernel"]) * plain_mup.logits(c)
    top = logits.max(-1)
    log_partition = top + jnp.log(jnp.exp(logits - top[..., None]).sum(-1))
    correct = (logits * (targets[..., None] == np.arange(logits.shape[-1]))).sum(-1)
    return (weights * (log_partition - correct + z_loss * log_partition**2)).sum()


def evaluation(c, p, b):
    """The weighted mean of the cross-entropy alone."""
    return entropy(c, p, last_norm(c, p, through(c, p, b, [])), b["targets"], b["weights"]) / b["weights"].sum()


def loss(c, p, b, z_loss=0.0):
    """The weighted mean over tokens of cross-entropy and z-loss, and over rows of experts' penalties."""
    return loss_and_excess(c, p, b, z_loss)[0]


def loss_and_excess(c, p, b, z_loss=0.0):
    """Return the loss, and experts' excess of load, a weighted mean over rows, [layers, experts], `ahead` the last."""
    told = []
    x = through(c, p, b, told)
    total = entropy(c, p, last_norm(c, p, x), b["targets"], b["weights"], z_loss)
    if c.multi_token_loss:
        each = [entropy(c, p, *further, z_loss) for further in ahead(c, p, b, x, told)]
        total = total + c.multi_token_loss * sum(each) / len(each)
    row = b["weights"].sum(1)
    total = total + sum((row * penalty).sum() for penalty, _ in told)
    return total / row.sum(), jnp.array([row @ excess / row.sum() for _, excess in told])


# ------------------------------------------------------------------------------------------------------ plain training

def norm_of(tree) -> jax.Array:
    return jnp.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(tree)))


def learning_rate(config, n: int) -> float:
    """Linear warm-up that starts at 1/warmup of the peak, then linear decay."""
    c, steps = config.optimizer, config.train.steps
    if n < c.warmup_steps:
        return c.learning_rate * (n + 1) / c.warmup_steps
    done = (n - c.warmup_steps) / (steps - c.warmup_steps)
    return c.learning_rate * (1 - done * (1 - c.final_fraction))


def adamw(c, p, g, m, v, rate, n):
    """Loshchilov and Hutter's; norms, biases and other vectors do not decay. -> parameters and both moments."""
    def one(path, p, g, m, v):
        name = path[-1].key
        decay = c.weight_decay * (name not in ("scale", "sinks", "query", "token") and not name.endswith("bias"))
        m, v = c.b1 * m + (1 - c.b1) * g, c.b2 * v + (1 - c.b2) * g**2
        step = (m / (1 - c.b1 ** (n + 1))) / (jnp.sqrt(v / (1 - c.b2 ** (n + 1))) + c.eps)
        return p - rate * (step + decay * p), m, v
    out = jax.tree_util.tree_map_with_path(one, p, g, m, v)
    return [jax.tree.map(lambda o, i=i: o[i], out, is_leaf=lambda x: isinstance(x, tuple)) for i in range(3)]


def trained(family: str = "gpt2", z_loss: float = 0.0, layers: int = 0, steps: int = STEPS, rows: int = BATCH):
    """Return the losses of all steps; and of step 0 the gradient (not yet clipped) and its norm."""
    return _trained(family, z_loss, layers, steps, rows)[:3]


def _trained(family, z_loss, layers, steps, rows):
    """The same, and the biases of routers after each step; no step is computed twice."""
    made, more = _training(family, z_loss, layers, rows)
    made.extend(itertools.islice(more, max(0, steps - len(made))))
    losses, biases, first = zip(*made[:steps], strict=True)
    return np.array(losses), *first[0], biases


@functools.cache
def _training(family, z_loss, layers, rows):
    """The steps that were computed, and an iterator over those to come."""
    return [], _steps(family, z_loss, layers, rows)


def _steps(family, z_loss, layers, rows):
    """Yield the loss of each step, the biases of routers behind it, and of the first the gradient and its norm."""
    config = tiny(family, **layers_key(layers))
    p = jax.tree.map(jnp.asarray, initial(family, layers))
    m = v = jax.tree.map(jnp.zeros_like, p)

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def step(p, m, v, rate, n, b):
        def value(p):
            return loss_and_excess(config.model, p, b, z_loss)
        (value, excess), g = jax.value_and_grad(value, has_aux=True)(p)
        size, clip = norm_of(g), config.optimizer.clip_norm
        clipped = jax.tree.map(lambda x: x * jnp.minimum(1, clip / size), g)
        p, m, v = adamw(config.optimizer, p, clipped, m, v, rate, n)
        if config.model.experts.bias_rate:
            sign = jnp.sign(jnp.round(excess, 6))  # even is even, however it rounds
            router(config.model, p)["bias"] -= config.model.experts.bias_rate * sign
        return p, m, v, value, g, size

    for n in itertools.count():
        p, m, v, value, g, size = step(p, m, v, jnp.float32(learning_rate(config, n)), jnp.float32(n), batch(n, rows))
        bias = np.asarray(router(config.model, p)["bias"]) if config.model.experts.bias_rate else None
        yield float(value), bias, jax.device_get((g, size)) if n == 0 else None


def worst(got, want, floor: float = 0.0):
    """The leaf that is furthest from what it should be: (error relative to its largest element, name)."""
    def error(path, g, w):
        scale = max(np.abs(w).max(initial=0), floor)
        return float(np.abs(np.asarray(g, np.float64) - w).max(initial=0) / (scale or 1)), jax.tree_util.keystr(path)
    errors = jax.tree_util.tree_map_with_path(error, jax.device_get(got), jax.device_get(want))
    return max(jax.tree.leaves(errors, is_leaf=lambda x: isinstance(x, tuple)))


# ------------------------------------------------------------------------------------------------------ the comparison

def check(run: jt.Run, family: str = "gpt2", steps: int = STEPS, tolerance: float = TOLERANCE) -> None:
    """The losses of a run, its first gradient and its norm are those of plain training; and its routers' biases."""
    c, rows = run.config, run.config.data.global_batch_size
    want, gradient, norm, biases = _trained(family, c.train.z_loss, c.model.num_layers, steps, rows)
    gradient = jax.tree.map(lambda leaf: leaf, gradient)  # a dict of one's own
    step, state, losses = compiled(run), start(run, family), []
    for n in range(steps):
        state, metrics = step(state, run.sharded.place(batch(n, rows)))
        losses.append(float(metrics["loss"]))
        if n == 0:  # Adam's first moment is now (1 - b1) x the clipped gradient
            o, size = c.optimizer, float(metrics["grad_norm"])
            got = jax.tree.map(lambda m: np.asarray(m) / (1 - o.b1) / min(1, o.clip_norm / size), moments(state))
            if c.model.experts.bias_rate:  # a bias has no moments
                del router(c.model, gradient)["bias"], router(c.model, got)["bias"]
            assert size == pytest.approx(float(norm), rel=tolerance), "the gradient's norm differs in the first step"
            # A key's bias shifts all scores of a query alike: its gradient is zero up to rounding, hence the floor.
            error, leaf = worst(got, gradient, floor=1e-3 * float(norm))
            assert error < tolerance, f"the first gradient of {leaf} is off by {error:.1e} of its largest element"
    off = np.abs(np.array(losses) / want - 1)
    assert off.max() < tolerance, (f"the loss of step {off.argmax()} is off by {off.max():.1e}; "
                                   f"the first over the tolerance is step {(off > tolerance).argmax()}")
    if c.model.experts.bias_rate:
        bias = np.asarray(router(c.model, state.params)["bias"])
        np.testing.assert_allclose(bias, biases[-1], atol=1e-6, err_msg="the biases did not follow the load")
        assert len(np.unique(bias)) > 2
    if steps == STEPS:
        assert want[-1] < 0.7 * want[0], "the reference itself does not learn, so it proves little"


def moments(state):
    """Adam's first."""
    return next(s.mu for s in jax.tree.leaves(state.opt_state, is_leaf=lambda s: hasattr(s, "mu")) if hasattr(s, "mu"))
