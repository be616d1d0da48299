"""The loss head against plain log_softmax over all logits, and what it costs."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.errors import UserError
from jaxtrain.hub import sampling
from jaxtrain.kernels.loss_head import triton_logits
from jaxtrain.kernels.loss_head.cross_entropy import distillation_loss
from jaxtrain.kernels.loss_head.token_cross_entropy import cross_entropy_and_draws, token_cross_entropy
from jaxtrain.sharding import activations, mesh_context

B, T, D, V = 8, 8, 16, 64
MESHES = {"one": {}, "batch": dict(data=4, fsdp=2), "vocab": dict(tensor=8), "both": dict(data=2, fsdp=2, tensor=2)}


@functools.cache
def inputs():
    rng = np.random.default_rng(0)
    weights = rng.choice([0, 0.5, 1, 3], size=(B, T))
    weights[3] = 0
    return (rng.normal(size=(B, T, D)).astype(np.float32), rng.normal(size=(D, V)).astype(np.float32) * 0.5,
            rng.integers(V, size=(B, T)).astype(np.int32), weights.astype(np.float32))


@functools.cache
def plain(z_loss, cap=0.0):
    """Loss and gradients by x, head and weights, in float64."""
    x, head, targets, weights = (a.astype(np.float64) if a.dtype == np.float32 else a for a in inputs())
    logits, slope = x @ head, 1.0
    if cap:
        slope = 1 - np.tanh(logits / cap)**2
        logits = cap * np.tanh(logits / cap)
    lse = np.log(np.exp(logits).sum(-1))
    hit = targets[..., None] == np.arange(V)
    losses = lse - (logits * hit).sum(-1) + z_loss * lse**2
    dlogits = slope * weights[..., None] * (np.exp(logits - lse[..., None]) * (1 + 2 * z_loss * lse)[..., None] - hit)
    return (weights * losses).sum(), dlogits @ head.T, np.einsum("btd,btv->dv", x, dlogits), losses


def place(arrays, head):
    names = [("batch", "seq", "act_embed"), head, ("batch", "seq"), ("batch", "seq")]
    return [activations.constrain(jnp.asarray(a), *n) for a, n in zip(arrays, names, strict=True)]


def value_and_grad(arrays, mesh, head=("embed", "vocab"), platform="cpu", **keys):
    mesh, rules = jt.make_mesh(**mesh), jt.rules("fsdp_tp")
    with mesh_context.use(mesh, rules), mesh_context.use(mesh.abstract_mesh, rules, platform):
        x, head, targets, weights = place(arrays, head)

        def f(x, head, weights):
            return jt.cross_entropy(x, head, targets, weights, **keys)
        loss, gradients = jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2)))(x, head, weights)
        alone = jax.jit(f)(x, head, weights)
    np.testing.assert_allclose(alone, loss, rtol=1e-6, err_msg="the loss depends on whether gradients are wanted")
    return float(loss), *(np.asarray(gradient, np.float64) for gradient in gradients)


def close(got, want, tolerance):
    for what, g, w in zip(("loss", "dx", "dhead", "dweights"), got, want, strict=True):
        off = np.abs(g - w).max() / np.abs(w).max()
        assert off < tolerance, f"{what} is off by {off:.1e} of its largest element"


@pytest.mark.parametrize(("mesh", "chunks", "z_loss"), [
    pytest.param(mesh, chunks, z_loss, marks=() if bool(chunks) == bool(z_loss) else pytest.mark.exhaustive)
    for mesh, chunks, z_loss in itertools.product(MESHES, (0, 4), (0.0, 1e-2))])
def test_loss_and_gradients_are_those_of_plain_log_softmax(mesh, chunks, z_loss):
    close(value_and_grad(inputs(), MESHES[mesh], chunks=chunks, z_loss=z_loss), plain(z_loss), 1e-5)


@pytest.mark.parametrize("mesh", ["one", pytest.param("both", marks=pytest.mark.slow)])
def test_logits_may_have_a_soft_cap(mesh):
    close(value_and_grad(inputs(), MESHES[mesh], chunks=4, z_loss=1e-2, cap=1.5), plain(1e-2, 1.5), 1e-5)


def test_so_may_those_of_each_token_and_of_a_teacher():
    x, head, targets, weights = map(jnp.asarray, inputs())

    def capped(x):
        return 1.5 * jnp.tanh(x @ head / 1.5)

    def by_token(x):
        return (weights * token_cross_entropy(x, head, targets, cap=1.5)).sum()

    def soft(x):
        return distillation_loss(x, head, targets, weights, x, head, soft=1.0, caps=(1.5, 0.5))[0]

    def divergence(x):
        p = jax.nn.log_softmax(0.5 * jnp.tanh(jax.lax.stop_gradient(x) @ head / 0.5))
        return (weights * (jnp.exp(p) * (p - jax.nn.log_softmax(capped(x)))).sum(-1)).sum()

    def plainly(x):
        picked = jnp.take_along_axis(jax.nn.log_softmax(capped(x)), targets[..., None], -1)[..., 0]
        return -(weights * picked).sum()

    for f, g in ((by_token, plainly), (soft, divergence)):
        for got, want in zip(jax.value_and_grad(f)(x), jax.value_and_grad(g)(x), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("mesh", MESHES)
def test_the_weight_may_be_laid_out_as_in_use(mesh):
    close(value_and_grad(inputs(), MESHES[mesh], head=(None, "act_vocab")), plain(0.0), 1e-5)


@pytest.mark.parametrize("mesh", MESHES)
def test_statistics_in_one_pass_are_the_same(mesh):
    """GPUs and TPUs compute them in one pass."""
    close(value_and_grad(inputs(), MESHES[mesh], platform="cuda", chunks=4, z_loss=1e-2), plain(1e-2), 1e-5)


@pytest.mark.parametrize(("mesh", "cap"), [("batch", 0.0), ("vocab", 0.0), ("one", 1.5)])
def test_one_kernel_makes_loss_and_gradient_of_the_logits(mesh, cap, monkeypatch):
    """Pallas's interpreter runs it; where the vocabulary is split over devices, plain operations compute."""
    monkeypatch.setattr(triton_logits, "INTERPRET", True)
    monkeypatch.setattr(triton_logits, "COLUMNS", 128)  # more than there are
    got = value_and_grad(inputs(), MESHES[mesh], chunks=4, z_loss=1e-2, cap=cap, kernel="triton")
    close(got, plain(1e-2, cap), 1e-5)


