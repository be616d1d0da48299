"""A .zst gives all that is in it, or says that it is not whole."""

import io

import pytest
import zstandard

from jaxtrain.commands.prepare import main
from jaxtrain.data.formats.zstd import _Frames, opened
from jaxtrain.data.prepare.prepare import Options, prepare

LINES = b"".join(b'{"text": "line %d"}\n' % i for i in range(20_000))
FRAME = zstandard.ZstdCompressor().compress(LINES)


@pytest.mark.parametrize("frames", [0, 1, 3])
def test_every_frame_is_read(frames):
    skippable = b"\x50\x2a\x4d\x18\x04\x00\x00\x00some"
    assert opened(io.BytesIO(skippable.join([b"", *[FRAME] * frames])), zstandard).read() == LINES * frames


@pytest.mark.parametrize("size", [1, 5, len(FRAME) // 2, len(FRAME) - 1, len(FRAME) + 7])
def test_a_file_that_is_cut_short_is_no_whole_one(size):
    with pytest.raises(EOFError):
        opened(io.BytesIO((FRAME + FRAME)[:size]), zstandard).read()


def test_no_document_is_lost_in_silence(tmp_path, capsys):
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(FRAME * 2)
    assert prepare([str(path)], tmp_path / "out", Options(eval_fraction=0)).train.num_documents == 40_000
    for content, words in ((FRAME[: len(FRAME) // 2], "it ends within a frame"), (b'{"text": "x"}\n', "it is not ")):
        path.write_bytes(content)
        for form in ("auto", "text"):
            assert main([f"--input={path}", f"--output={tmp_path / 'no'}", "--workers=1", f"--format={form}"]) == 2
            error = capsys.readouterr().err
            assert f"{path} cannot be read ({words}" in error and error.count("\n") == 1


def test_neither_memory_nor_time_follows_what_a_few_bytes_stand_for():
    """64 KiB of a frame stand for 2 GiB of zeros."""
    sizes, frame = [], zstandard.ZstdCompressor().compressobj()
    content = b"".join([*(frame.compress(bytes(2**23)) for _ in range(2**8)), frame.flush()])
    stream = _Frames(io.BytesIO(content), zstandard)
    assert len(content) < 2**17
    with pytest.raises(OSError, match=r"compressed more than 1,000 to 1, to over 268,435,456"):
        while stream.readinto(bytearray(1)) == 1:
            sizes.append(len(stream._left))
            stream._left = memoryview(b"")
    assert max(sizes) <= 2**26 and sum(sizes) > 2**27
