"""Each optimizer on meshes and under ZeRO as on one device; schedules; what decays; what Muon orthogonalises."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.config.schema import OptimizerConfig
from jaxtrain.train_step.optimizers import make_optimizer, make_schedule
from tests.numerics import reference
from tests.objectives import fuzz_modalities
from tests.tiers import slow, slow_if

OPTIMIZERS = ("adamw", "adafactor", "lion", "sgd", "muon")
PLAIN = fuzz_modalities.SHAPES
RATES = {"lion": 3e-3, "sgd": 0.3}
# Adafactor factors only dimensions of 128 and more.
SHAPES = {"adafactor": dict(model__embed_dim=128, model__vocab_size=128, model__mlp_dim=256)}


def build(name, mesh, **keys):
    return reference.build("gpt2", mesh, **SHAPES.get(name, {}), optimizer__name=name, optimizer__warmup_steps=0,
                           optimizer__learning_rate=RATES.get(name, 1e-2), **keys)


@functools.cache
def start(name):
    return jax.device_get(build(name, (1, 1, 1)).init())


def losses(name, mesh, stage=0):
    run = build(name, mesh, optimizer__zero_stage=stage)
    step, state = reference.compiled(run), jax.tree.map(jax.device_put, start(name), run.layout.state)
    out = []
    for n in range(5):
        state, metrics = step(state, run.sharded.place(reference.batch(n)))
        out.append(float(metrics["loss"]))
    return np.array(out)


@functools.cache
def alone(name):
    return losses(name, (1, 1, 1))


@pytest.mark.parametrize(("name", "stage"), [
    pytest.param(name, stage, marks=slow_if(stage == 3 and name == "adafactor"))
    for name in OPTIMIZERS for stage in range(4)])
def test_same_losses_on_a_mesh_and_under_zero(name, stage):
    off = np.abs(losses(name, (2, 2, 2), stage) / alone(name) - 1).max()
    assert off < 1e-5, f"{name} at zero_stage={stage} on data 2 x fsdp 2 x tensor 2 is off by {off:.1e} from one device"
    assert alone(name)[-1] < alone(name)[0] - 0.05, f"{name} does not learn: {alone(name)}"


# ----------------------------------------------------------------------------------------------------------- schedules

PEAK, STEPS, WARMUP, FINAL, DECAY = 1e-2, 100, 10, 0.1, 0.2
AFTER = STEPS - WARMUP


def cosine(n):
    return FINAL + (1 - FINAL) * (1 + math.cos(math.pi * (n - WARMUP) / AFTER)) / 2


def linear(n):
    return 1 - (1 - FINAL) * (n - WARMUP) / AFTER


def wsd(n):
    return 1 - (1 - FINAL) * max(0, n - STEPS * (1 - DECAY)) / (STEPS * DECAY)


@pytest.mark.parametrize(("name", "form"), [
    ("cosine", cosine), ("linear", linear), ("wsd", wsd), ("constant", lambda n: 1)])
def test_schedules_are_their_closed_forms(name, form):
    schedule = make_schedule(OptimizerConfig(learning_rate=PEAK, schedule=name, warmup_steps=WARMUP,
                                             final_fraction=FINAL, decay_fraction=DECAY), STEPS)
    for n in (0, 1, WARMUP - 1, WARMUP, 30, STEPS // 2, 80, 85, STEPS - 1, STEPS):
        want = PEAK * ((n + 1) / WARMUP if n < WARMUP else form(n))
        assert float(schedule(n)) == pytest.approx(want, rel=1e-5), f"{name} at step {n}"


@pytest.mark.parametrize("warmup", [0, 1])
def test_without_warm_up_the_first_step_has_the_peak(warmup):
    schedule = make_schedule(OptimizerConfig(learning_rate=PEAK, warmup_steps=warmup), STEPS)
    assert float(schedule(0)) == pytest.approx(PEAK)


def test_an_end_at_zero_is_zero():
    for name in ("cosine", "linear", "wsd"):
        schedule = make_schedule(OptimizerConfig(learning_rate=PEAK, schedule=name, final_fraction=0.0), STEPS)
        assert float(schedule(STEPS)) == pytest.approx(0, abs=1e-9)


# ------------------------------------------------------------------------------------- which parameters are treated how

def updates(name, run, gradient, **keys):
    """The first update of each parameter, by path; parameters are drawn, so that a vector that decays is seen to."""
    optimizer = make_optimizer(OptimizerConfig(name=name, **keys), lambda n: PEAK, run.layout.axes)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), run.abstract.params)
    grads = jax.tree.map(lambda p: jnp.asarray(gradient * rng.normal(size=p.shape), jnp.float32), params)
    moved, _ = jax.jit(optimizer.update)(grads, optimizer.init(params), params)
    flat = zip(jax.tree_util.tree_flatten_with_path(params)[0], jax.tree.leaves(moved), strict=True)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): (np.asarray(param), np.asarray(update))
            for (path, param), update in flat}


@pytest.mark.parametrize("family", ["gpt2", pytest.param("qwen3", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_matrices_decay_and_vectors_do_not(name, family):
    decays(name, reference.build(family))


def decays(name, run):
    for path, (param, update) in updates(name, run, gradient=0.0, weight_decay=0.5).items():
        want = -PEAK * 0.5 * param if path.endswith(("kernel", "table", "labels")) else 0 * param
        np.testing.assert_allclose(update, want, rtol=1e-5, atol=1e-8, err_msg=f"{name}, gradient of zero: {path}")


@pytest.mark.parametrize("family", [
    "clips", "vision_language", *slow(*sorted({*PLAIN} - {"clips", "vision_language"}))])
def test_the_embedding_of_patches_convolutions_and_read_outs_decay(family):
    """They have a side without a logical name; the biases of vision_language's encoder, layers that all stages have."""
    for shape in PLAIN[family]:
        config = fuzz_modalities.plain_of(family)[0](**{f"model__{key}": value for key, value in shape.items()})
        decays("sgd", jt.build(config, devices=1))


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_muon_turns_hidden_matrices_into_orthogonal_ones_and_leaves_the_rest_to_adam(family):
    for path, (_, update) in updates("muon", reference.build(family), gradient=1.0, weight_decay=0.0).items():
        update = update / PEAK
        if not (path.startswith("blocks") and path.endswith("kernel")):
            np.testing.assert_allclose(np.abs(update), 1, rtol=1e-3, err_msg=f"{path} is not moved as by Adam")
            continue
        for layer in update:  # [L, D, ...] or [L, ..., D]: D is one side, whatever else there is the other
            last = path.endswith(("out/kernel", "down/kernel"))
            side = layer.reshape(-1, layer.shape[-1]) if last else layer.reshape(len(layer), -1)
            values = np.linalg.svd(side, compute_uv=False)
            even = np.median(values) * 0.5 < values.min() and values.max() < np.median(values) * 1.6
            assert even, f"{path} is not orthogonalised layer by layer, its singular values are {values.round(2)}"
            assert 0.15 < np.sqrt((side**2).mean()) < 0.25, f"{path} does not move as far as by AdamW"


