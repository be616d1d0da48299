"""The kernels of what is within chunks, as Pallas's interpreter runs them: their numbers and what refuses them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtrain as jt
from jaxtrain.kernels.chunks import chunk_kernels, chunk_matrices, chunk_tiles
from jaxtrain.models.recurrent.kernels import delta_kernels, state_space_kernels
from jaxtrain.plan import compiler, instructions, targets
from jaxtrain.sharding import mesh_context
from tests.kernels.interpreted import needs_mosaic
from tests.models.recurrent import over_time
from tests.models.recurrent.over_time import MIXERS, single
from tests.models.recurrent.test_recurrent_mixers import TOLERANCE, TWO, Placed, compiled
from tests.numerics import reference
from tests.tiers import exhaustive, slow

ON_MESH = {"data": 2, "context": 2, "tensor": 2}


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(chunk_kernels, "INTERPRET", "tpu")


@pytest.fixture
def in_tiles(monkeypatch):
    """The kernels for GPUs, with tiles of 4 channels: two of keys and three of values."""
    monkeypatch.setattr(chunk_kernels, "INTERPRET", "gpu")
    monkeypatch.setattr(chunk_tiles, "TILE", 4)
    monkeypatch.setattr(chunk_tiles, "LEAST", 4)


def by_kernels(name):
    def whole(arrays, segments, state):
        return MIXERS[name].whole(*arrays, segments, state, kernel="pallas")
    return functools.partial(over_time.with_gradients, whole)


NAMES = ["gated_delta", "state_space", *slow("kimi_delta")]


@pytest.mark.parametrize("name", NAMES)
def test_kernels_have_the_numbers_of_a_loop_over_tokens(name, interpreted):
    """Output, last state and all gradients in float64; of documents in one row, behind a state, and of any decays."""
    f, args = by_kernels(name), single(over_time.drawn(name))
    program = str(jax.make_jaxpr(f)(*args))
    assert f"recurrent_{'space' if name == 'state_space' else 'delta'}_outputs_gradients" in program
    assert "_flop" not in program
    assert over_time.worst(compiled(f, *args), over_time.truth(name)) < TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_tiles_have_them_too(name, in_tiles):
    f, args = by_kernels(name), single(over_time.drawn(name))
    assert "_flop" in str(jax.make_jaxpr(f)(*args)), "only names of kernels in tiles tell FLOP"
    # The gradient of the one rate of a head sums that of all tokens.
    assert over_time.worst(compiled(f, *args), over_time.truth(name)) < (2 if name == "state_space" else 1) * TOLERANCE


@pytest.mark.parametrize("name", slow("gated_delta", "state_space", "kimi_delta"))
def test_rows_cut_over_devices_have_them_too(name, interpreted):
    """Kernels end where chunks end, so rows may be cut over `context`."""
    placed = Placed(name, TWO)
    assert over_time.worst(placed.back(placed.run(by_kernels(name))), over_time.truth(name)) < TOLERANCE


@pytest.mark.parametrize(("family", "interpreter", "mesh"), [
    *slow(("qwen3_5", "gpu", ON_MESH), ("bamba", "gpu", ON_MESH)),
    *exhaustive(("qwen3_5", "tpu", {}), ("kimi_linear", "tpu", {}), ("kimi_linear", "gpu", ON_MESH))])
def test_loss_and_gradients_of_a_model(family, interpreter, mesh, monkeypatch):
    """Packed documents, through whole layers: those of plain float32 on one device, one token after another."""
    monkeypatch.setattr(chunk_kernels, "INTERPRET", interpreter)
    run = reference.build(family, train__recurrent_kernel="pallas",
                          **{f"mesh__{axis}": size for axis, size in mesh.items()})
    start, rows = reference.initial(family), reference.batch(0)
    value, gradient = run.value_and_grad(reference.start_from(run, start), rows)
    want_value, want = jax.jit(jax.value_and_grad(lambda p: reference.loss(run.config.model, p, rows)))(start)
    assert float(value) == pytest.approx(float(want_value), rel=1e-5)
    error, leaf = reference.worst(jax.device_get(gradient), jax.device_get(want), floor=1e-4)
    assert error < 1e-4, f"the gradient of {leaf} is off by {error:.1e}"


def test_what_is_refused():
    def build(family):
        reference.build(family, train__recurrent_kernel="pallas")

    with pytest.raises(jt.UserError, match=r"^train\.recurrent_kernel: gpt2 has no Gated DeltaNet"):
        build("gpt2")
    with pytest.raises(jt.UserError, match=r"^train\.recurrent_kernel: pallas runs on TPUs and NVIDIA GPUs only.* cpu"):
        build("qwen3_5")


@pytest.mark.parametrize(("platform", "able"), [("tpu", True), ("cuda:8", True), ("cuda:10", True), ("cuda:7", False)])
def test_where_they_run(platform, able):
    with mesh_context.use(jt.make_mesh(devices=1), jt.rules(), platform):
        assert chunk_kernels.choose_backend("auto") == "xla"
        if able:
            assert chunk_kernels.choose_backend("pallas") == ("whole" if platform == "tpu" else "tiles")
        else:
            with pytest.raises(jt.UserError, match="compute capability below 8"):
                chunk_kernels.choose_backend("pallas")


@pytest.mark.exhaustive
@needs_mosaic
@pytest.mark.parametrize("target", ["h100", "a100", "b200"])
@pytest.mark.parametrize("name", ["gated_delta", "state_space"])
def test_tiles_compile_for_gpus(name, target):
    """Forward and backward, and what simulates the compiled program reads their FLOP from their names."""
    described, _ = targets.parse(f"{target}x1")
    try:
        devices = compiler.devices_of(described, 1)
    except jt.UserError as missing:
        pytest.skip(f"{missing}")
    at = NamedSharding(jax.sharding.Mesh(np.array(devices), ("x",)), P())

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=at)

    def loss(*arrays):
        return MIXERS[name].whole(*arrays, kernel="pallas")[0].astype(jnp.float32).sum()

    steps = array(1, 256, 4, dtype=np.float32)
    arrays = {"gated_delta": (*(array(1, 256, heads, 128) for heads in (2, 2, 4)), steps, steps),
              "state_space": (array(1, 256, 4, 64), steps, array(4, dtype=np.float32),
                              *[array(1, 256, 2, 128)] * 2)}[name]
    with mesh_context.use(jt.make_mesh(devices=1), jt.rules(), described.described), jax.set_mesh(at.mesh):
        text = jax.jit(jax.grad(loss, range(5))).trace(*arrays).lower(lowering_platforms=("cuda",)).compile().as_text()
    made = instructions.program(text).instructions.values()
    found = [one for one in made if "recurrent_" in one.path and one.own]
    assert len(found) >= 3
    assert all(one.flops > 0 and one.dtype == "f32" for one in found)


def test_a_planner_knows_what_they_cost(interpreted):
    """The products of a chunk, counted by hand; those of the inverse are exact, and cost a TPU six times as much."""
    C, K, V = 64, 8, 12
    shapes = [jax.ShapeDtypeStruct(sides, np.float32) for sides in ((C, K), (C, V), (1, C), (1, C))]
    found = jax.make_jaxpr(delta_kernels.MAPS.function)(*shapes, jax.ShapeDtypeStruct((1, C), np.int32))
    exact = 2 * C**3 * (1 + 2 * 6)  # sums of logarithms, and six levels of the inverse
    others = 2 * (C * C * K + C * C * V + C * C * K + C * K * V)
    assert chunk_matrices.products(found.jaxpr) == 6 * exact + others


def test_a_planner_knows_what_those_of_a_group_cost():
    """The product of each token's C and B is computed once for all heads of a group."""
    C, N, P, R = 64, 8, 12, 3
    sides = (C, N), (C, N), (R, C, P), (R, 1, C), (R, 1, C)
    found = jax.make_jaxpr(state_space_kernels.OUTPUTS.function)(
        *(jax.ShapeDtypeStruct(shape, np.float32) for shape in sides), jax.ShapeDtypeStruct((1, C), np.int32),
        jax.ShapeDtypeStruct((R, N, P), np.float32))
    sums = 2 * C**3 * 6  # of logarithms, exact
    assert chunk_matrices.products(found.jaxpr) == 2 * C * C * N + R * (sums + 2 * (C * N * P + C * C * P))
