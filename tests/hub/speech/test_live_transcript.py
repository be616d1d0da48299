"""Transcripts while they are heard: in the end those of whole files, until then of words that two readings share."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.data.tokenizers.tokenizer import ByteTokenizer
from jaxtrain.hub.speech import transcript_windows
from jaxtrain.hub.speech.live_transcript import LiveTranscript, _Window
from jaxtrain.hub.speech.transcribe import transcribed
from jaxtrain.kernels.log_mel import clipped
from tests.hub.speech import tiny_speech as tiny
from tests.tiers import slow

CHUNK = 1280  # samples


def blocks(samples, size=CHUNK):
    return (samples[at:at + size] for at in range(0, len(samples), size))


def segments(said):
    return [segment for one in said if one.segments is not None for segment in one.segments]


@pytest.mark.parametrize("keys", [{}, *slow(
    dict(mask_padding=False), dict(times=True), dict(times=True, mask_padding=False, audio_chunks_back=1),
    dict(beams=3), dict(audio_chunks_back=1))])
def test_in_the_end_there_is_the_transcript_of_the_whole_file(keys):
    """Four windows, of which the last is not full; the first is quiet at first, and so encoded once more."""
    model, samples = tiny.speech(**keys), tiny.sound()
    whole = transcribed(model, [("a", samples)], 1)["a"]
    assert len({one.text for one in whole}) > 1
    live = LiveTranscript(model)
    said = [*live.of(blocks(samples))]
    assert segments(said) == whole and live.whole_windows == 1
    before = sum(one.segments is None for one in said)  # that came before their window was over
    assert before > 2 or model.first  # whole segments are rare among such texts
    assert segments(live.of(blocks(samples, 7777))) == whole  # however the samples come, and with nothing kept


def test_a_window_is_encoded_chunk_by_chunk_where_nothing_louder_comes(monkeypatch):
    """With what the encoder carries: the programs of whole windows are not called."""
    model = tiny.speech()
    live = LiveTranscript(model)
    monkeypatch.setattr(type(model.decoding), "decode", None)  # an error where it is called
    assert segments(live.of(blocks(tiny.sound(0.5, loud_from=0)[1000:]))) and live.whole_windows == 0


@pytest.mark.parametrize("masked", slow(True, False))
def test_each_reading_is_of_what_was_heard_up_to_there(masked, monkeypatch):
    """Behind it there is padding, or silence where the model does not mask padding."""
    model, readings = tiny.speech(mask_padding=masked), []
    live = LiveTranscript(model)
    decoded = live._decoded

    def followed(state, heard, given):
        frames = clipped(live.now.logs, live.loudest)
        window = transcript_windows.window(frames, transcript_windows.silence_of(frames.max()), model.c)
        readings.append((live.encoder.memory(state), heard, given, live.now.stable, window))
        return decoded(state, heard, given)

    monkeypatch.setattr(live, "_decoded", followed)
    [*live.of(blocks(tiny.sound(0.4, loud_from=0)[1000:]))]
    *readings, over = readings
    for n, (memory, heard, given, stable, (frames, valid)) in enumerate(readings, 1):
        assert given == stable
        assert heard is None if not masked else np.array_equal(heard, [np.arange(17) < 4 * n])
        kept = slice(4 * n if masked else None)
        whole = model.model.encode(jnp.asarray(frames[None]), jnp.asarray(valid[None]) if masked else None)
        np.testing.assert_allclose(memory[:, kept], whole[:, kept], atol=1e-5)
    assert len(readings) == 4 and readings[-1][2] and over[2] == ()  # the window as a whole is decoded afresh


def test_frames_are_clipped_by_the_loudest_up_to_now():
    """If the loudest follows in a later window, those before are not what they are in the whole file."""
    live = LiveTranscript(tiny.speech())
    samples = tiny.sound(1.1, loud_from=0.7)
    before = [*live.of(blocks(samples[:10_000]))]
    assert live.loudest < -2
    after = [*live.of(blocks(samples))]
    assert live.loudest > 0 and segments(before)[0] == segments(after)[0]


@pytest.mark.slow
@pytest.mark.parametrize(("there", "masked"), [(34, True), (34, False), (13, True), (16, True), (17, True)])
def test_the_memory_of_chunks_is_that_of_the_whole_window(there, masked):
    """A window of 17 positions in chunks of 4: the last one is not full, and audio may end anywhere."""
    model = tiny.speech(mask_padding=masked, encoder_layers=2)
    frames = np.random.default_rng(0).normal(size=(34, 20)).astype(np.float32)
    frames, valid = transcript_windows.window(frames[:there], -1, model.c)
    encoder = model.encoder
    state = encoder.begin(frames[0])
    for chunk in range(-(-there // 8)):
        state = encoder.encode(state, frames, valid if masked else np.ones(34), chunk, chunk + 1)
    whole = model.model.encode(jnp.asarray(frames[None]), jnp.asarray(valid[None]) if masked else None)
    heard = (there + 1) // 2
    np.testing.assert_allclose(encoder.memory(state)[:, :heard], whole[:, :heard], atol=1e-5)


# ------------------------------------------------------------------------------------------------ words that are stable
def stable_of(readings, words, first=0):
    """Return what is stable after each reading, a list of tokens each."""
    live = LiveTranscript.__new__(LiveTranscript)
    live.model = SimpleNamespace(words=words, first=first)
    live.now = _Window(0, np.zeros((0, 1)), np.zeros((0, 1)))
    found = []
    for ids in readings:
        live._agree(ids)
        found.append(live.now.stable)
    return found


@pytest.mark.parametrize(("readings", "stable"), [
    (["one", "one"], ["", "one"]),  # both end there
    (["one tw", "one two", "one two th"], ["", "one", "one two"]),  # no word that goes on
    (["fou", "fourteen", "fourteen"], ["", "", "fourteen"]),
    (["one", "two", "two"], ["", "", "two"]), (["a b", "a", "a c"], ["", "a", "a"]),
    (["日本", "日本語", "日本語。"], ["", "日本", "日本語"]), (["", "é", "é è"], ["", "", "é"]),
])
def test_words_are_stable_once_two_readings_agree(readings, stable):
    tokenizer = ByteTokenizer()
    found = stable_of([list(text.encode()) for text in readings], tokenizer)
    assert [tokenizer.decode(ids) for ids in found] == stable


def test_where_there_are_times_whole_segments_are_stable():
    readings = [[20, 7, 8], [20, 7, 8, 22], [20, 7, 8, 22], [20, 7, 8, 22, 22, 9], [20, 7, 8, 22, 22, 9, 24]]
    words = SimpleNamespace(decode=lambda ids: " ".join(map(str, ids)))
    assert stable_of(readings, words, 20) == [[], [], [20, 7, 8, 22], [20, 7, 8, 22], [20, 7, 8, 22]]
