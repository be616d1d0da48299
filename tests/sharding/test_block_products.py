"""Products in MXFP8 and NVFP4: those of independently rounded factors, on units too, and the same on any mesh."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import jaxtrain as jt
from jaxtrain.errors import UserError
from jaxtrain.models.decoder import Compute
from jaxtrain.models.make_model import make_model
from jaxtrain.models.training_noise import Noise
from jaxtrain.sharding import block_formats, block_units, contractions, products
from jaxtrain.train_step import precision
from tests.numerics import reference

SLOW, KINDS = pytest.mark.slow, ("mxfp8", "nvfp4")
WIDE = dict(model__embed_dim=64, model__num_heads=4, model__num_kv_heads=2, model__head_dim=32, model__mlp_dim=128,
            model__max_seq_len=64, data__seq_len=64, data__global_batch_size=4)
BITS = np.random.default_rng(5).integers(0, 2**32, (2, 64), np.uint32)


@pytest.fixture
def float32_elsewhere(monkeypatch):
    """All but the products is computed in float32: then nothing hides an error of a product that is not rounding."""
    monkeypatch.setitem(precision.DTYPES, "bfloat16", jnp.float32)


def mx(x, axis):
    """MXFP8 by NumPy and ml_dtypes, in blocks along an axis."""
    x = np.moveaxis(x, axis, -1)
    blocks = x.reshape(*x.shape[:-1], -1, 32).astype(np.float64)
    peaks = np.abs(blocks).max(-1, keepdims=True)
    scale = np.exp2(np.ceil(np.log2(np.where(peaks == 0, 1, peaks) / 448)))
    return np.moveaxis(((blocks / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale).reshape(x.shape),
                       -1, axis)


def nv(x, peaks, noise=None, most=None):
    """NVFP4 by NumPy and ml_dtypes; `peaks`: the largest magnitude in each element's block; `most`: of the array."""
    scale = np.float32((np.abs(x).max() if most is None else most) / np.float32(2688))
    scales = (peaks / np.float32(6) / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    ratio = (x / np.where(scales == 0, 1, scales * scale)).astype(np.float32)
    if noise is None:
        return np.clip(ratio, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float64) * scales * np.float64(scale)
    grid = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    size = np.minimum(np.abs(ratio), 6)
    low = np.searchsorted(grid, size, side="right") - 1
    high = np.minimum(low + 1, 7)
    share = (size - grid[low]) / np.maximum(grid[high] - grid[low], 1e-9)
    return np.sign(ratio) * np.where(noise < share, grid[high], grid[low]) * scales * np.float64(scale)


def nv_along(x, axis, noise=None, most=None):
    moved = np.moveaxis(x, axis, -1)
    peaks = np.abs(moved).reshape(*moved.shape[:-1], -1, 16).max(-1).repeat(16, -1)
    return nv(x, np.moveaxis(peaks, -1, axis), noise, most)


def nv_tiles(w, most=None):
    peaks = np.abs(w).reshape(w.shape[0] // 16, 16, -1, 16).max((1, 3))
    return nv(w, peaks.repeat(16, 0).repeat(16, 1), most=most)


def turned(x):
    """The Hadamard transform along tokens, dimension 1."""
    blocks = x.reshape(x.shape[0], -1, 16, x.shape[2]).astype(np.float32)
    return np.einsum("bntk,ts->bnsk", blocks, block_formats.hadamard()).reshape(x.shape).astype(np.float32)


def wanted(kind, x, w, dy, noise):
    """Output and gradients, each the product of its own factors."""
    if kind == "mxfp8":
        pairs = (mx(x, 2), mx(w, 0)), (mx(dy, 2), mx(w, 1)), (mx(x, 1), mx(dy, 1))
    else:
        drawn = [None if noise is None else np.asarray(noise(name, jnp.asarray(dy))) for name in ("input", "weight")]
        pairs = ((nv_along(x, 2), nv_tiles(w)), (nv_along(dy, 2, drawn[0]), nv_tiles(w)),
                 (nv_along(turned(x), 1), nv_along(turned(dy), 1, drawn[1])))
    return [np.einsum(equation, *pair) for equation, pair in zip(("rtk,kn->rtn", "rtn,kn->rtk", "rtk,rtn->kn"), pairs,
                                                                strict=True)]


def factors():
    draw = np.random.default_rng(0)
    return [(draw.standard_normal(shape) * np.exp2(draw.integers(-3, 3, shape[-1]))).astype(np.float32)
            for shape in ((2, 64, 96), (96, 64), (2, 64, 64))]


@pytest.mark.parametrize("units", [False, True], ids=["in bfloat16", "on units"])
@pytest.mark.parametrize(("kind", "random"), [("mxfp8", False), ("nvfp4", False), ("nvfp4", True)])
def test_a_product_and_its_gradients_are_those_of_rounded_factors(kind, random, units, monkeypatch):
    monkeypatch.setattr(block_units, "there", lambda: units)
    (x, w, dy), noise = factors(), Noise(jnp.asarray(BITS), "a layer") if random else None
    product = contractions.Contraction("btk,kn->btn", ("embed", "mlp"), ("batch", "seq", "act_mlp"))

    @jax.jit
    def run(x, w, dy):
        with products.in_precision(kind):
            y, pull = jax.vjp(lambda x, w: products.multiply(product, x, w, noise), x, w)
            return y, *pull(dy)

    for got, want, exact in zip(run(x, w, dy), wanted(kind, x, w, dy, noise), (x @ w, dy @ w.T, None), strict=True):
        # A number at the middle between two of a grid may fall to either side where sums differ in float32's last bit.
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=(1e-6 if kind == "mxfp8" else 2e-3) * np.abs(want).max())
        assert exact is None or np.abs(np.asarray(got) - exact).max() > 1e-3 * np.abs(exact).max()  # rounded at all


def test_what_is_no_whole_block_is_filled_with_zeros():
    """A dimension of 40 has a block of 32 and one of 8, and a gate of one output a block of one."""
    draw = np.random.default_rng(1)
    x, w, dy = (draw.standard_normal(shape).astype(np.float32) for shape in ((1, 40, 40), (40, 1), (1, 40, 1)))

    def mx_padded(x, axis):
        pad = [(0, -size % 32 if d == axis else 0) for d, size in enumerate(x.shape)]
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.nan_to_num(mx(np.pad(x, pad), axis))[tuple(map(slice, x.shape))]

    with products.in_precision("mxfp8"):
        y, pull = jax.vjp(lambda x, w: products.multiply(lambda x, w: x @ w, x, w), x, w)
        dx, dw = pull(jnp.asarray(dy))
    for got, equation, pair in ((y, "rtk,kn->rtn", (mx_padded(x, 2), mx_padded(w, 0))),
                                (dx, "rtn,kn->rtk", (mx_padded(dy, 2), mx_padded(w, 1))),
                                (dw, "rtk,rtn->kn", (mx_padded(x, 1), mx_padded(dy, 1)))):
        np.testing.assert_allclose(got, np.einsum(equation, *pair), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_does_not_become_a_number(kind):
    x, w, _ = factors()
    for bad in (np.inf, np.nan):
        with products.in_precision(kind):
            assert not np.isfinite(products.multiply(lambda x, w: x @ w, jnp.asarray(x).at[0, 0, 0].set(bad), w)).all()


def batch():
    """Rows of random tokens."""
    tokens = np.random.default_rng(2).integers(0, reference.VOCAB, (4, 65)).astype(np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": np.ones((4, 64), np.float32),
            "segments": np.ones((4, 64), np.int32), "positions": np.tile(np.arange(64, dtype=np.int32), (4, 1))}


def gradients(mesh, **keys):
    """Loss and gradients of the first step."""
    run = reference.build("llama", mesh, **(WIDE | keys))
    return jax.device_get(run.value_and_grad(run.init(), run.sharded.place(batch())))


@functools.cache
def alone(kind, **keys):
    return gradients((1, 1, 1), train__precision=kind, **keys)


MESHES = [
    *(pytest.param(*case, marks=SLOW) for case in (
        ("mxfp8", True, (1, 2, 2), {}), ("nvfp4", False, (1, 2, 1), {"mesh__context": 2}))),
    *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in (
        ("mxfp8", False, (2, 2, 2), {"train__remat": "full"}), ("nvfp4", True, (1, 2, 2), {"train__remat": "dots"}),
        ("mxfp8", True, (1, 4, 1), {"optimizer__zero_stage": 3, "mesh__context": 2}),
        ("nvfp4", True, (2, 2, 1), {"mesh__context": 2}), ("nvfp4", True, (4, 1, 2), {"train__unroll": 0}))),
]


@pytest.mark.parametrize(("kind", "units", "mesh", "keys"), MESHES, ids=str)
def test_any_mesh_gives_the_numbers_of_one_device(float32_elsewhere, monkeypatch, kind, units, mesh, keys):
    want = alone(kind)
    monkeypatch.setattr(block_units, "there", lambda: units)
    assert_same(gradients(mesh, train__precision=kind, **keys), want)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "schedule", "chunks"), [("nvfp4", "1f1b", {}), ("mxfp8", "zb_v", {})])
