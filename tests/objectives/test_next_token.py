"""What the steps of next-token prediction say beside the loss: the cross-entropy without what is added to it."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.objectives.next_token import NextToken
from tests.numerics import reference


@pytest.mark.parametrize(("family", "keys"), [
    ("gpt2", {"train__accumulation": 2}),
    pytest.param("mixtral", {"mesh__data": 2, "mesh__tensor": 2, "model__mtp_loss_weight": 0.3,
                             "train__loss_chunks": 4}, marks=pytest.mark.slow),
    pytest.param("mixtral", {"mesh__data": 2, "mesh__stage": 2, "mesh__tensor": 2, "train__accumulation": 2,
                             "pipeline__microbatches": 2}, marks=pytest.mark.slow)])
def test_cross_entropy_is_the_loss_without_penalties(family, keys):
    run = reference.build(family, train__z_loss=1e-2, **keys)
    params, batch = reference.initial(family), reference.batch(0)
    if "model__mtp_loss_weight" in keys:
        params = jax.device_get(run.init().all_params)
    _, metrics = reference.compiled(run)(reference.start_from(run, params), run.place(batch))
    want = float(reference.evaluation(run.config.model, params, batch))
    assert float(metrics["cross_entropy"]) == pytest.approx(want, rel=1e-5)
    assert float(metrics["perplexity"]) == pytest.approx(np.exp(want), rel=1e-4)
    assert float(metrics["loss"]) > want + 0.01, "the case proves little: nothing is added"


def test_a_row_as_one_text():
    batch = {key: jnp.asarray(x) for key, x in reference.batch(0).items()}
    model = types.SimpleNamespace(params=dict)
    _, one = NextToken(model, cross_documents=True).prepare({}, batch)
    assert one.keys() == batch.keys() - {"segments"} and (one["positions"] == np.arange(reference.SEQ)).all()
    _, several = NextToken(model).prepare({}, batch)
    assert (several["positions"] == batch["positions"]).all() and "segments" in several


@pytest.mark.parametrize(("family", "keys"), [
    pytest.param("llama", {"mesh__fsdp": 2, "mesh__tensor": 2, "mesh__context": 2}, marks=pytest.mark.slow),
    pytest.param("gpt2", {"mesh__data": 2, "mesh__stage": 2, "pipeline__microbatches": 2}, marks=pytest.mark.slow),
    pytest.param("mixtral", {"mesh__fsdp": 2, "mesh__expert": 2, "train__remat": "full"}, marks=pytest.mark.slow)])
def test_attention_across_documents(family, keys):
    """Loss and gradients are those of rows that hold one document each."""
    batch, params = reference.batch(0), reference.initial(family)
    whole = {**batch, "segments": np.ones_like(batch["segments"]),
             "positions": np.broadcast_to(np.arange(reference.SEQ, dtype=np.int32), batch["tokens"].shape)}
    run = reference.build(family, data__cross_document_attention=True, **keys)
    loss, gradients = run.value_and_grad(reference.start_from(run, params), batch)
    plain = functools.partial(reference.loss, run.config.model)
    want, gradients_wanted = jax.jit(jax.value_and_grad(plain))(params, whole)
    assert float(loss) == pytest.approx(float(want), rel=1e-5)
    assert abs(float(jax.jit(plain)(params, batch)) / float(want) - 1) > 1e-4, "proves little"
    floor = 1e-3 * float(reference.norm_of(gradients_wanted))
    error, leaf = reference.worst(gradients, gradients_wanted, floor)
    assert error < 1e-4, f"the gradient of {leaf} is off by {error:.1e} of its largest element"
