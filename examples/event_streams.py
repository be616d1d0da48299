"""Predict what a user does next: a table of events to bucketed batches of users, and a small recurrent network.

    python examples/event_streams.py

Half a minute on a laptop, which plays eight devices. The table is made here: each user wanders between four moods that
nobody records (a hidden Markov chain), and each mood has items that it likes.
"""

import os

# Before JAX is imported: one CPU poses as eight devices. Where there are accelerators this changes nothing.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pyarrow as pa
import pyarrow.parquet as pq
from flax import nnx

import jaxtrain as jt
from jaxtrain.data import BucketedBatches, SequenceRows
from jaxtrain.data.loading.bucketing import choose, equal_sizes
from jaxtrain.data.prepare_sequences.event_streams import Events
from jaxtrain.data.prepare_sequences.prepare_sequences import prepare_sequences, summary

USERS, MOODS, ITEMS, STEPS, WIDTH = 800, 4, 32, 80, 64


# ------------------------------------------------------------------------------------------------------------- the data
def write_table(path: Path):
    """Rows in no order, as a log of many users has them."""
    rng = np.random.default_rng(0)
    likes = rng.dirichlet(np.full(ITEMS, 0.1), MOODS)
    users, times, items = [], [], []
    for user in range(USERS):
        mood, now = rng.integers(MOODS), rng.uniform(0, 1e6)
        for _ in range(int(np.clip(rng.lognormal(3, 0.6), 5, 80))):
            mood = mood if rng.random() < 0.95 else rng.integers(MOODS)
            now += rng.exponential(60)
            users.append(f"user{user}")
            times.append(now)
            items.append(f"item{rng.choice(ITEMS, p=likes[mood])}")
    order = rng.permutation(len(users))
    dates = pa.array((np.array(times) * 1e6).astype("i8")).cast(pa.timestamp("us"))
    table = {"user": users, "at": dates, "item": items}
    pq.write_table(pa.table(table).take(order), path, row_group_size=4000)


def batches_of(sequences, mesh, repeat=True):
    """Each user a row; three lengths of rows, with about as many events in every batch."""
    rows = SequenceRows(sequences)
    buckets = choose(rows.lengths, 3, multiple=8)
    sizes = equal_sizes(buckets, places=1500, multiple=mesh.size)
    return BucketedBatches(rows, buckets=buckets, global_batch_size=sizes, seed=0, repeat=repeat)


# ------------------------------------------------------------------------------------------------------------ the model
class Recurrent(nnx.Module):
    """A recurrent model of the next event: one gated unit, over items and the time between them."""

    def __init__(self, rngs: nnx.Rngs, items: int):
        def normal(*shape):
            return jax.random.normal(rngs.params(), shape) / np.sqrt(shape[0])

        self.table = nnx.Param(normal(items, WIDTH), axes=(None, "embed"))
        self.time = nnx.Param(normal(1, WIDTH), axes=(None, "embed"))
        self.gates = nnx.Param(normal(2 * WIDTH, 2, WIDTH), axes=("embed", None, None))
        self.say = nnx.Param(normal(WIDTH, items), axes=("embed", None))

    def __call__(self, items, elapsed):
        x = self.table[...][items] + jnp.log1p(elapsed)[..., None] / 4 * self.time[...]

        def after(state, now):
            gate, new = jnp.einsum("bi,igo->gbo", jnp.concatenate([state, now], -1), self.gates[...])
            state = state + jax.nn.sigmoid(gate) * (jnp.tanh(new) - state)
            return state, state

        _, states = jax.lax.scan(after, jnp.zeros_like(x[:, 0]), jnp.moveaxis(x, 1, 0))
        return jnp.moveaxis(states, 0, 1) @ self.say[...]


def loss_fn(model, batch):
    logits = model(batch["item"][:, :-1], batch["elapsed"][:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["item"][:, 1:])
    weights = batch["weights"][:, 1:]  # padding is not learnt
    return jt.Weighted((losses * weights).sum(), weights.sum())


# ------------------------------------------------------------------------------------------------------------- training
def main():
    devices = jax.devices() if jax.device_count() >= 8 else jax.devices("cpu")
    mesh = jt.make_mesh(data=4, fsdp=2, devices=devices[:8])
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder, "events.parquet")
        write_table(table)
        source = Events("user", "at", categories=("item",), eval_fraction=0.1)
        corpus = prepare_sequences([str(table)], Path(folder, "corpus"), source)
        print(summary(corpus))
        batches = batches_of(corpus.train, mesh)
        print(f"batches of (rows, events): {batches.shapes}")
        items = 1 + len(corpus.manifest["vocabularies"]["item"]["values"])
        step = jt.make_train_step(loss_fn, optax.adam(optax.cosine_decay_schedule(1e-2, STEPS)), mesh=mesh,
                                  rules=jt.rules("fsdp"), clip_norm=1.0)
        state = step.init(lambda: Recurrent(nnx.Rngs(0), items))
        for n in range(STEPS):
            state, metrics = step(state, batches[n])
            if n % 20 == 0 or n == STEPS - 1:
                size, length = batches.size(n), batches.length(n)
                print(f"step {n:3}  {size:3} rows of {length:2}  loss {float(metrics['loss']):.4f}")
        held_out = batches_of(corpus.eval, mesh, repeat=False)
        totals, weights = zip(*(step.evaluate(state, held_out[n]) for n in range(held_out.num_batches)), strict=True)
        loss = float(sum(totals) / sum(weights))
        seen = np.bincount(np.concatenate([row["item"] for row in corpus.train]), minlength=items) + 1
        asked = np.concatenate([row["item"][1:] for row in corpus.eval])
        assert sum(weights) == len(asked)  # every event of every user that was not trained on, once
        alone = float(-np.log(seen / seen.sum())[asked].mean())
        print(f"users that were not trained on, nats an event: {loss:.3f}; by how common items are: {alone:.3f}")


if __name__ == "__main__":
    main()
