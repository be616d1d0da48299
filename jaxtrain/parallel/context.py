"""Context parallelism: attention over sequences sharded over mesh axis `context`, with balanced work.

Under causal attention late tokens attend to more keys. So a sequence is cut into 2n chunks for n devices, and device i
holds chunks i and 2n-1-i: an early and a late one, the same work for all. Three strategies give the same numbers:

- `ring`: blocks of keys and values circulate; every device works on one while the next is in transit (ring.py).
- `gather`: each device gathers keys and values for its own queries, a bounded part of the sequence at a time.
- `ulysses`: an all-to-all from sequence shards to head shards, attention over the whole sequence, and back.

Backends (`train.attention`) compute whole rows for `ulysses`, which are in their own order, and blocks or tiles for the
other two (kernels/attention/tiled.py, ring.py). strategies.py chooses.

Collectives name the axis, so all of this also runs where a surrounding `shard_map` (a pipeline's) made it manual.

Shape suffixes: B batch, T and S sequence, H query heads, G key/value heads, K head width.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxtrain.base.annotations import PyTree
from jaxtrain.kernels.attention import by_device, sinks, tiled, tiles
from jaxtrain.kernels.attention.tiles import Pull, Scoring, Tokens, merge
from jaxtrain.parallel import ring, strategies
from jaxtrain.parallel.balanced import balance, unbalance
from jaxtrain.parallel.cut_rows import AXIS, balanced_order, size
from jaxtrain.sharding import activations, axis_rules

F32 = jnp.float32
GATHERED = 2**15  # tokens whose keys and values `gather` holds at a time


def _tokens(device: jax.Array | int, n: int, tokens: int, segments_BT: jax.Array | None) -> Tokens:
    return Tokens(balanced_order(device, n, tokens), segments_BT)


def _everywhere(n: int, tokens: int) -> jax.Array:
    """Return the positions of all tokens, [n, T / n], by the device that holds them."""
    return jnp.stack([balanced_order(device, n, tokens // n) for device in range(n)])


def attend(q_BTHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, segments_BT: jax.Array | None, *, window: int,
           strategy: str, backend: str = "auto", sinks_H: jax.Array | None = None,
           soft_cap: float = 0.0) -> jax.Array:
    """Compute `models.attention.attend` for a sequence in balanced order."""
    n, heads, mesh = size(), activations.split_by("act_heads"), jax.sharding.get_abstract_mesh()
    split, G = axis_rules.shards(heads, mesh), k_BSGK.shape[2]
    if heads != activations.split_by("act_kv_heads"):
        repeats = math.lcm(G, split) // G
        # Fewer key/value heads than devices: repeated just enough that every device gets those its queries attend to.
        k_BSGK, v_BSGK = (activations.constrain(jnp.repeat(x, repeats, axis=2), "batch", "seq", "act_heads",
                                             "act_head_dim") for x in (k_BSGK, v_BSGK))
    # Within a pipeline the axis is already manual.
    stages = 1 if AXIS in axis_rules.free_axes(mesh) else mesh.shape["stage"]
    (strategy, _), backend = strategies.decide(
        strategy, backend, q_BTHK.dtype, q_BTHK.shape[1], max(q_BTHK.shape[3], v_BSGK.shape[3]), stages=stages, parts=n,
        heads=q_BTHK.shape[2] // split, soft_cap=soft_cap, packed=segments_BT is not None, sinks=sinks_H is not None)
    scoring = Scoring(window, soft_cap, backend)
    if strategy != "ulysses":
        return _attend(strategy, scoring, q_BTHK, k_BSGK, v_BSGK, segments_BT, sinks_H)
    repeats = math.lcm(k_BSGK.shape[2] // split, n) * split // k_BSGK.shape[2]
    kernel = (by_device(backend, *_specs("ulysses"), window, soft_cap) if backend != "xla" else
              partial(_attend, strategy, scoring))
    # Kept in place of the products that they are exchanged from, so that no exchange is repeated.
    q_BTHK, k_BSGK, v_BSGK = (checkpoint_name(_fewer_heads(times, x), "dots") for times, x in (
        (1, q_BTHK), (repeats, k_BSGK), (repeats, v_BSGK)))
    return _fewer_tokens(1, kernel(q_BTHK, k_BSGK, v_BSGK, None if segments_BT is None else _whole(segments_BT),
                                   None if sinks_H is None else _own_heads(sinks_H)))


def _specs(strategy: str) -> tuple[P, P]:
    """Return the specs of arrays by head and of arrays by token, inside a strategy's manual region."""
    batch, seq, heads = map(activations.split_by, ("batch", "seq", "act_heads"))
    if strategy == "ulysses":
        return P(batch, None, (*axis_rules.axes_of(heads), *axis_rules.axes_of(seq))), P(batch, None)
    return P(batch, seq, heads), P(batch, seq)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(strategy, scoring, q, k, v, segments, sinks_H):
    return _forward(strategy, scoring, q, k, v, segments, sinks_H)[0]


