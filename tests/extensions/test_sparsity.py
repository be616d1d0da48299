"""2:4 sparsity: the masks, training with them against a plain formula on a mesh, and what is saved and exported."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.checkpoint import CheckpointManager
from jaxtrain.extensions.sparsity import NAME, largest
from jaxtrain.hub.weights import published_weights, safetensors_files
from jaxtrain.train_step import partition
from jaxtrain.train_step.hooks import extras_of
from tests.numerics import reference

START, EVERY, STOP, DECAY, STEPS, ROWS = 2, 2, 4, 0.05, 6, 8
# The dimension of neighbouring inputs of each kernel of the plain model; in `out` the heads' widths.
INPUTS = {"q": 1, "k": 1, "v": 1, "out": 2, "gate": 1, "up": 1, "down": 1}


def plain_mask(x, dimension):
    """Return the mask, computed for each four values, one after the other."""
    rows = np.moveaxis(np.asarray(x), dimension, -1)
    mask = np.zeros(rows.shape, bool)
    for place in np.ndindex(rows.shape[:-1]):
        for at in range(0, rows.shape[-1], 4):
            order = np.argsort(-np.abs(rows[place][at:at + 4]), kind="stable")
            mask[place][at + order[:2]] = True
    return np.moveaxis(mask, -1, dimension)


def test_the_two_largest_of_four_stay():
    x = np.random.default_rng(0).integers(-2, 3, (3, 8, 4)).astype(np.float32)  # many are equal
    for dimension in (1, 2):
        np.testing.assert_array_equal(jax.jit(largest, static_argnums=1)(x, dimension), plain_mask(x, dimension))


@cache
def training():
    run = reference.build("llama", (2, 2, 2), sparsity__targets=["blocks/*"], sparsity__start=START,
                          sparsity__every=EVERY, sparsity__stop=STOP, sparsity__decay=DECAY, model__num_layers=1,
                          data__global_batch_size=ROWS)
    return run, reference.compiled(run)


def by_kernel(f, tree, *rest):
    """Apply a function to each kernel of the blocks and the dimension of its inputs; others stay."""
    def one(path, x, *more):
        keys = [key.key for key in path]
        return f(INPUTS[keys[-2]], x, *more) if keys[0] == "blocks" and keys[-1] == "kernel" else x
    return jax.tree_util.tree_map_with_path(one, tree, *rest)


@cache
def plain():
    """Losses and masks of each step, by a plain formula in float32 on one device."""
    c = training()[0].config
    p = jax.tree.map(jnp.asarray, reference.initial("llama", 1))
    m = v = jax.tree.map(jnp.zeros_like, p)
    masks = by_kernel(lambda _, x: np.ones(x.shape, bool), p)
    value = jax.jit(jax.value_and_grad(lambda p, batch: reference.loss(c.model, p, batch)))
    losses, chosen = [], []
    for n in range(STEPS):
        loss, g = value(by_kernel(lambda _, x, mask: x * mask, p, masks), reference.batch(n, ROWS))
        g = by_kernel(lambda _, g, x, mask: g + DECAY * x * ~mask, g, p, masks)
        size = reference.norm_of(g)
        g = jax.tree.map(lambda x, size=size: x * jnp.minimum(1, c.optimizer.clip_norm / size), g)
        p, m, v = reference.adamw(c.optimizer, p, g, m, v, reference.learning_rate(c, n), n)
        if n + 1 in (2, 4):
            masks = by_kernel(lambda d, x: plain_mask(x, d), p)
        losses.append(float(loss))
        chosen.append(masks)
    return losses, chosen, by_kernel(lambda _, x, mask: x * mask, p, masks)


@cache
def trained():
    run, step = training()
    state, losses, states = reference.start(run, "llama"), [], []
    for n in range(STEPS):
        state, metrics = step(state, run.sharded.place(reference.batch(n, ROWS)))
        losses.append(float(metrics["loss"]))
        states.append(jax.device_get(state))
    return losses, states, state.params


@pytest.mark.slow
def test_training_is_that_of_the_plain_formula():
    """Dense until a step, sparse from then on, masks chosen again and then fixed; on a mesh that splits the inputs."""
    losses, states, _ = trained()
    want, chosen, params = plain()
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    for state, masks in zip(states, chosen, strict=True):
        mine = state.extras[NAME]["masks"]
        assert jax.tree.all(jax.tree.map(np.array_equal, mine, partition.like(masks, mine)))
    first, again = (jax.tree.leaves(states[n].extras[NAME]["masks"]) for n in (1, 3))
    assert any((a != b).any() for a, b in zip(first, again, strict=True)), "no weight came back"
    assert jax.tree.all(jax.tree.map(np.array_equal, states[3].extras[NAME]["masks"], states[5].extras[NAME]["masks"]))
    assert reference.worst(states[-1].params, params)[0] < 1e-4


def zeros_of_four(x, dimension):
    """Return the number of zeros in each four values."""
    x = np.moveaxis(np.asarray(x, np.float32), dimension, -1)
    return set((x.reshape(-1, 4) == 0).sum(-1).tolist())


@pytest.mark.slow
def test_what_is_exported_is_sparse(tmp_path):
    """Two of four inputs of each matrix, as published: [outputs, inputs]; the others are whole."""
    run, _ = training()
    params = trained()[2]
    published_weights.save(params, run.config.model, tmp_path, jnp.dtype("bfloat16"), 10**9)
    files = {name: tensor.view() for name, tensor in safetensors_files.tensors_of(tmp_path).items()}
    sparse = {name: x for name, x in files.items() if name.endswith("proj.weight")}
    assert len(sparse) == 7
    assert all(zeros_of_four(x, 1) == {2} for x in sparse.values())
    assert not any((np.asarray(x, np.float32) == 0).mean() > 0.1 for name, x in files.items() if name not in sparse)


@pytest.mark.slow
def test_a_resumed_run_is_the_same_to_the_bit(tmp_path):
    run, step = training()
    state = reference.start(run, "llama")
    for n in range(3):
        state, _ = step(state, run.sharded.place(reference.batch(n, ROWS)))
    store = CheckpointManager(tmp_path / "c", extras=extras_of(run.extensions))
    store.save(3, state, {})
    store.wait()
    state = store.restore(3, run.abstract)
    for n in range(3, STEPS):
        state, _ = step(state, run.sharded.place(reference.batch(n, ROWS)))
    assert jax.tree.all(jax.tree.map(np.array_equal, jax.device_get(state), trained()[1][-1]))
    store.close()


@pytest.mark.parametrize("keys, sentence", [
    ({"sparsity.every": 3}, "sparsity.every: it is read with sparsity.targets only"),
    ({"sparsity.targets": ["nothing/*"]}, "sparsity.targets: no linear layer's path matches"),
    ({"sparsity.targets": ["blocks/*"], "train.ema_decay": 0.9}, "train.ema_decay: an average of weights whose zeros"),
    ({"sparsity.targets": ["blocks/*"], "train.freeze": ["blocks/*"]}, "sparsity.targets: .* is not trained"),
    ({"sparsity.targets": ["blocks/*"], "sparsity.start": 99}, "sparsity.start: 99 is behind train.steps=20"),
    ({"sparsity.targets": ["blocks/*"], "sparsity.start": 9, "sparsity.stop": 3}, "sparsity.stop: 3 is before"),
    ({"sparsity.targets": ["blocks/*"], "model.embed_dim": 48, "mesh.fsdp": 8},
     r"sparsity.targets: the 48 inputs of .*, split over fsdp, are not groups of 4 on each device")])
def test_what_cannot_be_sparse_is_one_sentence(keys, sentence):
    with pytest.raises(jt.UserError, match=f"^{sentence}"):
        jt.build(jt.load_config("configs/gpt.py:tiny", {"mesh.data": 1} | keys), devices=keys.get("mesh.fsdp", 1))
