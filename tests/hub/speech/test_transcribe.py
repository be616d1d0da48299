"""Transcripts of files and of standard input, at once and while it comes, and the sentences about what is wrong."""

import contextlib
import json
import os
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile

import jaxtrain as jt
from jaxtrain.commands import transcribe as transcribe_command
from jaxtrain.data.prepare_sequences import audio
from jaxtrain.hub import trained_model
from jaxtrain.hub.speech import speech_model, transcribe
from tests.hub.speech import tiny_speech as tiny

ONE_ROW = "--batch_size=1"  # the program that live transcripts take, too


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    """A folder whose model is the tiny one, with two files: four windows and one of zeros."""
    (tmp_path / "config.json").write_text(json.dumps({"model": {"name": "whisper", "audio_chunk": 4}}))
    for name, seconds in (("a", 1.1), ("b", 0.3)):
        soundfile.write(tmp_path / f"{name}.wav", tiny.sound(seconds), 16_000)
        (tmp_path / f"{name}.txt").write_text("k k")
    monkeypatch.setattr(speech_model, "open_model", lambda *_, beams, language, task, timestamps: tiny.speech())
    return tmp_path


@contextlib.contextmanager
def standard_input(content, monkeypatch):
    """A pipe into which something else writes."""
    ours, theirs = os.pipe()
    with os.fdopen(ours, "rb") as pipe, os.fdopen(theirs, "wb") as end:
        monkeypatch.setattr("sys.stdin", SimpleNamespace(fileno=pipe.fileno, isatty=lambda: False))
        writer = threading.Thread(target=lambda: (end.write(content), end.close()))
        writer.start()
        yield
        writer.join()


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_files_are_transcribed_as_they_come_and_as_a_whole_alike(workdir, capsys):
    told = [f"{workdir}/{name}.wav" for name in "ab"]
    for how in (ONE_ROW, "--stream"):
        words = [f"{workdir}", *told, how, "--output", f"{workdir}/said{how}", "--references"]
        assert transcribe_command.main(words) == 0
        assert "word error rate" in capsys.readouterr().err
    whole, live = lines_of(workdir / f"said{ONE_ROW}"), lines_of(workdir / "said--stream")
    assert whole == live and [one["file"] for one in whole] == told
    assert [len(one["segments"]) for one in whole] == [4, 1] and whole[0]["text"]
    assert transcribe_command.main([f"{workdir}", f"{workdir}", ONE_ROW]) == 0
    assert capsys.readouterr().out == "".join(f"{one['file']}\t{one['text']}\n" for one in whole)
    assert transcribe_command.main([f"{workdir}", *told, ONE_ROW, "--json"]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == whole
    assert transcribe_command.main([f"{workdir}", *told, ONE_ROW, "--timestamps"]) == 0
    assert capsys.readouterr().out == "".join(
        f"{one['file']}\t{part['begin']:.2f}\t{part['end']:.2f}\t{part['text'].strip()}\n"
        for one in whole for part in one["segments"])


@pytest.mark.parametrize("head", [0, 44])  # WAV, and its samples alone
def test_standard_input_is_transcribed(workdir, monkeypatch, capsys, head):
    content = (workdir / "a.wav").read_bytes()[head:]
    transcribe_command.main([f"{workdir}", f"{workdir}/a.wav", ONE_ROW, "--output", f"{workdir}/file"])
    for how in (ONE_ROW, "--stream"):
        with standard_input(content, monkeypatch):
            assert transcribe_command.main([f"{workdir}", "-", how, "--output", f"{workdir}/piped"]) == 0
        assert lines_of(workdir / "piped") == [lines_of(workdir / "file")[0] | {"file": "-"}]
    assert capsys.readouterr().out.splitlines()[-1]


def test_few_recordings_are_in_memory_at_once():
    """A file is read when there is a row for it; one that has no frame says nothing, and all rows are full."""
    read, model = [], tiny.speech()

    def sounds():
        for n, seconds in enumerate((0.3, 0, 1.1, 0.3, 0.3)):
            read.append(n)
            yield f"{n}", tiny.sound(seconds, loud_from=0)

    asked, nothing = [], np.full((2, 1), model.c.end)
    counted = SimpleNamespace(decode=lambda *given: asked.append(len(read)) or (nothing, None))
    counting = SimpleNamespace(c=model.c, prompt_for=model.prompt_for, new=model.new, beams=1, said=model.said,
                               read=model.read, first=0, decoding=counted)
    counting.timed = counting
    found = transcribe.transcribed(counting, sounds(), 2)
    assert [len(said) for said in found.values()] == [1, 0, 4, 1, 1]
    assert asked == [3, 3, 4, 5]  # two windows each time


def test_behind_each_recording_there_is_its_own_silence():
    """8 decades below the loudest of all of it, and not of the window, nor of what else is in the batch."""
    model, asked = tiny.speech(mask_padding=False), []
    decoding = SimpleNamespace(decode=lambda frames, *_: asked.append(frames) or (np.full((3, 1), model.c.end), None))
    told = SimpleNamespace(c=model.c, prompt_for=model.prompt_for, new=model.new, beams=1, said=model.said,
                           read=model.read, first=0, decoding=decoding)
    told.timed = told
    sound = tiny.sound(loud_from=0)[1000:8000]
    transcribe.transcribed(told, [("fades", sound * np.where(np.arange(7000) < 5000, 1, 0.01)),
                                  ("low", 0.1 * sound[:1600])], 3)
    loud, faded, low = asked[0]
    assert max(faded[:9].max(), low.max()) + 0.3 < loud.max()
    assert np.all(faded[10:] == loud.max() - 2) and np.all(low[10:] == low.max() - 2)


def test_zeros_follow_a_clip_of_a_published_model():
    """Its last frames reach into them, as those of transformers' extractor; the segment ends where the clip ends."""
    model, asked = tiny.speech(mask_padding=False, audio_chunk=0), []
    decoding = SimpleNamespace(decode=lambda frames, *_: asked.append(frames) or (np.full((1, 1), model.c.end), None))
    told = SimpleNamespace(c=model.c, prompt_for=model.prompt_for, new=model.new, beams=1, said=model.said,
                           read=model.read, first=0, decoding=decoding)
    sound = tiny.sound(loud_from=0)[1000:2650]
    found = transcribe.transcribed(told, [("a", sound)], 1)["a"]
    wanted = audio.log_mel(np.pad(sound, (0, 34 * audio.HOP - len(sound))), model.c.mels)
    np.testing.assert_allclose(asked[0][0], wanted, atol=2e-4)
    assert asked[0][0, 10:12].max() > wanted.min() + 0.1 and (found[0].begin, found[0].end) == (0, 0.1)


@pytest.mark.parametrize(("argv", "message"), [
    (["gone.wav"], "FILES: gone.wav does not exist; name files or folders of .wav, .flac, .ogg, .mp3"),
    (["b.txt"], "FILES: {0}/b.txt has no audio; name files or folders of .wav"),
    (["a.wav", "broken.wav"], "FILES: {0}/broken.wav is not readable as audio; leave it out"),
    (["a.wav", "--beams=0"], "--beams: 0 is below 1; give 1 or more"),
    (["a.wav", "--english"], "--english: it is read with --references only; give that too, or leave it out"),
    (["a.wav", "--stream", "--batch_size=2"], "--batch_size: with --stream windows come one after the other; leave it"),
    (["-", "--references"], "--references: standard input has no reference text; name a file, or leave the flag out"),
    (["-", "--stream"], "-: standard input is a terminal; write audio into it, as in: arecord ... | jaxtrain ..."),
])
def test_mistakes_are_told_in_one_line(workdir, monkeypatch, capsys, argv, message):
    """Before anything is loaded."""
    monkeypatch.setattr(speech_model, "open_model", None)
    (workdir / "broken.wav").write_bytes(b"RIFF")
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    argv = [f"{workdir}/{word}" if (workdir / word).is_file() else word for word in argv]
    assert transcribe_command.main([f"{workdir}", *argv]) == 2
    assert capsys.readouterr().err.startswith(message.format(workdir))


@pytest.mark.parametrize("model", [{}, {"audio_chunk": 0}])
def test_a_model_that_attends_to_what_comes_later_cannot_stream(workdir, monkeypatch, capsys, model):
    monkeypatch.setattr(speech_model, "open_model", None)
    (workdir / "config.json").write_text(json.dumps({"model": {"name": "whisper", **model}}))
    assert transcribe_command.main([f"{workdir}", f"{workdir}/a.wav", "--stream"]) == 2
    assert capsys.readouterr().err == (
        "--stream: the encoder of this model attends to later audio too; leave it out, or train with "
        "model.audio_chunk=50: a second\n")


def test_a_model_that_does_not_read_audio_is_refused(workdir, capsys):
    (workdir / "config.json").write_text(json.dumps({"model": {}}))  # the default
    assert transcribe_command.main([f"{workdir}", f"{workdir}/a.wav"]) == 2
    assert capsys.readouterr().err == "WORKDIR: its model is gpt2, which does not read audio; give one of whisper\n"


def test_a_workdir_of_speech_is_opened_and_one_of_images_is_not(tmp_path):
    for name in ("whisper", "image_flow"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model": {"name": name}}))
    assert trained_model.sections_of(tmp_path / "whisper") == {"model": {"name": "whisper"}}
    with pytest.raises(jt.UserError, match=r"^WORKDIR: it trained image_flow, which is not a decoder of text"):
        trained_model.sections_of(tmp_path / "image_flow")
