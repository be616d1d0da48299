"""Prove a module that is sharded by hand, or be told what is wrong with it (docs/prove.md).

    python examples/prove_module.py
    python examples/prove_module.py --bug=sum
    python examples/prove_module.py --bug=gradient
    python examples/prove_module.py --bug=mean
"""

import argparse
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # before JAX starts

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import jaxtrain as jt

ROWS, LENGTH, VOCAB, WIDTH, HIDDEN = 32, 8, 16, 8, 32
BUG = ""


def parameters():
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = {"embed": (VOCAB, WIDTH), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH), "head": (WIDTH, VOCAB)}
    return {name: 0.3 * jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}


AXES = {"embed": None, "up": (None, "mlp"), "down": ("mlp", None), "head": None}


def batch(step):
    """Return tokens that follow from each other, in rows of unequal length."""
    rng = np.random.default_rng(step)
    tokens = (rng.integers(VOCAB, size=(ROWS, 1)) + 3 * np.arange(LENGTH + 1)) % VOCAB
    weights = np.arange(LENGTH) < rng.integers(1, LENGTH + 1, size=(ROWS, 1))
    return {"tokens": tokens.astype(np.int32), "weights": weights.astype(np.float32)}


@jax.custom_vjp
def summed_again(x):
    """Return the same, and sum its gradient over the axis once more, where that was done already."""
    return x


def _axis_size():
    return dict(jax.sharding.get_abstract_mesh().shape)["tensor"]


summed_again.defvjp(lambda x: (x, None), lambda _, g: (g * _axis_size(),))


def mlp(x, up, down):
    """Compute an MLP whose hidden units are split over the mesh axis `tensor`."""
    def on_device(x, up, down):
        y = jax.nn.relu(x @ up) @ down
        return y if BUG == "sum" else jax.lax.psum(y, "tensor")

    rows, columns = P(("data", "fsdp")), P(None, "tensor")
    return jax.shard_map(on_device, mesh=jax.sharding.get_abstract_mesh(), in_specs=(rows, columns, P("tensor")),
                         out_specs=rows, check_vma=False)(x, up, down)


def loss_fn(params, batch):
    tokens, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    x = params["embed"][tokens]
    if BUG == "gradient":
        x = summed_again(x)
    x = x + mlp(x, params["up"], params["down"])
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], targets)
    total, weight = (losses * batch["weights"]).sum(), batch["weights"].sum()
    return total / weight if BUG == "mean" else jt.Weighted(total, weight)


def main(argv=None):
    global BUG
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bug", default="", choices=["", "sum", "gradient", "mean"])
    parser.add_argument("--meshes", type=int, default=12)
    flags = parser.parse_args(argv)
    BUG = flags.bug
    proof = jt.prove(jt.Config(), meshes=flags.meshes, model=parameters, loss_fn=loss_fn, axes=AXES,
                     optimizer=optax.adamw(1e-2), data=jt.BatchFunction(batch))
    print(proof)
    return 0 if proof.proven else 1


if __name__ == "__main__":
    raise SystemExit(main())
