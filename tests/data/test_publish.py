"""A corpus to object storage: whole or not there, and sent once however often it is interrupted."""

import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jaxtrain import storage
from jaxtrain.commands.publish import main
from jaxtrain.data import open_corpus
from jaxtrain.data.publish import publish
from jaxtrain.errors import UserError
from tests.data import made
from tests.data.corpus.test_corruption import flip

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return made.corpus(tmp_path_factory.mktemp("made") / "corpus", tokens=100_000)


def puts(network) -> list[str]:
    """Names of what was sent, in order."""
    return [request.rpartition("/")[2] for request in network.requests if request.startswith("PUT")]


def everything(url: str, corpus: Path) -> bool:
    names = {path.name for path in corpus.iterdir()}
    return {found.name for found in storage.find(url)} == names and all(
        storage.read(storage.join(url, name)) == (corpus / name).read_bytes() for name in names)


@pytest.mark.slow
def test_the_manifest_is_last_and_a_second_time_sends_nothing(network, bucket, corpus):
    url = f"{bucket}/deep/folder"
    assert publish(corpus, url) == len(list(corpus.iterdir())) == len(puts(network)) == 16
    assert puts(network)[-1] == "manifest.json" and everything(url, corpus)
    network.calm()
    assert publish(corpus, f"{url}/") == 0 and puts(network) == []


@pytest.mark.slow
def test_a_tokenizer_goes_along(bucket, tmp_path):
    from tokenizers import Tokenizer, models

    from jaxtrain.data.prepare.prepare import Options, prepare

    (tmp_path / "a.txt").write_text("aaa")
    Tokenizer(models.BPE({"a": 0, "</s>": 1}, [])).save(str(tmp_path / "tokenizer.json"))
    made = prepare([str(tmp_path / "a.txt")], tmp_path / "out", Options(tokenizer=str(tmp_path / "tokenizer.json")))
    publish(made.path, f"{bucket}/c")
    (made.path / "tokenizer.json").rename(tmp_path / "away.json")
    with pytest.raises(UserError, match=r"tokenizer\.json cannot be read \(No such file"):
        publish(made.path, f"{bucket}/d")
    opened = open_corpus(f"{bucket}/c", tmp_path / "cache")
    assert opened.tokenizer.fingerprint == made.tokenizer.fingerprint and opened.manifest_hash == made.manifest_hash


@pytest.mark.slow
def test_a_bad_network_changes_nothing(network, bucket, corpus):
    network.shake(1, faults=["error", "busy", "reset"], methods=("PUT", "HEAD"))
    network_get = network.fault
    network.fault = lambda number, method, path: (
        network_get(number, method, path) or ("truncated" if method == "GET" and number % 4 == 0 else ""))
    publish(corpus, f"{bucket}/c")
    assert len(network.faults) > 5
    network.calm()
    assert everything(f"{bucket}/c", corpus)


