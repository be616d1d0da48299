"""Batches of random numbers that are hard on purpose: rows of unequal weight, padding, several documents in a row."""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from jaxtrain.data.loading.batch_spec import SEQ, Array

TEXT = ("tokens", "targets", "segments", "positions", "weights")


def text_batch(step: int, rows: int, seq: int, vocab: int) -> dict[str, np.ndarray]:
    """Return a packed batch: segments of several lengths, positions that start again, padding, weights from 0 to 2.

    The text can be learnt: each token decides the next, most of the time.
    """
    rng = np.random.default_rng(step)
    tokens = np.zeros((rows, seq + 1), np.int64)
    tokens[:, 0] = rng.integers(vocab, size=rows)
    for t in range(seq):
        tokens[:, t + 1] = (3 * tokens[:, t] + 1 + (rng.random(rows) < 0.1)) % vocab
    starts = rng.random((rows, seq)) < 0.2
    starts[:, 0] = True
    segments = np.cumsum(starts, 1)
    positions = np.arange(seq) - np.maximum.accumulate(np.where(starts, np.arange(seq), 0), 1)
    weights = rng.choice([0, 0.25, 1, 2], size=(rows, seq)) * rng.choice([0.5, 1, 3], size=(rows, 1))
    weights[rng.permutation(rows)[: rows // 8]] = 0  # whole rows that do not count
    padding = np.arange(seq) >= seq - rng.integers(0, 4, size=(rows, 1))
    segments, weights = np.where(padding, 0, segments), np.where(padding, 0, weights)
    arrays = dict(tokens=tokens[:, :-1], targets=tokens[:, 1:], segments=segments, positions=positions)
    return {key: x.astype(np.int32) for key, x in arrays.items()} | {"weights": weights.astype(np.float32)}


def batch_of(spec: Mapping[str, Array], step: int, rows: int, seq: int, vocab: int) -> dict[str, np.ndarray]:
    """Return a batch that has the arrays of a spec; `vocab`: the tokens that there are, where it has any."""
    plain = {name for name in TEXT if name in spec and spec[name].dims == (SEQ,)}
    found = {name: x for name, x in text_batch(step, rows, seq, vocab or 2).items() if plain >= {"tokens", "segments"}
             and name in plain}
    rng = np.random.default_rng([step, 1])
    return {name: found[name] if name in found else _random(rng, name, array, array.shape(rows, seq))
            for name, array in spec.items()}


def _random(rng: np.random.Generator, name: str, array: Array, shape: tuple[int, ...]) -> np.ndarray:
    if jnp.issubdtype(array.dtype, jnp.floating):
        numbers = rng.choice([0, 0.5, 1, 2], size=shape) if name.endswith("weights") else 0.5 * rng.normal(size=shape)
        return numbers.astype(array.dtype)
    return rng.integers(array.below or 2, size=shape).astype(array.dtype)
