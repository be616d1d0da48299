"""Lengths of documents, as text and as a drawing."""

import struct
import sys
from dataclasses import replace

import pytest

from jaxtrain.commands.prepare import main
from jaxtrain.data.corpus import lengths
from jaxtrain.data.prepare.prepare import Options, prepare


@pytest.fixture
def source(tmp_path):
    (tmp_path / "in").mkdir()
    for i, size in enumerate((1, 2, 3, 3, 6, 31)):
        (tmp_path / f"in/{i}").write_text("x" * size)
    return tmp_path / "in"


def test_documents_are_counted_with_their_ends_in_both_splits(tmp_path, source):
    corpus = prepare([str(source)], tmp_path / "out", Options(eval_fraction=0.5, task_bytes=5))
    assert corpus.eval.num_documents and lengths.counts(corpus) == [0, 2, 3, 0, 0, 1]
    assert lengths.histogram(corpus).splitlines()[2].split() == ["4+", "3", "#" * 40]


def test_no_documents(tmp_path):
    (tmp_path / "a").write_text("text")
    corpus = prepare([str(tmp_path / "a")], tmp_path / "out", Options(eval_fraction=0))
    assert "no documents" in lengths.histogram(replace(corpus, train=corpus.eval))


def test_the_drawing(tmp_path, source):
    path = tmp_path / "lengths.png"
    command = [f"--input={source}", f"--output={tmp_path / 'out'}", f"--histogram={path}"]
    assert main(command) == 0
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG") and struct.unpack(">II", content[16:24]) == (1050, 600)
    path.unlink()
    assert main(command) == 0 and path.exists()  # of a corpus that is there already


def test_a_drawing_that_cannot_be_drawn_is_told_before_the_work(tmp_path, source, capsys, monkeypatch):
    command = [f"--input={source}", f"--output={tmp_path / 'out'}"]
    for path in (tmp_path / "no/a.png", tmp_path):
        assert main([*command, f"--histogram={path}"]) == 2
        assert capsys.readouterr().err.startswith(f"--histogram: {path} is a folder, or its folder does not exist")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([*command, "--histogram=a.png"]) == 2
    assert "'.[plots]'" in capsys.readouterr().err and not (tmp_path / "out").exists()
