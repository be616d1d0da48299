"""jaxtrain computes what the same model computes that was written by hand, in JAX and in PyTorch."""

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.bench import compare, contenders
from jaxtrain.sharding import mesh_context
from tests.tiers import exhaustive, slow

STEPS = 200
FAMILIES = {
    "gpt2": {"name": "gpt2"},
    "llama": {"name": "llama", "num_heads": 4, "num_kv_heads": 2, "mlp_dim": 48, "tied_embeddings": False,
              "rope_theta": 100.0, "rope_scaling": 4.0, "rope_original_len": 16},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    text = tmp_path_factory.mktemp("text")
    for n in range(300):  # short documents: most rows hold two or three
        (text / f"{n}.txt").write_text(f"{n} times {n} is {n * n}\n")

    def make(family):
        return jt.build(jt.make_config({
            "model": {"vocab_size": 320, "num_layers": 2, "embed_dim": 32, "num_heads": 2, "max_seq_len": 32}
                     | FAMILIES[family],
            "data": {"seq_len": 32, "global_batch_size": 4, "source": str(text)},
            "optimizer": {"learning_rate": 1e-3, "warmup_steps": 10}, "train": {"steps": STEPS, "unroll": 0},
        }), devices=jax.devices()[:1])

    return {family: make(family) for family in FAMILIES}


@pytest.mark.parametrize(("family", "other"), [
    *slow(("gpt2", "plain"), ("llama", "torch")), *exhaustive(("gpt2", "torch"))])  # whose gradients are tested below
def test_losses_of_200_steps(runs, family, other):
    if other == "torch":
        pytest.importorskip("torch")
    run = runs[family]
    assert run.train_batches[0]["segments"].max() > 1
    state, batches, ours = run.init(), [run.train_batches[n] for n in range(STEPS)], []
    its = contenders.contenders([other], run, state.params)[other]
    for batch in batches:
        state, metrics = run.step(state, batch)
        ours.append(float(metrics["loss"]))
    theirs = its.steps(map(its.place, batches))
    assert ours[-1] < 0.7 * ours[0], "it learns"
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=1e-3)
    assert contenders.apart({"jaxtrain": ours, other: theirs})[other] == np.abs(np.subtract(theirs, ours)).max()


def assert_same(theirs, ours):
    assert theirs.keys() == ours.keys()
    for name, gradient in theirs.items():
        scale = np.abs(ours[name]).max()
        np.testing.assert_allclose(gradient, ours[name], rtol=0, atol=1e-5 * scale, err_msg=name)


def gradients(run):
    """Return parameters that are nowhere 0 or 1, a batch, and the gradient of its mean loss."""
    draw = np.random.default_rng(0)
    params = jax.tree.map(lambda p: np.asarray(p) + draw.normal(0, 0.1, p.shape).astype(np.float32), run.init().params)
    batch = run.train_batches[0]

    def mean(params):
        total, weight, _ = run.objective.loss(params, run.sharded.place(batch))
        return total / weight

    with mesh_context.use(run.mesh, run.sharded.rules):
        placed = jax.tree.map(lambda p, like: jax.device_put(p, like.sharding), params, run.abstract.params)
        return params, batch, jax.device_get(jax.jit(jax.grad(mean))(placed))


@pytest.mark.slow
def test_gradients_of_plain_jax(runs):
    from jaxtrain.bench.reference import plain_jax

    params, batch, ours = gradients(runs["gpt2"])
    shape = contenders.shape_of(runs["gpt2"].config.model)
    theirs = jax.jit(jax.grad(plain_jax.loss), static_argnums=2)(plain_jax.from_jaxtrain(params), batch, shape)
    assert_same(jax.device_get(theirs), plain_jax.from_jaxtrain(ours))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("remat", [False, True])
def test_gradients_of_torch(runs, family, remat):
    pytest.importorskip("torch")
    from jaxtrain.bench.reference import torch_twin

    params, batch, ours = gradients(runs[family])
    model = torch_twin.Twin(runs[family].config.model, remat=remat)
    model.load_state_dict(torch_twin.from_jaxtrain(params))
    tensors = torch_twin.tensors(batch)
    total, weight = model(**tensors, mask=torch_twin.make_mask(tensors["segments"]))
    (total / weight).backward()
    assert_same({name: p.grad.numpy() for name, p in model.named_parameters()},
                {name: value.numpy() for name, value in torch_twin.from_jaxtrain(ours).items()})


def test_learning_rate_is_the_same(runs):
    from jaxtrain.bench.reference import plain_jax

    run = runs["gpt2"]
    hyper = contenders.hyper(run)
    theirs = [float(plain_jax.learning_rate(hyper, np.float32(step))) for step in range(STEPS + 1)]
    ours = [float(run.sharded.settings.schedule(step)) for step in range(STEPS + 1)]
    np.testing.assert_allclose(theirs, ours, rtol=1e-5)


@pytest.mark.slow
def test_taking_turns(runs):
    found = compare.compare(runs["gpt2"], ["step", "plain"], steps=5, warmup=2)
    assert list(found["contenders"]) == ["jaxtrain", "step", "plain"] and found["blocks"] == 5
    for name, one in found["contenders"].items():
        assert one["wall_ms"] > 0 and one["cpu_ms"] > 0
        assert one["wall_quartiles"][0] <= one["wall_paired"] <= one["wall_quartiles"][1]
        assert one["loss_apart"] is None if name == "jaxtrain" else one["loss_apart"] < 1e-4, "batches are the same"
    assert found["contenders"]["jaxtrain"]["wall_paired"] == 1


@pytest.mark.parametrize(("keys", "refused"), [
    ({"train.z_loss": 0.1}, "train.z_loss"), ({"optimizer.clip_norm": 0}, "optimizer.clip_norm"),
    ({"model.norm_eps": 0.1}, "model.norm_eps"), ({"train.accumulation": 2}, "train.accumulation"),
    ({"model.head_dim": 64}, "model.head_dim"), ({"optimizer.name": "lion"}, "optimizer.name"),
    ({"model.name": "llama"}, "model.name"), ({"train.precision": "bfloat16"}, "train.precision")])
def test_what_another_program_does_not_have_is_refused(keys, refused):
    run = jt.build(jt.make_config({"mesh": {"data": 1}}, keys), devices=jax.devices()[:1])
    with pytest.raises(jt.UserError, match=f"^{refused}: .* cannot be compared: plain has gpt2 in float32"):
        contenders.refuse(["plain"], run)
    contenders.refuse(["step"], run)
