"""A larger vocabulary than that of the model that a run begins with.

A tokenizer may have got tokens for chat, or the size is to divide over a mesh. The embedding and the output column of
each new token begin as the mean of the others, with which it is never likelier than the likeliest known token (Hewitt,
"Initializing New Word Embeddings for Pretrained Language Models", 2021).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxtrain.base.annotations import PyTree

_DIMENSION = {"embed/table": 0, "output/kernel": 1, "output/bias": 0}  # of the vocabulary, by path


def with_known_tokens(abstract: PyTree, known: int) -> PyTree:
    """Return the abstract parameters of a model with a vocabulary of `known` tokens, which no mesh axis splits."""
    def smaller(path, leaf):
        dim = _dimension(path)
        if dim is None:
            return leaf
        shape = [known if i == dim else size for i, size in enumerate(leaf.shape)]
        spec = [None if i == dim else entry for i, entry in enumerate((*leaf.sharding.spec, None, None)[:leaf.ndim])]
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=leaf.sharding.update(spec=P(*spec)))

    return jax.tree_util.tree_map_with_path(smaller, abstract)


def with_new_tokens(params: PyTree, abstract: PyTree) -> PyTree:
    """Return parameters of a vocabulary as large as in `abstract`, in its shardings."""
    def larger(path, x):
        dim = _dimension(path)
        if dim is None:
            return x
        leaf = abstract[path[0].key][path[1].key]
        return jax.jit(_grown, static_argnums=(1, 2), out_shardings=leaf.sharding)(x, dim, leaf.shape[dim])

    return jax.tree_util.tree_map_with_path(larger, params)


def _grown(x: jax.Array, dim: int, size: int) -> jax.Array:
    shape = [size - n if i == dim else n for i, n in enumerate(x.shape)]
    mean = x.mean(dim, keepdims=True, dtype=jnp.float32).astype(x.dtype)
    return jnp.concatenate([x, jnp.broadcast_to(mean, shape)], dim)


def _dimension(path: Any) -> int | None:
    return _DIMENSION.get(jax.tree_util.keystr(path, simple=True, separator="/"))
