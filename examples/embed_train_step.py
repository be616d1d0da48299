"""Your own model and loss, trained on any device mesh: the numbers are those of one device.

    python examples/embed_train_step.py

Ten seconds on a laptop, which plays eight devices. First a Flax NNX module, then a plain dict of arrays.
"""

import os

# Before JAX is imported: one CPU poses as eight devices. Where there are accelerators this changes nothing.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxtrain as jt

VOCAB, WIDTH, HEADS, LENGTH, BATCH, STEPS = 128, 64, 4, 64, 16, 5


# ------------------------------------------------------------------------------------------------ a module of one's own
# Nothing in it knows of a mesh. The only addition is `axes`: what the dimensions of each parameter mean.
class Block(nnx.Module):
    """Causal attention, then an MLP, each added to what came in."""

    def __init__(self, rngs: nnx.Rngs):
        def normal(*shape):
            return 0.1 * jax.random.normal(rngs.params(), shape)

        head = WIDTH // HEADS
        self.qkv = nnx.Param(normal(WIDTH, 3, HEADS, head), axes=("embed", None, "heads", "head_dim"))
        self.out = nnx.Param(normal(HEADS, head, WIDTH), axes=("heads", "head_dim", "embed"))
        self.up = nnx.Param(normal(WIDTH, 4 * WIDTH), axes=("embed", "mlp"))
        self.down = nnx.Param(normal(4 * WIDTH, WIDTH), axes=("mlp", "embed"))

    def __call__(self, x):
        q, k, v = jnp.einsum("btd,dchk->cbthk", normalise(x), self.qkv[...])
        x = x + jnp.einsum("bthk,hkd->btd", jax.nn.dot_product_attention(q, k, v, is_causal=True), self.out[...])
        return x + jax.nn.gelu(normalise(x) @ self.up[...]) @ self.down[...]


class Model(nnx.Module):
    """A language model over bytes."""

    def __init__(self, rngs: nnx.Rngs):
        self.table = nnx.Param(0.1 * jax.random.normal(rngs.params(), (VOCAB, WIDTH)), axes=("vocab", "embed"))
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])

    def __call__(self, tokens):
        x = self.table[...][tokens]
        for block in self.blocks:
            x = block(x)
        return normalise(x) @ self.table[...].T


def normalise(x):
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


def module_loss(model, batch):
    # A sum and its weight: micro-batches with different numbers of letters still add up to the whole batch.
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["tokens"]), batch["targets"])
    return jt.Weighted((losses * batch["weights"]).sum(), batch["weights"].sum())


# -------------------------------------------------------------------------------------------------- or a plain pytree
# The next byte from the two before it. A tree has nowhere to write names, so they stand beside it, in `axes`. (The
# head's second dimension has none: "vocab" would go over the mesh axis that "mlp" is on already, and be refused.)
TREE_AXES = {"table": ("vocab", "embed"), "hidden": {"kernel": (None, "embed", "mlp"), "bias": ("mlp",)},
             "head": ("mlp", None)}


def make_tree():
    keys = jax.random.split(jax.random.key(0), 3)
    return {"table": jax.random.normal(keys[0], (VOCAB, WIDTH)),
            "hidden": {"kernel": 0.1 * jax.random.normal(keys[1], (2, WIDTH, 4 * WIDTH)), "bias": jnp.zeros(4 * WIDTH)},
            "head": 0.1 * jax.random.normal(keys[2], (4 * WIDTH, VOCAB))}


def tree_loss(params, batch):
    embedded = params["table"][batch["tokens"]]
    before = jnp.pad(embedded, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    pair = jnp.stack([before, embedded], axis=2)
    hidden = jax.nn.relu(jnp.einsum("btcd,cdf->btf", pair, params["hidden"]["kernel"]) + params["hidden"]["bias"])
    losses = optax.softmax_cross_entropy_with_integer_labels(hidden @ params["head"], batch["targets"])
    return losses.mean()  # a plain mean, since here every byte counts


# --------------------------------------------------------------------------------------------------------- training
def batches():
    """Windows of Python's own source, as bytes; blanks are not learned."""
    text = np.frombuffer(Path(argparse.__file__).read_bytes(), np.uint8) % VOCAB
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        starts = rng.integers(0, len(text) - LENGTH - 1, BATCH)
        window = np.stack([text[start: start + LENGTH + 1] for start in starts]).astype(np.int32)
        tokens, targets = window[:, :-1], window[:, 1:]
        yield {"tokens": tokens, "targets": targets, "weights": (targets != ord(" ")).astype(np.float32)}


def train(loss, init, mesh, accumulation=1, axes=None):
    """The loss at every step."""
    step = jt.make_train_step(loss, optax.adamw(3e-3), mesh=mesh, rules=jt.rules("fsdp_tp"), axes=axes,
                              accumulation=accumulation, clip_norm=1.0)
    state = step.init(init)  # a function: compiled with sharded outputs, so no parameter is ever whole on one device
    if mesh.size > 1:
        step.report()
    losses = []
    for batch in batches():
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses


def main():
    devices = jax.devices() if jax.device_count() >= 8 else jax.devices("cpu")
    one, many = jt.make_mesh(devices=devices[:1]), jt.make_mesh(data=2, fsdp=2, tensor=2, devices=devices[:8])
    for name, loss, init, axes in (("NNX module", module_loss, lambda: Model(nnx.Rngs(0)), None),
                                   ("plain pytree", tree_loss, make_tree, TREE_AXES)):
        print(f"\n{name}")
        alone, together = train(loss, init, one, axes=axes), train(loss, init, many, accumulation=2, axes=axes)
        print("\nstep  one device  eight devices, two micro-batches")
        for n, pair in enumerate(zip(alone, together, strict=True)):
            print(f"{n:4}  {pair[0]:10.6f}  {pair[1]:10.6f}")
        np.testing.assert_allclose(together, alone, rtol=1e-5)
        print("equal within 1e-5")


if __name__ == "__main__":
    main()
