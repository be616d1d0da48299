"""Kernels inside of context parallelism: interpreted or stood in for, against plain operations on one device.

Letters: B examples, T the whole sequence, n devices along `context`, H and G query and key/value heads, K head width.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtrain as jt
from jaxtrain.kernels.attention import cudnn_attention, cudnn_kernel, cudnn_tiles, mosaic_attention, packed_attention
from jaxtrain.kernels.attention.tiles import Scoring, merge
from jaxtrain.models.attention.self_attention import attend
from jaxtrain.parallel import ring
from jaxtrain.parallel.balanced import balance, unbalance
from jaxtrain.plan import targets
from jaxtrain.plan.trace import kernels as costs
from jaxtrain.plan.trace import reader
from jaxtrain.run import shapes_of
from jaxtrain.sharding import mesh_context
from tests.kernels.interpreted import interpreted, needs_mosaic  # noqa: F401

B, K = 2, 64


def arrays(T, H, G, V=K):
    rng = np.random.default_rng(0)
    shapes = (B, T, H, K), (B, T, G, K), (B, T, G, V), (B, T, H, V)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def documents(T, seed=0):
    """Documents that begin anywhere, and padding."""
    rng = np.random.default_rng(seed)
    ids = np.cumsum(rng.random((B, T)) < 4 / T, 1).astype(np.int32) + 1
    return jnp.asarray(np.where(np.arange(T) >= T - np.array([[0], [T // 7]]), 0, ids))


def gradients(q, k, v, pull, segments, **keys):
    """Return output, dq, dk, dv."""
    out, back = jax.vjp(lambda q, k, v: attend(q, k, v, segments_BT=segments, **keys), q, k, v)
    return out, *back(pull)


def spread(n, given, segments, **keys):
    """Return the same of a sequence cut over n devices."""
    mesh = jt.make_mesh(context=n, devices=jax.devices()[:n])
    with mesh_context.use(mesh, jt.rules()):
        held = [x if x is None else jax.device_put(balance(x, n), NamedSharding(mesh, P(None, "context")))
                for x in (*given, segments)]
        found = jax.jit(functools.partial(gradients, **keys))(*held)
    return [unbalance(jnp.asarray(np.asarray(x)), n) for x in found]


def same(got, want):
    for name, one, other in zip(("output", "dq", "dk", "dv"), got, want, strict=True):
        off = float(np.abs(one - other).max() / max(np.abs(other).max(), 1e-30))
        assert off < 1e-5, f"{name} is off by {off:.1e} of its largest element"


# --------------------------------------------------------------------------------------------- jaxtrain's own kernels

CASES = [  # devices, tokens, heads, packed, window, soft cap
    (2, 256, (1, 1), True, 0, 0.0), (2, 512, (2, 1), True, 0, 0.0), (2, 200, (2, 1), False, 70, 3.0),
    (4, 640, (2, 2), True, 200, 0.0)]


def plainly(options, q, k, v, seen, lse=None):
    """Return scores to base 2 as the kernels compute them, which are hidden, and the heads' keys and values."""
    *_, soft_cap, scale = options
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bthk,bshk->bhts", q, k, precision="highest") * scale
    capped = soft_cap * jnp.tanh(scores / soft_cap) if soft_cap else scores
    slope = 1 - (capped / soft_cap)**2 if soft_cap else 1.0
    place = jnp.arange(seen.shape[2])
    first, last = seen[:, 0], seen[:, 1]
    shown = (place >= first[:, :, None]) & (place <= last[:, :, None])
    return capped / packed_attention.LN2, slope, shown[:, None], k, v


def results(options, q, k, v, seen):
    scores, _, shown, _, v = plainly(options, q, k, v, seen)
    scores = jnp.where(shown, scores, -1e30)
    top = jnp.maximum(scores.max(-1, keepdims=True), -1e30)
    weights = jnp.where(shown, jnp.exp2(scores - top), 0)
    total = jnp.maximum(weights.sum(-1, keepdims=True), 1e-30)
    return (jnp.einsum("bhts,bshk->bthk", weights / total, v, precision="highest").astype(q.dtype),
            (top + jnp.log2(total))[..., 0])


def pulled(options, q, k, v, pull, lse, delta, seen, by_query):
    seen = seen if by_query else seen[:, ::-1]
    scores, slope, shown, k, v = plainly(options, q, k, v, seen)
    if not by_query:
        place = jnp.arange(q.shape[1])[:, None]
        shown = ((place >= seen[:, 0][:, None]) & (place <= seen[:, 1][:, None]))[:, None]
    weights = jnp.where(shown, jnp.exp2(jnp.minimum(scores - lse[..., None], 60)), 0)
    pulls = jnp.einsum("bthk,bshk->bhts", pull, v, precision="highest") - delta[..., None]
    return weights, weights * slope * pulls * options[-1], k


def by_queries(options, q, k, v, pull, lse, delta, seen):
    _, dscores, k = pulled(options, q, k, v, pull, lse, delta, seen, True)
    return jnp.einsum("bhts,bshk->bthk", dscores, k, precision="highest")


