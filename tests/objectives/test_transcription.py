"""Speech: loss and gradients of plain formulas on any mesh; runs by a config over a prepared corpus; SpecAugment."""

import functools
import json
import math

import jax
import numpy as np
import pytest
import soundfile

import jaxtrain as jt
from jaxtrain.data.loading.spec_augment import augmented
from jaxtrain.data.prepare_sequences.audio import Audio
from jaxtrain.data.prepare_sequences.prepare_sequences import prepare_sequences
from jaxtrain.sharding.mesh import AXES
from jaxtrain.train_step import partition
from tests.numerics import reference
from tests.objectives import plain_transcription as plain
from tests.objectives.tuned import resumed

CASES = {
    "data, fsdp, tensor": dict(mesh__data=2, mesh__fsdp=2, mesh__tensor=2, train__accumulation=2),
    "chunks, tensor": dict(mesh__tensor=4, model__audio_chunk=2, model__audio_chunks_back=1, train__remat="full"),
    "one device, without ctc": dict(model__ctc_weight=0.0),
    "zero": dict(mesh__data=2, mesh__fsdp=4, optimizer__zero_stage=3),
}
SLOW = ("data, fsdp, tensor", "chunks, tensor")


@functools.cache
def begun(**keys):
    """All parameters on the host, of which none is 0, as one device makes them."""
    run = jt.build(plain.config(**keys), devices=jax.devices()[:1])
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda a: (a + rng.normal(0, 0.05, a.shape)).astype(np.float32),
                        jax.device_get(run.compiled_init(jax.random.key(0)).all_params))


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.slow if name in SLOW else pytest.mark.exhaustive) for name in CASES])
def test_loss_and_gradients_are_those_of_the_formulas(name):
    config = plain.config(**CASES[name])
    run = jt.build(config, devices=jax.devices()[: math.prod(getattr(config.mesh, axis) for axis in AXES)])
    params = begun(**{key: value for key, value in CASES[name].items() if key.startswith("model")})
    batch, state = plain.batch(), reference.start_from(run, params)
    formula = functools.partial(plain.loss, config.model, b=batch)
    want, slopes = jax.jit(jax.value_and_grad(formula)).lower(params).compile(
        {"xla_backend_optimization_level": 0})(params)
    got, grads = jax.device_get(run.value_and_grad(state, batch))
    assert float(got) == pytest.approx(float(want), rel=1e-5)
    slopes = jax.device_get(partition.like(slopes, grads))
    error, leaf = reference.worst(grads, slopes, floor=1e-3 * float(reference.norm_of(slopes)))
    assert error < 3e-5, leaf
    assert "audio_positions" not in grads and "audio_positions" in state.frozen