def _forward(strategy, scoring, q, k, v, segments, sinks_H):
    heads, tokens = _specs(strategy)

    def local(q, k, v, segments, sinks_H):
        out, lse = _STRATEGIES[strategy][0](q, k, v, segments, scoring)
        if sinks_H is not None:  # once, after all keys are merged
            out, lse = sinks.added(out, lse, sinks_H)
        return out.astype(q.dtype), lse

    specs = (heads, heads, heads, tokens, P(heads[2]))
    out, lse = activations.manual_region(local, in_specs=specs, out_specs=(heads, heads))(q, k, v, segments, sinks_H)
    # With both of these saved, no rematerialization policy recomputes attention.
    out, lse = checkpoint_name(out, "attention"), checkpoint_name(lse, "attention")
    return out, (q, k, v, segments, out, lse, sinks_H)


def _backward(strategy, scoring, saved, dout):
    heads, tokens = _specs(strategy)

    def local(q, k, v, segments, out, lse, dout):
        pull = Pull(dout, out, lse, (out.astype(F32) * dout).sum(-1))
        grads = _STRATEGIES[strategy][1](q, k, v, segments, pull, scoring)
        return tuple(g.astype(x.dtype) for g, x in zip(grads, (q, k, v), strict=True))

    specs, (*saved, sinks_H) = (heads, heads, heads, tokens, heads, heads, heads), saved
    grads = activations.manual_region(local, in_specs=specs, out_specs=(heads, heads, heads))(*saved, dout)
    if sinks_H is None:
        return *grads, None, None
    *_, out, lse = saved
    return *grads, None, sinks.gradient(sinks_H, lse, (out.astype(F32) * dout).sum(-1))


_attend.defvjp(_forward, _backward)


# -------------------------------------------------------------------------------------------------------------- gather

