"""Routed experts in MXFP8 and NVFP4: products of independently rounded factors, and the same on any mesh."""

import functools
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxtrain as jt
from jaxtrain.errors import UserError
from jaxtrain.models import training_noise
from jaxtrain.models.training_noise import Noise
from jaxtrain.parallel import expert_blocks
from jaxtrain.parallel.experts import through_experts
from jaxtrain.run.slow_kernels import sentences
from jaxtrain.sharding import axis_rules, mesh_context, products
from jaxtrain.train_step import precision
from jaxtrain.train_step.state import Skeleton
from tests.kernels.test_slow_paths import run_of
from tests.models.experts import test_moe as moe
from tests.models.experts.test_moe import emulated
from tests.numerics import reference
from tests.sharding import test_block_products as dense

SLOW, EXHAUSTIVE = pytest.mark.slow, pytest.mark.exhaustive
B, T, D, F, E, K = 2, 64, 32, 64, 4, 2
N = B * T
BITS = np.random.default_rng(5).integers(0, 2**32, (B, T), np.uint32)


def drawn():
    rng = np.random.default_rng(0)
    x, dy = (rng.standard_normal((2, N, D)) * np.exp2(rng.integers(-3, 3, D))).astype(np.float32)
    matrices = [rng.standard_normal(shape).astype(np.float32) / 4 for shape in ((E, D, F), (E, D, F), (E, F, D))]
    chosen = np.stack([rng.permutation(E - 1)[:K] for _ in range(N)])  # one expert has no token
    return x, chosen, rng.random((N, K)).astype(np.float32), *matrices, dy


class Plain:
    """The layer by NumPy and ml_dtypes, a row for each choice of a token."""

    def __init__(self, kind, chosen, bits_NK):
        self.kind, self.expert, self.token = kind, chosen.reshape(-1), np.repeat(np.arange(N), K)
        self.bits_R = None if bits_NK is None else jnp.asarray(bits_NK.reshape(-1, 1))

    def noise(self, name, a_R):
        """The numbers of each row and feature."""
        if self.kind == "mxfp8" or self.bits_R is None:
            return None
        return np.asarray(Noise(self.bits_R, "blocks/experts")(name, jnp.asarray(a_R)[:, None]))[:, 0]

    def rows(self, a_R, noise=None):
        """Rounded along features."""
        return dense.mx(a_R, 1) if self.kind == "mxfp8" else dense.nv_along(a_R, 1, noise)

    def matrix(self, w_E, dim):
        """Rounded along the dimension that a product sums over."""
        if self.kind == "mxfp8":
            return np.stack([dense.mx(w, dim) for w in w_E])
        return np.stack([dense.nv_tiles(w, np.abs(w_E).max()) for w in w_E])

    def tokens(self, a_R, noise=None):
        """All tokens of each expert, rounded along them; those that it does not have are zeros."""
        found = []
        for e in range(E):
            mine = self.expert == e
            a_N, noise_N = np.zeros((2, N, a_R.shape[1]), np.float32)
            a_N[self.token[mine]] = a_R[mine]
            if noise is not None:
                noise_N[self.token[mine]] = noise[mine]
            found.append(dense.mx(a_N, 0) if self.kind == "mxfp8" else dense.nv_along(
                a_N, 0, None if noise is None else noise_N, np.abs(a_R).max()))
        return np.stack(found)

    def product(self, x_R, w_E):
        return np.einsum("rk,rkn->rn", self.rows(x_R), self.matrix(w_E, 0)[self.expert]).astype(np.float32)

    def gradients(self, name, x_R, w_E, dy_R):
        dx_R = np.einsum("rn,rkn->rk", self.rows(dy_R, self.noise(f"{name} input", dy_R)),
                         self.matrix(w_E, 1)[self.expert])
        return dx_R.astype(np.float32), np.einsum(
            "enk,enf->ekf", self.tokens(x_R), self.tokens(dy_R, self.noise(f"{name} weight", dy_R)))

    def __call__(self, x, weights, gate, up, down, dy):
        x_R, w_R, dy_R = x[self.token], weights.reshape(-1, 1), dy[self.token]
        g_R, u_R = self.product(x_R, gate), self.product(x_R, up)
        sigmoid = 1 / (1 + np.exp(-g_R))
        act_R = g_R * sigmoid * u_R * w_R
        dact_R, ddown = self.gradients("down", act_R, down, dy_R)
        dg_R = dact_R * w_R * u_R * sigmoid * (1 + g_R * (1 - sigmoid))
        du_R = dact_R * w_R * g_R * sigmoid
        (dx_R, dgate), (more_R, dup) = self.gradients("gate", x_R, gate, dg_R), self.gradients("up", x_R, up, du_R)
        of_tokens = lambda a_R: a_R.reshape(N, K, -1).sum(1)  # noqa: E731
        return (of_tokens(self.product(act_R, down)), of_tokens(dx_R + more_R),
                (dact_R * g_R * sigmoid * u_R).sum(1).reshape(N, K), dgate, dup, ddown)


