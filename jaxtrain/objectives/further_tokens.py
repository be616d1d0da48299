"""The loss of multi-token prediction (arXiv 2412.19437): the targets of further tokens, and what each layer adds."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxtrain.models import training_noise
from jaxtrain.models.decoder import Decoder
from jaxtrain.train_step.state import Batch


def with_further_targets(batch: Batch, layers: int = 1) -> Batch:
    """Add to a batch the tokens after the next: `predicted_2_targets` and so on, and what each weighs.

    A weight is 0 where the token is past the end of the document or row.
    """
    def following(x_BT):
        return jnp.concatenate([x_BT[:, 1:], jnp.zeros_like(x_BT[:, :1])], 1)

    same_BT = batch["segments"] == following(batch["segments"])
    targets_BT, weights_BT, found = batch["targets"], batch["weights"], {}
    for number in range(2, layers + 2):
        targets_BT, weights_BT = following(targets_BT), jnp.where(same_BT, following(weights_BT), 0)
        found |= {f"predicted_{number}_targets": targets_BT, f"predicted_{number}_weights": weights_BT}
    return batch | found


def further_losses(model: Decoder, x_BTD: jax.Array, batch: Batch, layers: int,
                   entropy: Callable[..., jax.Array]) -> list[tuple[jax.Array, jax.Array | None]]:
    """Return for each layer the summed cross-entropy of its tokens, and the penalty of each row that its block reports.

    Args:
        model: the decoder.
        x_BTD: its activations, as `Decoder.look_ahead` reads them.
        batch: with further targets.
        layers: how many predict further tokens.
        entropy: returns the summed cross-entropy of what the output head reads, of targets and their weights.
    """
    numbers = range(2, 2 + layers)
    following = [batch["targets"], *(batch[f"predicted_{n}_targets"] for n in numbers)]
    with training_noise.of(batch):
        ahead = model.look_ahead(x_BTD, following[:-1], batch["segments"], batch["positions"])
        return [(entropy(y_BTD, batch[f"predicted_{n}_targets"], batch[f"predicted_{n}_weights"]), aux.get("penalty"))
                for n, (y_BTD, aux) in zip(numbers, ahead, strict=True)]
