"""The second moments of what each linear layer of a published model reads, of some text: what GPTQ rounds by."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.base.annotations import AnyArray
from jaxtrain.checkpoint.trees import flatten
from jaxtrain.config.family import entries
from jaxtrain.hub import trained_model
from jaxtrain.hub.weights import published_weights
from jaxtrain.models import layer_place
from jaxtrain.models.layers import Linear, observed
from jaxtrain.run import Run

Moments = dict[str, np.ndarray]  # by the name of the published tensor


def moments_of(folder: Path, tokens_BT: np.ndarray) -> Moments:
    """Return the moments of all inputs of linear layers, of these rows of tokens; the layers run one by one."""
    run, state = trained_model.load_model(folder, {"train.precision": "float32"})
    assert run.model is not None
    model = run.model.merge(jax.tree.map(jnp.asarray, jax.device_get(state.all_params)))  # without a mesh
    for path, linear in nnx.iter_graph(model):
        if isinstance(linear, Linear):
            linear.path = "/".join(map(str, path))
    found: dict[tuple[str, int], AnyArray] = {}
    last: list[Any] = [None, None]  # an input that several layers read has one sum

    def see(linear: Linear, x: jax.Array) -> None:
        if last[0] is not x:
            weight, result = linear.equation.split(",")[1].split("->")
            summed = sum(letter not in result for letter in weight)
            rows = x.reshape(-1, int(np.prod(x.shape[x.ndim - summed:])))
            last[:] = x, np.asarray(jnp.matmul(rows.T, rows, precision="highest"))
        key = linear.path, int(layer_place.number())
        found[key] = found[key] + last[1] if key in found else last[1]

    with observed(see):
        for row_T in tokens_BT:
            model.hidden(jnp.asarray(row_T)[None])
    return dict(_named(run, found))


def _named(run: Run, found: dict[tuple[str, int], np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the moments by the names of the tensors that are published."""
    shapes = flatten(run.abstract.all_params)
    for entry in entries(run.config.model):
        if entry.ours not in shapes:
            continue
        for name, which in published_weights.names(entry, shapes[entry.ours].shape):
            key = entry.ours.removesuffix("/kernel"), which[0] if which else 0
            if key in found:
                yield name, found[key]
