"""A plain pytree of parameters in the whole loop, and an observer: nothing of Flax, and no class of a model.

    python examples/own_pytree.py

Ten seconds on a laptop. A network of random features and two layers learns a curve from noisy points.
"""

import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxtrain as jt

WIDTH, ROWS, STEPS = 64, 128, 300


def make_params():
    keys = jax.random.split(jax.random.key(0), 3)
    return {"waves": 3 * jax.random.normal(keys[0], (1, WIDTH)),
            "layers": [{"w": jax.random.normal(key, shape) / np.sqrt(shape[0]), "b": jnp.zeros(shape[1])}
                       for key, shape in zip(keys[1:], [(WIDTH, WIDTH), (WIDTH, 1)], strict=True)]}


# A tree has no place for logical names, so they are given apart. What has none is spread over `fsdp`.
AXES = {"waves": (None, "embed"), "layers": [{"w": ("embed", "mlp"), "b": ("mlp",)}, {"w": ("mlp", None), "b": None}]}


def loss_fn(params, batch):
    first, last = params["layers"]
    hidden = jnp.tanh(jnp.sin(batch["x"] @ params["waves"]) @ first["w"] + first["b"])
    return jnp.square((hidden @ last["w"] + last["b"])[:, 0] - batch["y"]).mean()


def points(step):
    rng = np.random.default_rng(step)
    x = rng.uniform(-1, 1, (ROWS, 1)).astype(np.float32)
    return {"x": x, "y": (np.sin(5 * x[:, 0]) + 0.1 * rng.normal(size=ROWS)).astype(np.float32)}


class Printer(jt.Observer):
    def on_complete(self, record):
        print(f"step {record['step']:3}  loss {record['loss']:.4f}")


def main(workdir):
    config = jt.make_config({"mesh": {"data": -1}, "train": {"steps": STEPS, "log_every": 50, "progress": False}})
    run = jt.build(config, model=make_params, axes=AXES, loss_fn=loss_fn, data=jt.BatchFunction(points),
                   optimizer=optax.adam(optax.cosine_decay_schedule(1e-2, STEPS)))
    jt.train(run, workdir, observers=[Printer()])


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
