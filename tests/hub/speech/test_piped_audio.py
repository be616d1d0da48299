"""Audio from a pipe: WAV and samples as they come, what is neither, and Ctrl-C."""

import io
import signal
import struct
import threading

import numpy as np
import pytest
import soundfile

import jaxtrain as jt
from jaxtrain.data.prepare_sequences.audio import samples_in
from jaxtrain.hub.speech import piped_audio
from tests.hub.speech import tiny_speech as tiny

SAMPLES = tiny.sound(1.0, loud_from=0)


class Drops(io.BytesIO):
    """A pipe that gives a few bytes at a time, not always whole samples."""

    def read(self, count=-1):
        return super().read(min(count, 999))


def wav(samples=SAMPLES, rate=16_000, format="WAV", **keys):
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=format, **keys)
    return file.getvalue()


def read(content):
    return np.concatenate([np.zeros(0, np.float32), *piped_audio.samples_of_pipe(Drops(content))])


@pytest.mark.parametrize(("rate", "channels", "kind"), [
    (16_000, 1, "PCM_16"), (16_000, 2, "PCM_16"), (44_100, 1, "PCM_16"), (8_000, 2, "PCM_16")])
def test_wav_is_what_it_is_as_a_file(rate, channels, kind):
    both = np.stack([SAMPLES, SAMPLES[::-1]], 1)[:, :channels]
    content = wav(both, rate, subtype=kind)
    np.testing.assert_allclose(read(content), samples_in(content, 1), atol=1e-6)


def test_samples_without_a_header_are_those_of_wav():
    content = wav()
    assert np.array_equal(read(wav(format="WAVEX", subtype="PCM_16")), read(content))  # the extensible format
    assert np.array_equal(read(content[44:]), read(content))
    assert len(read(b"")) == 0 and len(read(b"\1")) == 0 and len(read(b"\1\2\3")) == 1


@pytest.mark.parametrize("length", [0, 2**32 - 1, 2**31 - 36])
def test_a_recorder_does_not_know_the_length(length):
    content = wav()
    other = b"LIST" + struct.pack("<I", 5) + b"other\0"
    unknown = content[:36] + other + b"data" + struct.pack("<I", length) + content[44:]
    assert np.array_equal(read(unknown), read(content))
    assert np.array_equal(read(content + other), read(content))  # what follows the samples is not among them


@pytest.mark.parametrize(("content", "message"), [
    (b"fLaC....", "-: it is FLAC, and standard input is read as WAV or samples only; decode it first, such as by ffm"),
    (b"OggS", "-: it is Ogg,"), (b"ID3\4", "-: it is MP3,"), (b"RIFF....AVI ", "-: its header is not that of a WAV"),
    (b"RIFF....WAVE", "-: its header is not that of a WAV"), (wav()[:40], "-: its header is not that of a WAV"),
    (wav(subtype="FLOAT"), "-: its samples have 32 bits, in format 3 of WAV; write 16-bit integers, such as by ffm"),
    (wav(subtype="PCM_24"), "-: its samples have 24 bits"),
    (wav(format="WAVEX", subtype="FLOAT"), "-: its samples have 32"), (wav(rate=900), "-: a sampling rate of 900 Hz"),
])
def test_what_cannot_be_read_is_one_sentence(content, message):
    with pytest.raises(jt.UserError) as refusal:
        read(content)
    assert f"{refusal.value}".startswith(message)


def test_what_came_in_the_meantime_comes_as_one():
    working, came, over = threading.Event(), threading.Event(), threading.Event()

    def recorder():
        yield np.arange(2)
        working.wait()
        yield np.arange(2, 4)
        yield np.arange(4, 6)
        came.set()  # both are there
        over.wait()

    heard = piped_audio.as_it_comes(recorder())
    assert next(heard).tolist() == [0, 1]
    working.set()
    came.wait()
    assert next(heard).tolist() == [2, 3, 4, 5]
    over.set()
    assert [*heard] == []


def test_an_error_of_the_pipe_comes_behind_what_was_read():
    def broken():
        yield np.arange(2)
        raise jt.UserError("-", "it is broken", "mend it")

    heard = []
    with pytest.raises(jt.UserError, match=r"^-: it is broken"):
        for block in piped_audio.as_it_comes(broken()):
            heard += block.tolist()
    assert heard == [0, 1]


def test_the_first_interrupt_is_the_end_and_the_second_stops():
    over, before = threading.Event(), signal.getsignal(signal.SIGINT)

    def recorder():
        yield np.arange(2)
        over.wait()

    heard = piped_audio.as_it_comes(recorder())
    assert next(heard).tolist() == [0, 1]
    signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert [*heard] == []
    over.set()


def test_a_process_that_ignores_interrupts_goes_on_ignoring_them():
    """A shell begins those in the background so, and Ctrl-C is then meant for another one."""
    before, go_on = signal.signal(signal.SIGINT, signal.SIG_IGN), threading.Event()

    def recorder():
        yield np.arange(2)
        go_on.wait()
        yield np.arange(2, 4)

    try:
        heard = piped_audio.as_it_comes(recorder())
        assert next(heard).tolist() == [0, 1]
        signal.raise_signal(signal.SIGINT)
        go_on.set()
        assert [block.tolist() for block in heard] == [[2, 3]]
    finally:
        signal.signal(signal.SIGINT, before)
