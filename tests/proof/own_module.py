"""A module whose user shards it by hand, with explicit collectives, right or with one of the bugs that such code has.

Two layers' worth of everything: an embedding, sequence-parallel norms, causal attention over `context`, an MLP over
`tensor`, experts over `expert`, dropout, a weighted loss; an optimizer, and an average of weights. `BUGS` lists what
can be wrong, many as in Megatron-LM's issue 7452 and pull request 5916, TransformerEngine's pull request 715 of ROCm
and transformers' issue 48687.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxtrain as jt

ROWS, SEQ, WIDE, HIDDEN, EXPERTS, VOCAB = 32, 16, 8, 16, 8, 24
BATCH = ("data", "fsdp", "expert")  # mesh axes that split rows
ACTIVATION = P(BATCH, "context", None)

BUGS = {  # name: (the mesh axis or key that shows it, or any of several, what is wrong first, words of the hint)
    "mlp_without_psum": ("tensor", "loss", "tensor"),
    "mlp_summed_twice": ("tensor", "loss", "tensor"),
    "mlp_divided_by_axis_size": ("tensor", "loss", "tensor"),
    "mlp_input_gradient_counted_twice": ("tensor", "gradient", "tensor"),
    "norm_gradient_of_one_sequence_shard": ("context", "gradient", "context"),
    "norm_gradient_counted_per_tensor_shard": ("tensor", "gradient", "2 times what it should be"),
    "mask_without_offset": ("context", "loss", "context"),
    "mask_off_by_one_behind_the_first_shard": ("context", "loss", "context"),
    "keys_of_own_shard_only": ("context", "loss", "context"),
    "positions_start_again_in_each_shard": ("context", "loss", "context"),
    "sink_gradient_replicated": ("tensor", "gradient", "2 times what it should be"),
    "experts_of_last_shard_dropped": ("expert", "loss", "expert"),
    "expert_outputs_not_summed": ("expert", "loss", "expert"),
    "router_gradient_partial": ("expert", "gradient", "expert"),
    "router_gradient_replicated": ("expert", "gradient", "expert"),
    "balance_loss_by_wrong_axis_size": ("data", "loss", "data"),
    "loss_averaged_over_devices": ("data|fsdp|context|expert", "loss", "split over it"),
    "loss_averaged_over_micro_batches": ("train.accumulation", "loss", "jt.Weighted"),
    "target_of_the_last_token_of_a_shard_lost": ("context", "loss", "context"),
    "dropout_keyed_by_device": ("data|fsdp|context|expert", "loss", "split over it"),
    "dropout_alike_on_all_devices": ("data|fsdp|context|expert", "loss", "split over it"),
    "initial_values_drawn_by_mesh": ("fsdp", "initial value", "must not depend on the mesh"),
    "clipped_by_local_norm": ("tensor", "optimizer state", "tensor"),
    "norm_counts_copies": ("tensor", "clip", "not split over `tensor` are counted once on each of its 2 devices"),
    "decayed_twice_on_one_shard": ("fsdp", "update", "shard 2 of 2"),
    "moments_of_first_shard": ("fsdp", "optimizer state", "shard 2 of 2"),
    "gradient_summed_over_data_again": ("data", "gradient", "2 times what it should be"),
    "average_by_axis_size": ("data", "extra state", "data"),
    "update_differs_between_copies": ("data", "copies", "should hold the same numbers"),
    "metric_not_summed": ("data", "metric", "data"),
}


def mesh():
    """The mesh that is traced for."""
    return jax.sharding.get_abstract_mesh()


def size(axis):
    return dict(mesh().shape)[axis]


def island(function, in_specs, out_specs):
    """A function of the shards that each device holds."""
    return jax.shard_map(function, mesh=mesh(), in_specs=in_specs, out_specs=out_specs, check_vma=False)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def gradient_times(x, factor):
    return x


gradient_times.defvjp(lambda x, factor: (x, None), lambda factor, _, g: (g * factor,))


def parameters(bug=""):
    """Initial values; all are of one key."""
    def draw(n, *shape):
        key = jax.random.fold_in(jax.random.key(0), n)
        if bug == "initial_values_drawn_by_mesh" and n == 2:
            key = jax.random.fold_in(key, dict(mesh().shape).get("fsdp", 1))
        return 0.3 * jax.random.normal(key, shape)
    return {
        "embed": draw(0, VOCAB, WIDE), "places": draw(1, SEQ, WIDE), "head": draw(2, WIDE, VOCAB),
        "norm": 1 + draw(3, WIDE), "qkv": draw(4, 3, WIDE, WIDE), "sink": draw(5, 1),
        "up": draw(6, WIDE, HIDDEN), "down": draw(7, HIDDEN, WIDE), "router": draw(8, WIDE, EXPERTS),
        "expert_up": draw(9, EXPERTS, WIDE, WIDE)}


AXES = {"embed": None, "places": None, "head": ("embed", None), "norm": None, "qkv": None, "sink": None,
        "up": (None, "mlp"), "down": ("mlp", None), "router": None, "expert_up": ("experts", None, None)}


def batch(step):
    rng = np.random.default_rng(step)
    tokens = rng.integers(VOCAB, size=(ROWS, SEQ + 1))
    weights = rng.choice([0, 0.5, 1, 3], size=(ROWS, SEQ)) * rng.choice([0.2, 1, 4], size=(ROWS, 1))
    return {"tokens": tokens[:, :-1].astype(np.int32), "targets": tokens[:, 1:].astype(np.int32),
            "weights": weights.astype(np.float32)}


def norm(x, scale, bug):
    """Every device normalizes its part of the sequence."""
    if bug == "norm_gradient_of_one_sequence_shard":
        first = jnp.arange(size("context")) == 0
        scales = jnp.where(first[:, None], scale, lax.stop_gradient(scale))
    else:
        scales = jnp.broadcast_to(scale, (size("context"), WIDE))
    if bug == "norm_gradient_counted_per_tensor_shard":
        scales = gradient_times(scales, size("tensor"))
    return island(lambda x, s: x * lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5) * s[0],
                  (ACTIVATION, P("context", None)), ACTIVATION)(x, scales)


def attention(x, qkv, sink, bug):
    """Causal, over a sequence that is split: keys and values of all shards are gathered."""
    if bug == "sink_gradient_replicated":
        sink = gradient_times(sink, size("tensor"))

    def local(x, qkv, sink):
        q, k, v = jnp.einsum("btd,ndk->nbtk", x, qkv)
        here, length = lax.axis_index("context"), x.shape[1]
        mine = here * length + jnp.arange(length)
        every = jnp.arange(length * size("context"))
        if bug == "keys_of_own_shard_only":
            every = mine
        else:
            k, v = (lax.all_gather(one, "context", axis=1, tiled=True) for one in (k, v))
        if bug == "mask_without_offset":
            mine = jnp.arange(length)
        if bug == "mask_off_by_one_behind_the_first_shard":
            mine = mine - (here > 0)
        scores = jnp.where(mine[:, None] >= every, jnp.einsum("btk,bsk->bts", q, k), -1e9)
        scores = jnp.concatenate([scores, jnp.broadcast_to(sink, (*scores.shape[:2], 1))], -1)
        return jnp.einsum("bts,bsk->btk", jax.nn.softmax(scores)[..., :-1], v)
    return island(local, (ACTIVATION, P(), P()), ACTIVATION)(x, qkv, sink)


def mlp(x, up, down, bug):
    if bug == "mlp_input_gradient_counted_twice":
        x = gradient_times(x, size("tensor"))

    def local(x, up, down):
        y = jax.nn.relu(x @ up) @ down
        if bug != "mlp_without_psum":
            y = lax.psum(y, "tensor")
        if bug == "mlp_summed_twice":
            y = lax.psum(y, "tensor")
        return y / size("tensor") if bug == "mlp_divided_by_axis_size" else y
    return island(local, (ACTIVATION, P(None, "tensor"), P("tensor", None)), ACTIVATION)(x, up, down)


def experts(x, router, up, bug):
    """All tokens of the group go to the experts of each device, and what these make of them is summed."""
    if bug == "router_gradient_replicated":
        router = gradient_times(router, size("expert"))

    def local(x, router, up):
        here, many = lax.axis_index("expert"), up.shape[0]
        every = lax.all_gather(x, "expert", axis=0, tiled=True)
        weights = jax.nn.softmax(every @ router)
        own = lax.dynamic_slice_in_dim(weights, here * many, many, 2)
        if bug == "router_gradient_partial":
            own = jnp.where(here == 0, own, lax.stop_gradient(own))
        y = jnp.einsum("bte,btd,edf->btf", own, every, up)
        if bug == "experts_of_last_shard_dropped" and size("expert") > 1:
            y = jnp.where(here == size("expert") - 1, 0, y)
        if bug == "expert_outputs_not_summed":
            return lax.dynamic_slice_in_dim(y, here * x.shape[0], x.shape[0], 0)
        return lax.psum_scatter(y, "expert", scatter_dimension=0, tiled=True)
    return island(local, (ACTIVATION, P(), P("expert")), ACTIVATION)(x, router, up)


def dropout(x, key, bug):
    if bug in ("dropout_keyed_by_device", "dropout_alike_on_all_devices"):
        def local(x):
            own = key
            if bug == "dropout_keyed_by_device":
                own = jax.random.fold_in(key, lax.axis_index("data"))
            return x * jax.random.bernoulli(own, 0.8, x.shape) / 0.8
        return island(local, ACTIVATION, ACTIVATION)(x)
    return x * jax.random.bernoulli(key, 0.8, x.shape) / 0.8


def loss_fn(params, batch, key, bug=""):
    p, (tokens, targets, weights) = params, (batch[name] for name in ("tokens", "targets", "weights"))
    if bug == "gradient_summed_over_data_again":
        p = jax.tree.map(lambda x: gradient_times(x, size("data")), p)
    places = jnp.arange(SEQ) % (SEQ // size("context") if bug == "positions_start_again_in_each_shard" else SEQ)
    x = p["embed"][tokens] + p["places"][places]
    x = x + attention(norm(x, p["norm"], bug), p["qkv"], p["sink"], bug)
    x = x + dropout(mlp(norm(x, p["norm"], bug), p["up"], p["down"], bug), key, bug)
    x = x + experts(x, p["router"], p["expert_up"], bug)
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ p["head"], targets)
    if bug == "target_of_the_last_token_of_a_shard_lost":
        length = SEQ // size("context")
        lost = (jnp.arange(SEQ) % length == length - 1) & (jnp.arange(SEQ) < SEQ - 1)
        weights = jnp.where(lost, 0, weights)
    if bug == "loss_averaged_over_devices":
        def mean(losses, weights):
            return lax.pmean((losses * weights).sum() / weights.sum(), tuple(mesh().axis_names))
        return jt.Weighted(island(mean, (P(BATCH, "context"),) * 2, P())(losses, weights) * weights.sum(),
                           weights.sum())
    if bug == "loss_averaged_over_micro_batches":
        return (losses * weights).sum() / weights.sum()
    total = (losses * weights).sum()
    right = (x @ p["head"]).argmax(-1) == targets
    if bug == "metric_not_summed":
        right = island(lambda r: jnp.where(lax.axis_index("data") == 0, r, False), P(BATCH, "context"),
                       P(BATCH, "context"))(right)
    balance = 0.01 * (p["router"] ** 2).sum() * weights.sum()
    total += balance * (size("data") if bug == "balance_loss_by_wrong_axis_size" else 1)
    return jt.Weighted(total, weights.sum(), {"accuracy": (right * weights).sum()})


def by_hand(bug):
    """Clip to a norm that is always exceeded, as an optimizer of one's own does."""
    def norm_of(name, x, axes):
        if bug == "clipped_by_local_norm" and name == "up":
            return island(lambda x: (x**2).sum(), P(None, "tensor"), P())(x)
        copies = size("tensor") if bug == "norm_counts_copies" and name not in ("up", "down") else 1
        return copies * (x**2).sum()

    def update(grads, state, params=None):
        norm = jnp.sqrt(sum(norm_of(name, x, AXES[name]) for name, x in grads.items()))
        return jax.tree.map(lambda g: g * 0.1 / norm, grads), state
    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def decay(bug):
    def update(grads, state, params=None):
        def one(name, g, p):
            if name != "head":
                return g
            def local(p):
                again = (lax.axis_index("fsdp") == 1) if bug == "decayed_twice_on_one_shard" else 0
                return 0.1 * p * (1 + again)
            return g + island(local, P("fsdp"), P("fsdp"))(p)
        return {name: one(name, g, params[name]) for name, g in grads.items()}, state
    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def momentum(bug):
    def update(grads, state, params=None):
        new = jax.tree.map(lambda m, g: 0.9 * m + g, state.trace, grads)
        if bug == "moments_of_first_shard":
            new["head"] = island(lambda m: jnp.where(lax.axis_index("fsdp") == 1, 0, m), P("fsdp"), P("fsdp"))(
                new["head"])
        return new, optax.TraceState(new)
    return optax.GradientTransformation(lambda params: optax.TraceState(jax.tree.map(jnp.zeros_like, params)), update)


def noisy(bug):
    def update(grads, state, params=None):
        if bug == "update_differs_between_copies":
            grads = dict(grads, sink=island(lambda g: g + 1e-6 * lax.axis_index("data"), P(), P())(grads["sink"]))
        return grads, state
    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def optimizer(bug=""):
    return optax.chain(by_hand(bug), momentum(bug), decay(bug), optax.scale(-0.5), noisy(bug))


class Average(jt.Extension):
    """An average of the weights."""

    def __init__(self, bug=""):
        self.bug = bug

    def extra_state(self):
        return {"average": lambda params: jax.tree.map(jnp.copy, params)}

    def after_update(self, params, extras, taken, step):
        rate = 0.9 ** (size("data") if self.bug == "average_by_axis_size" else 1)
        return params, extras | {"average": jax.tree.map(
            lambda a, p: rate * a + (1 - rate) * p, extras["average"], params)}


def parts(bug=""):
    """The arguments of `jt.build` and `jt.prove` besides a config."""
    return dict(model=functools.partial(parameters, bug), loss_fn=functools.partial(loss_fn, bug=bug), axes=AXES,
                optimizer=optimizer(bug), data=jt.BatchFunction(batch), with_key=True, extensions=[Average(bug)])