@pytest.mark.parametrize(("kind", "random"), [("mxfp8", False), ("nvfp4", False), ("nvfp4", True)])
def test_all_nine_products_are_those_of_rounded_factors(kind, random):
    x, chosen, weights, *matrices, dy = drawn()
    noise = Noise(jnp.asarray(BITS), "blocks/experts").of_choices(K) if random else None

    def run(x, weights, *matrices):
        blocks = expert_blocks.in_blocks(dict(zip(("gate", "up", "down"), matrices, strict=True)), kind, ())
        return through_experts(x, jnp.asarray(chosen), weights, jnp.ones((N, K), bool), *blocks.values(),
                               marks=expert_blocks.marks(kind, (B, T), (), noise))

    y, pull = jax.vjp(jax.jit(run), x, weights, *matrices)
    plain = Plain(kind, chosen, np.asarray(noise.bits_BT).reshape(N, K) if random else None)
    names = "y", "dx", "dweights", "dgate", "dup", "ddown"
    for name, got, want in zip(names, (y, *pull(jnp.asarray(dy))), plain(x, weights, *matrices, dy), strict=True):
        # What rounds to either side differs by a step of one factor: of what is rounded once, and of what was twice.
        few = np.abs(np.asarray(got) - want) > 1e-4 * np.abs(want).max()
        assert few.mean() < (0.02 if name == "y" else 0.1), name
        np.testing.assert_allclose(got, want, atol=(0.01 if kind == "mxfp8" else 0.04) * np.abs(want).max(),
                                   err_msg=name)
    assert np.abs(pull(jnp.asarray(dy))[2][E - 1]).max() == 0  # of no token


def layer_gradients(module, kind):
    """Value, totals and gradients of a layer, with random bits for its tokens."""
    def run(bits, *arguments):
        with training_noise.of({training_noise.BITS: bits}), products.in_precision(kind):
            return moe.gradients(module)(*arguments)
    return jax.jit(run)


@functools.cache
def layer_alone(kind):
    module = Skeleton.of(moe.layer(LAYER))
    return jax.device_get(layer_gradients(module, kind)(LAYER_BITS, moe.initial(module), *moe.inputs()))


LAYER = reference.tiny("mixtral", model__expert_mlp_dim=32).model
LAYER_BITS = np.random.default_rng(1).integers(0, 2**32, (moe.ROWS, moe.SEQ), np.uint32)


@pytest.mark.parametrize(("kind", "exchange", "sizes"), [
    pytest.param(*case, marks=SLOW if n < 2 else EXHAUSTIVE) for n, case in enumerate((
        ("nvfp4", "gather", dict(expert=2, tensor=2, fsdp=2)), ("nvfp4", "ragged", dict(expert=4, fsdp=2)),
        ("mxfp8", "ragged", dict(expert=4, fsdp=2)), ("mxfp8", "gather", dict(expert=8))))], ids=str)
def test_a_layer_on_any_mesh_has_the_numbers_of_one_device(kind, exchange, sizes, monkeypatch):
    """Rows cross to their experts with their windows and random bits."""
    monkeypatch.setattr(lax, "ragged_all_to_all", emulated)
    want, module = layer_alone(kind), Skeleton.of(moe.layer(LAYER, exchange, 0.0))
    rules, mesh = axis_rules.rules(), jt.make_mesh(**sizes)
    with mesh_context.use(mesh, rules):
        bits = jax.device_put(LAYER_BITS, axis_rules.parameter_sharding(
            ("batch", "seq"), LAYER_BITS.shape, rules, mesh, "bits"))
        found = layer_gradients(module, kind)(bits, *moe.placed(module, mesh, rules))
        moe.close(moe.in_order(found, mesh), want)


@pytest.mark.parametrize("kind", dense.KINDS)
def test_a_block_of_rows_is_what_an_expert_has_of_a_window(kind):
    """Rows of other experts and windows are so much larger that these would vanish in one block with them."""
    experts, window = np.repeat([0, 1], 24), np.tile(np.repeat([0, 1], 12), 2)
    rows = np.random.default_rng(0).standard_normal((48, 8)).astype(np.float32) * np.exp2(
        -6.0 * (2 * experts + window)).astype(np.float32)[:, None]
    at = SimpleNamespace(experts=jnp.asarray(experts), marks=expert_blocks.Marks(jnp.asarray(window)))
    found = expert_blocks._along_rows(jnp.asarray(rows), expert_blocks._blocks(at), kind)
    for e, w in itertools.product(range(2), range(2)):
        mine = rows[(experts == e) & (window == w)]
        one = np.pad(mine, ((0, 20 if kind == "mxfp8" else 4), (0, 0)))
        want = dense.mx(one, 0) if kind == "mxfp8" else dense.nv_along(one, 0, most=np.abs(rows).max())
        got = found.values[(experts == e) & (window == w)] * (1 if found.scale is None else found.scale)
        np.testing.assert_allclose(got, want[:12], rtol=1e-6)


