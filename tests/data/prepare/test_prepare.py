"""A corpus from text of any form: the same to the byte for any number of workers and kills, and checked when opened."""

import gzip
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.commands.prepare import main
from jaxtrain.config.schema import DataConfig
from jaxtrain.data import PackedRows, load_corpus, open_corpus
from jaxtrain.data.formats import inputs
from jaxtrain.data.formats.inputs import find_tasks, read
from jaxtrain.data.prepare.prepare import Options, prepare, prepare_part
from jaxtrain.data.tokenizers.tokenizer import load_tokenizer
from jaxtrain.errors import UserError

ROOT = Path(__file__).parents[3]
DOCUMENTS = [f"document {i}: " + "é word " * (i % 13) for i in range(200)]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Path:
    """A small byte-level BPE, as Hugging Face writes it, which would add a token of its own in front."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "<|endoftext|>"], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    made.train_from_iterator(DOCUMENTS, trainer)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


def jsonl(documents) -> bytes:
    return "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(documents)).encode()


def write(path: Path, documents=DOCUMENTS) -> Path:
    """Write documents in the form that the file's name says."""
    content = jsonl(documents)
    if path.suffix == ".gz":
        content = gzip.compress(content)
    elif path.suffix == ".zst":
        content = pytest.importorskip("zstandard").compress(content)
    elif path.suffix == ".parquet":
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        pq.write_table(pa.table({"text": documents}), path, row_group_size=30)
        return path
    path.write_bytes(content)
    return path


def stream(corpus) -> list[list[int]]:
    return [tokens.read(0, tokens.num_tokens).tolist() if tokens.num_tokens else []
            for tokens in (corpus.train, corpus.eval)]


