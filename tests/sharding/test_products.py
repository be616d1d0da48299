"""Products in fp8: the values of an independent rounding, the same on any mesh, and in every layer."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.sharding import products
from jaxtrain.train_step import precision
from tests.numerics import reference

SLOW = pytest.mark.slow
MESHES = [
    *(pytest.param(*case, marks=SLOW) for case in (
        ("qwen3", (1, 2, 1), {"mesh__context": 2, "mesh__context_strategy": "ulysses"}),
        ("deepseek_v3", (1, 2, 2), {"mesh__expert": 2}))),
    *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in (
        ("llama", (2, 2, 2), {"train__remat": "full"}), ("gpt2", (1, 1, 4), {"train__unroll": 0}),
        ("gemma3", (1, 2, 2), {}), ("llama", (1, 8, 1), {"optimizer__zero_stage": 3, "train__remat": "dots"}),
        ("gpt2", (8, 1, 1), {}), ("llama", (2, 1, 2), {"mesh__context": 2}),
        ("mixtral", (2, 1, 1), {"mesh__expert": 2}))),
]


@pytest.fixture
def float32_elsewhere(monkeypatch):
    """All but the products is computed in float32: then nothing hides an error of a product that is not rounding."""
    monkeypatch.setitem(precision.DTYPES, "bfloat16", jnp.float32)


def rounded(x, dtype, most):
    """Return the array rounded by another library, whose conversion is not XLA's."""
    peak = np.abs(x).max()
    scale = np.float32(peak / most if peak else 1)
    return np.clip(x / scale, -most, most).astype(dtype).astype(np.float32), scale


def product(x, weight):
    return x @ weight


@pytest.mark.parametrize("size", [1.0, 1e-20, 1e20, 0.0], ids=str)
def test_a_product_and_its_gradients_are_those_of_rounded_factors(size):
    draw = np.random.default_rng(0)
    x, w, dy = (draw.standard_normal(shape).astype(np.float32) for shape in ((6, 16), (16, 8), (6, 8)))
    x = x * np.float32(size)
    (rx, sx), (rw, sw) = (rounded(a, ml_dtypes.float8_e4m3fn, 448) for a in (x, w))
    rdy, sdy = rounded(dy, ml_dtypes.float8_e5m2, 57344)
    y, pull = jax.vjp(lambda x, w: products.multiply(product, x, w), x, w)
    dx, dw = pull(dy)
    for got, want in ((y, rx @ rw * (sx * sw)), (dx, rdy @ rw.T * (sdy * sw)), (dw, rx.T @ rdy * (sx * sdy))):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6 * np.abs(want).max())
    for bad in (np.inf, np.nan):  # must not become a number: the step is then skipped
        assert not np.isfinite(products.multiply(product, jnp.asarray(x).at[0, 0].set(bad), w)).all()
    with products.in_precision("fp8"):  # as a zero-bubble pipeline computes them
        np.testing.assert_array_equal(dx, products.input_gradient(product, x, w, dy))
        np.testing.assert_array_equal(dw, products.weight_gradient(product, x, w, dy))
    assert size == 0 or np.abs(np.asarray(y) / (x @ w) - 1).max() > 1e-3  # rounded at all


@pytest.mark.parametrize("fp8", [False, True])
def test_gradients_keep_the_precision_of_sums(fp8):
    """Gradients of float32 keep it where a pipeline computes the two apart; those of fp8 are exact in any case."""
    a = jnp.ones((8, 8))
    for gradient in (products.input_gradient, products.weight_gradient):
        with jax.default_matmul_precision("default" if fp8 else "highest"), products.in_precision("fp8" if fp8 else ""):
            traced = str(jax.make_jaxpr(lambda x, w, dy, gradient=gradient: gradient(product, x, w, dy))(a, a, a))
        assert "dot_general" in traced and "HIGHEST" in traced


def test_scales_do_not_bias_a_product_of_bfloat16():
    """Each element is rounded by itself; together they are as large as they should be."""
    draw = np.random.default_rng(1)
    for size in np.linspace(1.0, 2.0, 9):
        x, w, dy = (jnp.asarray(size * draw.standard_normal((128, 128)), jnp.bfloat16) for _ in range(3))
        (rx, sx), (rw, sw) = (rounded(np.asarray(a, np.float32), ml_dtypes.float8_e4m3fn, 448) for a in (x, w))
        rdy, sdy = rounded(np.asarray(dy, np.float32), ml_dtypes.float8_e5m2, 57344)
        y, pull = jax.vjp(lambda x, w: products.multiply(product, x, w), x, w)
        dx, dw = pull(dy)
        for got, want in ((y, rx @ rw * (sx * sw)), (dx, rdy @ rw.T * (sdy * sw)), (dw, rx.T @ rdy * (sx * sdy))):
            assert got.dtype == jnp.bfloat16
            assert abs((np.asarray(got, np.float32) * want).sum() / (want * want).sum() - 1) < 3e-4


