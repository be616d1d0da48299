"""Data of unequal lengths with all that the losses of the API read."""

import numpy as np

from jaxtrain.serving.datums import Datum, checked
from jaxtrain.serving.token_loss import LOSSES


def policy_datums(loss=""):
    """Return the tokens of data, and what this loss reads of them, or any loss."""
    random, found = np.random.default_rng(5), []
    for n in (5, 16, 9):
        tokens = random.integers(0, 256, n).astype(np.int32)
        inputs = {"target_tokens": random.integers(0, 256, n),
                  "logprobs": random.normal(-5.5, 0.3, n).astype(np.float32),
                  "advantages": random.normal(size=n).astype(np.float32),
                  "sequence_ratio_mask": (np.arange(n) >= n // 2).astype(np.float32)}
        names = ("target_tokens", *LOSSES[loss].inputs) if loss else inputs
        found.append((tokens, {name: inputs[name] for name in names} | (
            {"weights": np.ones(n, np.float32)} if loss == "cross_entropy" else {})))
    return found


def data_of(loss, engine, numbers):
    """Return the same as an engine takes them."""
    return checked([Datum(*one) for one in policy_datums(loss)], loss, numbers, vocabulary=engine.vocabulary,
                   longest=engine.longest)
