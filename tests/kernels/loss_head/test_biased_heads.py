"""Output heads with a bias: losses and their gradients are those of logits with it."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.kernels.loss_head.biased_heads import for_head, with_bias_rows
from jaxtrain.kernels.loss_head.cross_entropy import cross_entropy, distillation_loss
from jaxtrain.kernels.loss_head.token_cross_entropy import token_cross_entropy


def test_losses_and_gradients_are_those_of_logits_with_a_bias():
    rng = np.random.default_rng(0)
    x, w, b = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((2, 3, 8), (8, 12), (12,)))
    targets, weights = jnp.asarray(rng.integers(0, 12, (2, 3))), jnp.asarray(rng.random((2, 3)), jnp.float32)

    def plain(x, w, b):
        return jnp.take_along_axis(-jax.nn.log_softmax(x @ w + b), targets[..., None], -1)[..., 0]

    def summed(x, w, b):
        return cross_entropy(x, with_bias_rows(w, b), targets, weights, chunks=2)

    def by_token(x, w, b):
        return (weights * token_cross_entropy(x, with_bias_rows(w, b), targets)).sum()

    def distilled(x, w, b):
        head = with_bias_rows(w, b)
        return distillation_loss(x, head, targets, weights, x, head, soft=0.5)[0]

    wanted = jax.value_and_grad(lambda *own: (weights * plain(*own)).sum(), (0, 1, 2))(x, w, b)
    for found, factor in ((summed, 1), (by_token, 1), (distilled, 0.5)):  # a teacher with the same logits pulls nowhere
        each = jax.tree.map(lambda a, factor=factor: a / factor, jax.value_and_grad(found, (0, 1, 2))(x, w, b))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), each, wanted)
    temperature = 2.0  # divides activations with the column that reads the bias
    head = with_bias_rows(w, b)
    np.testing.assert_allclose(for_head(x, head) / temperature @ head, (x @ w + b) / temperature, rtol=1e-5, atol=1e-6)
