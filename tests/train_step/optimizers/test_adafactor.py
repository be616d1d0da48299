"""Adafactor as published, matrix by matrix in float64; where its factors lie on a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from jaxtrain.config.schema import OptimizerConfig
from jaxtrain.train_step.optimizers import make_optimizer
from tests.numerics import reference

RATE, DECAY = 1e-2, 0.1
# name: logical names, shape, how many matrices or vectors it holds, and the sides of each (None: not factored)
LEAVES = {
    "matrix": (("embed", "mlp"), (128, 160), 1, (128, 160)),
    "layers": (("layers", "mlp", "embed"), (3, 160, 128), 3, (160, 128)),
    "heads": (("layers", "embed", "heads", "head_dim"), (2, 128, 4, 40), 2, (128, 160)),
    "heads_in": (("layers", "heads", "head_dim", "embed"), (2, 4, 40, 128), 2, (160, 128)),
    "few_heads": (("layers", "embed", "heads", "head_dim"), (2, 128, 2, 60), 2, None),  # 120 columns
    "experts": (("layers", "experts", "expert_embed", "expert_mlp"), (2, 3, 128, 130), 6, (128, 130)),
    "table": (("vocab", "embed"), (150, 128), 1, (150, 128)),
    "narrow": (("embed", "mlp"), (127, 300), 1, None),
    "many_norms": (("layers", "norm"), (130, 140), 130, None),  # vectors, however many
    "biases": (("layers", "heads", "head_dim"), (2, 128, 130), 2, None),
    "whole": (("every_layer", "mlp", "embed"), (3, 160, 128), 3, (160, 128)),
    "whole_biases": (("every_layer", "embed"), (130, 140), 130, None),
    "patches": ((None, "embed"), (130, 128), 1, (130, 128)),
    "convolution": ((None, None, "embed"), (3, 50, 128), 1, (150, 128)),
    "read_out": (("embed", None), (128, 5), 1, None),
}


class Reference:
    """Algorithm 4 of Shazeer and Stern (2018) for one matrix or vector, without a relative step size."""

    def __init__(self):
        self.row = self.column = self.full = 0.0

    def step(self, grad, t, factored):
        beta, square = 1 - t**-0.8, grad**2 + 1e-30
        if factored:
            self.row = beta * self.row + (1 - beta) * square.sum(1)
            self.column = beta * self.column + (1 - beta) * square.sum(0)
            second = np.outer(self.row, self.column) / self.row.sum()
        else:
            second = self.full = beta * self.full + (1 - beta) * square
        update = grad / np.sqrt(second)
        return update / max(1.0, np.sqrt((update**2).mean()))


def test_it_is_the_published_one_in_float64_layer_by_layer():
    axes = {key: names for key, (names, *_) in LEAVES.items()}
    optimizer = make_optimizer(OptimizerConfig(name="adafactor", weight_decay=DECAY), lambda n: RATE, axes)
    rng = np.random.default_rng(0)
    want = {key: rng.normal(size=shape) for key, (_, shape, *_) in LEAVES.items()}
    params = jax.tree.map(jnp.float32, want)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    references = {key: [Reference() for _ in range(many)] for key, (_, _, many, _) in LEAVES.items()}
    for t in range(1, 5):
        # Layers of unequal size, and growing, so that some updates are clipped and others are not.
        grads = {key: rng.normal(size=x.shape) * 4.0 ** (t + np.arange(len(x))[(..., *(None,) * (x.ndim - 1))] % 3 * t)
                 for key, x in want.items()}
        moved, state = update(jax.tree.map(jnp.float32, grads), state, params)
        params = optax.apply_updates(params, moved)
        for key, (names, shape, many, sides) in LEAVES.items():
            each = grads[key].reshape(many, *(sides or (-1,)))
            steps = np.stack([r.step(g, t, sides) for r, g in zip(references[key], each, strict=True)]).reshape(shape)
            decays = "norm" not in names and not key.endswith("biases")
            want[key] = want[key] - RATE * (steps + DECAY * want[key] * decays)
            np.testing.assert_allclose(params[key], want[key], rtol=1e-6, atol=2e-6, err_msg=f"{key} after step {t}")


def factors(state):
    leaves = jax.tree.leaves(state.opt_state, is_leaf=lambda s: hasattr(s, "rows"))
    found = next(leaf for leaf in leaves if hasattr(leaf, "rows"))
    return found.rows["blocks"]["layer"], found.columns["blocks"]["layer"], found.full["blocks"]["layer"]


@pytest.mark.parametrize("stage", [0, 2])
def test_factors_lie_on_the_mesh_as_the_dimensions_of_their_parameters(stage):
    """A width of 128 in both dimensions of the output projection does not confuse them."""
    run = reference.build("llama", (2, 2, 2), model__embed_dim=128, model__mlp_dim=128, model__num_heads=32,
                          model__num_kv_heads=32, optimizer__name="adafactor", optimizer__zero_stage=stage)
    for part, name in (("attention", "q"), ("attention", "out"), ("mlp", "gate"), ("mlp", "down")):
        whole = run.layout.gradients["blocks"]["layer"][part][name]["kernel"].spec  # under ZeRO spread as the state
        rows, columns, _ = (tree[part][name]["kernel"] for tree in factors(run.layout.state))
        shapes = [tree[part][name]["kernel"].shape for tree in factors(run.abstract)[:2]]
        for factor, shape in ((rows, shapes[0]), (columns, shapes[1])):
            want = [None if size == 1 else entry for size, entry in zip(shape, whole, strict=True)]
            assert factor.spec == P(*want), (part, name)
        assert any(whole) and ("data" in str(whole)) == bool(stage)
    assert factors(run.abstract)[2]["attention"]["q"]["kernel"] is None
