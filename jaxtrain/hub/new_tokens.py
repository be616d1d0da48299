"""A larger vocabulary than that of the model that a run begins with.

A tokenizer may have got tokens for chat, or the size is to divide over a mesh. The embedding and the output column of
each new token begin as the mean of the others, with which it is never likelier than the likeliest known token (Hewitt,
"Initializing New Word Embeddings for Pretrained Language Models", 2021).
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxtrain.base.annotations import PyTree
from jaxtrain.config.model_config import ModelConfig

_DIMENSION = {"embed/table": 0, "output/kernel": 1, "output/bias": 0}  # of the vocabulary, by path


def tokens(model: ModelConfig) -> dict[str, int]:
    """Return for how many tokens a model has rows or columns, by the path of the parameter, if it has that."""
    return dict.fromkeys(_DIMENSION, model.vocabulary) | {path: getattr(model, key)
                                                          for path, key in model.lookups.items()}


def with_known_tokens(abstract: PyTree, known: Mapping[str, int]) -> PyTree:
    """Return the abstract parameters of a model with this many `tokens`, which no mesh axis splits."""
    def smaller(path, leaf):
        name = _name(path)
        dim = _DIMENSION.get(name, 0)
        if name not in known or known[name] == leaf.shape[dim]:
            return leaf
        shape = [known[name] if i == dim else size for i, size in enumerate(leaf.shape)]
        spec = [None if i == dim else entry for i, entry in enumerate((*leaf.sharding.spec, None, None)[:leaf.ndim])]
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=leaf.sharding.update(spec=P(*spec)))

    return jax.tree_util.tree_map_with_path(smaller, abstract)


def with_new_tokens(params: PyTree, abstract: PyTree, known: Mapping[str, int]) -> PyTree:
    """Return parameters of this many `tokens` with as many as in `abstract`, in its shardings."""
    wanted = {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(abstract)}

    def larger(path, x):
        name = _name(path)
        if name not in known or x.shape == wanted[name].shape:
            return x
        dim = _DIMENSION.get(name, 0)
        return jax.jit(_grown, static_argnums=(1, 2), out_shardings=wanted[name].sharding)(
            x, dim, wanted[name].shape[dim])

    return jax.tree_util.tree_map_with_path(larger, params)


def _grown(x: jax.Array, dim: int, size: int) -> jax.Array:
    shape = [size - n if i == dim else n for i, n in enumerate(x.shape)]
    mean = x.mean(dim, keepdims=True, dtype=jnp.float32).astype(x.dtype)
    return jnp.concatenate([x, jnp.broadcast_to(mean, shape)], dim)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
