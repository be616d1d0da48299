"""Windows of long files, and what follows from the times among the tokens of one."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.config.modality_families import SILENCE
from jaxtrain.data.prepare_sequences.audio import log_mel
from jaxtrain.hub.speech import transcript_windows
from jaxtrain.models.modalities.speech_transformer import silent_after

FIRST = 20  # the token of 0 seconds
C = SimpleNamespace(audio_positions=5, mels=80)
WORDS = SimpleNamespace(decode=lambda ids: " ".join(map(str, ids)))


@pytest.mark.parametrize(("ids", "whole", "rest"), [
    ([20, 7, 22], [(0, 2, [7])], None),  # all was said
    ([20, 7, 22, 22, 8], [(0, 2, [7])], [22, 8]), ([20, 7, 22, 22], [(0, 2, [7])], [22]),
    ([20, 7, 22, 23, 8, 24], [(0, 2, [7]), (3, 4, [8])], None), ([20, 7, 8], [], [20, 7, 8]), ([20], [], [20]),
    ([], [], None), ([7, 22], [(0, 2, [7])], None),
])
def test_a_window_is_cut_at_its_times(ids, whole, rest):
    found, left = transcript_windows.cut_at_times(ids, FIRST)
    assert found == [(begin * 0.02, end * 0.02, part) for begin, end, part in whole] and left == rest


@pytest.mark.parametrize(("ids", "at", "said"), [
    ([20, 7, 22, 22, 8], 4, [(0, 0.04, "7")]),  # what is not whole is read again
    ([20, 7, 22], 10, [(0, 0.04, "7")]), ([20, 7], 10, [(0, 0.1, "7")]), ([20], 10, []),
])
def test_the_next_window_begins_where_the_last_whole_segment_ended(ids, at, said):
    found, moved = transcript_windows.read_window(ids, 0, 10, WORDS, FIRST)
    assert moved == at and [(one.begin, one.end, one.text) for one in found] == said


@pytest.mark.parametrize("loud", [1.0, 1e-3])
def test_behind_the_end_there_is_the_silence_of_frames_of_zeros(loud):
    sound = loud * np.sin(np.arange(1600) * 0.3)
    both = log_mel(np.concatenate([sound, np.zeros(4000)]))
    frames, there = transcript_windows.window(both[10:15], transcript_windows.silence_of(both[:15].max()), C)
    assert there.tolist() == [1] * 5 + [0] * 5 and np.array_equal(frames[:5], both[10:15])
    assert np.all(frames[5:] == both[-1]) and both[-1, 0] == both.min() >= SILENCE
    padded = silent_after(jnp.asarray(both[None]), jnp.arange(len(both))[None] < 15)
    assert np.allclose(padded[0, 15:], both[-1])
