"""Random numbers that only training has: dropout of what adapters read, noise on embeddings (NEFTune), and rounding.

Each token of a step's batch has 32 random bits, a function of the seed, the step and its place in the whole batch.
Every further number is a hash of those with the layer, the parameter and the feature. So masks and noise are the same
on any mesh, with any accumulation, and after a restart. A batch without these bits, as in an evaluation, has neither.

Shape suffixes: B rows, T tokens, D embedding.
"""

import contextlib
import zlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxtrain.models import layer_place
from jaxtrain.sharding import activations

BITS = "noise"  # of each token, in a batch
AMPLITUDE = "embedding_noise"  # of the noise on each token's embedding, in a batch
_MASK = 2**32 - 1
_BITS: ContextVar[jax.Array | None] = ContextVar("bits", default=None)


def added_to(batch: Mapping[str, jax.Array], seed: int, step: jax.Array, alpha: float,
             width: int) -> dict[str, jax.Array]:
    """Return a whole batch with the bits of its tokens, and with the amplitude of NEFTune's noise if `alpha` is not 0.

    `width`: of an embedding. The noise is uniform within alpha / sqrt(length of a row x width) (arXiv 2310.05914).
    """
    zeros_BT = jnp.zeros_like(batch["tokens"], jnp.uint32)
    rows, length = zeros_BT.shape
    rows_B1 = _hash(jnp.uint32(seed & _MASK) + jnp.uint32(1)) ^ step.astype(jnp.uint32)
    rows_B1 = _hash(_hash(rows_B1) + jnp.arange(rows, dtype=jnp.uint32)[:, None])
    found = {**batch, BITS: _hash(zeros_BT + rows_B1 + jnp.arange(length, dtype=jnp.uint32))}
    if alpha:
        found[AMPLITUDE] = jnp.full_like(zeros_BT, alpha / (length * width)**0.5, jnp.float32)
    return found


@contextlib.contextmanager
def of(batch: Mapping[str, jax.Array]) -> Iterator[None]:
    """A context in which layers compute this batch, with the bits of its tokens if it has them."""
    token = _BITS.set(batch.get(BITS))
    try:
        yield
    finally:
        _BITS.reset(token)


def active() -> bool:
    """Return whether the layers that are traced now have random numbers."""
    return _BITS.get() is not None


def on_embeddings(x_BTD: jax.Array, batch: Mapping[str, jax.Array]) -> jax.Array:
    """Return the embeddings with noise, if the batch asks for it."""
    if AMPLITUDE not in batch:
        return x_BTD
    bits_BT, amplitude_BT = (activations.constrain(batch[name], "batch", "block_seq") for name in (BITS, AMPLITUDE))
    noise_BTD = 2 * _uniform(bits_BT, "embed", x_BTD) - 1
    return x_BTD + (noise_BTD * amplitude_BT[..., None]).astype(x_BTD.dtype)


def dropout(x: jax.Array, rate: float, name: str) -> jax.Array:
    """Return an input of a layer with zeros for a share of its features, the rest larger by as much.

    Args:
        x: [rows, tokens, ...].
        rate: the share.
        name: of the layer, so that each has a mask of its own.
    """
    bits_BT = _BITS.get()
    if not rate or bits_BT is None:
        return x
    kept = _uniform(bits_BT ^ _hash(jnp.asarray(layer_place.number()).astype(jnp.uint32) + 1), name, x) >= rate
    return x * (kept * (1 / (1 - rate))).astype(x.dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Noise:
    """The random numbers of one product of one layer: of each token, 32 bits."""

    bits_BT: jax.Array
    name: str = field(metadata={"static": True})

    def __call__(self, name: str, like: jax.Array) -> jax.Array:
        """Return a number in [0, 1) for each feature of each token of an array, others for each name."""
        bits_BT, spec = self.bits_BT, jax.typeof(like).sharding.spec
        if activations.activation_spec() is not None and spec.partitions[:2] != jax.typeof(bits_BT).sharding.spec:
            bits_BT = jax.reshard(bits_BT, P(*spec.partitions[:2]))
        return _uniform(bits_BT, f"{self.name} {name}", like)

    def of_choices(self, count: int) -> "Noise":
        """Return those of each of so many experts of a token, as bits [rows, tokens, experts]."""
        return Noise(self.bits_BT[..., None] ^ _hash(jnp.arange(1, count + 1, dtype=jnp.uint32)), self.name)


def of_layer(name: str) -> Noise | None:
    """Return the random numbers of a product of the layer that is traced now; None where the batch has no bits."""
    bits_BT = _BITS.get()
    if bits_BT is None:
        return None
    return Noise(bits_BT ^ _hash(jnp.asarray(layer_place.number()).astype(jnp.uint32) + 1), name)


def _uniform(bits_BT: jax.Array, name: str, like: jax.Array) -> jax.Array:
    """Return a number in [0, 1) for each feature of each token, laid out as `like`."""
    features = np.arange(np.prod(like.shape[2:]), dtype=np.uint32).reshape(like.shape[2:])
    own_BT = _hash(bits_BT + jnp.uint32(zlib.crc32(name.encode())))
    places = jnp.zeros_like(like, jnp.uint32) + jnp.asarray(features * np.uint32(0x9E3779B9))
    bits = _hash(places ^ own_BT.reshape(*own_BT.shape, *(1,) * features.ndim))
    return (bits >> 8).astype(jnp.float32) * 2.0**-24


def _hash(x: jax.Array) -> jax.Array:
    """Return 32 bits that each depend on all 32 that are given (the finalizer of MurmurHash3)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