def gradients(family, mesh, **keys):
    """Loss and gradients of the first step; of one device without other keys: what the others are compared with."""
    run = reference.build(family, mesh, train__precision="fp8", **keys)
    return jax.device_get(run.value_and_grad(reference.start(run, family), run.sharded.place(reference.batch(0))))


def assert_same(got, want):
    assert got[0] == pytest.approx(float(want[0]), rel=1e-5)
    error, leaf = reference.worst(got[1], want[1], floor=1e-3 * float(reference.norm_of(want[1])))
    # Rounding in float32 may move a value to the next one of 8 bits; a wrong scale or mask is off by more than this.
    assert error < 1e-3, f"the gradient of {leaf} is off by {error:.1e} of its largest element"


@pytest.mark.parametrize(("family", "mesh", "keys"), MESHES, ids=str)
def test_any_mesh_gives_the_numbers_of_one_device(float32_elsewhere, family, mesh, keys):
    assert_same(gradients(family, mesh, **keys), gradients(family, (1, 1, 1)))


@pytest.mark.parametrize("schedule", [
    pytest.param(name, marks=pytest.mark.exhaustive) for name in ("zb_v", "1f1b")])
def test_a_pipeline_gives_the_numbers_of_one_device_with_as_many_micro_batches(float32_elsewhere, schedule):
    """Each micro-batch has scales of its own."""
    got = gradients("llama", (1, 2, 2), mesh__stage=2, pipeline__schedule=schedule, pipeline__microbatches=4)
    assert_same(got, gradients("llama", (1, 1, 1), train__accumulation=4))


@pytest.mark.parametrize("family", ["llama", pytest.param("deepseek_v3", marks=SLOW)])
def test_every_product_of_a_layer_is_computed_in_fp8(family):
    """Twice as many roundings to e4m3 and one to e5m2; in what is compiled later, XLA may merge equal ones.

    Of a stack of experts there are three products, of which two read the same tokens.
    """
    run = reference.build(family, train__precision="fp8")
    text = run.lower().as_text()
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(run.abstract.params)[0]]
    linear = sum("'kernel'" in path and "'layer'" in path and "'router'" not in path for path in paths)
    experts = sum(path.endswith("['mlp']['down']") for path in paths)  # stacks with layers of them
    forward, backward = (len(re.findall(rf"convert .*-> tensor<.*{name}>", text)) for name in ("f8E4M3FN", "f8E5M2"))
    assert backward == linear + 3 * experts, (linear, backward)
    assert forward == 2 * linear if not experts else forward >= 2 * linear + 5 * experts, (linear, forward)


@pytest.mark.exhaustive
def test_it_learns_as_bfloat16_does():
    losses = {}
    for name in ("bfloat16", "fp8"):
        run = reference.build("llama", train__precision=name)
        step, state, losses[name] = reference.compiled(run), reference.start(run, "llama"), []
        for n in range(reference.STEPS):
            state, metrics = step(state, run.sharded.place(reference.batch(n)))
            losses[name].append(float(metrics["loss"]))
    np.testing.assert_allclose(losses["fp8"], losses["bfloat16"], rtol=0.02)
    assert losses["fp8"][-1] < 0.7 * losses["fp8"][0] and losses["fp8"] != losses["bfloat16"]


@pytest.mark.exhaustive
def test_two_thousand_steps_give_the_evaluation_loss_of_bfloat16():
    """Within half a per cent; the text is Python's own library."""
    found = {}
    for name in ("bfloat16", "fp8"):
        run = jt.build(jt.load_config("configs/gpt.py:tiny", {"train.steps": 2000, "train.precision": name,
                                                              "mesh.data": 1}), devices=jax.devices()[:1])
        state = run.init()
        for n in range(2000):
            state, _ = run.step(state, run.batch(n))
        found[name] = run.evaluate(state, 8)["eval_loss"]
    print(found)
    assert found["fp8"] == pytest.approx(found["bfloat16"], rel=0.005)


def test_an_array_that_was_cast_is_rounded_as_it_is():
    """XLA for GPUs otherwise rounds the float32 that it was cast from; for CPUs it does not, so the program is read."""
    program = f"{jax.make_jaxpr(lambda x: products.Rounded.of(x.astype(jnp.bfloat16), products.FORWARD).values)(1.0)}"
    assert re.search(r"reduce_precision\[exponent_bits=8 mantissa_bits=7\]", program)
