"""Decoding audio into tokens: the encoder once, then beam search with a key-value cache, one token of all beams a step.

One beam is greedy decoding. A model is whole on one device. Programs are compiled once for each number of rows and
beams.

Shape suffixes: B rows of audio, K beams, R = B K, M frames, C mels, P prompt tokens, N new tokens, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.models.attention.kv_cache import Cache

NEVER = -1e30  # a log-probability
SECONDS = 0.02  # between two timestamps


@dataclass(frozen=True)
class Timestamps:
    """The tokens that say when something is said, and what follows from one.

    They come in pairs: what is said begins with one and ends with one, after which the next begins or the transcript
    ends. Times do not go back. Where times together are likelier than any text, a time comes. These are the rules of
    the published decoding (arXiv 2212.04356, section 4.5).
    """

    first: int  # the token of 0 seconds; all from there on are times
    end: int  # the end of a transcript
    latest: int | None = 50  # that the first one may be; None: any

    def allowed(self, logp_RV: jax.Array, tokens_RN: jax.Array, count: jax.Array) -> jax.Array:
        """Return log-probabilities without those that break a rule, after `count` tokens of each row."""
        V = logp_RV.shape[1]
        ids_V, written_N = jnp.arange(V), jnp.arange(tokens_RN.shape[1]) < count
        times_V, text_V = ids_V >= self.first, ids_V < self.end
        time_RN = (tokens_RN >= self.first) & written_N

        def was(back):  # whether the token so many back was a time; before the first, one counts as such
            found = jnp.take_along_axis(time_RN, jnp.full((len(time_RN), 1), jnp.maximum(count - back, 0)), 1)[:, 0]
            return found & (count >= back) if back == 1 else found | (count < back)

        last, before = was(1), was(2)
        newest_R = jnp.where(time_RN, tokens_RN, self.first).max(1)
        # A closing time may be followed by the same time again, which opens; an opening one lies later than it began.
        least_R = newest_R + jnp.where(last & ~before, 0, time_RN.any(1))
        banned = (last & before)[:, None] & times_V | (last & ~before)[:, None] & text_V
        banned |= times_V & (ids_V < least_R[:, None])
        starts = ~times_V if self.latest is None else ~times_V | (ids_V > self.first + self.latest)
        logp_RV = jnp.where(banned | ((count == 0) & starts), NEVER, logp_RV)
        times_R = jax.nn.logsumexp(jnp.where(times_V, logp_RV, NEVER), -1)
        likelier_R = times_R > jnp.where(times_V, NEVER, logp_RV).max(-1)
        return jnp.where(likelier_R[:, None] & ~times_V, NEVER, logp_RV)


@dataclass(frozen=True, eq=False)
class SpeechDecoding:
    """The programs of one model.

    Args:
        model: with its parameters.
        end: the token that ends a transcript.
        known: how many tokens the tokenizer has; the table may have more rows, which are never chosen.
        suppressed: tokens that are never chosen.
        suppressed_first: tokens that are not chosen as the first ones.
        timestamps: the rules of times; None: no token is one.
    """

    model: nnx.Module
    end: int
    known: int
    suppressed: Sequence[int] = ()
    suppressed_first: Sequence[int] = ()
    timestamps: Timestamps | None = None

    def __post_init__(self):
        graphdef, params = nnx.split(self.model)
        object.__setattr__(self, "_params", params)
        for name, static in (("_decoded", (4, 5)), ("_continued", (4, 5)), ("_next_logits", ())):
            object.__setattr__(self, f"{name}_program", jax.jit(partial(getattr(self, name), graphdef),
                                                                static_argnums=static))

    def decode(self, features_BMC: np.ndarray, valid_BM: np.ndarray | None, prompts_BP: np.ndarray, new: int,
               beams: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Return the best tokens of each row [B, N], and their mean log-probability [B].

        What follows the end token is the end token. `prompts_BP` are the tokens before; at most `new` follow.
        """
        found = self._decoded_program(self._params, features_BMC, valid_BM, prompts_BP, new, beams)  # pyrefly: ignore
        return tuple(map(np.asarray, found))  # pyrefly: ignore[bad-return]

    def continue_from(self, memory_BSD: jax.Array, heard_BS: np.ndarray | None, prompts_BP: np.ndarray, new: int,
                      beams: int = 1, given: Sequence[int] = ()) -> tuple[np.ndarray, np.ndarray]:
        """Return what `decode` does, of what an encoder returned already, for transcripts that begin with `given`.

        `heard_BS` are the positions of the memory that are not padding. The program is one for any number of tokens
        given; they are in what is returned, but not in the mean log-probability.
        """
        begun_N, n = np.full(new, self.end, np.int32), np.int32(len(given))
        begun_N[:n] = given
        found = self._continued_program(self._params, memory_BSD, heard_BS, prompts_BP,  # pyrefly: ignore
                                        new, beams, begun_N, n)
        return tuple(map(np.asarray, found))  # pyrefly: ignore[bad-return]

    def most_likely(self, features_1MC: np.ndarray, valid_1M: np.ndarray | None, prompt: Sequence[int],
                    among: Sequence[int]) -> int:
        """Return which of some tokens is the likeliest after a prompt."""
        logits_V = np.asarray(self._next_logits_program(  # pyrefly: ignore
            self._params, features_1MC, valid_1M, np.array([prompt], np.int32)))
        return among[int(logits_V[list(among)].argmax())]

    def _next_logits(self, graphdef, params, features_1MC, valid_1M, prompt_1P):
        model = nnx.merge(graphdef, params)
        memory_1SD, heard_1S = self._heard(model, features_1MC, valid_1M)
        return model.logits(model.decode(prompt_1P, memory_1SD, heard_1S)[0])[0, -1]

    def _decoded(self, graphdef, params, features_BMC, valid_BM, prompts_BP, new, beams):
        model = nnx.merge(graphdef, params)
        return self._searched(model, *self._heard(model, features_BMC, valid_BM), prompts_BP, new, beams)

    def _heard(self, model, features_BMC, valid_BM):
        """Return what the decoder reads of audio, and which positions of that are not padding."""
        memory_BSD = model.encode(features_BMC.astype(model.norm.scale[...].dtype), valid_BM)
        return memory_BSD, None if valid_BM is None else valid_BM[:, ::2]

    def _continued(self, graphdef, params, memory_BSD, heard_BS, prompts_BP, new, beams, begun_N, n):
        return self._searched(nnx.merge(graphdef, params), memory_BSD, heard_BS, prompts_BP, new, beams, begun_N, n)

    def _searched(self, model, memory_BSD, heard_BS, prompts_BP, new, beams, begun_N=None, n=0):
        """Return the best transcripts. The first `n` tokens are those of `begun_N`, read at once with the prompt."""
        (B, P), room = prompts_BP.shape, prompts_BP.shape[1] + new
        begun = jnp.full(new, self.end, jnp.int32) if begun_N is None else begun_N
        tokens = jnp.tile(begun, (B * beams, 1))
        read = jnp.repeat(prompts_BP, beams, 0)
        if begun_N is not None:  # what is read behind the n tokens is never seen: each step writes before it reads
            read = jnp.concatenate([read, tokens[:, :-1]], 1)
        valid_RS = None if heard_BS is None else jnp.repeat(heard_BS, beams, 0)
        x, cache = model.decode(read, jnp.repeat(memory_BSD, beams, 0), valid_RS, cache=Cache())
        own = jax.tree.map(lambda a: jnp.pad(a, [(0, 0)] * 3 + [(0, room - read.shape[1]), (0, 0)]), cache["own"])
        memory = cache["memory"]

        def step(state):
            own, tokens, scores, logp, done, count = state
            # Beams that are finished go on with the end token alone, at no cost.
            stay = jnp.where(jnp.arange(logp.shape[1]) == self.end, 0.0, NEVER)
            logp = jnp.where(done[:, None], stay, self._allowed(logp, tokens, count))
            V = logp.shape[1]
            sums = (scores[:, None] + logp).reshape(B, beams * V)
            best, which = jax.lax.top_k(sums, beams)
            rows = (jnp.arange(B)[:, None] * beams + which // V).reshape(-1)
            token = (which % V).reshape(-1).astype(jnp.int32)
            own, tokens, done = jax.tree.map(lambda a: a[:, rows], own), tokens[rows], done[rows]
            tokens = jax.lax.dynamic_update_slice_in_dim(tokens, token[:, None], count, 1)
            done |= token == self.end
            held = Cache({"own": own, "memory": memory}, P + count)
            x, new = model.decode(token[:, None], None, valid_RS, P + count, held)
            own = Cache(own, P + count).extended(new["own"])
            return own, tokens, best.reshape(-1), self._logp(model, x[:, -1:]), done, count + 1

        scores = jnp.where(jnp.arange(B * beams) % beams == 0, 0.0, NEVER)  # all beams begin as the first one
        last = x[:, -1:] if begun_N is None else jax.lax.dynamic_slice_in_dim(x, P - 1 + n, 1, 1)
        state = (own, tokens, scores, self._logp(model, last), jnp.zeros(B * beams, bool), jnp.int32(n))
        _, tokens, scores, *_ = jax.lax.while_loop(lambda s: (s[5] < new) & ~s[4].all(), step, state)
        lengths = jnp.maximum(jnp.minimum((tokens != self.end).sum(1) + 1, new) - n, 1)
        means = (scores / lengths).reshape(B, beams)
        return tokens.reshape(B, beams, new)[jnp.arange(B), means.argmax(1)], means.max(1)

    def _logp(self, model, x_R1D):
        logits_RV = model.logits(x_R1D)[:, 0]
        never = np.arange(logits_RV.shape[1]) >= self.known
        never[list(self.suppressed)] = True
        return jax.nn.log_softmax(jnp.where(never, NEVER, logits_RV))

    def _allowed(self, logp_RV, tokens_RN, count):
        if len(self.suppressed_first):
            first = np.isin(np.arange(logp_RV.shape[1]), self.suppressed_first)
            logp_RV = jnp.where((count == 0) & first, NEVER, logp_RV)
        return logp_RV if self.timestamps is None else self.timestamps.allowed(logp_RV, tokens_RN, count)
