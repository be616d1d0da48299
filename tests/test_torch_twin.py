"""jaxtrain computes what the same model computes that was written by hand, in JAX and in PyTorch."""

import jax
import numpy as np
import pytest

from jaxtrain import sharding
from jaxtrain.build import build
from tools import bench

STEPS = 200


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    text = tmp_path_factory.mktemp("text")
    for n in range(300):  # short documents: most rows hold two or three
        (text / f"{n}.txt").write_text(f"{n} times {n} is {n * n}\n")
    return build(bench.make_config("tiny", STEPS, source=str(text)), devices=jax.devices()[:1])


@pytest.mark.parametrize("other", ["plain", "torch"])
def test_losses_of_200_steps(run, other):
    if other == "torch":
        pytest.importorskip("torch")
    assert run.train_batches[0]["segments"].max() > 1
    curves, final = bench.losses(run, [other], STEPS)
    assert len(curves[other]) == STEPS and curves["jaxtrain"][-1] < 0.7 * curves["jaxtrain"][0], "it learns"
    np.testing.assert_allclose(curves[other], curves["jaxtrain"], rtol=0, atol=1e-3)
    assert abs(final[other] - final["jaxtrain"]) < 1e-3


def assert_same(theirs, ours):
    assert theirs.keys() == ours.keys()
    for name, gradient in theirs.items():
        scale = np.abs(ours[name]).max()
        np.testing.assert_allclose(gradient, ours[name], rtol=0, atol=1e-5 * scale, err_msg=name)


@pytest.fixture(scope="module")
def gradients(run):
    """-> parameters that are nowhere 0 or 1, a batch, and the gradient of its mean loss."""
    draw = np.random.default_rng(0)
    params = jax.tree.map(lambda p: np.asarray(p) + draw.normal(0, 0.1, p.shape).astype(np.float32), run.init().params)
    batch = run.train_batches[0]

    def mean(params):
        total, weight = run.loss(params, run.place(batch))
        return total / weight

    with sharding.use(run.mesh, run.rules):
        placed = jax.tree.map(lambda p, like: jax.device_put(p, like.sharding), params, run.abstract.params)
        return params, batch, jax.device_get(jax.jit(jax.grad(mean))(placed))


def test_gradients_of_plain_jax(run, gradients):
    from tools.reference import plain_jax

    params, batch, ours = gradients
    shape = bench.shape_of(run.config.model)
    theirs = jax.jit(jax.grad(plain_jax.loss), static_argnums=2)(plain_jax.from_jaxtrain(params), batch, shape)
    assert_same(jax.device_get(theirs), plain_jax.from_jaxtrain(ours))


def test_gradients_of_torch(run, gradients):
    pytest.importorskip("torch")
    from tools.reference import torch_twin

    params, batch, ours = gradients
    model = torch_twin.Twin(*bench.shape_of(run.config.model))
    model.load_state_dict(torch_twin.from_jaxtrain(params))
    total, weight = model(**torch_twin.tensors(batch))
    (total / weight).backward()
    assert_same({name: p.grad.numpy() for name, p in model.named_parameters()},
                {name: value.numpy() for name, value in torch_twin.from_jaxtrain(ours).items()})


def test_learning_rate_is_the_same(run):
    from tools.reference import plain_jax

    hyper = bench.hyper(run.config)
    theirs = [float(plain_jax.learning_rate(hyper, np.float32(step))) for step in range(STEPS + 1)]
    np.testing.assert_allclose(theirs, [float(run.schedule(step)) for step in range(STEPS + 1)], rtol=1e-5)
