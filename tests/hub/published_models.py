"""The tiny published models of `tests.hub.cases` in jaxtrain, on any mesh, and how far they are from transformers."""

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxtrain as jt
from jaxtrain.base.annotations import JsonMapping
from jaxtrain.hf.hf_config import model_section
from jaxtrain.hub.weights import published_weights, safetensors_files
from jaxtrain.sharding import activations, mesh_context
from jaxtrain.train_step import partition
from jaxtrain.train_step.state import Params
from tests.hub import published

ROWS, LENGTH = 8, published.TOKENS.shape[1]
REPEATED = np.tile(published.TOKENS, (ROWS // len(published.TOKENS), 1))  # so that every mesh divides the rows


def built(folder: Path, keys: JsonMapping | None = None, **mesh: int) -> jt.Run:
    """The run of a model on as many devices as the mesh has, in float32, with these keys of the model."""
    section = model_section(folder) | (keys or {})
    section["max_seq_len"] = max(section["max_seq_len"], LENGTH)  # of LongRoPE it is shorter as read
    config = {"model": section, "data": {"seq_len": LENGTH, "global_batch_size": ROWS},
              "train": {"precision": "float32"}, "mesh": mesh or {"data": 1}}
    return jt.build(jt.make_config(config), devices=jax.devices()[:int(np.prod([*mesh.values()]))])


def loaded(folder: Path, keys: JsonMapping | None = None, **mesh: int) -> tuple[jt.Run, Params]:
    """The run of a model, and its published parameters as that lays them out."""
    run = built(folder, keys, **mesh)
    return run, published_weights.load(folder, run.config.model, run.abstract.all_params)


def logits(run: jt.Run, params: Params) -> np.ndarray:
    """The logits of `published.TOKENS`."""
    @jax.jit
    def computed(params):
        tokens = activations.constrain(jnp.asarray(REPEATED), "batch", "seq")
        return activations.constrain(run.model.merge(params)(tokens), None, None, None)

    with mesh_context.use(run.mesh, run.sharded.rules):
        return np.asarray(computed(params))[:len(published.TOKENS)]


def value_and_grad(run: jt.Run, params: Params) -> tuple[float, Params]:
    """The mean loss of the tokens and all gradients, as the train step computes them."""
    tokens = REPEATED
    weights = np.ones_like(tokens, np.float32)
    weights[:, -1] = 0  # nothing follows the last token
    batch = {"tokens": tokens, "targets": np.roll(tokens, -1, 1), "weights": weights,
             "segments": np.ones_like(tokens), "positions": np.broadcast_to(np.arange(LENGTH, dtype=np.int32),
                                                                            tokens.shape)}
    loss, gradients = run.value_and_grad(run.with_params(params), batch)
    return float(loss), gradients


@dataclass(frozen=True)
class Errors:
    """The distances between a model here and in transformers."""

    loss: float
    gradients: float  # the worst tensor's, relative to its norm
    worst: str  # that tensor's name
    logits: float | None  # relative to the largest one; None: not computed on this mesh
    other_bytes: list[str]  # tensors that are not written as they were read


def errors(name: str, folder: Path, mesh: dict[str, int]) -> Errors:
    """Return the errors of a case on a mesh; raises for a tensor that has no gradient here or there."""
    case = published.truth(name)
    run, params = loaded(published.write(folder / "in", case), **mesh)
    off = None
    if not {"stage", "context"} & mesh.keys():
        wanted = np.asarray(case["logits"]).reshape(*published.TOKENS.shape, -1)
        off = float(np.abs(logits(run, params) - wanted).max() / np.abs(wanted).max())
    loss, gradients = value_and_grad(run, params)
    each = gradient_errors(run, gradients, case, folder / "gradients")
    worst = max(each, key=each.get)
    return Errors(abs(loss - case["loss"]) / case["loss"], each[worst], worst, off,
                  other_bytes(run, params, folder / "in", folder / "out"))


def gradient_errors(run: jt.Run, gradients: Params, case: dict[str, Any], out: Path) -> dict[str, float]:
    """Return the error of every tensor's gradient, of its norm and two projections, relative to the norm.

    Or to a hundredth of the largest norm, where that is more: rounding is as large as what comes in.
    """
    out.mkdir()
    nothing = jax.tree.map(lambda a: jax.device_put(np.zeros(a.shape, np.float32), a.sharding), run.abstract.frozen)
    published_weights.save(partition.merge(gradients, nothing), run.config.model, out, np.float32, 10**6)
    found = {name: published.projections(name, tensor.view())
             for name, tensor in safetensors_files.tensors_of(out).items()
             if not re.search(r"layers\.\d+\.(embed_tokens|shared_head\.head)\.", name)}  # copies
    assert not [name for name in found.keys() - case["gradients"].keys()
                if not name.endswith(("e_score_correction_bias", "expert_bias")) and found[name][0]]
    least = 1e-2 * max(wanted[0] for wanted in case["gradients"].values())
    return {name: float(np.abs(np.subtract(found[name], wanted)).max() / max(wanted[0], least))
            for name, wanted in case["gradients"].items()}


def other_bytes(run: jt.Run, params: Params, folder: Path, out: Path) -> list[str]:
    """Return the tensors that are not the same bytes when they are written, in several files."""
    out.mkdir()
    published_weights.save(params, run.config.model, out, np.float32, 4000)
    before, after = map(safetensors_files.tensors_of, (folder, out))
    assert len(list(out.glob("*.safetensors"))) > 1
    same = partial(np.array_equal, equal_nan=True)
    return sorted(before.keys() ^ after.keys()) + [
        name for name, tensor in before.items() if name in after and not same(tensor.view(), after[name].view())]
