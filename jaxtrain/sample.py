"""Text from a model: the whole generation is one compiled loop on the mesh the model lives on."""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain import precision, sharding

if TYPE_CHECKING:
    from jaxtrain.build import Run
    from jaxtrain.state import TrainState


def sample(run: "Run", state: "TrainState", prompt: str = "", length: int = 200, *, temperature: float = 0.8,
           seed: int = 0) -> str:
    """`prompt` continued by at most `length` tokens, as many as `data.seq_len` has room for.

    Every step computes the whole window again, without a cache: fine for a look at what a run has learned.
    """
    tokenizer = run.corpus.tokenizer
    # A document's first token has no predecessor in training, so an empty prompt starts behind a line's end.
    start = np.asarray(tokenizer.encode((prompt or "\n").encode()), np.int32)[-(run.config.data.seq_len - 1):]
    stop = min(len(start) + length, run.config.data.seq_len)
    # One row for every piece the batch is cut into: the mesh is busy either way.
    tokens = np.zeros((run.layout.batch_shards, run.config.data.seq_len), np.int32)
    tokens[:, : len(start)] = start

    def generate(params, tokens, key):
        model = run.model.merge(precision.cast(params, run.precision))

        def extend(i, tokens):
            x_BTD = model.hidden(tokens)
            last_BD = jax.lax.dynamic_index_in_dim(x_BTD, i - 1, axis=1, keepdims=False)
            logits_BV = jnp.einsum("bd,dv->bv", last_BD, model.head(), preferred_element_type=jnp.float32,
                                   out_sharding=sharding.activation_spec("batch", None))
            noise = jax.random.gumbel(jax.random.fold_in(key, i), logits_BV.shape[-1:])
            next_B = jnp.argmax(logits_BV / temperature + noise, axis=-1).astype(jnp.int32)
            return jnp.where(jnp.arange(tokens.shape[1]) == i, next_B[:, None], tokens)

        return jax.lax.fori_loop(len(start), stop, extend, tokens)

    where = run.layout.batch(2)
    placed = jax.make_array_from_callback(tokens.shape, where, lambda index: tokens[index])
    key = jax.random.key(seed)
    with sharding.use(run.mesh, run.rules):
        out = jax.jit(generate)(state.params, placed, key)
    row = np.asarray(out.addressable_shards[0].data)[0]
    return tokenizer.decode(row[:stop] if prompt else row[1:stop])
