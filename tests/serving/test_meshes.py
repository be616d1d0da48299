"""Training adapters on a mesh: the numbers of one device."""

import jax
import numpy as np
import pytest

from jaxtrain.config.sections.tuning_keys import LoraConfig
from jaxtrain.serving.lora_engine import Adam, Engine
from tests.serving import tiny_model
from tests.serving.policy_data import data_of
from tests.tiny import devices

LORA = LoraConfig(rank=4, alpha=32.0)


def numbers(engine):
    """Losses, log-probabilities, the gradient and the adapters after a step."""
    shape, found = engine.shape(LORA), []
    model = shape.begin(3)
    for loss in ("ppo", "gspo"):
        total, logprobs = shape.forward_backward(model, data_of(loss, engine, {}), loss)
        found += [total, *logprobs]
    found += jax.tree.leaves(jax.device_get(model.gradient))
    shape.optim_step(model, Adam(1e-2, 0.9, 0.95, 1e-8, 0.0, 1.0))
    return found + jax.tree.leaves(jax.device_get(model.params))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module")
def alone(folder, cache):
    with devices(1):
        return numbers(Engine.load(folder, batch_tokens=256))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2},
                                  {"mesh.data": 1, "mesh.fsdp": 2, "mesh.context": 4}])
def test_a_mesh_gives_the_numbers_of_one_device(alone, folder, mesh):
    """The rows are padded to other numbers, and `context` cuts them."""
    for wanted, got in zip(alone, numbers(Engine.load(folder, mesh, batch_tokens=256)), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