WIDE = dense.WIDE | dict(model__expert_mlp_dim=64, train__expert_buffer=0.0)


def gradients(mesh, family="mixtral", **keys):
    """Loss and gradients of the first step."""
    run = reference.build(family, mesh, **(WIDE | keys))
    return jax.device_get(run.value_and_grad(run.init(), run.sharded.place(dense.batch())))


@functools.cache
def alone(kind, family="mixtral", **keys):
    return gradients((1, 1, 1), family, train__precision=kind, **keys)


@pytest.fixture
def float32_elsewhere(monkeypatch):
    monkeypatch.setitem(precision.DTYPES, "bfloat16", jnp.float32)
    monkeypatch.setattr(lax, "ragged_all_to_all", emulated)


@pytest.mark.parametrize(("kind", "mesh", "keys"), [
    pytest.param(*case, marks=SLOW if n < 2 else EXHAUSTIVE) for n, case in enumerate((
        ("mxfp8", (1, 2, 2), {"mesh__expert": 2}),
        ("mxfp8", (1, 1, 1), {"mesh__expert": 2, "mesh__stage": 2, "pipeline__recompute": False}),
        ("nvfp4", (2, 2, 1), {"mesh__expert": 2, "train__remat": "full"}),
        ("mxfp8", (2, 1, 1), {"mesh__expert": 4, "family": "gpt_oss"}),
        ("nvfp4", (1, 2, 2), {"family": "deepseek_v3", "optimizer__zero_stage": 3}),
        ("mxfp8", (1, 2, 1), {"mesh__expert": 2, "mesh__context": 2, "train__remat": "dots"})))], ids=str)
def test_any_mesh_gives_the_numbers_of_one_device(float32_elsewhere, kind, mesh, keys):
    keys = {**keys}
    family = keys.pop("family", "mixtral")
    dense.assert_same(gradients(mesh, family, train__precision=kind, **keys), alone(kind, family))


@EXHAUSTIVE
@pytest.mark.parametrize("kind", dense.KINDS)
def test_accumulation_is_that_of_one_device(float32_elsewhere, kind):
    """Each micro-batch has scales of its own."""
    keys = {"train__accumulation": 2}
    dense.assert_same(gradients((1, 2, 1), train__precision=kind, mesh__expert=1, **keys), alone(kind, **keys))


def test_every_product_of_experts_is_narrow_or_none():
    found = []
    for keys in ({}, {"train__experts_in_bf16": True}):
        run = reference.build("mixtral", train__precision="mxfp8", **(WIDE | keys))
        found.append(dense.roundings(run.sharded.trace(dense.batch()).jaxpr.jaxpr))
    layers = run.config.model.num_layers
    assert found == [(4 + 3) * 6 * layers, 4 * 6 * layers]  # two factors of three products of each matrix


def test_what_has_no_kernel_is_said_with_what_to_do():
    blackwell = functools.partial(run_of, "cuda:10", config="mixtral_8x7b.py:tiny", train__precision="mxfp8",
                                  data__cross_document_attention=True)
    assert any("routed experts in train.precision=mxfp8 have no kernel" in said for said in sentences(blackwell()))
    assert not any("routed" in said for said in sentences(blackwell(train__experts_in_bf16=True)))


@pytest.mark.parametrize(("family", "mesh", "keys", "key"), [
    ("mixtral", (1, 1, 4), {"train__precision": "mxfp8"}, "train.precision"),
    ("mixtral", (1, 1, 1), {"train__precision": "nvfp4", "mesh__context": 2}, "mesh.context"),
    ("mixtral", (1, 1, 1), {"train__precision": "bfloat16", "train__experts_in_bf16": True}, "train.experts_in_bf16"),
    ("llama", (1, 1, 1), {"train__precision": "mxfp8", "train__experts_in_bf16": True}, "train.experts_in_bf16")],
    ids=str)
def test_what_experts_cannot_do_is_refused_by_its_key(family, mesh, keys, key):
    wide = WIDE if family == "mixtral" else dense.WIDE
    with pytest.raises(UserError) as refused:
        reference.build(family, mesh, **(wide | keys))
    assert refused.value.key == key


def test_windows_of_tokens_are_numbered_apart():
    found = expert_blocks.marks("mxfp8", (2, 40), ()).window
    np.testing.assert_array_equal(found, [0] * 32 + [1] * 8 + [2] * 32 + [3] * 8)