def _pieces(n: int, x: PyTree) -> PyTree:
    """Split [B, T / n, ...] into [pieces, B, T / n / pieces, ...], with as few pieces as the gather limit allows."""
    T = n * jax.tree.leaves(x)[0].shape[1]
    pieces = math.gcd(T // n, 2 ** math.ceil(math.log2(max(1, T / GATHERED))))
    return jax.tree.map(lambda x: jnp.moveaxis(x.reshape(len(x), pieces, -1, *x.shape[2:]), 1, 0), x)


def _gather_forward(q, k, v, segments, scoring):
    n, T = lax.axis_size(AXIS), q.shape[1]
    mine = _tokens(lax.axis_index(AXIS), n, T, segments)

    def visit(result, piece):
        (k, v, segments), at = _all(piece[0]), piece[1].reshape(-1)
        return merge(result, tiled.forward(q, k, v, mine, Tokens(at, segments), scoring)), None

    nothing = jnp.zeros((*q.shape[:-1], v.shape[-1]), F32), jnp.full(q.shape[:-1], tiles.NOTHING)
    return lax.scan(visit, nothing, (_pieces(n, (k, v, segments)), _pieces(n, _everywhere(n, n * T))))[0]


def _gather_backward(q, k, v, segments, pull, scoring):
    n, T = lax.axis_size(AXIS), q.shape[1]
    mine = _tokens(lax.axis_index(AXIS), n, T, segments)

    def visit(dq, piece):
        (k, v, segments), at = _all(piece[0]), piece[1].reshape(-1)
        ddq, *dkv = tiled.backward(q, k, v, pull, mine, Tokens(at, segments), scoring)
        return dq + ddq, [lax.psum_scatter(x, AXIS, scatter_dimension=1, tiled=True) for x in dkv]

    dq, dkv = lax.scan(visit, jnp.zeros(q.shape, F32), (_pieces(n, (k, v, segments)),
                                                        _pieces(n, _everywhere(n, n * T))))
    return dq, *(jnp.moveaxis(dx, 0, 1).reshape(x.shape) for dx, x in zip(dkv, (k, v), strict=True))


def largest_across(q: jax.Array, k: jax.Array, segments: jax.Array | None, scoring: Scoring) -> jax.Array:
    """Return the largest scores [B, H] of a device's own queries over all keys; called inside a manual region."""
    n, T = lax.axis_size(AXIS), q.shape[1]
    mine = _tokens(lax.axis_index(AXIS), n, T, segments)

    def visit(top, piece):
        (k, segments), at = _all(piece[0]), piece[1].reshape(-1)
        return jnp.maximum(top, tiles.largest(q, k, mine, Tokens(at, segments), scoring)), None

    nothing = jnp.full((len(q), q.shape[2]), tiles.NOTHING, F32)
    return lax.scan(visit, nothing, (_pieces(n, (k, segments)), _pieces(n, _everywhere(n, n * T))))[0]


def _all(tree: PyTree) -> PyTree:
    return jax.tree.map(partial(lax.all_gather, axis_name=AXIS, axis=1, tiled=True), tree)


# ------------------------------------------------------------------------------------------------------------- ulysses

@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fewer_heads(repeats: int, x: jax.Array) -> jax.Array:
    """Switch from sequence shards with all heads to head shards with the whole sequence, after repeating the heads.

    The whole sequence is in its own order, a shard in balanced order.
    """
    def exchange(x):
        x = lax.all_to_all(jnp.repeat(x, repeats, axis=2), AXIS, split_axis=2, concat_axis=1, tiled=True)
        return unbalance(x, lax.axis_size(AXIS))

    return activations.manual_region(exchange, in_specs=_specs("")[0], out_specs=_specs("ulysses")[0])(x)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fewer_tokens(repeats: int, x: jax.Array) -> jax.Array:
    """Switch back, summing repeated heads: the transpose of `_fewer_heads`."""
    def exchange(x):
        x = balance(x, lax.axis_size(AXIS))
        x = lax.all_to_all(x, AXIS, split_axis=1, concat_axis=2, tiled=True)
        return x.reshape(*x.shape[:2], -1, repeats, x.shape[3]).sum(3) if repeats > 1 else x

    return activations.manual_region(exchange, in_specs=_specs("ulysses")[0], out_specs=_specs("")[0])(x)


_fewer_heads.defvjp(lambda repeats, x: (_fewer_heads(repeats, x), None), lambda repeats, _, g: (
    _fewer_tokens(repeats, g),))
_fewer_tokens.defvjp(lambda repeats, x: (_fewer_tokens(repeats, x), None), lambda repeats, _, g: (
    _fewer_heads(repeats, g),))


def _whole(x_BT: jax.Array) -> jax.Array:
    def gather(x):
        return unbalance(_all(x), lax.axis_size(AXIS))
    return activations.manual_region(gather, in_specs=_specs("")[1], out_specs=_specs("ulysses")[1])(x_BT)


def _own_heads(x_H: jax.Array) -> jax.Array:
    """Return the part of what each head has that belongs to the heads of the devices after `_fewer_heads`."""
    def part(x_H):
        own = len(x_H) // lax.axis_size(AXIS)
        return lax.dynamic_slice_in_dim(x_H, lax.axis_index(AXIS) * own, own)
    return activations.manual_region(part, in_specs=P(_specs("")[0][2]), out_specs=P(_specs("ulysses")[0][2]))(x_H)


def _whole_forward(q, k, v, segments, scoring):
    mine = Tokens(jnp.arange(q.shape[1]), segments)
    return tiled.forward(q, k, v, mine, mine, scoring, own=True)


def _whole_backward(q, k, v, segments, pull, scoring):
    mine = Tokens(jnp.arange(q.shape[1]), segments)
    return tiled.backward(q, k, v, pull, mine, mine, scoring, own=True)


_STRATEGIES = {"ring": (ring.forward, ring.backward), "gather": (_gather_forward, _gather_backward),
               "ulysses": (_whole_forward, _whole_backward)}