def newton_schulz(matrix, stored=lambda x: x):
    """The orthogonalization of Jordan et al. (kellerjordan.github.io/posts/muon), in float64, of what is stored."""
    wide = matrix.T if len(matrix) > len(matrix[0]) else matrix
    x = stored(wide / (np.linalg.norm(wide) + 1e-8))
    for _ in range(5):
        gram = stored(x @ x.T)
        x = stored(stored(3.4445 * np.eye(len(x)) - 4.7750 * gram + 2.0315 * stored(gram @ gram)) @ x)
    return x if wide is matrix else x.T


def test_muon_is_the_published_one_in_float64():
    axes = {"matrix": ("mlp", "embed"), "heads": ("layers", "embed", "heads", "head_dim"), "table": ("vocab", "embed"),
            "whole": ("every_layer", "mlp", "embed"), "whole_biases": ("every_layer", "embed"), "scale": ("norm",),
            "patches": (None, "embed"), "convolution": (None, None, "embed"), "read_out": ("embed", None)}
    shapes = {"matrix": (20, 8), "heads": (3, 8, 2, 6), "table": (11, 8), "whole": (3, 20, 8), "whole_biases": (3, 8),
              "scale": (8,), "patches": (12, 8), "convolution": (3, 5, 8), "read_out": (8, 5)}
    config = OptimizerConfig(name="muon", weight_decay=0.1, b1=0.8, b2=0.9, momentum=0.7)
    optimizer = make_optimizer(config, lambda n: PEAK, axes)
    rng = np.random.default_rng(0)
    want = {key: rng.normal(size=shape) for key, shape in shapes.items()}
    params = jax.tree.map(jnp.float32, want)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    first, second = ({key: np.zeros(shape) for key, shape in shapes.items()} for _ in range(2))
    for n in range(1, 6):
        grads = {key: rng.normal(size=shape) for key, shape in shapes.items()}
        moved, state = update(jax.tree.map(jnp.float32, grads), state, params)
        params = optax.apply_updates(params, moved)
        for key, grad in grads.items():
            if key in ("matrix", "heads", "whole"):
                first[key] = 0.7 * first[key] + 0.3 * grad
                nesterov = 0.7 * first[key] + 0.3 * grad
                by_layer = nesterov.reshape(-1, *((8, 12) if key == "heads" else (20, 8)))
                step = 0.2 * np.sqrt(max(by_layer.shape[1:])) * np.stack([*map(newton_schulz, by_layer)])
            else:
                first[key] = 0.8 * first[key] + 0.2 * grad
                second[key] = 0.9 * second[key] + 0.1 * grad**2
                step = first[key] / (1 - 0.8**n) / (np.sqrt(second[key] / (1 - 0.9**n)) + config.eps)
            want[key] = want[key] - PEAK * (
                step.reshape(grad.shape) + 0.1 * want[key] * (key not in ("scale", "whole_biases")))
            np.testing.assert_allclose(params[key], want[key], rtol=0, atol=2e-6, err_msg=f"{key} after step {n}")


def test_a_decay_longer_than_the_run_still_ends_where_it_should():
    config = OptimizerConfig(learning_rate=PEAK, schedule="wsd", warmup_steps=WARMUP, decay_fraction=1.0,
                             final_fraction=0.1)
    assert float(make_schedule(config, STEPS)(STEPS)) == pytest.approx(0.1 * PEAK)
