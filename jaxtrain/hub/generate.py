"""Text from a model: the whole generation is one compiled loop on the mesh the model lives on.

Here every axis but `tensor` splits rows, `stage` and `context` too: one row is never spread over several devices.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.data.tokenizers.tokenizer import encode_documents, load_tokenizer
from jaxtrain.errors import UserError
from jaxtrain.models import Decoder
from jaxtrain.sharding import rules as sharding
from jaxtrain.sharding.mesh import AXES

if TYPE_CHECKING:
    from jaxtrain.run import Run
    from jaxtrain.train_step.state import TrainState


def sample(run: "Run", state: "TrainState", prompt: str = "", length: int = 200, *, temperature: float = 0.8,
           seed: int = 0, tokenizer: str | Path = "") -> str:
    """`prompt` continued by at most `length` tokens, as many as `data.seq_len` has room for.

    Every step computes the whole window again, without a cache: fine for a look at what a run has learned. At
    `temperature=0` each token is the most probable one. `tokenizer` is the folder of one that was kept, such as
    "WORKDIR/tokenizer", for where the data is no longer there.
    """
    if temperature < 0:
        raise UserError("temperature", f"{temperature} is below 0", "give 0 for the most probable tokens, or more")
    words = load_tokenizer(f"{tokenizer}") if tokenizer else run.corpus.tokenizer
    # A document's first token has no predecessor in training, so an empty prompt starts behind a line's end.
    begin, = encode_documents([(prompt or "\n").encode()], words)
    start = np.asarray(begin, np.int32)[-(run.config.data.seq_len - 1):]
    stop = min(len(start) + length, run.config.data.seq_len)
    rules = sharding.Rules({**run.rules.table, "batch": tuple(axis for axis in AXES if axis != "tensor"), "seq": (),
                            "block_seq": tuple(axis for axis in run.rules["block_seq"] if axis == "tensor")})
    where = NamedSharding(run.mesh, P(sharding.without_trivial_axes(rules.spec(("batch",)), run.mesh)[0], None))
    # One row for every piece the batch is cut into: the mesh is busy either way.
    tokens = np.zeros((sharding.shards(where.spec[0], run.mesh), run.config.data.seq_len), np.int32)
    tokens[:, : len(start)] = start

    def generate(params, tokens, key):
        params = dict(run.cast(params))
        for stack in params.keys() & set(Decoder.STACKS):  # layers are taken from it one by one
            params[stack] = jax.tree.map(lambda w: jax.reshard(w, P(None, *jax.typeof(w).sharding.spec[1:])),
                                         params[stack])
        model = run.model.merge(params)

        def extend(i, tokens):
            x_BTD = model.hidden(tokens)
            last_BD = jax.lax.dynamic_index_in_dim(x_BTD, i - 1, axis=1, keepdims=False)
            head_DV = sharding.gather(model.head(), "embed", "vocab")
            logits_BV = jnp.einsum("bd,dv->bv", last_BD, head_DV, preferred_element_type=jnp.float32,
                                   out_sharding=sharding.activation_spec("batch", None))
            noise = jax.random.gumbel(jax.random.fold_in(key, i), logits_BV.shape[-1:])
            next_B = jnp.argmax(logits_BV + temperature * noise, axis=-1).astype(jnp.int32)
            return jnp.where(jnp.arange(tokens.shape[1]) == i, next_B[:, None], tokens)

        return jax.lax.fori_loop(len(start), stop, extend, tokens)

    placed = jax.make_array_from_callback(tokens.shape, where, lambda index: tokens[index])
    key = jax.random.key(seed)
    with sharding.use(run.mesh, rules):
        out = jax.jit(generate)(state.all_params, placed, key)
    row = np.asarray(out.addressable_shards[0].data)[0]
    return words.decode(row[:stop] if prompt else row[1:stop])
