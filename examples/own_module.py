"""Your own Flax NNX module in the whole loop: checkpoints, metrics, resume and survival around a loss of your own.

    python examples/own_module.py

Ten seconds on a laptop. It trains half of the steps, then goes on from its checkpoint as another start would.
"""

import sys
import tempfile

import jax
import numpy as np
import optax
from flax import nnx

import jaxtrain as jt

SIDE, SHAPES, ROWS, STEPS = 12, 3, 64, 60


class Classifier(nnx.Module):
    """A classifier of shapes in images. `axes` names the dimensions, and `mesh.rules` spreads them by these names."""

    def __init__(self, rngs: nnx.Rngs):
        normal = jax.nn.initializers.lecun_normal()
        self.up = nnx.Param(normal(rngs.params(), (SIDE * SIDE, 128)), axes=("embed", "mlp"))
        self.down = nnx.Param(normal(rngs.params(), (128, SHAPES)), axes=("mlp", None))

    def __call__(self, images):
        return jax.nn.relu((images.reshape(-1, SIDE * SIDE) / 127.5 - 1) @ self.up[...]) @ self.down[...]


def loss_fn(model, batch):
    logits = model(batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["shape"])
    return jt.Weighted(losses.sum(), losses.size, {"accuracy": (logits.argmax(-1) == batch["shape"]).sum()})


def draw(step):
    """Noisy squares, crosses and diagonals."""
    rng = np.random.default_rng(step)
    shape, far = rng.integers(0, SHAPES, ROWS), rng.integers(4, 7, (ROWS, 1, 1))
    y, x = np.abs(np.indices((SIDE, SIDE)) - SIDE // 2)
    kinds = np.stack([np.maximum(y, x) == far, np.minimum(y, x) < far - 3, (y == x) & (y <= far)])
    noise = rng.integers(0, 56, (ROWS, SIDE, SIDE), np.uint8)
    return {"image": np.uint8(200) * kinds[shape, np.arange(ROWS)] + noise, "shape": shape}


def main(workdir):
    for steps in (STEPS // 2, STEPS):
        run = jt.build(jt.make_config({"train": {"steps": steps}}), model=lambda: Classifier(nnx.Rngs(0)),
                       loss_fn=loss_fn, optimizer=optax.adam(3e-3), data=jt.BatchFunction(draw))
        state = jt.train(run, workdir)
    right = (run.module(state)(draw(STEPS)["image"]).argmax(-1) == draw(STEPS)["shape"]).mean()
    print(f"{right:.0%} of unseen images are recognised")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
