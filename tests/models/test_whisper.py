"""Whisper's encoder by chunks with a state, and decoding with a cache, against the passes over the whole."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxtrain as jt
from jaxtrain.config.modality_families import WhisperConfig
from jaxtrain.hub.speech.speech_decoding import SpeechDecoding, Timestamps
from jaxtrain.models.make_model import make_model

END, FIRST_TIME, KNOWN = 3, 18, 23


def model(**keys):
    """A tiny model whose parameters are not 0."""
    c = WhisperConfig(**(dict(vocab_size=24, num_layers=2, embed_dim=16, num_heads=4, max_seq_len=12,
                              audio_positions=8, mels=4, prefix=[1, 2], end=END) | keys))
    graphdef, params = nnx.split(make_model(c, rngs=nnx.Rngs(params=jax.random.key(0))))
    rng = np.random.default_rng(0)
    return nnx.merge(graphdef, jax.tree.map(lambda a: a + jnp.asarray(rng.normal(0, 0.3, a.shape), a.dtype), params))


FRAMES = np.random.default_rng(1).normal(size=(3, 16, 4)).astype(np.float32)


@pytest.mark.exhaustive
@pytest.mark.parametrize("back", [0, 1])
def test_chunk_by_chunk_is_the_whole_pass(back):
    whisper = model(audio_chunk=2, audio_chunks_back=back)
    state, found = whisper.begin_stream(FRAMES[:, :1]), []
    ahead = np.concatenate([FRAMES[:, 1:], np.zeros_like(FRAMES[:, :1])], 1)
    step = jax.jit(lambda state, frames: whisper.encode_next(state, frames))
    for at in range(0, 16, 4):
        memory, state = step(state, ahead[:, at:at + 4])
        found.append(memory)
    np.testing.assert_allclose(np.concatenate(found, 1), whisper.encode(FRAMES), atol=1e-5)
    kept = 2 * back or 8
    assert state["past"]["keys"].shape[2] == kept  # as long as what is attended to


@pytest.mark.slow
@pytest.mark.parametrize(("masked", "positions"), [(True, 8), (True, 7), (False, 7)])
def test_rows_that_end_within_a_chunk_are_the_whole_pass(masked, positions):
    """In a window whose last chunk is not full, too."""
    whisper = model(audio_chunk=3, audio_positions=positions, mask_padding=masked)
    frames = FRAMES[:, :2 * positions]
    there = np.arange(24)[None, 1:] < np.array([[14], [11], [4]] if masked else [[2 * positions]] * 3)
    ahead = np.pad(frames[:, 1:], ((0, 0), (0, 24 - 2 * positions), (0, 0)), constant_values=9.0)  # padding is not 0
    step = jax.jit(lambda state, frames, valid: whisper.encode_next(state, frames, valid))
    state, found = whisper.begin_stream(frames[:, :1]), []
    for at in range(0, 18, 6):
        memory, state = step(state, ahead[:, at:at + 6], there[:, at:at + 6])
        found.append(memory)
    heard = np.arange(2 * positions)[None] < np.array([[14], [11], [4]])
    whole = np.asarray(whisper.encode(frames, heard if masked else None))
    kept = heard[:, ::2] if masked else np.ones((3, positions), bool)
    np.testing.assert_allclose(np.concatenate(found, 1)[:, :positions][kept], whole[kept], atol=1e-5)


def test_an_encoder_of_the_whole_cannot_stream():
    with pytest.raises(jt.UserError, match=r"^model\.audio_chunk: without it the encoder attends to what comes later"):
        nnx.eval_shape(model).begin_stream(FRAMES[:, :1])


@pytest.mark.exhaustive
def test_decoding_with_a_cache_is_the_pass_without_one():
    """Greedily, and with beams that search the same tree, from its root or from where the first tokens are known."""
    whisper, new = model(), 6
    valid = (np.arange(16) < np.array([[16], [11], [7]])).astype(np.float32)
    prompts = np.array([[1, 2]] * 3, np.int32)
    whole = jax.jit(lambda tokens: jax.nn.log_softmax(whisper(FRAMES, tokens, valid)[:, :, :KNOWN]))

    def next_logps(row, text):
        tokens = np.full((3, 2 + new), END)
        tokens[:, :2], tokens[:, 2:2 + len(text)] = prompts, text
        return np.asarray(whole(tokens))[row, 1 + len(text)]

    def mean(beam):
        return beam[1] / (min(new, sum(token != END for token in beam[0]) + 1) - len(given))

    decoding = SpeechDecoding(whisper, END, KNOWN)
    memory = jax.jit(lambda: whisper.encode(FRAMES, valid))()
    for beams, given in itertools.product((1, 3), ((), (5, 7))):
        tokens, means = decoding.decode(FRAMES, valid, prompts, new, beams)
        again = decoding.continue_from(memory, valid[:, ::2], prompts, new, beams, given)
        if given:
            tokens, means = again
        else:
            assert np.array_equal(tokens, again[0]) and np.allclose(means, again[1], atol=1e-5)
        for row in range(3):
            held = [(given, 0.0)]
            for _ in range(new - len(given)):
                longer = []
                for text, total in held:
                    if END in text:
                        longer.append(((*text, END), total))
                    else:
                        logps = next_logps(row, text)
                        longer += [((*text, token), total + logps[token]) for token in range(KNOWN)]
                held = sorted(longer, key=lambda beam: -beam[1])[:beams]
            best = max(held, key=mean)
            assert tokens[row].tolist() == list(best[0])
            assert means[row] == pytest.approx(mean(best), abs=1e-5)


def test_times_come_in_pairs_and_do_not_go_back():
    """All texts of four tokens that the rules allow, where no time is likelier than all text."""
    rules = Timestamps(FIRST_TIME, END, latest=2)
    allowed = jax.jit(rules.allowed)

    def following(*text):
        tokens = np.full((1, 6), END)
        tokens[0, :len(text)] = text
        logp = np.where(np.arange(24) < FIRST_TIME, 0.0, -9.0).astype(np.float32)[None]
        return set(np.flatnonzero(np.asarray(allowed(logp, tokens, len(text)))[0] > -1e29).tolist())

    texts, times = set(range(END)), set(range(FIRST_TIME, 24))
    others = set(range(END, FIRST_TIME))
    assert following() == {18, 19, 20}  # a time comes first, and not a late one
    assert following(19) == texts | others  # then text
    assert following(19, 0) == texts | others | {20, 21, 22, 23}  # more of it, or a later time
    assert following(19, 0, 21) == {21, 22, 23} | others  # a time opens, or the end comes
    assert following(19, 0, 21, 21) == texts | others  # and again text
    assert times.isdisjoint(following(19, 0, 21, 21))


def test_a_time_comes_where_all_times_together_are_likelier_than_any_text():
    logp = np.log(np.where(np.arange(24) < FIRST_TIME, 0.05, 0.02)).astype(np.float32)[None]  # six times: 0.12
    tokens = np.array([[19, 0, END, END]])
    found = np.flatnonzero(np.asarray(Timestamps(FIRST_TIME, END).allowed(logp, tokens, 2))[0] > -1e29)
    assert found.tolist() == [20, 21, 22, 23]
