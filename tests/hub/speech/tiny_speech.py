"""A tiny Whisper whose parameters are not 0, that says other letters of other sounds, and sounds for it."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.config.modality_families import WhisperConfig
from jaxtrain.hub.speech.speech_model import SpeechModel, own_rules
from jaxtrain.models.make_model import make_model

LETTERS = "abcdxefgyhijzk mnop"  # of tokens 4 and up
FIRST_TIME = 4 + len(LETTERS)


def decode(ids):
    return "".join(LETTERS[id - 4] for id in ids if 4 <= id < FIRST_TIME)


WORDS = SimpleNamespace(vocab_size=FIRST_TIME, decode=decode, specials={})


@functools.cache
def speech(times=False, beams=1, **keys):
    """Windows of 0.34 seconds, in chunks of 0.08."""
    c = WhisperConfig(**(dict(vocab_size=FIRST_TIME + 18, num_layers=1, embed_dim=16, num_heads=4, max_seq_len=14,
                              audio_positions=17, audio_chunk=4, mels=20, prefix=[1, 2], end=3) | keys))
    graphdef, params = nnx.split(nnx.eval_shape(lambda: make_model(c, rngs=nnx.Rngs(params=jax.random.key(0)))))
    rng = np.random.default_rng(1)  # whose texts differ most from sound to sound
    params = jax.tree.map_with_path(lambda path, a: jnp.asarray(
        ("scale" in jax.tree_util.keystr(path)) + rng.normal(0, 0.6, a.shape), a.dtype), params)
    return SpeechModel(c, nnx.merge(graphdef, params), WORDS, own_rules(c, WORDS), [1, 2], FIRST_TIME if times else 0,
                       beams)


def sound(seconds=1.1, loud_from=0.2):
    """Notes over noise; a quiet beginning, with zeros, then a loud part."""
    rng = np.random.default_rng(2)
    at = np.arange(int(seconds * 16_000))
    notes = rng.uniform(0.1, 1.5, 40)[at // 900 % 40]
    made = np.sin(at * notes) * np.where(at < loud_from * 16_000, 1e-4, 0.4) + 1e-6 * rng.normal(size=len(at))
    return (made * (at > 1000)).astype(np.float32)