@pytest.mark.parametrize("columns", [32, 16])
def test_the_kernel_reads_rows_in_parts(columns, monkeypatch):
    monkeypatch.setattr(triton_logits, "INTERPRET", True)
    monkeypatch.setattr(triton_logits, "COLUMNS", columns)
    x, head, targets, weights = inputs()
    # Tokens that are ignored have targets beyond the vocabulary.
    uneven = head[:, :V - 7], np.where(weights == 0, V - 6, np.minimum(targets, V - 8))
    given = (x, uneven[0], uneven[1], weights)
    got = value_and_grad(given, {}, z_loss=1e-2, kernel="triton")
    close(got, value_and_grad(given, {}, z_loss=1e-2), 1e-6)
    large = value_and_grad((x * 1e3, *given[1:]), {}, kernel="triton")
    assert all(np.isfinite(one).all() for one in large), "large logits overflow"


def test_the_kernel_loses_no_more_of_bfloat16_than_plain_operations(monkeypatch):
    x, head, targets, weights = inputs()
    rounded = jnp.bfloat16(x), jnp.bfloat16(head)
    exact = value_and_grad((*(np.asarray(a, np.float32) for a in rounded), targets, weights), {})
    off = {}
    monkeypatch.setattr(triton_logits, "INTERPRET", True)
    for kernel in ("xla", "triton"):
        got = value_and_grad((*rounded, targets, weights), {}, chunks=2, kernel=kernel)
        off[kernel] = [np.square(a - b).mean() for a, b in zip(got, exact, strict=True)]
    np.testing.assert_allclose(off["triton"][1:3], off["xla"][1:3], rtol=1e-3)


