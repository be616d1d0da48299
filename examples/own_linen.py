"""Parameters of a Flax Linen module in the whole loop, with dropout: the key follows from train.seed and the step.

    python examples/own_linen.py

Ten seconds on a laptop. A small network reads three digits and learns the last digit of their sum.
"""

import sys
import tempfile

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxtrain as jt

DIGITS, LENGTH, ROWS, STEPS = 10, 3, 256, 300


class Summer(nn.Module):
    """Linen's logical names are read from its boxes: `mesh.rules` spreads the parameters by them."""

    @nn.compact
    def __call__(self, digits, *, train):
        named = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        x = nn.Embed(DIGITS, 32)(digits).reshape(len(digits), -1)
        x = nn.relu(nn.Dense(256, kernel_init=named)(x))
        return nn.Dense(DIGITS)(nn.Dropout(0.1, deterministic=not train)(x))


model = Summer()


def loss_fn(variables, batch, key):
    rngs = {} if key is None else {"dropout": key}  # None: it is an evaluation
    logits = model.apply(variables, batch["digits"], train=key is not None, rngs=rngs)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["sum"])
    return jt.Weighted(losses.sum(), losses.size, {"accuracy": (logits.argmax(-1) == batch["sum"]).sum()})


def sums(step):
    digits = np.random.default_rng(step).integers(0, DIGITS, (ROWS, LENGTH)).astype(np.int32)
    return {"digits": digits, "sum": digits.sum(1) % DIGITS}


def main(workdir):
    config = jt.make_config({"mesh": {"data": -1}, "train": {"steps": STEPS, "log_every": 50, "seed": 7}})
    run = jt.build(config, model=lambda: model.init(jax.random.key(0), jnp.zeros((1, LENGTH), int), train=False),
                   loss_fn=loss_fn, with_key=True, optimizer=optax.adamw(5e-3),
                   data=jt.BatchFunction(sums, tokens_per_row=LENGTH))
    state = jt.train(run, workdir)
    total, weight = run.sharded.evaluate(state, sums(STEPS))[:2]
    print(f"loss on unseen digits {float(total / weight):.3f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