def test_a_pipeline_with_wide_ends_gives_the_numbers_of_one_device(float32_elsewhere, kind, schedule, chunks):
    """Each micro-batch has scales of its own."""
    keys = {"train__layers_at_end_in_bf16": 1, "model__num_layers": 4}
    got = gradients((1, 1, 1), train__precision=kind, mesh__stage=2, pipeline__schedule=schedule,
                    pipeline__microbatches=2, **keys, **chunks)
    assert_same(got, alone(kind, train__accumulation=2, **keys))


def assert_same(got, want):
    assert got[0] == pytest.approx(float(want[0]), rel=1e-5)
    error, leaf = reference.worst(got[1], want[1], floor=1e-2 * float(reference.norm_of(want[1])))
    # Rounding in float32 may move a value to the next one of its grid; a wrong scale or mask is off by more than this.
    assert error < 1e-2, f"the gradient of {leaf} is off by {error:.1e} of its largest element"


def roundings(jaxpr):
    """Return how often a program rounds to e4m3, each time that a loop over layers does."""
    count = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "convert_element_type" and equation.params["new_dtype"] == jnp.float8_e4m3fn:
            count += 1
        is_program = lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")  # noqa: E731
        inner = [*filter(is_program, jax.tree.leaves([*equation.params.values()], is_leaf=is_program))]
        if equation.primitive.name != "custom_vjp_call":
            count += equation.params.get("length", 1) * sum(roundings(getattr(one, "jaxpr", one)) for one in inner)
        else:
            count += roundings(getattr(inner[0], "jaxpr", inner[0]))
    return count