def test_where_the_kernel_serves():
    def check(platform, dtype=jnp.bfloat16, parts=1):
        with mesh_context.use(jt.make_mesh(devices=1), jt.rules("fsdp_tp"), platform):
            triton_logits.check(jnp.dtype(dtype), parts)

    assert [triton_logits.chosen(asked) for asked in ("auto", "xla", "triton")] == [False, False, True]
    check("cuda:8")
    check("cuda:10", jnp.float16)
    for platform, dtype in (*((one, jnp.bfloat16) for one in ("cpu", "tpu", "cuda:7")), ("cuda:9", jnp.float32)):
        with pytest.raises(UserError, match=r"train\.loss_kernel: the triton kernel runs on NVIDIA GPUs since"):
            check(platform, dtype)
    with pytest.raises(UserError, match="the mesh splits the vocabulary in 2"):
        check("cuda:9", parts=2)
    with pytest.raises(UserError, match=r"train\.loss_kernel: the triton"):
        jt.build(jt.load_config("configs/gpt.py:tiny", {"train.loss_kernel": "triton"}), devices=1)


@pytest.mark.parametrize("mesh", ["one", "both"])
def test_bfloat16_inputs_give_a_float32_loss(mesh):
    x, head, targets, weights = inputs()
    rounded = (jnp.bfloat16(x), jnp.bfloat16(head), targets, weights)
    got = value_and_grad(rounded, MESHES[mesh], chunks=2)
    close(got, plain(0.0), 2e-2)
    exact = value_and_grad(tuple(np.asarray(a, np.float32) if a.dtype == jnp.bfloat16 else a for a in rounded), {})
    assert abs(got[0] / exact[0] - 1) < 1e-6, "logits of bfloat16 inputs are not computed and summed in float32"


def test_large_logits_do_not_overflow():
    x, head, targets, weights = inputs()
    loss, dx, dhead, _ = value_and_grad((x * 1e3, head, targets, weights), MESHES["both"])
    assert np.isfinite(loss) and np.isfinite(dx).all() and np.isfinite(dhead).all()


def test_a_token_of_weight_zero_has_no_gradient():
    _, dx, _, _ = value_and_grad(inputs(), MESHES["vocab"], z_loss=1e-2)
    assert (dx[inputs()[3] == 0] == 0).all()


def test_the_gradient_follows_what_comes_after_the_loss():
    """A scaled loss has a scaled gradient: as float16's loss scale and the division by the tokens' weight need."""
    x, head, targets, weights = map(jnp.asarray, inputs())
    got = jax.grad(lambda x: 3 * jt.cross_entropy(x, head, targets, weights) / weights.sum())(x)
    np.testing.assert_allclose(got, plain(0.0)[1] * 3 / inputs()[3].sum(), rtol=0, atol=1e-6)


def test_weights_that_are_whole_numbers_have_no_gradient():
    x, head, targets, weights = map(jnp.asarray, inputs())
    dx = jax.grad(lambda x: jt.cross_entropy(x, head, targets, (weights > 0).astype(jnp.int32)))(x)
    assert np.isfinite(dx).all()


def test_chunks_that_do_not_divide_are_refused():
    with pytest.raises(UserError, match=r"^chunks: 7 does not divide the 64 tokens on a device; give a divisor"):
        jt.cross_entropy(*map(jnp.asarray, inputs()), chunks=7)


# -------------------------------------------------------------------------------------------------------- what it costs

def abstract(tokens, vocab, dim, dtype=jnp.float32):
    shapes = [((1, tokens, dim), dtype), ((dim, vocab), dtype), ((1, tokens), jnp.int32), ((1, tokens), jnp.float32)]
    return [jax.ShapeDtypeStruct(*shape) for shape in shapes]


