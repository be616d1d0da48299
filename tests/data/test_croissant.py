"""The origin of a corpus is in its manifest, and its datasheet is one that others can read."""

import base64
import hashlib
import json

import pyarrow as pa
import pytest
from pyarrow import parquet

from jaxtrain.commands.croissant import main
from jaxtrain.data import open_corpus
from jaxtrain.data.corpus.open import BESIDE
from jaxtrain.data.prepare.prepare import Options, prepare
from jaxtrain.files import atomic_files

TOLD = ("description=Letters of a family", "data_biases=one family only", "creator=The family",
        "date_published=2026-01-31", "cite_as=Letters (2026)", "url=https://example.org/letters")


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.txt").write_text("from jo@doe.org")
    (folder / "b.jsonl").write_text("".join(json.dumps({"text": f"letter {i}", "rights": "CC0-1.0" if i % 2 else None})
                                            + "\n" for i in range(9)))
    return folder


def test_inputs_are_named_with_their_hashes_by_piece_where_they_were_cut(tmp_path, source):
    parquet.write_table(pa.table({"text": ["x", "y", "z"]}), source / "c.parquet", row_group_size=1)
    corpus = prepare([str(source)], tmp_path / "out", Options(task_bytes=200, licence_of="record:rights"))
    manifest = json.loads((corpus.path / "manifest.json").read_text())
    pieces = [piece for task in manifest["inputs"] for piece in task]
    for piece in pieces:
        content = (source / piece["name"]).read_bytes()
        if piece["kind"] == "parquet":
            assert ("sha256" in piece) == (piece["start"] == 0)
        else:
            content = content[piece["start"]: piece["stop"]]
        assert piece.get("sha256", hashlib.sha256(content).hexdigest()) == hashlib.sha256(content).hexdigest()
    assert [piece["name"] for piece in pieces].count("b.jsonl") > 1
    assert manifest["licences"] == {"not told": 9, "CC0-1.0": 4}  # of a file of text and of Parquet, too
    assert set(manifest["code"]) == {"git_commit", "versions"}


def test_the_commit_is_told_but_does_not_change_what_the_data_is(tmp_path, source, monkeypatch):
    hashes = []
    for commit in ("one", "two"):
        monkeypatch.setattr("jaxtrain.data.prepare.provenance.git_commit", lambda commit=commit: commit)
        corpus = prepare([str(source)], tmp_path / commit, Options())
        assert json.loads((corpus.path / "manifest.json").read_text())["code"]["git_commit"] == commit
        hashes.append(open_corpus(corpus.path).manifest_hash)
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize("change", [{"options": None}, {"options": {"describe": "x=1"}}, {"licences": {"a": "many"}},
                                    {"steps": [None]}, {"steps": [{"step": "a"}]}, {"inputs": [[{"name": 3}]]},
                                    {"inputs": None}])
def test_a_manifest_of_another_form_is_one_line(tmp_path, source, change, capsys):
    pytest.importorskip("mlcroissant", reason="mlcroissant comes with the extra .[test-all]")
    corpus = prepare([str(source)], tmp_path / "out", Options(format="text"))
    path = corpus.path / "manifest.json"
    manifest = json.loads(path.read_text()) | change
    sealed = atomic_files.digest({key: value for key, value in manifest.items() if key not in BESIDE})
    path.write_text(json.dumps(manifest | {"sha256": sealed}))
    assert main([str(corpus.path)]) == 2
    error = capsys.readouterr().err
    assert "CORPUS: " in error and "manifest.json cannot be read (" in error and error.count("\n") == 1


@pytest.mark.slow
def test_the_datasheet_validates_and_tells_what_is_known(tmp_path, source, caplog):
    mlcroissant = pytest.importorskip("mlcroissant", reason="mlcroissant comes with the extra .[test-all]")
    options = Options(eval_fraction=0, steps=("pii",), deduplicate=True, licence_of="CC-BY-4.0", describe=TOLD)
    corpus = prepare([str(source)], tmp_path / "out", options)
    assert main([str(corpus.path), "--describe", "data_limitations=few letters"]) == 0
    dataset = mlcroissant.Dataset(str(corpus.path / "croissant.json"))  # raises when it does not validate
    assert not dataset.metadata.ctx.issues.errors and not dataset.metadata.ctx.issues.warnings
    sheet = dataset.metadata
    assert (sheet.name, sheet.description, sheet.license) == ("out", "Letters of a family", ["CC-BY-4.0"])
    assert (sheet.data_biases, sheet.data_limitations) == (["one family only"], ["few letters"])
    assert sheet.data_preprocessing_protocol[:2] == [
        "pii: of 10 documents dropped none; changed 1.",
        "deduplicate=exact: of 10 documents dropped none; changed 0."]
    assert "2 files" in sheet.data_collection_raw_data
    files = {file.content_url: file.sha256 for file in sheet.distribution}
    assert {"manifest.json", "train-00000.bin"} <= set(files)
    for name, sha256 in files.items():
        assert hashlib.sha256((corpus.path / name).read_bytes()).hexdigest() == sha256


@pytest.mark.slow
def test_a_mistake_is_one_line(tmp_path, source, capsys):
    corpus = prepare([str(source)], tmp_path / "out", Options())
    for words, told in (([str(tmp_path / "none")], "has no manifest.json"),
                        ([str(corpus.path), "--output=/no/x"], "--output: /no/x cannot be written"),
                        ([str(corpus.path), "--describe", "titel=x"], "no field 'titel'")):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert told in error and error.count("\n") == 1


@pytest.mark.slow
def test_any_tokenizers_file_is_in_it_and_a_missing_file_is_named(tmp_path, source, capsys):
    (tmp_path / "own.tiktoken").write_bytes(
        b"".join(base64.b64encode(bytes([i])) + b" %d\n" % i for i in range(256)))
    options = Options(f"{tmp_path / 'own.tiktoken'}:cl100k_base", eval_fraction=0, licence_of="record:rights")
    corpus = prepare([str(source)], tmp_path / "out", options)
    assert main([str(corpus.path)]) == 0
    sheet = json.loads((corpus.path / "croissant.json").read_text())
    assert sheet["license"] in ("CC0-1.0", ["CC0-1.0"])  # not "not told"
    file = json.loads((corpus.path / "manifest.json").read_text())["tokenizer"]["file"]
    assert file.endswith(".tiktoken") and file in [entry["name"] for entry in sheet["distribution"]]
    for name in (file, "train-00000.bin"):
        (corpus.path / name).rename(tmp_path / "away")
        capsys.readouterr()
        assert main([str(corpus.path)]) == 2
        error = capsys.readouterr().err
        assert f"{name} cannot be read (No such file" in error and error.count("\n") == 1
        (tmp_path / "away").rename(corpus.path / name)