def by_keys_and_values(options, q, k, v, pull, lse, delta, seen):
    weights, dscores, _ = pulled(options, q, k, v, pull, lse, delta, seen, False)
    sums = (jnp.einsum("bhts,bthk->bshk", x, y, precision="highest") for x, y in ((dscores, q), (weights, pull)))
    return tuple(x.reshape(*x.shape[:2], k.shape[2], -1, x.shape[3]).sum(3) for x in sums)


@pytest.fixture
def stood_in(monkeypatch):
    """Plain operations in place of the kernels, which Pallas's interpreter runs on one device at a time only."""
    from tests.kernels.interpreted import interpret

    interpret(monkeypatch)
    for name, one in {"_results": results, "_by_queries": by_queries,
                      "_by_keys_and_values": by_keys_and_values}.items():
        monkeypatch.setattr(packed_attention, name, one)


@needs_mosaic
@pytest.mark.parametrize("case", [CASES[0], *(pytest.param(case, marks=pytest.mark.slow) for case in CASES[1:])],
                         ids=str)
def test_the_ring_by_kernels_has_the_numbers_of_one_device(case, stood_in):
    n, T, heads, packed, window, soft_cap = case
    given, segments = arrays(T, *heads), documents(T) if packed else None
    more = dict(window=window, soft_cap=soft_cap, sinks_H=jnp.asarray([0.5, -1.0]) if soft_cap else None)
    want = jax.jit(functools.partial(gradients, backend="xla", **more))(*given, segments)
    same(spread(n, given, segments, backend="mosaic", context="ring", **more), want)


@needs_mosaic
@pytest.mark.parametrize("case", [CASES[0], *(pytest.param(case, marks=pytest.mark.slow) for case in CASES[1:])],
                         ids=str)
def test_kernels_compute_what_stands_in_for_them(case, interpreted, monkeypatch):  # noqa: F811
    """Each device's queries with each block, merged as the ring does: interpreted, on one device."""
    n, T, heads, packed, window, soft_cap = case
    (q, k, v, pull), segments = arrays(T, *heads), documents(T) if packed else jnp.zeros((B, T), jnp.int32)
    blocks = ring.ranges_of(segments, n, Scoring(window, soft_cap, "mosaic"))
    held = [jnp.split(balance(x, n), n, 1) for x in (q, k, v, pull)]
    want = jax.jit(functools.partial(gradients, backend="xla", window=window, soft_cap=soft_cap))(
        q, k, v, pull, segments)
    outs, dqs, dkvs = [], [], [0] * n
    for me, (q, _, _, pull) in enumerate(zip(*held, strict=True)):
        parts = [packed_attention.part(mosaic_attention.WIDTHS, q, held[1][other], held[2][other],
                                       blocks.ranges(me, other), window, soft_cap)
                 for other in range(n)]
        out, lse = functools.reduce(merge, parts)
        assert all(np.isfinite(x).all() for part in parts for x in part)
        found = [packed_attention.part_gradients(
            mosaic_attention.WIDTHS, q, held[1][other], held[2][other], pull, lse, (out * pull).sum(-1),
            blocks.ranges(me, other), window, soft_cap) for other in range(n)]
        outs.append(out)
        dqs.append(sum(dq for dq, *_ in found))
        dkvs = [np.asarray(dkv) + so_far for (_, *dkv), so_far in zip(
            [(dq, *map(np.asarray, dkv)) for dq, *dkv in found], dkvs, strict=True)]
    dks, dvs = zip(*dkvs, strict=True)
    same([unbalance(jnp.concatenate(x, 1), n) for x in (outs, dqs, dks, dvs)], want)