def differentiated(x, head, targets, weights):
    return jax.value_and_grad(jt.cross_entropy, argnums=(0, 1))(x, head, targets, weights)


def test_memory_at_a_vocabulary_of_128k_is_a_fifteenth_of_all_logits():
    tokens, vocab, dim = 65_536, 128 * 1024, 64
    memory = jax.jit(differentiated).lower(*abstract(tokens, vocab, dim)).compile().memory_analysis()
    logits, head = tokens * vocab * 4, dim * vocab * 4
    # dhead accumulates in float32 beside the result: that is memory of the head, not of the logits.
    temporary = memory.temp_size_in_bytes - head
    assert temporary < logits / 15, f"{temporary:,} bytes, {temporary / logits:.1%} of all logits"


def matmuls(jaxpr, size):
    """Multiply-adds of all dot products of a jaxpr in units of `size`, loops multiplied."""
    count = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contract, _), _ = eqn.params["dimension_numbers"]
            inner = np.prod([eqn.invars[0].aval.shape[i] for i in contract])
            count += inner * np.prod(eqn.outvars[0].aval.shape) / size
        for value in eqn.params.values():
            for inner in jax.tree.leaves(value, is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    count += matmuls(inner, size) * eqn.params.get("length", 1)
    return count


@pytest.mark.parametrize("vocab", [64, 128 * 1024], ids=["one_chunk", "chunks"])
def test_three_matmuls_with_gradients_and_one_without(vocab):
    tokens, dim = 4096, 16
    shapes, size = abstract(tokens, vocab, dim), tokens * vocab * dim
    assert matmuls(jax.make_jaxpr(differentiated)(*shapes).jaxpr, size) == 3
    assert matmuls(jax.make_jaxpr(jt.cross_entropy)(*shapes).jaxpr, size) == 1


def test_a_sum_too_large_for_float16_is_divided_before_it_is_rounded():
    """The head's gradient adds up tokens: 131,072 alike make more than float16 holds, their mean does not."""
    tokens, vocab = 2**17, 16
    x, head = jnp.ones((1, tokens, 8), jnp.float16), jnp.zeros((8, vocab), jnp.float16)
    targets, weights = jnp.zeros((1, tokens), jnp.int32), jnp.ones((1, tokens), jnp.float32)
    gradient = jax.grad(lambda head: jt.cross_entropy(x, head, targets, weights) / tokens)(head)
    np.testing.assert_allclose(gradient[:, 0], -15 / 16, rtol=1e-3)


@pytest.mark.parametrize("mesh", [MESHES["one"], MESHES["both"]], ids=["one", "both"])
def test_a_token_is_drawn_as_the_sampler_draws_it(mesh):
    """From the columns that are known, by the same random numbers, whatever devices hold the columns."""
    x, head, targets, _ = inputs()
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(3), jnp.arange(B * T))
    words, known = np.asarray(jax.random.key_data(keys)).reshape(B, T, 2), np.full((B, T), V - 9, np.int32)
    known[2] = 5
    logits = (x @ head).reshape(-1, V)
    logits = np.where(np.arange(V) < known.reshape(-1, 1), logits, -np.inf)
    want = sampling.choose(jnp.asarray(logits), keys, sampling.Sampling().numbers(), False)
    mesh, rules = jt.make_mesh(**mesh), jt.rules("fsdp_tp")
    with mesh_context.use(mesh, rules):
        x, head, targets, low, high, known = (activations.constrain(jnp.asarray(a), *names) for a, names in (
            (x, ("batch", "seq", "act_embed")), (head, ("embed", "vocab")), *(
                (a, ("batch", "seq")) for a in (targets, words[..., 0], words[..., 1], known))))
        loss, _, drawn = jax.jit(cross_entropy_and_draws, static_argnames="chunks")(
            x, head, targets, (low, high, known), chunks=2)
    np.testing.assert_array_equal(drawn.reshape(-1), want)
    np.testing.assert_allclose(loss, plain(0.0)[3], rtol=1e-5)
