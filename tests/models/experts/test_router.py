"""The balance loss, by the definitions of others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.models.experts.router import route
from jaxtrain.parallel.rows import Row
from tests.numerics import reference

T, D = 24, 16


@pytest.mark.slow
@pytest.mark.parametrize("experts_per_token", [1, 2, 4])
def test_the_balance_loss_beside_those_of_other_frameworks(experts_per_token):
    """docs/parallelism.md gives the factors between published coefficients and ours."""
    config = reference.tiny("mixtral", model__experts_per_token=experts_per_token).model
    x_BTD, kernel_DE = (jax.random.normal(jax.random.key(seed), shape) for seed, shape in enumerate(
        [(1, T, D), (D, config.num_experts)]))
    routing = route(config.experts, x_BTD, jnp.ones((1, T), bool), kernel_DE, None, Row(()))
    ours = float(routing.sums_B["balance"][0]) / T

    probabilities = np.asarray(jax.nn.softmax(x_BTD[0] @ kernel_DE, axis=-1), np.float64)
    chosen = np.argsort(-probabilities, axis=-1)[:, :experts_per_token]
    hits = chosen[..., None] == np.arange(config.num_experts)  # [T, K, E]
    transformers = config.num_experts * (hits.mean(0) * probabilities.mean(0)).sum()  # load_balancing_loss_func
    deepseek = (config.num_experts / (experts_per_token * T) * hits.sum((0, 1)) * probabilities.mean(0)).sum()
    assert ours == pytest.approx(transformers / experts_per_token, rel=1e-5)
    assert ours == pytest.approx(deepseek, rel=1e-5)  # arXiv 2412.19437, equations 17 to 20, for one sequence