def test_blocks_are_ranges_and_half_of_all_pairs_on_every_device():
    n, T = 4, 64
    segments = jnp.zeros((1, T), jnp.int32)
    blocks = ring.ranges_of(segments, n, Scoring(kernel="mosaic"))
    for me in range(n):
        counts = []
        for source in range(n):
            ranges = [np.asarray(x)[0] for x in blocks.ranges(me, source)]
            assert all((np.diff(x) >= 0).all() for x in ranges), "the kernels read the ends of tiles only"
            place = np.arange(T // n)
            by_query = (place >= ranges[0][:, None]) & (place <= ranges[1][:, None])
            by_key = (place[:, None] >= ranges[2]) & (place[:, None] <= ranges[3])
            np.testing.assert_array_equal(by_query, by_key)
            counts.append(by_query.sum())
        assert counts.pop(me) == (T // n) * (T // n + 1) // 2 and set(counts) == {(T // n)**2 // 2}


# ------------------------------------------------------------------------------------------------------ cuDNN in tiles

def plain_part(q, k, v, seen):
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bthk,bshk->bhts", q, k, precision="highest") / np.sqrt(q.shape[3])
    shown = jnp.ones((1, *scores.shape[2:]), bool) if seen is None else seen
    scores = jnp.where(shown[:, None], scores, -1e30)
    lse = jax.nn.logsumexp(scores, -1)
    weights = jnp.where(shown[:, None], jnp.exp(scores - lse[..., None]), 0)
    some = shown.any(-1)[:, None]
    return (jnp.einsum("bhts,bshk->bthk", weights, v, precision="highest"),
            jnp.where(some, lse, cudnn_kernel.LOWEST).swapaxes(1, 2))


def plain_part_gradients(q, k, v, pull, out, lse, seen):
    def weighed(q, k, v):
        """Return a number with the gradients that are asked for: those of all keys' softmax with this normalizer."""
        many_k, many_v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        scores = jnp.einsum("bthk,bshk->bhts", q, many_k, precision="highest") / np.sqrt(q.shape[3])
        weights = jnp.exp(scores - lse.swapaxes(1, 2)[..., None])
        weights = weights if seen is None else jnp.where(seen[:, None], weights, 0)
        pulls = jnp.einsum("bthk,bshk->bhts", pull, many_v, precision="highest")
        delta = (pull * out).sum(-1).swapaxes(1, 2)[..., None]
        return (weights * (pulls - delta)).sum()

    return jax.grad(weighed, (0, 1, 2))(q, k, v)


@pytest.fixture
def cudnn(monkeypatch):
    """Plain operations in place of cuDNN, in tiles of 8 tokens."""
    monkeypatch.setattr(cudnn_attention, "refusal", lambda *_, **__: "")
    monkeypatch.setattr(cudnn_attention, "LONG", 16)
    monkeypatch.setattr(cudnn_tiles, "SMALLER", 8)
    monkeypatch.setattr(cudnn_tiles, "LARGER", 16)
    monkeypatch.setattr(cudnn_kernel, "part", plain_part)
    monkeypatch.setattr(cudnn_kernel, "part_gradients", plain_part_gradients)


@pytest.mark.parametrize(("strategy", "n", "packed", "window", "values"), [
    ("ring", 2, True, 0, K), ("whole", 1, True, 0, K), ("gather", 2, True, 21, K),
    pytest.param("ring", 4, False, 21, K // 2, marks=pytest.mark.slow),
    pytest.param("ulysses", 2, True, 5, K, marks=pytest.mark.slow)], ids=str)
def test_tiles_by_cudnn_have_the_numbers_of_one_device(strategy, n, packed, window, values, cudnn):
    given, segments = arrays(64, 4, 2, values), documents(64) if packed else None
    want = jax.jit(functools.partial(gradients, backend="xla", window=window))(*given, segments)
    if strategy == "whole":
        got = jax.jit(functools.partial(gradients, backend="cudnn", window=window))(*given, segments)
    else:
        got = spread(n, given, segments, backend="cudnn", context=strategy, window=window)
    same(got, want)


# ---------------------------------------------------------------------------------------------------- splash attention

@pytest.mark.parametrize(("n", "tokens", "packed", "soft_cap", "window"), [
    (2, 512, True, 0.0, 0), pytest.param(4, 200, False, 3.0, 0, marks=pytest.mark.slow),
    pytest.param(2, 64, True, 0.0, 9, marks=pytest.mark.slow)], ids=str)  # a window: in plain tiles
def test_the_ring_by_splash_attention_has_the_numbers_of_one_device(n, tokens, packed, soft_cap, window):
    given, segments = arrays(tokens, 2, 1), documents(tokens) if packed else None
    more = dict(soft_cap=soft_cap, window=window)
    want = jax.jit(functools.partial(gradients, backend="xla", **more))(*given, segments)
    same(spread(n, given, segments, backend="splash", context="ring", **more), want)


# ------------------------------------------------------------------------------------------------------ what is planned

def counted(strategy, remat="attention"):
    """Return the FLOP of attention's kernels on a device, as the planner counts them."""
    keys = {"mesh.data": 1, "mesh.fsdp": 1, "mesh.context": 4, "mesh.context_strategy": strategy, "train.remat": remat,
            "model.num_layers": 2, "model.embed_dim": 512, "model.num_heads": 8, "model.num_kv_heads": 4,
            "model.head_dim": 64, "model.mlp_dim": 512, "model.vocab_size": 512, "model.max_seq_len": 8192,
            "data.seq_len": 8192, "data.global_batch_size": 1, "train.accumulation": 1, "train.unroll": 1}
    target = targets.TARGETS["h100"]
    with costs.stand_ins():
        run = jt.build(jt.load_config("configs/llama3_8b.py", keys), devices=4, platform=target.described)
        traced = run.sharded.trace(shapes_of(run).abstract())
    block = reader.read(traced.jaxpr, dict(run.mesh.shape), target.platform, target.rings, 0, run.config.model.windows)
    return sum(op.flops * times for op, times in block.all() if op.name in costs.MOSAIC.values())


@needs_mosaic
def test_the_planner_counts_every_block_of_a_ring():
    """Also those in a loop of a rematerialized layer."""
    whole = counted("ulysses")
    assert counted("ring") == pytest.approx(whole, rel=0.06)
    assert counted("ring", "full") == pytest.approx(11 / 9 * whole, rel=0.06)  # the two products forward once more
