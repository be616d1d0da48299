"""Sequences over several devices: the numbers of one device, balanced work, falling memory, and few words between them.

Letters: B examples on one device, T the whole sequence, n devices along `context`, H and G query and key/value heads,
K head width.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtrain as jt
from jaxtrain.kernels import attention as kernels
from jaxtrain.kernels.attention import tiles
from jaxtrain.models.attention.self_attention import attend
from jaxtrain.parallel import context, cut_rows, strategies
from jaxtrain.plan import hlo
from jaxtrain.run import across_context
from jaxtrain.sharding import activations, mesh_context
from jaxtrain.trainer.reporting import summary
from tests.numerics import reference
from tests.tiers import slow_if

SLOW = pytest.mark.slow
STRATEGIES = ("ring", "gather", "ulysses")
FIRST = [pytest.param("ring", marks=SLOW),
         *(pytest.param(strategy, marks=pytest.mark.exhaustive) for strategy in STRATEGIES[1:])]
B, T, K = 4, 32, 8
HEADS = ("batch", "seq", "act_heads", None)
KV_HEADS = ("batch", "seq", "act_kv_heads", None)


def mesh_of(**sizes):
    return jt.make_mesh(**sizes, devices=jax.devices()[: math.prod(sizes.values())])


def order(n, tokens):
    """Return the order of tokens: device i has chunks i and 2n-1-i of 2n."""
    chunks = np.arange(tokens).reshape(2 * n, -1)
    return np.concatenate([chunks[[i, 2 * n - 1 - i]].ravel() for i in range(n)])


@functools.cache
def arrays(heads, kv_heads, seed=0):
    """q, k, v, what pulls on the output, and segments with padding at the end."""
    rng = np.random.default_rng(seed)
    q, k, v, pull = (rng.normal(size=(B, T, h, K)).astype(np.float32) for h in (heads, kv_heads, kv_heads, heads))
    segments = np.cumsum(rng.random((B, T)) < 0.12, 1).astype(np.int32) + 1
    return q, k, v, pull, np.where(np.arange(T) >= T - rng.integers(0, 6, size=(B, 1)), 0, segments)


def gradients(q, k, v, pull, segments, **keys):
    """Return output, dq, dk, dv."""
    out, back = jax.vjp(lambda q, k, v: attend(q, k, v, segments_BT=segments, **keys), q, k, v)
    return out, *back(pull.astype(out.dtype))


@functools.cache
def one_device(heads, kv_heads, packed, window):
    q, k, v, pull, segments = arrays(heads, kv_heads)
    return jax.jit(functools.partial(gradients, window=window, backend="xla"))(
        q, k, v, pull, segments if packed else None)


def spread(rules, **sizes):
    """(run, place, back): compile for a mesh, put an array on it in balanced order, and undo that."""
    mesh, turn = mesh_of(**sizes), order(sizes["context"], T)

    def place(x, names):
        with mesh_context.use(mesh, rules):
            spec = activations.activation_spec(*names)
        return jax.device_put(x[:, turn], NamedSharding(mesh, spec))

    def run(f, *args):
        with mesh_context.use(mesh, rules):
            return jax.jit(f).lower(*args).compile(compiler_options=reference.QUICKLY)(*args)

    return run, place, lambda x: np.asarray(x)[:, np.argsort(turn)]


CASES = [  # mesh, heads, key/value heads, packed, window, small tiles
    (dict(context=2, tensor=2), (8, 4), True, 0, False), (dict(context=4), (8, 2), True, 9, True),
    (dict(data=2, context=4), (4, 1), False, 5, False), (dict(context=8), (8, 8), True, 0, True),
    (dict(context=2, fsdp=2, tensor=2), (8, 1), True, 0, True),  # one key/value head for two devices of `tensor`
]
SOME = [("ring", 2), ("ulysses", 2)]  # neither packed


@pytest.mark.parametrize(("strategy", "sizes", "heads", "packed", "window", "small"), [
    pytest.param(strategy, *case, marks=[] if i in (1, 4) else slow_if((strategy, i) in SOME))
    for strategy in STRATEGIES for i, case in enumerate(CASES)] + [
        ("auto", dict(context=4), (6, 3), True, 0, False)], ids=str)  # heads that do not divide
def test_attention_has_the_output_and_gradients_of_one_device(strategy, sizes, heads, packed, window, small,
                                                              monkeypatch):
    if small:  # several tiles and several pieces, of 2 tokens or so
        monkeypatch.setattr(tiles, "SCORES", 4 * B * heads[0])
        monkeypatch.setattr(context, "GATHERED", T // 2)
    # Fewer key/value heads than devices of `tensor`: they are whole on each.
    whole = heads[1] % sizes.get("tensor", 1) != 0
    run, place, back = spread(jt.rules(**({"act_kv_heads": None} if whole else {})), **sizes)
    q, k, v, pull, segments = arrays(*heads)
    got = run(functools.partial(gradients, window=window, context=strategy),
              place(q, HEADS), place(k, KV_HEADS), place(v, KV_HEADS), place(pull, HEADS),
              place(segments, HEADS[:2]) if packed else None)
    for name, got, want in zip(("output", "dq", "dk", "dv"), got, one_device(*heads, packed, window), strict=True):
        off = float(np.abs(back(got) - want).max() / np.abs(want).max())
        assert off < 1e-5, f"{name} is off by {off:.1e} of its largest element"


@pytest.mark.parametrize("strategy", FIRST)
def test_values_may_be_narrower_than_keys(strategy):
    run, place, back = spread(jt.rules(), context=4)
    q, k, v, pull, segments = arrays(8, 2)
    v, pull = v[..., :K // 2], pull[..., :K // 2]
    got = run(functools.partial(gradients, context=strategy), *(place(x, HEADS) for x in (q, k, v, pull)),
              place(segments, HEADS[:2]))
    want = jax.jit(functools.partial(gradients, backend="xla"))(q, k, v, pull, segments)
    for got, want in zip(got, want, strict=True):
        np.testing.assert_allclose(back(got), want, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("strategy", FIRST)
def test_bfloat16_loses_no_more_than_rounding(strategy):
    run, place, back = spread(jt.rules(), context=4)
    q, k, v, pull, segments = arrays(8, 4)
    half = [place(x.astype(jnp.bfloat16), HEADS) for x in (q, k, v, pull)]
    f, args = functools.partial(gradients, context=strategy), (*half, place(segments, HEADS[:2]))
    got = run(f, *args)
    with mesh_context.use(mesh_of(context=4), jt.rules()):
        products = {eqn.outvars[0].aval.dtype for eqn in equations(jax.make_jaxpr(f)(*args).jaxpr)
                    if eqn.primitive.name == "dot_general"}
    assert products == {jnp.dtype(jnp.float32)}, "a product is rounded before it is summed"
    for got, want in zip(got, one_device(8, 4, True, 0), strict=True):
        assert got.dtype == jnp.bfloat16
        assert np.abs(back(got).astype(np.float32) - want).max() < 2**-5 * np.abs(want).max()


def test_both_ways_padding_may_come_before_other_tokens(monkeypatch):
    """Since devices have tokens in balanced order; cuDNN, here by plain operations, cannot be given lengths then."""
    run, place, back = spread(jt.rules(), context=2)
    (q, k, v, *_), there = arrays(2, 2), np.arange(T) < np.array([[T], [25], [9], [1]])
    want = attend(q, k, v, segments_BT=jnp.asarray(there), causal=False)
    real = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *given, implementation, **keys: real(
        *given, implementation="xla", **keys))
    monkeypatch.setattr(kernels, "choose_backend", lambda *_, **__: "cudnn")
    got = run(lambda q, k, v, there: attend(q, k, v, segments_BT=there, causal=False),
              *(place(x, HEADS) for x in (q, k, v)), place(there, HEADS[:2]))
    np.testing.assert_allclose(back(got)[there], want[there], atol=1e-5)


@pytest.mark.parametrize("strategy", ["gather", "ulysses"])
def test_inside_a_pipeline(strategy):
    """Axes made manual around it, and only one stage attends."""
    sizes = dict(stage=2, context=2, tensor=2)
    run, place, back = spread(jt.rules(), **sizes)

    def stages(*args):
        def attends(q, k, v):
            return lax.cond(lax.axis_index("stage") == 1,
                            lambda: attend(q, k, v, segments_BT=args[4], window=9, context=strategy),
                            lambda: jnp.zeros_like(q))
        out, pullback = jax.vjp(attends, *args[:3])
        return [x[None] for x in (out, *pullback(args[3]))]

    outer = jax.shard_map(stages, in_specs=P(None, "context"), out_specs=P("stage", None, "context"),
                          axis_names={"data", "fsdp", "stage", "context", "expert"}, check_vma=False)
    q, k, v, pull, segments = arrays(8, 4)
    got = run(outer, *(place(x, HEADS) for x in (q, k, v, pull)), place(segments, HEADS[:2]))
    for got, want in zip(got, one_device(8, 4, True, 9), strict=True):
        assert not np.asarray(got)[0].any(), "a stage that did not attend has something to say"
        np.testing.assert_allclose(back(np.asarray(got)[1]), want, atol=1e-5 * np.abs(want).max())


# ------------------------------------------------------------------------------------------------------ the whole model

# Of auto, what it chooses; of 16 heads and 8 of keys, tensor=2 leaves each device 8 and 4.
MODELS = [("gpt2", (2, 1, 1), 4, "ring"), ("qwen3", (1, 1, 1), 4, "auto: ulysses"),
          pytest.param("qwen3", (1, 2, 2), 2, "auto: ulysses", marks=SLOW),
          pytest.param("llama", (1, 1, 1), 2, "gather", marks=pytest.mark.exhaustive)]
# 4 meshes of each family, so that the strategies, dealt in turn, meet every mesh and family; the fuzz meets the rest.
MORE = [*itertools.product(("gpt2", "llama", "qwen3"), ((1, 1, 1), (1, 1, 2), (1, 2, 2), (2, 1, 2)), (2,)),
        *itertools.product(("gpt2", "llama", "qwen3"), ((1, 1, 1), (2, 1, 1)), (4,)),
        *itertools.product(("gpt2", "llama", "qwen3"), ((1, 1, 1),), (8,))]


@pytest.mark.parametrize(("family", "mesh", "n", "strategy"), MODELS, ids=str)
def test_a_model_has_the_loss_and_gradients_of_one_device(family, mesh, n, strategy):
    asked, _, chosen = strategy.partition(": ")
    run = reference.build(family, mesh, mesh__context=n, mesh__context_strategy=asked)
    assert across_context.of(run).name == (chosen or asked)
    config, batch = reference.tiny(family), reference.batch(0)
    want = jax.jit(jax.value_and_grad(lambda p: reference.loss(config.model, p, batch)))(reference.initial(family))
    params = jax.device_put(reference.initial(family), run.layout.state.params)
    placed = run.sharded.place(batch)

    def mean(params, batch):
        total, weight, _ = run.objective.loss(params, batch)
        return total / weight

    with mesh_context.use(run.mesh, run.sharded.rules):
        compiled = jax.jit(jax.value_and_grad(mean)).lower(params, placed).compile(
            compiler_options=reference.QUICKLY)
    loss, grads = compiled(params, placed)
    assert float(loss) == pytest.approx(float(want[0]), rel=1e-5)
    error, leaf = reference.worst(grads, want[1], floor=1e-3)
    assert error < 1e-5, f"the gradient of {leaf} is off by {error:.1e} of its largest element"


@pytest.mark.exhaustive  # the loss and gradients of one step are in the other tiers
@pytest.mark.parametrize(("family", "mesh", "n", "strategy"), [
    (*case, strategy) for case, strategy in zip(MORE, itertools.cycle(STRATEGIES))], ids=str)
def test_training_has_the_numbers_of_one_device(family, mesh, n, strategy):
    policies = ("none", "full", "dots", "attention", "attention_and_dots")
    remat = policies[(n + len(family) + mesh[1]) % len(policies)]
    run = reference.build(family, mesh, mesh__context=n, mesh__context_strategy=strategy, train__remat=remat,
                          train__accumulation=n // 2)
    reference.check(run, family)


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["gather", "ulysses"])
@pytest.mark.parametrize("tensor", [1, 2])
def test_training_in_a_pipeline_has_the_numbers_of_one_device(tensor, strategy):
    run = reference.build("qwen3", (1, 1, tensor), mesh__context=2, mesh__stage=2, mesh__context_strategy=strategy)
    reference.check(run, "qwen3")


@pytest.mark.slow
def test_evaluation_has_the_loss_of_one_device():
    one, spread = reference.build("gpt2"), reference.build("gpt2", (1, 1, 1), mesh__context=4)
    sums = [run.sharded.evaluate(reference.start(run), reference.batch(0)) for run in (one, spread)]
    np.testing.assert_allclose(*map(np.asarray, sums), rtol=1e-6)


# ------------------------------------------------------------------------------------------------- the order of tokens

def test_a_batch_is_arranged_without_a_word_between_devices():
    mesh, n = mesh_of(data=2, context=4), 4
    x = np.arange(B * T).reshape(B, T).astype(np.int32)
    with mesh_context.use(mesh, jt.rules()):
        placed = jax.device_put({"tokens": x}, NamedSharding(mesh, P("data", None)))
        compiled = jax.jit(cut_rows.arrange).lower(placed).compile()
        got = compiled(placed)["tokens"]
    np.testing.assert_array_equal(got, x[:, order(n, T)])
    assert got.sharding.spec == P("data", "context")
    assert not hlo.collectives(compiled.as_text())


@pytest.mark.parametrize("n", [2, 4, 8])
def test_every_device_has_the_same_number_of_pairs(n):
    at = order(n, T).reshape(n, -1)
    assert len({int((device + 1).sum()) for device in at}) == 1, "a causal query at t has t + 1 keys"
    np.testing.assert_array_equal(context._everywhere(n, T), at)


@pytest.mark.parametrize("window", [0, 3])
def test_a_tile_is_passed_over_only_where_nobody_sees_anybody(window):
    rng, passed = np.random.default_rng(0), 0
    for _ in range(300):
        ends = [np.sort(rng.integers(1, 6, size=(2, 4)), 1) for _ in "qk"]
        queries, keys = (tiles.Tokens(rng.integers(20) + np.arange(4), segments) for segments in ends)
        same = (queries.segments[:, :, None] == keys.segments[:, None, :]).any(0)
        behind = queries.at[:, None] - keys.at
        sees = (same & (behind >= 0) & ((behind < window) if window else True)).any()
        meets = bool(tiles.meet(queries, keys, window))
        assert meets or not sees
        passed += not meets
    assert passed > 50, "hardly anything is passed over, so this proves little"


@pytest.mark.parametrize(("n", "window"), [(1, 0), (2, 0), (4, 0), (1, 5), (2, 5), (4, 9)])
def test_tiles_above_the_diagonal_are_not_even_looked_at(n, window):
    """On a device's own keys; with a window nor are those far below it, and none is left out that is seen."""
    for device in range(n):
        mine = tiles.Tokens(cut_rows.balanced_order(device, n, T // n), None)
        at = np.asarray(mine.at).reshape(-1, 2)
        pairs = {tuple(pair) for pair in tiles.pairs(mine, mine, 2, window, own=True).tolist()}
        behind = at[:, None, :, None] - at[None, :, None, :]
        seen = ((behind >= 0) & (behind < (window or T))).any((2, 3))
        assert {*zip(*np.nonzero(seen), strict=True)} <= pairs
        assert len(pairs) == len(at) * (len(at) + 1) // 2 if not window else len(pairs) < 4 * len(at)


# --------------------------------------------------------------------------------------------------- work and memory

def attention(strategy, n, tokens, heads=8, kv_heads=2, head_dim=64, gradient=True):
    """(function, abstract arguments) of attention alone, on n devices."""
    mesh, where = mesh_of(context=n), P(None, "context" if n > 1 else None)
    shapes = [(1, tokens, h, head_dim) for h in (heads, kv_heads, kv_heads)]
    args = [jax.ShapeDtypeStruct(s, jnp.float32, sharding=NamedSharding(mesh, where)) for s in shapes]
    segments = jax.ShapeDtypeStruct((1, tokens), jnp.int32, sharding=NamedSharding(mesh, where))

    def forward(q, k, v, segments):
        return attend(q, k, v, segments_BT=segments, context=strategy)

    def backward(q, k, v, segments):
        return jax.grad(lambda *qkv: jnp.square(forward(*qkv, segments)).sum(), argnums=(0, 1, 2))(q, k, v)

    return mesh, backward if gradient else forward, (*args, segments)


def temporary(strategy, n, tokens):
    mesh, f, args = attention(strategy, n, tokens)
    with mesh_context.use(mesh, jt.rules()):
        return jax.jit(f).lower(*args).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("strategy", FIRST)
def test_memory_of_attention_falls_as_the_context_axis_grows(strategy):
    sizes = {n: temporary(strategy, n, 2048) for n in (2, 4, 8)}
    print(f"{strategy}: MiB of temporaries on each device", {n: round(size / 2**20, 1) for n, size in sizes.items()})
    assert sizes[4] < 0.6 * sizes[2] and sizes[8] < 0.6 * sizes[4]


@pytest.mark.parametrize("strategy", FIRST)
def test_memory_of_attention_grows_no_faster_than_the_sequence(strategy):
    short, long = (temporary(strategy, 4, tokens) for tokens in (16384, 32768))
    print(f"{strategy}: {short / 2**20:.0f} MiB at 16,384 tokens, {long / 2**20:.0f} at 32,768")
    assert long < 2.1 * short


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_loop_over_layers_makes_no_masks_of_all_tiles_before_it(strategy, monkeypatch):
    """As JAX does with what depends on no layer; they took eight times the memory of the rest."""
    monkeypatch.setattr(tiles, "SCORES", 2**10)
    mesh, f, (q, k, v, segments) = attention(strategy, 4, 256, gradient=False)

    def layers(q, k, v, segments):
        return jnp.square(lax.scan(lambda x, _: (f(x, k, v, segments), None), q, length=2)[0]).sum()

    with mesh_context.use(mesh, jt.rules()):
        found = equations(jax.make_jaxpr(jax.grad(layers))(q, k, v, segments).jaxpr)
    masks = [out.aval.size for eqn in found for out in eqn.outvars if out.aval.dtype == bool]
    assert masks and max(masks) <= tiles.SCORES


def inside(eqn):
    """The programs that an equation calls."""
    subs = [getattr(leaf, "jaxpr", leaf) for leaf in jax.tree.leaves(list(eqn.params.values()))]
    return [sub for sub in subs if hasattr(sub, "eqns")]


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for sub in inside(eqn):
            yield from equations(sub)


def flops(jaxpr):
    """Return the FLOPs of all matmuls. A branch that may be skipped counts as if it is not; others must be alike."""
    total = 0
    for eqn in jaxpr.eqns:
        subs = inside(eqn)
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            summed = math.prod(eqn.invars[0].aval.shape[d] for d in contracted)
            total += 2 * summed * math.prod(eqn.outvars[0].aval.shape)
        elif eqn.primitive.name == "cond":
            costs = {flops(sub) for sub in subs} - {0}
            assert len(costs) <= 1, f"one device multiplies more than another: {costs}"
            assert not any(word in str(eqn) for word in ("ppermute", "all_gather", "psum")), "a collective in a branch"
            total += max(costs, default=0)
        else:
            total += eqn.params.get("length", 1) * sum(map(flops, subs))
    return total


@pytest.mark.parametrize("n", [2, 8])
@pytest.mark.parametrize("gradient", [False, True])
def test_each_hop_of_the_ring_multiplies_half_a_block_on_every_device(n, gradient):
    tokens, heads, width = 256, 8, 64
    mesh, f, args = attention("ring", n, tokens, gradient=gradient)
    with mesh_context.use(mesh, jt.rules()):
        got = flops(jax.make_jaxpr(f)(*args).jaxpr)
    block = 2 * heads * (tokens // n) ** 2 * width  # one matmul of all queries with all keys of a device
    assert got == (2 + 5 * gradient) * (1 + (n - 1) / 2) * block


# ------------------------------------------------------------------------------------------------- what devices say

def said(strategy, n, layers=2, tokens=64, heads=8, kv_heads=2, width=16):
    """Collectives of `layers` of attention, forward and backward; the bytes of the formulas; a bound for segments."""
    mesh = mesh_of(context=n)
    where = NamedSharding(mesh, P(None, "context"))
    x = jax.ShapeDtypeStruct((1, tokens, heads, width), jnp.float32, sharding=where)
    segments = jax.ShapeDtypeStruct((1, tokens), jnp.int32, sharding=where)

    def stack(x, segments):
        def layer(x, _):
            k, v = x[:, :, :kv_heads], 2 * x[:, :, :kv_heads]
            return attend(x, k, v, segments_BT=segments, context=strategy), None
        return jnp.square(lax.scan(layer, x, length=layers)[0]).sum()

    with mesh_context.use(mesh, jt.rules()):
        found = hlo.collectives(jax.jit(jax.grad(stack)).lower(x, segments).compile().as_text())
    block = 2 * tokens // n * kv_heads * width * 4  # keys and values of one device
    kept = 2 * tokens // n * (heads + math.lcm(kv_heads, n)) * width * 4
    each = {
        "ring": {"collective-permute": 2 * (n - 1) * block + n * block},
        "gather": {"all-gather": 2 * n * block, "reduce-scatter": block},
        "ulysses": {"all-to-all": 2 * kept},
    }[strategy]
    return found, {kind: layers * each.get(kind, 0) for kind in hlo.KINDS}, layers * 2 * 4 * tokens


@pytest.mark.parametrize("n", [pytest.param(2, marks=SLOW), pytest.param(4, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_strategy_says_what_its_formula_says(strategy, n):
    found, want, all_segments = said(strategy, n)
    integers = [c for c in found if {dtype for dtype, _ in c.arrays} == {"s32"}]
    got = {kind: hlo.total([c for c in found if c not in integers], kind) for kind in hlo.KINDS}
    assert got == want, hlo.table(found)
    # Segments go with the keys, or once for all layers where the compiler sees that they stay.
    assert sum(c.bytes for c in integers) <= all_segments


@pytest.mark.exhaustive
def test_kept_attention_is_not_computed_again():
    """Its two outputs are all that the policy keeps, and they suffice."""
    hops = {remat: reference.build("gpt2", (1, 1, 1), mesh__context=2, mesh__context_strategy="ring",
                                   train__remat=remat).lower().as_text().count("collective_permute")
            for remat in ("none", "attention", "full")}
    assert hops["none"] == hops["attention"] < hops["full"], hops


@pytest.mark.slow
def test_policies_that_keep_products_repeat_no_exchange():
    """Queries, keys and values are exchanged once; the exchange back is repeated, since its result serves a product."""
    exchanges = {remat: reference.build("llama", (1, 1, 1), mesh__context=2, mesh__context_strategy="ulysses",
                                        train__remat=remat).lower().as_text().count("stablehlo.all_to_all")
                 for remat in ("none", "attention_and_dots", "attention", "full")}
    assert exchanges["none"] == exchanges["attention_and_dots"] - 1 == exchanges["attention"] - 4, exchanges
    assert exchanges["attention"] == exchanges["full"]


def whole_sequence(collective):
    """Whether it carries a whole sequence of activations."""
    return any(len(dims) > 2 and reference.SEQ in dims[1:-1] for _, dims in collective.arrays)


@pytest.mark.slow
def test_a_model_gathers_its_sequence_nowhere():
    """Head, embeddings, positions and norms need no gather: only blocks of keys and values travel."""
    run = reference.build("gpt2", (1, 1, 2), mesh__context=4, mesh__context_strategy="ring")
    found = hlo.collectives(reference.compiled(run).as_text())
    assert found and not (bad := [c for c in found if whole_sequence(c)]), hlo.table(bad)


@pytest.mark.parametrize(("strategy", "sizes"), [
    pytest.param("ring", dict(context=32, tensor=8), marks=SLOW),
    pytest.param("gather", dict(context=32, tensor=8), marks=pytest.mark.exhaustive),
    pytest.param("ulysses", dict(fsdp=8, context=4, tensor=8), marks=pytest.mark.exhaustive),  # no more than heads
])
def test_a_million_tokens_lower_for_256_devices(strategy, sizes):
    keys = {f"mesh.{axis}": size for axis, size in (dict(data=1, fsdp=1) | sizes).items()}
    config = jt.load_config("configs/llama3_8b.py", keys | {
        "mesh.context_strategy": strategy, "data.seq_len": 2**20, "model.max_seq_len": 2**20,
        "data.global_batch_size": 8, "train.accumulation": 1})
    assert "stablehlo" in jt.build(config, devices=256).lower().as_text()


# -------------------------------------------------------------------------------------------------------- refusals

def refused(mesh, **keys):
    shape = dict(vocab_size=64, num_layers=2, embed_dim=32, num_heads=8, max_seq_len=64)
    config = jt.make_config({"model": shape, "mesh": {"data": 1} | mesh, "data": dict(seq_len=32, global_batch_size=8)},
                            {key.replace("__", "."): value for key, value in keys.items()})
    return jt.build(config, devices=math.prod(mesh.values()))


@pytest.mark.parametrize(("do", "key", "words"), [
    (lambda: refused(dict(context=4), data__seq_len=20), "data.seq_len", "make it a multiple of 8"),
    (lambda: refused(dict(context=4, tensor=4), data__seq_len=24), "data.seq_len", "make it a multiple of 16"),
    (lambda: refused(dict(context=4, tensor=4), mesh__context_strategy="ulysses"), "mesh.context_strategy", "'ring'"),
    (lambda: refused(dict(context=2), mesh__context_strategy="rings"), "mesh.context_strategy", "did you mean 'ring'"),
    (lambda: refused(dict(context=2, stage=2), mesh__context_strategy="ring"), "mesh.context_strategy", "'gather'"),
])
def test_what_cannot_work_is_refused_by_name(do, key, words):
    with pytest.raises(jt.UserError) as refusal:
        do()
    assert refusal.value.key == key and words in str(refusal.value), str(refusal.value)


KERNEL, NONE, REFUSED = "cudnn", "xla", ""


@pytest.mark.parametrize(("heads", "parts", "stages", "whole", "in_parts", "chosen", "why"), [
    (32, 4, 1, KERNEL, KERNEL, "ulysses", "mesh.context=4 divides the 32"),
    (32, 4, 2, NONE, NONE, "ulysses", "divides"), (32, 4, 1, NONE, REFUSED, "ulysses", "divides"),
    (8, 16, 1, KERNEL, KERNEL, "ring", "mesh.context=16 does not divide the 8"), (6, 4, 2, NONE, NONE, "gather", "not"),
    (32, 4, 1, NONE, KERNEL, "ring", "cudnn does not take whole rows"),
    (32, 4, 1, REFUSED, KERNEL, "ring", "cudnn does not take whole rows"),
    (32, 4, 2, NONE, KERNEL, "gather", "cudnn does not take whole rows")])
def test_auto_is_ulysses_where_heads_divide_and_kernels_take_whole_rows(heads, parts, stages, whole, in_parts, chosen,
                                                                       why):
    def backend(strategy):
        found = whole if strategy == "ulysses" else in_parts
        if found == REFUSED:
            raise jt.UserError("train.attention", "it cannot", "use another")
        return found

    name, reason = strategies.choose("auto", stages, parts, heads, backend)
    assert name == chosen and why in reason
    for asked in STRATEGIES:
        assert strategies.choose(asked, stages, parts, heads, backend) == (asked, "")


@pytest.mark.parametrize(("heads", "strategy"), [(8, "ulysses"), (6, "ring")])
def test_what_auto_chooses_is_said_and_is_what_devices_do(heads, strategy, tmp_path):
    run = refused(dict(context=4), model__num_heads=heads, model__head_dim=4, model__vocab_size=320)
    assert f"attention over context by {strategy}, since mesh.context=4 d" in summary(run, tmp_path).splitlines()[0]
    program = run.lower().as_text()
    assert ("all_to_all" in program, "collective_permute" in program) == (strategy == "ulysses", strategy == "ring")
