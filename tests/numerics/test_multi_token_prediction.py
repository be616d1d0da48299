"""Layers that predict tokens after the next: the numbers of the plain model on any mesh, and only in training."""

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.objectives.further_tokens import with_further_targets
from jaxtrain.sharding import mesh_context
from tests.composition import fuzz
from tests.numerics import reference
from tests.tiers import slow_if

CASES = [
    ("llama", {"mesh.context": 2, "mesh.tensor": 2, "mesh.fsdp": 2, "train.remat": "full"}),
    ("deepseek_v3", {"mesh.expert": 2, "mesh.tensor": 2, "mesh.context": 2, "optimizer.zero_stage": 3}),
    ("mixtral", {"mesh.stage": 2, "mesh.expert": 2, "mesh.tensor": 2, "pipeline.schedule": "zb_v",
                 "model.mtp_layers": 3}),
    ("deepseek_v3", {"mesh.data": 2, "mesh.context": 2, "mesh.fsdp": 2, "model.mtp_layers": 2}),
    ("deepseek_v3", {"mesh.stage": 2, "mesh.context": 2, "mesh.fsdp": 2, "train.z_loss": 1e-3,
                     "model.tied_embeddings": True, "train.accumulation": 2}),
]


@pytest.mark.parametrize(("family", "keys"), [
    pytest.param(*case, marks=slow_if(case is CASES[-2])) for case in CASES], ids=str)
def test_looking_ahead_gives_the_numbers_of_the_plain_model(family, keys):
    fuzz.check({f"mesh.{axis}": 1 for axis in fuzz.AXES} | {
        "family": family, "packing": True, "data.global_batch_size": fuzz.ROWS, "data.seq_len": fuzz.SEQ,
        "model.max_seq_len": fuzz.SEQ, "model.num_layers": 3, "train.precision": "float32",
        "model.mtp_loss_weight": 0.3} | keys)


def test_the_last_tokens_of_a_document_have_no_further_targets():
    batch = dict(targets=np.array([[11, 12, 13, 14, 15, 16]]), segments=np.array([[1, 1, 1, 2, 2, 0]]),
                 weights=np.array([[1, 0.5, 0, 2, 0, 0]], np.float32))  # the last of a document predicts nothing
    ahead = jax.jit(with_further_targets, static_argnums=1)(batch, 2)
    assert ahead["predicted_2_weights"].tolist() == [[0.5, 0, 0, 0, 0, 0]] and ahead["predicted_2_targets"][0, 0] == 12
    assert not ahead["predicted_3_weights"].any() and ahead["predicted_3_targets"].tolist() == [[13, 14, 15, 16, 0, 0]]


@pytest.mark.slow
def test_targets_that_are_ignored_may_be_negative():
    """The result is the same on any mesh, though a vocabulary that is split is looked up in another way."""
    values, batch = [], reference.batch(0)
    batch["targets"][batch["weights"] == 0] = -100
    for mesh in (1, 1, 1), (1, 1, 2):
        run = reference.build("llama", mesh, model__mtp_loss_weight=0.3)
        ahead = jax.tree.map(lambda leaf: np.full(leaf.shape, 0.02, np.float32), run.abstract.params["ahead"])
        params = jax.device_put(reference.initial("llama") | {"ahead": ahead}, run.layout.state.params)
        with mesh_context.use(run.mesh, run.sharded.rules):
            values.append(float(jax.jit(run.objective.loss)(params, run.sharded.place(batch))[0]))
    assert values[0] == pytest.approx(values[1], rel=1e-6)


@pytest.mark.exhaustive
def test_evaluation_does_not_look_ahead():
    run, plain = reference.build("llama", model__mtp_loss_weight=0.3), reference.build("llama")
    params, batch = run.init().params, run.sharded.place(reference.batch(0))
    total, weight = run.sharded.compiled_evaluation(batch)(params, batch)
    want = plain.sharded.compiled_evaluation(batch)({key: params[key] for key in params if key != "ahead"}, batch)
    assert (float(total), float(weight)) == (float(want[0]), float(want[1]))
    assert float(jax.jit(run.objective.loss)(params, batch)[0]) > 1.2 * float(total)


def test_a_model_without_such_a_layer_refuses():
    with pytest.raises(jt.UserError, match="gpt2 has no such key"):
        reference.build("gpt2", model__mtp_loss_weight=0.3)
