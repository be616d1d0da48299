"""The metrics of next-token prediction beside the loss: the cross-entropy without what is added to it."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.objectives.next_token import NextToken
from tests.numerics import reference
from tests.tiers import exhaustive, slow


@pytest.mark.parametrize(("family", "keys"), [
    *exhaustive(("mixtral", {"mesh__data": 2, "mesh__stage": 2, "mesh__tensor": 2, "train__accumulation": 2,
                             "pipeline__microbatches": 2}),
                ("gpt2", {"train__accumulation": 2}),
                ("mixtral", {"mesh__data": 2, "mesh__tensor": 2, "model__mtp_loss_weight": 0.3,
                             "train__loss_chunks": 4}))])
def test_cross_entropy_is_the_loss_without_penalties(family, keys):
    run = reference.build(family, train__z_loss=1e-2, **keys)
    params, batch = reference.initial(family), reference.batch(0)
    if "model__mtp_loss_weight" in keys:
        params = jax.device_get(run.init().all_params)
    step = reference.compiled(run)
    _, metrics = step(reference.start_from(run, params), run.sharded.place(batch))
    want = float(reference.evaluation(run.config.model, params, batch))
    assert float(metrics["cross_entropy"]) == pytest.approx(want, rel=1e-5)
    assert float(metrics["perplexity"]) == pytest.approx(np.exp(want), rel=1e-4)
    assert float(metrics["loss"]) > want + 0.01, "the case proves little: nothing is added"
    assert float(metrics["unknown_ids"]) == 0

    for name, place, wrong in (("tokens", (0, 1), run.config.model.vocab_size), ("targets", (2, 3), -1)):
        batch[name][place] = wrong  # on the devices already, where nobody looks at each id
    _, metrics = step(reference.start_from(run, params), run.sharded.place(batch))
    assert float(metrics["unknown_ids"]) == 2


def test_a_row_as_one_text():
    batch = {key: jnp.asarray(x) for key, x in reference.batch(0).items()}
    model = types.SimpleNamespace(params=dict)
    goal = NextToken(model, cross_documents=True)
    assert goal.evaluation.cross_documents
    _, one = goal.prepare({}, batch)
    assert one["segments"].dtype == bool and (one["segments"] == (batch["segments"] > 0)).all()
    assert (one["positions"] == np.arange(reference.SEQ)).all()
    _, several = NextToken(model).prepare({}, batch)
    assert all((several[key] == batch[key]).all() for key in batch)


@pytest.mark.slow
def test_padding_of_a_row_as_one_text_reaches_no_expert():
    """Tokens in padding change neither the loss nor the experts' load."""
    run = reference.build("mixtral", data__cross_document_attention=True)
    batch = reference.batch(0)
    for name in ("segments", "weights"):
        batch[name][:, -5:] = 0
    other = batch | {"tokens": batch["tokens"].copy()}
    other["tokens"][:, -5:] = 7
    found = [reference.compiled(run)(reference.start(run, "mixtral"), run.sharded.place(one))[1]
             for one in (batch, other)]
    assert float(found[0]["loss"]) == float(found[1]["loss"])
    assert float(found[0]["moe_max_load"]) == float(found[1]["moe_max_load"])


@pytest.mark.parametrize(("family", "keys"), [
    *slow(("llama", {"mesh__fsdp": 2, "mesh__tensor": 2, "mesh__context": 2})),
    *exhaustive(("gpt2", {"mesh__data": 2, "mesh__stage": 2, "pipeline__microbatches": 2}),
                ("mixtral", {"mesh__fsdp": 2, "mesh__expert": 2, "train__remat": "full"}))])
def test_attention_across_documents(family, keys):
    """Loss and gradients are those of rows that hold one document each."""
    batch, params = reference.batch(0), reference.initial(family)
    whole = {**batch, "segments": (batch["segments"] > 0).astype(np.int32),
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
