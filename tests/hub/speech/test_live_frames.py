"""Frames of samples as they come are those of the file."""

import numpy as np
import pytest

from jaxtrain.hub.speech.live_frames import LiveFrames
from jaxtrain.kernels.log_mel import clipped, log_mel_of_file
from tests.hub.speech import tiny_speech as tiny


@pytest.mark.parametrize("count", [0, 100, 160, 200, 201, 399, 560, 16_000])
def test_frames_are_those_of_the_file(count):
    samples, rng = tiny.sound(1.1, loud_from=0)[900:900 + count], np.random.default_rng(count)
    live, found, at = LiveFrames(20, 8), [], 0
    while at < count:
        size = int(rng.choice([1, 7, 160, 401, 3000]))
        found.append(live.add(samples[at:at + size]))
        at += size
    logs = np.concatenate([*found, live.end()])
    wanted = log_mel_of_file(samples, 20)
    assert logs.shape == wanted.shape
    if len(wanted):
        np.testing.assert_allclose(clipped(logs, logs.max()), wanted, atol=1e-5)


def test_a_frame_comes_once_what_it_reads_has_come():
    """200 samples behind its middle, of which the first frame has as many in front that mirror them."""
    live, samples = LiveFrames(20, 8), tiny.sound()
    assert len(live.add(samples[:200])) == 0
    assert len(live.add(samples[200:201])) == 1 and len(live.add(samples[201:359])) == 0
    assert len(live.add(samples[359:360])) == 1