def files(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
@pytest.mark.parametrize("task_bytes", [1, 700, 2**26])
def test_every_form_gives_every_document_once_and_in_order(tmp_path, name, task_bytes):
    path = write(tmp_path / name)
    tasks = find_tasks([str(path)], task_bytes)
    found = [text.content.decode() for task in tasks for piece in task for text in read(piece, "text")]
    assert found == DOCUMENTS
    if name == "a.jsonl":
        assert len(tasks) == -(-path.stat().st_size // task_bytes)


def test_a_folder_of_text_has_a_document_a_file(tmp_path):
    contents = {"b/x.txt": b"second", "a.txt": b"first", ".hidden": b"no", "empty": b"", "raw": b"\0\xff"}
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    task, = find_tasks([str(tmp_path)])
    assert [piece.name for piece in task] == ["a.txt", "b/x.txt", "raw"]
    found = [text for piece in task for text in read(piece, "text")]
    assert [text.content for text in found[:2]] == [b"first", b"second"] and found[2] == "raw: not UTF-8 text"


def test_splits_hold_all_tokens_and_follow_from_the_content(tmp_path):
    options = Options(eval_fraction=0.2, task_bytes=900)
    corpus = prepare([str(write(tmp_path / "a.jsonl"))], tmp_path / "out", options)
    turned = prepare([str(write(tmp_path / "b.jsonl", DOCUMENTS[::-1]))], tmp_path / "turned", options)
    texts = [bytes(i for i in tokens if i < 256).decode() for tokens in stream(corpus)]
    assert sorted("".join(texts)) == sorted("".join(DOCUMENTS)) and 20 < corpus.eval.num_documents < 60
    assert (corpus.train.num_documents, corpus.train.num_bytes) == (turned.train.num_documents, turned.train.num_bytes)
    assert corpus.train.num_tokens == corpus.train.num_bytes + corpus.train.num_documents
    assert len(corpus.train.shards) > 5 and corpus.manifest_hash != turned.manifest_hash


def test_equal_documents_are_kept_once_wherever_they_are(tmp_path):
    (tmp_path / "in").mkdir()
    write(tmp_path / "in/a.jsonl", [*DOCUMENTS, DOCUMENTS[3], "new"])
    write(tmp_path / "in/b.jsonl", ["new", "", *DOCUMENTS[50:60], "newer"])
    options = Options(eval_fraction=0, task_bytes=700, deduplicate=True)
    one, two = (prepare([str(tmp_path / "in")], tmp_path / str(workers), options, workers) for workers in (1, 2))
    wanted = [*DOCUMENTS, "new", "newer"]
    assert stream(one)[0] == [id for text in wanted for id in [*text.encode(), 256]]
    assert files(one.path) == files(two.path)
    manifest = json.loads((one.path / "manifest.json").read_text())
    assert manifest["left_out"] == {"equal to another": 12, "empty": 1}
    both = prepare([str(tmp_path / "in")], tmp_path / "all", Options(eval_fraction=0, task_bytes=700))
    assert both.train.num_documents == one.train.num_documents + 12


def test_deduplication_notices_input_that_changed_between_two_runs(tmp_path):
    """The input changes without changing its size, in another task than the first document of its kind."""
    first, second = write(tmp_path / "a.jsonl", ["one", "two"]), write(tmp_path / "b.jsonl", ["six", "ten"])
    sources = [str(first), str(second)]
    options = Options(eval_fraction=0, task_bytes=first.stat().st_size, deduplicate=True)
    for stage in ("duplicates", "tokens"):  # all but the manifest
        prepare_part(sources, tmp_path / "out", options, stage=stage)
    write(first, ["one", "ten"])
    corpus = prepare(sources, tmp_path / "out", options)
    assert stream(corpus)[0] == [id for text in ("one", "ten", "six") for id in [*text.encode(), 256]]


def test_licences_of_files_of_tokens_are_not_told(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_text(json.dumps({"text": "x", "licence": "mit"}) + "\n")
    np.save(tmp_path / "in/b.npy", np.array([1, 2, 256, 3, 256], np.uint16))
    corpus = prepare([str(tmp_path / "in")], tmp_path / "out", Options(licence_of="record:licence"))
    manifest = json.loads((corpus.path / "manifest.json").read_text())
    assert manifest["licences"] == {"mit": 1, "not told": 2}


def test_deduplication_notices_input_that_changed_after_the_comparison(tmp_path):
    first, second = write(tmp_path / "a.jsonl", ["one", "two"]), write(tmp_path / "b.jsonl", ["two", "ten"])
    options = Options(eval_fraction=0, task_bytes=first.stat().st_size, deduplicate=True)

    def edit(line):
        if line.startswith("duplicates: 2 of 2"):
            write(second, ["six", "ten"])

    with pytest.raises(UserError, match=r"b.jsonl changed while it was read; run again"):
        prepare([str(first), str(second)], tmp_path / "out", options, say=edit)
    corpus = prepare([str(first), str(second)], tmp_path / "out", options)
    assert stream(corpus)[0] == [id for text in ("one", "two", "six", "ten") for id in [*text.encode(), 256]]


def test_an_edit_of_the_same_size_after_all_was_done_is_noticed(tmp_path):
    source = write(tmp_path / "a.jsonl")
    options = Options(task_bytes=900)
    made = prepare([str(source)], tmp_path / "out", options)
    os.utime(source, (1, 1))
    assert prepare([str(source)], tmp_path / "out", options).manifest_hash == made.manifest_hash  # only touched
    source.write_bytes(source.read_bytes().replace(b"document 150", b"document 15x"))
    with pytest.raises(UserError, match=r"a.jsonl is not what .*out was made from; delete that to make it again"):
        prepare([str(source)], tmp_path / "out", options)


def test_any_number_of_workers_writes_the_same_bytes(tmp_path, tokenizer):
    source = str(write(tmp_path / "a.jsonl"))
    options = Options(tokenizer=str(tokenizer), eval_fraction=0.1, task_bytes=2000)
    one, three = (prepare([source], tmp_path / str(workers), options, workers) for workers in (1, 3))
    assert files(one.path) == files(three.path) and len(files(one.path)) > 30
    whole = prepare([source], tmp_path / "whole", Options(tokenizer=str(tokenizer), eval_fraction=0.1))
    assert stream(whole) == stream(one) and len(whole.train.shards) == 1


@pytest.mark.parametrize("kills", [
    pytest.param(3, marks=pytest.mark.slow), pytest.param(50, marks=pytest.mark.exhaustive)])
def test_killed_at_any_moment_it_goes_on_to_the_same_bytes(tmp_path, kills):
    source, rng = write(tmp_path / "a.jsonl", DOCUMENTS * 20), random.Random(kills)
    command = [sys.executable, "-m", "jaxtrain", "prepare", f"--input={source}", "--task_bytes=3000", "--workers=2",
               "--eval_fraction=0.1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    want = prepare([str(source)], tmp_path / "want", Options(eval_fraction=0.1, task_bytes=3000))
    done, killed, round_ = 0, 0, 0
    while killed < kills:
        output = tmp_path / f"out{round_}"
        process = subprocess.Popen([*command, f"--output={output}"], env=environment, stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL, start_new_session=True)
        time.sleep(rng.uniform(0.1, 1.0))
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            killed += 1
        process.wait()
        if (output / "manifest.json").exists():  # it was too fast for us: another one
            assert files(want.path).items() <= files(output).items()
            subprocess.run([*command, f"--output={output}"], env=environment, check=True, capture_output=True)
            assert files(output) == files(want.path)
            done, round_ = done + 1, round_ + 1
    subprocess.run([*command, f"--output={output}"], env=environment, check=True, capture_output=True)
    assert files(output) == files(want.path)


def test_ids_are_the_tokenizers_and_ends_are_ours(tmp_path, tokenizer):
    documents = ["plain text", "a <|endoftext|> that somebody wrote, and <s>"]
    corpus = prepare([str(write(tmp_path / "a.jsonl", documents))], tmp_path / "out",
                     Options(tokenizer=str(tokenizer), eval_fraction=0))
    ids = corpus.train.read(0, corpus.train.num_tokens)
    assert (ids == 1).sum() == 2 and ids[-1] == 1 and 0 not in ids  # one end each, no beginning that the file asks for
    parts = np.split(ids, np.flatnonzero(ids == 1) + 1)[:2]
    assert [corpus.tokenizer.decode(part) for part in parts] == documents
    assert corpus.tokenizer.vocab_size == 300


def test_a_run_reads_the_corpus_with_its_tokenizer(tmp_path, tokenizer):
    made = prepare([str(write(tmp_path / "a.jsonl"))], tmp_path / "out",
                   Options(tokenizer=str(tokenizer), eval_fraction=0.2, task_bytes=900))
    config = DataConfig(source=str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))
    corpus = load_corpus(config)
    assert corpus.manifest_hash == made.manifest_hash and corpus.tokenizer.vocab_size == 300
    rows, whole = PackedRows(corpus.train, 32), made.train.read(0, made.train.num_tokens)
    for i in range(len(rows)):
        np.testing.assert_array_equal(rows[i]["tokens"], whole[32 * i: 32 * i + 32])


# --------------------------------------------------------------------------------------------------- what is refused

def test_an_unfinished_corpus_is_refused_and_a_finished_one_is_kept(tmp_path):
    source, output, options = str(write(tmp_path / "a.jsonl")), tmp_path / "out", Options(task_bytes=900)
    prepare_part([source], output, options)  # all but the manifest
    with pytest.raises(UserError, match="is not finished; run the same prepare command again"):
        load_corpus(DataConfig(source=str(output)))
    prepare([source], output, options)
    before = files(output)
    prepare([source], output, options, say=lambda line: pytest.fail(f"done again: {line}"))
    assert files(output) == before
    with pytest.raises(UserError, match="holds another corpus"):
        prepare([source], output, Options(task_bytes=1000))


@pytest.mark.parametrize("end", [".bin", ".offsets.npy"])
def test_a_flipped_byte_is_found_and_the_file_named(tmp_path, end):
    corpus = prepare([str(write(tmp_path / "a.jsonl"))], tmp_path / "out", Options(task_bytes=900))
    config = DataConfig(source=str(corpus.path), cache_dir=str(tmp_path / "cache"))
    load_corpus(config)
    path = corpus.path / f"train-00003{end}"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"{path.name} is corrupt"):
        load_corpus(config)


def test_a_tokenizer_that_changed_is_found(tmp_path, tokenizer, monkeypatch):
    corpus = prepare([str(write(tmp_path / "a.jsonl"))], tmp_path / "out", Options(tokenizer=str(tokenizer)))
    from jaxtrain.data.tokenizers.tokenizer import JsonTokenizer

    with monkeypatch.context() as silent:  # as a library that begins to add a token
        encode = JsonTokenizer.encode_many
        silent.setattr(JsonTokenizer, "encode_many",
                       lambda self, texts: [np.append(0, ids) for ids in encode(self, texts)])
        with pytest.raises(UserError, match="gives other ids than when it was prepared"):
            open_corpus(corpus.path)
    other = json.loads((corpus.path / "tokenizer.json").read_text())
    other["model"]["merges"].pop()
    (corpus.path / "tokenizer.json").write_text(json.dumps(other))
    with pytest.raises(UserError, match="has a different tokenizer"):
        open_corpus(corpus.path)


@pytest.mark.parametrize(("name", "content", "flags", "words"), [
    ("a.jsonl", b'{"text": "x"}\n{"txt": "y"}\n', [], "a.jsonl, line 2 has no field 'text'"),
    ("a.jsonl", b'{"text": "x"}\nnot json\n', [], "a.jsonl, line 2 is not a JSON object"),
    ("a.jsonl", b'{"text": 3}\n', [], "'text' is not text"),
    ("a.jsonl.gz", gzip.compress(b'{"text": "xxxxxxx"}\n' * 99)[:-9], [], "a.jsonl.gz cannot be read"),
    ("a.txt", b"x", ["--tokenizer=nonsense"], "there is no tokenizer 'nonsense'"),
    ("a.txt", b"x", ["--tokenizer=/no/tokenizer.json"], "/no/tokenizer.json cannot be read"),
    ("a.txt", b"x", ["--tokenizer=a.txt"], "a.txt is not a tokenizer.json"),
    ("a.txt", b"x", ["--eval_fraction=1"], "--eval_fraction: 1.0 is not between"),
    ("a.txt", b"x", ["--workers=-1"], "--workers: -1"), ("a.txt", b"x", ["--workers=0"], "--workers: 0"),
    ("a.txt", b"x", ["--input=none"], "none does not exist; name existing files or folders"),
    ("a.txt", b"x", ["--output=a.txt"], "cannot be written"),
    ("a.txt", b"x", ["--output=."], "is not empty"),
    ("a.txt", b"x", ["--near_threshold=0.7"], "--near_threshold: it has no effect without --deduplicate=near"),
    ("a.txt", b"x", ["--deduplicate", "--near_shingle=4"], "--near_shingle: it has no effect"),
    ("a.txt", b"x", ["--train_on=last"], "--train_on: it is for conversations, and the input is text"),
    ("a.jsonl", b'{"text": "x"}', ["--format=text", "--chat_template=plain"], "--chat_template: it is for conv"),
    ("a.txt", b"x", ["--token_dtype=uint16"], "--token_dtype: the input has no files of tokens"),
    ("a.txt", b"x", ["--outputs=b"], "--outputs=b: there is no such flag; did you mean '--output'?"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_a_mistake_is_one_line(tmp_path, monkeypatch, capsys, name, content, flags, words):
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(content)
    assert main([f"--input={name}", "--output=out", *flags]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_an_end_that_the_vocabulary_lacks_is_refused(tokenizer):
    with pytest.raises(UserError, match="has no token '</s>'; name one of its tokens with --eod"):
        load_tokenizer(str(tokenizer), "</s>")


def test_a_flag_given_twice_counts_twice(tmp_path, capsys):
    first, second = write(tmp_path / "a.jsonl", ["one"]), write(tmp_path / "b.jsonl", ["two"])
    assert main([f"--input={first}", f"--input={second}", f"--output={tmp_path / 'out'}", "--workers=1"]) == 0
    assert open_corpus(tmp_path / "out").train.num_documents == 2
    said = capsys.readouterr().out
    assert "runs will not evaluate" in said and "total: 2 documents, " in said
    assert main([f"--input={first}", str(second), f"--output={tmp_path / 'two'}"]) == 2
    assert "several values follow a flag without =" in capsys.readouterr().err
    assert main([f"--input={first}", f"--output={tmp_path / 'two'}", "--dry-runn"]) == 2
    assert "did you mean '--dry_run'" in capsys.readouterr().err
    assert main([f"--input={first}", f"--output={tmp_path / 'two'}", "--nonsense"]) == 2
    assert capsys.readouterr().err == "--nonsense: there is no such flag; see jaxtrain prepare --help\n"


def test_a_corpus_that_was_not_copied_whole_is_no_text(tmp_path):
    corpus = prepare(str(write(tmp_path / "a.jsonl")), tmp_path / "out", Options())
    (corpus.path / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"has no manifest.json, so it is not a corpus; copy the complete corpus"):
        load_corpus(DataConfig(source=str(corpus.path), cache_dir=str(tmp_path)))


@pytest.mark.parametrize(("name", "content"), [
    ("a.png", b"\x89PNG\r\n\x1a\n\0\1"), ("a.txt", "text of another encoding".encode("utf-16"))])
def test_input_without_a_usable_document_is_refused(tmp_path, name, content, capsys):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(content)
    assert main([f"--input={tmp_path}/in", f"--output={tmp_path}/out"]) == 2
    assert "--input: none of its documents can be used (1 were dropped: not UTF-8 text); give text in UTF-8" in (
        capsys.readouterr().err)
    assert not (tmp_path / "out/manifest.json").exists()


def test_one_file_is_cut_so_that_many_workers_are_busy(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "x" * 1000}) + "\n")
    assert inputs.task_bytes_of([str(tmp_path / "a.jsonl")]) == 2**20
    with open(tmp_path / "a.jsonl", "ab") as file:
        file.truncate(50 * 2**20)  # a hole: only its size counts here
    assert len(inputs.find_tasks([str(tmp_path / "a.jsonl")], inputs.task_bytes_of(str(tmp_path / "a.jsonl")))) == 32
    with open(tmp_path / "a.jsonl", "ab") as file:
        file.truncate(2**40)
    assert inputs.task_bytes_of([str(tmp_path)]) == 2**26


@pytest.mark.parametrize(("part", "said"), [
    ("3/2", "'3/2' is not one of 2 parts, which are numbered from 0; write 0/2 to 1/2"),
    ("x", "'x' is not one of 16 parts, which are numbered from 0; write 0/16 to 15/16")])
def test_a_part_that_is_none(tmp_path, part, said, capsys):
    (tmp_path / "a.txt").write_text("text")
    assert main([f"--input={tmp_path}/a.txt", f"--output={tmp_path}/out", f"--part={part}"]) == 2
    assert capsys.readouterr().err == f"--part: {said}\n"