@pytest.mark.slow
def test_killed_half_way_it_goes_on(network, bucket, corpus, tmp_path):
    url, enough, go_on = f"{bucket}/c", threading.Event(), threading.Event()

    def stuck_after_ten(number, method, path):
        if len(puts(network)) > 10:  # eight may be under way: at least two are there, and the last are not
            enough.set()
            go_on.wait(60)
            return "reset"
        return ""

    network.fault = stuck_after_ten
    process = subprocess.Popen([sys.executable, "-m", "jaxtrain", "publish", str(corpus), f"--output={url}"], cwd=ROOT,
                               stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert enough.wait(60)
    process.kill()
    process.communicate()
    network.fault = lambda *_: ""
    go_on.set()
    there = {found.name for found in storage.find(url)}
    assert 0 < len(there) < 15 and "manifest.json" not in there
    with pytest.raises(UserError, match=r"has no manifest\.json, so it is not a corpus"):
        open_corpus(url, tmp_path)
    network.calm()
    sent = publish(corpus, url)
    assert everything(url, corpus) and 0 < sent <= 16 - len(there) and there.isdisjoint(puts(network))


@pytest.mark.slow
def test_what_is_there_but_wrong_is_sent_again(network, bucket, corpus):
    publish(corpus, f"{bucket}/c")
    right = (corpus / "train-00001.bin").read_bytes()
    storage._connected("s3").pipe_file(f"{bucket}/c/train-00001.bin", right[:-1] + b"x")  # of the right size
    network.calm()
    assert publish(corpus, f"{bucket}/c") == 1 and puts(network) == ["train-00001.bin"]
    assert everything(f"{bucket}/c", corpus)


@pytest.mark.slow
def test_what_does_not_arrive_as_it_was_sent_is_sent_again(bucket, corpus, tmp_path, monkeypatch):
    plain, sent = storage.put, []

    def put(local, url):
        sent.append(url)
        (tmp_path / "wrong").write_bytes(local.read_bytes()[:-1] + b"x")
        plain(tmp_path / "wrong" if local.name == "train-00001.bin" and sent.count(url) < 3 else local, url)

    monkeypatch.setattr(storage, "put", put)
    publish(corpus, f"{bucket}/c")
    assert len(sent) == 16 + 2 and everything(f"{bucket}/c", corpus)
    monkeypatch.setattr(storage, "put", lambda local, url: plain(corpus / "manifest.json", url))
    with pytest.raises(UserError, match=r"arrived corrupt 3 times"):
        publish(corpus, f"{bucket}/d")
    assert not storage.exists(f"{bucket}/d/manifest.json")


@pytest.mark.slow
@pytest.mark.parametrize(("harm", "words"), [
    (lambda folder: flip(folder / "train-00000.bin", 5), "train-00000.bin is corrupt: its sha256 is not"),
    (lambda folder: (folder / "train-00000.bin").unlink(), "train-00000.bin cannot be read"),
    (lambda folder: (folder / "manifest.json").unlink(), "has no manifest.json"),
])
def test_what_is_no_whole_corpus_is_refused(network, bucket, corpus, tmp_path, harm, words):
    harmed = Path(shutil.copytree(corpus, tmp_path / "harmed"))
    harm(harmed)
    with pytest.raises(UserError) as caught:
        publish(harmed, f"{bucket}/c")
    assert words in str(caught.value) and "manifest.json" not in puts(network)


@pytest.mark.slow
def test_another_corpus_is_not_written_over(bucket, corpus, tmp_path):
    publish(corpus, f"{bucket}/c")
    other = made.corpus(tmp_path / "other", shards=1, tokens=1000)
    with pytest.raises(UserError, match="holds another corpus; name another place, or delete it"):
        publish(other, f"{bucket}/c")
    assert everything(f"{bucket}/c", corpus)


@pytest.mark.slow
@pytest.mark.parametrize(("url", "words"), [("elsewhere", "--output: 'elsewhere' is not a URL"),
                                            ("s3://no-such-bucket/c", "is not there")])
def test_a_mistake_is_one_line(network, corpus, capsys, url, words):
    assert main([str(corpus), f"--output={url}"]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_the_command_says_what_it_did(corpus, capsys):
    assert main([str(corpus), "--output=memory://published/c", "--dry_run"]) == 0
    assert re.fullmatch(r"memory://published/c: 16 files of .*B, of which 0 are there\n", capsys.readouterr().out)
    assert main([str(corpus), "--output=memory://published/c"]) == 0
    assert capsys.readouterr().out == "memory://published/c: complete; 16 files were sent\n"


def test_a_folder_behind_a_url_need_not_be_there(tmp_path):
    from jaxtrain.data.prepare.prepare import Options, prepare

    (tmp_path / "a.txt").write_text("some text " * 50)
    made = prepare(str(tmp_path / "a.txt"), tmp_path / "made", Options(eval_fraction=0))
    url = f"file://{tmp_path}/not/there/yet"
    assert publish(made.path, url) > 0
    assert open_corpus(url, tmp_path / "cache").train.read(0, 10).tolist() == made.train.read(0, 10).tolist()
