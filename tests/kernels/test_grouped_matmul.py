"""Grouped matmuls: Pallas's interpreter runs the GPU kernels, against `lax.ragged_dot` and float64 NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxtrain as jt
from jaxtrain.kernels import grouped_matmul as kernels
from jaxtrain.kernels.grouped_matmul import grouped_matmul
from jaxtrain.sharding import axis_rules, mesh_context
from tests.kernels.interpreted import needs_mosaic
from tests.tiers import slow_if

ROWS, WIDTH, WIDER, GROUPS = 256, 128, 192, 5
SIZES = [[70, 0, 58, 1, 60], [0, 256, 0, 0, 0], [0, 0, 0, 0, 0]]  # part of the rows in groups, all of them, none
SHAPES = {"rows": (ROWS, WIDTH), "weights": (GROUPS, WIDTH, WIDER), "pull": (ROWS, WIDER)}


def random_sizes(rng):
    """Bounds anywhere, some of them equal; the last group ends anywhere, too."""
    bounds = np.sort(rng.choice([0, 1, 63, 64, 65, 127, 128, 129, *rng.integers(0, ROWS + 1, 8)], GROUPS))
    return np.diff(bounds, prepend=0).tolist()


def arrays(dtype, seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in SHAPES.values()]


@functools.partial(jax.jit, static_argnums=4)
def run(rows, weights, pull, sizes, backend):
    y, back = jax.vjp(lambda rows, weights: grouped_matmul(rows, weights, sizes, backend=backend), rows, weights)
    return y, *back(pull)


def plain(rows, weights, pull, sizes):
    """Result and gradients in float64."""
    rows, weights, pull = (np.asarray(a, np.float64) for a in (rows, weights, pull))
    y, drows, dweights = np.zeros_like(pull), np.zeros_like(rows), np.zeros_like(weights)
    end = np.cumsum(sizes)
    for group, (begin, stop) in enumerate(zip(end - sizes, end, strict=True)):
        y[begin:stop] = rows[begin:stop] @ weights[group]
        drows[begin:stop] = pull[begin:stop] @ weights[group].T
        dweights[group] = rows[begin:stop].T @ pull[begin:stop]
    return y, drows, dweights


@needs_mosaic
@pytest.mark.parametrize("sizes", [
    *SIZES, *(pytest.param(random_sizes(np.random.default_rng(seed)), id=f"random{seed}",
                           marks=slow_if(seed < 2) if seed else ()) for seed in range(12))], ids=str)
def test_the_kernels_give_the_numbers_of_numpy(sizes, interpreted):
    given = arrays(jnp.float32)
    for got, ragged, want in zip(run(*given, jnp.asarray(sizes), "mosaic"), run(*given, jnp.asarray(sizes), "xla"),
                                 plain(*given, np.asarray(sizes)), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-6 * max(1, np.abs(want).max()))
        np.testing.assert_allclose(ragged, want, atol=2e-6 * max(1, np.abs(want).max()))


@needs_mosaic
def test_bfloat16_is_rounded_once(interpreted):
    """Sums are in float32: results differ from exact ones by half a unit in the last place."""
    given = arrays(jnp.bfloat16)
    exact = plain(*given, np.asarray(SIZES[0]))
    for got, want in zip(run(*given, jnp.asarray(SIZES[0]), "mosaic"), exact, strict=True):
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2**-8, atol=1e-5)


@pytest.mark.slow
@needs_mosaic
@pytest.mark.parametrize("sizes", SIZES[:1], ids=str)
def test_values_of_8_bits_are_multiplied_as_they_are(sizes, interpreted):
    """The kernels take them; elsewhere the same values are widened."""
    rng = np.random.default_rng(0)
    rows, weights, pull = (jnp.asarray(rng.standard_normal(shape), dtype) for shape, dtype in (
        ((ROWS, WIDTH), jnp.float8_e4m3fn), ((GROUPS, WIDTH, 256), jnp.float8_e4m3fn), ((ROWS, 256), jnp.float8_e5m2)))

    def run(rows, weights, pull, backend):
        how = dict(backend=backend, dtype=jnp.float32)
        return (grouped_matmul(rows, weights, jnp.asarray(sizes), **how),
                *kernels.grouped_matmul_gradients(rows, weights, jnp.asarray(sizes), pull, **how))

    traced = jax.make_jaxpr(run, static_argnums=3)(rows, weights, pull, "auto")
    assert "ragged_dot" not in str(traced)
    for backend in ("auto", "xla"):
        for got, want in zip(jax.jit(run, static_argnums=3)(rows, weights, pull, backend),
                             plain(rows, weights, pull, np.asarray(sizes)), strict=True):
            assert got.dtype == jnp.float32
            np.testing.assert_allclose(got, want, atol=2e-6 * np.abs(want).max())


@needs_mosaic
def test_rows_behind_the_last_group_do_not_count(interpreted):
    """Values that are not finite do not matter there: buffers hold whatever was sent before."""
    sizes = np.asarray([64, 0, 30, 0, 0])
    rows, weights, pull = arrays(jnp.float32)
    behind = jnp.arange(ROWS)[:, None] >= sizes.sum()
    got = run(jnp.where(behind, 1e30, rows), weights, jnp.where(behind, 1e30, pull), jnp.asarray(sizes), "mosaic")
    for a, want in zip(got, plain(rows, weights, pull, sizes), strict=True):
        np.testing.assert_allclose(a, want, atol=2e-6 * max(1, np.abs(want).max()))


def test_gradients_alone_are_those_of_the_product():
    """XLA computes them here; with kernels they are the same function."""
    rows, weights, pull = arrays(jnp.float32)
    sizes = jnp.asarray(SIZES[0])
    got = jax.jit(kernels.grouped_matmul_gradients)(rows, weights, sizes, pull)
    for a, want in zip(got, plain(rows, weights, pull, np.asarray(sizes))[1:], strict=True):
        np.testing.assert_allclose(a, want, atol=2e-6 * max(1, np.abs(want).max()))


H100, A100, B200, V100 = "cuda:9", "cuda:8", "cuda:10", "cuda:7"


def chosen(asked, platform, dtype=jnp.bfloat16, rows=128, dimensions=(64, 192)):
    with mesh_context.use(jt.make_mesh(devices=1), axis_rules.rules(), platform):
        return kernels.choose_backend(asked, jnp.dtype(dtype), rows, *dimensions)


@needs_mosaic
@pytest.mark.parametrize(("platform", "keys", "reason"), [
    (A100, {}, "it runs on NVIDIA GPUs of compute capability 9 (H100, H200) only"),
    ("tpu", {}, "it runs on NVIDIA GPUs of compute capability 9 (H100, H200) only"),
    ("cuda:10", {}, "it runs on NVIDIA GPUs of compute capability 9 (H100, H200) only"),
    (H100, dict(dtype=jnp.float32), "it computes in bfloat16 or float16, not float32"),
    (H100, dict(rows=100), "100 rows of a device are not a multiple of 128"),
    (H100, dict(dimensions=(64, 96)), "the width 96 is not a multiple of 64")], ids=str)
def test_what_the_kernels_cannot_do(platform, keys, reason):
    """It is left to others, or refused where the kernels are asked for."""
    half = keys.get("dtype") != jnp.float32
    assert chosen("auto", platform, **keys) == ("triton" if half and platform.startswith("cuda") else "xla")
    with pytest.raises(jt.UserError) as refused:
        chosen("mosaic", platform, **keys)
    assert f"{refused.value}" == f"train.grouped_matmul: the mosaic backend cannot do this: {reason}; " \
        "use 'auto' or 'xla'"


@needs_mosaic
def test_the_kernels_are_the_choice_for_hopper():
    assert [chosen(asked, H100) for asked in ("auto", "mosaic", "xla")] == ["mosaic", "mosaic", "xla"]


@pytest.mark.parametrize(("platform", "auto"), [(A100, "triton"), (B200, "triton"), (V100, "xla"), ("cpu", "xla")])
def test_other_gpus_have_kernels_of_triton(platform, auto):
    """On CPUs they are interpreted, where they are asked for."""
    assert chosen("auto", platform) == auto
    assert chosen("auto", platform, dtype=jnp.float32) == "xla"
    if auto == "triton" or platform == "cpu":
        assert chosen("triton", platform, rows=100, dimensions=(40, 72)) == "triton"
    else:
        with pytest.raises(jt.UserError, match=r"since compute capability 8 \(A100\) only"):
            chosen("triton", platform)


def test_a_jax_without_triton_leaves_it_to_xla(monkeypatch):
    monkeypatch.setattr(kernels, "has_triton", lambda: False)
    assert chosen("auto", B200) == "xla"
    with pytest.raises(jt.UserError, match="has no Triton in Pallas"):
        chosen("triton", B200)


def test_older_versions_of_jax_refuse(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    assert chosen("auto", H100) == "triton"
    with pytest.raises(jt.UserError, match=r"it needs JAX 0\.11 or newer"):
        chosen("mosaic", H100)


def test_a_run_is_refused_before_it_is_traced():
    from tests.numerics import reference

    with pytest.raises(jt.UserError, match=r"^train\.grouped_matmul: the mosaic backend cannot do this: it runs on"):
        jt.build(reference.tiny("mixtral", train__grouped_matmul="mosaic"), devices=1)


@needs_mosaic
def test_where_the_compiler_splits_arrays_xla_computes(interpreted):
    """A custom call in the middle of what the compiler splits would make it gather all operands."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, weights, _ = arrays(jnp.float32)

    def inside(rows, weights, sizes):
        return grouped_matmul(rows, weights, sizes)

    manual = jax.shard_map(inside, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    with jax.set_mesh(mesh):
        texts = [f"{jax.make_jaxpr(f)(rows, weights, jnp.asarray(SIZES[0]))}" for f in (inside, manual)]
    assert ["ragged_dot" in text for text in texts] == [True, False]