@pytest.mark.parametrize("ends", [(0, 0), (1, 1), (0, 2)])
def test_every_product_is_narrow_but_those_of_layers_at_the_ends(ends):
    keys = dict(zip(("train__layers_at_start_in_bf16", "train__layers_at_end_in_bf16"), ends, strict=True))
    run = reference.build("llama", train__precision="mxfp8", model__num_layers=4, **(WIDE | keys))
    found = roundings(run.sharded.trace(batch()).jaxpr.jaxpr)
    assert found == 6 * 7 * (4 - sum(ends))  # two factors of three products of seven layers


def test_ends_are_counted_in_layers_where_layers_come_in_groups():
    """Behind a dense layer stands a group of two, which are the last two of the model."""
    config = reference.tiny("kimi_linear")
    model = nnx.eval_shape(lambda: make_model(config.model, Compute.of(config.model, config.train, config.mesh),
                                              config.lora, rngs=nnx.Rngs(params=jax.random.key(0))))
    with products.in_precision("mxfp8", at_end=2):
        assert model.blocks._has_wide() and not model.first_blocks._has_wide()


def test_gradients_are_rounded_anew_in_each_step_and_the_same_again():
    run = reference.build("llama", train__precision="nvfp4", **WIDE)
    state, step = run.init(), run.sharded.compiled(batch())
    placed = run.sharded.place(batch())
    norms = []
    for at in (0, 0, 1):
        copied = jax.tree.map(jnp.copy, state)  # the step takes it
        norms.append(float(step(replace(copied, step=copied.step + at), placed)[1]["grad_norm"]))
    assert norms[0] == norms[1] != norms[2]


@pytest.mark.parametrize(("keys", "key"), [
    ({"train__precision": "mxfp8", "data__seq_len": 48}, "data.seq_len"),
    ({"train__precision": "bfloat16", "train__layers_at_end_in_bf16": 1}, "train.layers_at_end_in_bf16"),
    ({"train__precision": "mxfp8", "train__layers_at_start_in_bf16": 3}, "train.layers_at_end_in_bf16"),
    ({"train__precision": "nvfp4", "mesh__stage": 2, "pipeline__schedule": "zb_v"}, "pipeline.schedule"),
], ids=str)
def test_what_a_format_cannot_do_is_refused_by_its_key(keys, key):
    with pytest.raises(UserError) as refused:
        reference.tiny("llama", **(WIDE | keys))
    assert refused.value.key == key


def test_parameters_at_rest_are_float32():
    run = jt.build(reference.tiny("llama", train__precision="nvfp4", **WIDE), devices=jax.devices()[:1])
    assert {leaf.dtype for leaf in jax.tree.leaves(run.abstract.params)} == {jnp.dtype(jnp.float32)}
