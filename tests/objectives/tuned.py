"""A tuning objective's first step on any mesh, against a formula on one device in float32; and runs that go on."""

import json
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.data.loading.batch_function import BatchFunction
from jaxtrain.models.lora import scale
from jaxtrain.train_step import partition
from jaxtrain.tuning.reference_sums import ReferenceSums
from tests.numerics import reference
from tests.numerics.plain_lora import at_random, merged
from tests.numerics.test_lora import initial


def check(run, loss_of, batch, scaled=1.1):
    """Compare loss, norm and every gradient; return the metrics and what the formula gives beside its loss.

    The policy is not what the reference is a copy of, so that the reference counts. Frozen leaves stay as they are.

    Args:
        scaled: what the policy is of the reference.
        loss_of: from the model's parameters and the reference's to the loss, and something for the caller.
    """
    config, begun = run.config, at_random(initial(run))
    own = {key: value for key, value in begun.items() if key != "reference"}
    trained = partition.like(own, run.layout.axes)
    policy, rest = jax.tree.map(lambda a: a * np.float32(scaled), trained), partition.without(own, trained)
    params = partition.merge(policy, rest) | (
        {"reference": partition.like(trained, run.objective.trained)} if run.objective.frozen_axes else {})

    def whole(some):
        both = partition.merge(some, rest)
        return merged(both, scale(config.lora)) if config.lora.rank else both

    (loss, beside), want = jax.jit(jax.value_and_grad(
        lambda policy: loss_of(whole(policy), whole(trained)), has_aux=True))(policy)
    if run.objective.precomputed:
        batch = precomputed(run, partition.merge(trained, rest), batch)
    state, metrics = reference.compiled(run)(reference.start_from(run, params), run.sharded.place(batch))
    norm, o = float(reference.norm_of(want)), config.optimizer
    assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-5, abs=1e-6)
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-5)
    got = jax.tree.map(lambda m: np.asarray(m) / (1 - o.b1) / min(1, o.clip_norm / norm), reference.moments(state))
    error, leaf = reference.worst(got, jax.device_get(want), floor=1e-3 * norm)
    assert error < 2e-5, leaf
    kept = partition.without(params, run.layout.axes)
    assert jax.tree.all(jax.tree.map(np.array_equal, jax.device_get(state.frozen), kept)), "a frozen one has changed"
    return metrics, beside


def precomputed(run, params, batch):
    """The batch with what the reference, of these parameters, gives to its answers."""
    data = BatchFunction(lambda step: batch, tokens_per_row=batch["tokens"].shape[1])
    sums = ReferenceSums(replace(run, data=data))
    sums.prepare(lambda: reference.start_from(run, params))
    return sums.beside(batch)


def resumed(whole, parts, last):
    """A copy of a workdir that has lost its last checkpoint."""
    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "checkpoints" / str(last))
    return parts


def lines_of_same_bits(run, folder, last):
    """Train in a folder, go on from the checkpoint before the `last`: the same bits; return what metrics.jsonl has."""
    whole = jt.train(run, folder / "whole")
    parts = jt.train(run, resumed(folder / "whole", folder / "parts", last))
    for other in (parts, jt.load_model(folder / "whole")[1]):
        assert jax.tree.all(jax.tree.map(np.array_equal, *map(jax.device_get, (whole.params, other.params))))
    return [json.loads(line) for line in (folder / "whole" / "metrics.jsonl").read_text().splitlines()]
