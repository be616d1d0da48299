"""Files behind URLs, against a server that speaks S3: what passes is got over, what lasts is said at once."""

import functools
import gc
import gzip
import http.server
import json
import struct
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from jaxtrain import storage
from jaxtrain.checkpoint.mirror import Mirror
from jaxtrain.commands.prepare import main
from jaxtrain.data import open_corpus
from jaxtrain.data.formats.inputs import find_tasks
from jaxtrain.data.prepare.prepare import Options, prepare, prepare_part
from jaxtrain.errors import UserError

ROOT = Path(__file__).parents[2]
CONTENT = bytes(range(256)) * 400
FAULTS = ["error", "busy", "reset", "truncated", "short", "silent"]


@pytest.fixture
def url(bucket, tmp_path) -> str:
    (tmp_path / "file").write_bytes(CONTENT)
    storage.put(tmp_path / "file", f"{bucket}/folder/file")
    return f"{bucket}/folder/file"


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_what_passes_is_tried_again(network, url, fault, request):
    if fault == "silent":
        request.getfixturevalue("impatient")
    network.calm()
    network.fault = lambda number, *_: fault if number < 2 else ""
    assert storage.read(url, 1000, 99_000) == CONTENT[1000:99_000]
    assert network.faults == [fault, fault] and len(network.requests) == 3
    network.calm()
    assert storage.read(url) == CONTENT and [request.split()[0] for request in network.requests] == ["HEAD", "GET"]


@pytest.mark.slow
def test_a_file_is_read_to_its_end_through_a_bad_network(network, url, monkeypatch):
    monkeypatch.setattr(storage, "BLOCK", 10_000)
    network.calm()
    network.shake(1, share=0.5, methods=("GET", "HEAD"))
    with storage.open(url) as file:
        assert b"".join(iter(lambda: file.read(7000), b"")) == CONTENT
        file.seek(-100, 2)
        assert file.read() == CONTENT[-100:] and file.tell() == len(CONTENT)
    assert len(network.faults) > 5
    with storage.fetched(url) as file:
        assert file.read() == CONTENT


@pytest.mark.slow
def test_what_was_sent_twice_is_there_once(network, url, bucket, tmp_path):
    network.calm()
    network.fault = lambda number, *_: ["busy", "reset", "error", ""][min(number, 3)]
    storage.put(tmp_path / "file", f"{bucket}/again")
    assert [request.split()[0] for request in network.requests] == ["PUT"] * 4
    assert storage.read(f"{bucket}/again") == CONTENT


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fault", "words"), [
    ("folder/none", "", "is not there"),
    ("folder/file", "forbidden", "cannot be read (PermissionError"),
])
def test_what_lasts_is_said_at_once(network, url, bucket, name, fault, words):
    network.calm()
    network.fault = lambda *_: fault
    with pytest.raises(UserError) as caught:
        storage.read(f"{bucket}/{name}", 0, 10)
    assert str(caught.value).startswith(f"{bucket}/{name}: {words}") and str(caught.value).count(";") == 1
    assert isinstance(caught.value, storage.Gone) == (not fault)
    assert len(network.requests) == 1


@pytest.mark.slow
def test_threads_do_not_wait_for_each_other(network, url):
    network.calm()
    together = threading.Barrier(16, timeout=30)
    network.fault = lambda *_: together.wait() and ""  # an answer, once all are here
    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(lambda _: storage.read(url, 0, 10), range(16))) == {CONTENT[:10]}
    assert len(network.requests) == 16  # none was given up for a second try


@pytest.mark.slow
def test_a_bucket_that_is_not_there_is_named(network):
    with pytest.raises(storage.Gone, match=r"s3://no-such-bucket/x: is not there"):
        storage.find("s3://no-such-bucket/x")


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "words"), [("busy", "injected"), ("truncated", ""), ("short", "instead of 98000"),
                                              ("reset", "")])
def test_a_store_that_stays_away_is_named_with_the_last_reason(network, url, fault, words):
    network.calm()
    network.fault = lambda *_: fault
    with pytest.raises(UserError) as caught:
        storage.read(url, 1000, 99_000)
    assert str(caught.value).startswith(f"{url}: cannot be read: ") and words in str(caught.value)
    # A connection that was kept from before and is lost is replaced once by the HTTP client itself.
    assert len(network.requests) in (storage.TRIES, 2 * storage.TRIES)


def test_pauses_grow_and_are_never_twice_the_same(monkeypatch):
    pauses = []
    monkeypatch.setattr(storage.time, "sleep", pauses.append)
    with pytest.raises(UserError):
        storage._tried("s3://b/x", lambda: 1 / 0)
    longest = [min(20.0, 0.2 * 2**i) for i in range(storage.TRIES - 1)]
    assert all(high / 2 <= pause <= high for pause, high in zip(pauses, longest, strict=True))
    assert len({pause / high for pause, high in zip(pauses, longest, strict=True)}) == len(pauses)


@pytest.mark.slow
def test_credentials_that_are_not_there_are_not_waited_for(network, url, monkeypatch, request):
    import s3fs

    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(key)
    def forget():
        s3fs.S3FileSystem.clear_instance_cache()
        storage._connected.cache_clear()

    forget()
    request.addfinalizer(forget)
    network.calm()
    with pytest.raises(UserError, match=r"NoCredentialsError.*; check the credentials"):
        storage.read(url, 0, 10)
    assert not network.requests


@pytest.mark.slow
def test_a_listing_names_what_prepare_would_read(bucket, tmp_path):
    (tmp_path / "x").write_bytes(b"12345")
    for name in ("b/x.txt", "a.txt", ".hidden", "c/.d/e"):
        storage.put(tmp_path / "x", f"{bucket}/in/{name}")
    storage.put(tmp_path / "x", f"{bucket}/in2/other")
    found = [("a.txt", f"{bucket}/in/a.txt", 5), ("b/x.txt", f"{bucket}/in/b/x.txt", 5)]
    for url in (f"{bucket}/in", f"{bucket}/in/"):
        assert [(file.name, file.path, file.size) for file in storage.find(url)] == found
    assert [(file.name, file.path) for file in storage.find(f"{bucket}/in/a.txt")] == [("a.txt", f"{bucket}/in/a.txt")]
    assert storage.exists(f"{bucket}/in/a.txt") and not storage.exists(f"{bucket}/in/b.txt")
    assert storage.find(f"{bucket}/nothing") == []


@pytest.mark.slow
def test_another_version_has_another_stamp(bucket, tmp_path):
    stamps = set()
    for content in (b"12345", b"12354"):
        (tmp_path / "x").write_bytes(content)
        storage.put(tmp_path / "x", f"{bucket}/x")
        stamps |= {storage.stamp(f"{bucket}/x"), storage.stamp(f"{bucket}/x")}
    assert len(stamps) == 2 and all(isinstance(stamp, str) for stamp in stamps)


def test_any_protocol_of_fsspec_will_do(tmp_path):
    (tmp_path / "x").write_bytes(CONTENT)
    storage.put(tmp_path / "x", "memory://storage/in/x")
    assert [(file.name, file.size) for file in storage.find("memory://storage/in")] == [("x", len(CONTENT))]
    assert storage.read(storage.find("memory://storage/in")[0].path, 5, 9) == CONTENT[5:9]
    with pytest.raises(storage.Gone):
        storage.size("memory://storage/in/y")
    assert storage.read(f"file://{tmp_path}/x", 5, 9) == CONTENT[5:9]


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch):
    import fsspec

    monkeypatch.setattr(fsspec, "filesystem", lambda *_, **__: (_ for _ in ()).throw(ImportError("Install gcsfs")))
    storage._connected.cache_clear()
    with pytest.raises(UserError, match=r"gs://b/x: gs:// needs a package .*; run pip install -e '\.\[gcs\]'"):
        storage.read("gs://b/x", 0, 1)
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"nonsense:// cannot be used"):
        storage.read("nonsense://b/x", 0, 1)


def test_paths_do_not_touch_fsspec(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"12345")
    code = """if True:
        import sys
        from jaxtrain import storage
        sys.modules["fsspec"] = None  # an import would raise
        path = sys.argv[1]
        assert storage.read(path, 1, 3) == b"23" and storage.open(path).read() == storage.fetched(path).read()
        assert storage.size(path) == 5 and storage.exists(path) and isinstance(storage.stamp(path), int)
        from jaxtrain.data.formats.inputs import find_tasks, read
        assert [text.content for text in read(find_tasks([path])[0][0], "text")] == [b"12345"]
    """
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "x.txt")], check=True, cwd=ROOT)


# ------------------------------------------------------------------------------------------------ prepare from there

DOCUMENTS = [f"document {i}: " + "é word " * (i % 13) for i in range(120)]


def every_kind(folder: Path) -> Path:
    """A folder with a file of each."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import zstandard

    lines = "".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS).encode()
    contents = {"text/a.txt": b"first", "text/b/c.txt": "é second".encode(), "raw": b"\0\xff", "a.jsonl": lines,
                "b.jsonl.gz": gzip.compress(lines), "c.jsonl.zst": zstandard.compress(lines)}
    ids = np.array([*b"one", *b"two!"], "<u2")
    contents["m.bin"] = ids.tobytes()
    contents["m.idx"] = (b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 2, 3) + np.array([3, 4], "<i4").tobytes()
                         + np.array([0, 6, 0, 1, 2], "<i8").tobytes())
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    pq.write_table(pa.table({"text": DOCUMENTS}), folder / "d.parquet", row_group_size=50)
    return folder


def send(folder: Path, url: str) -> str:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            storage.put(path, storage.join(url, path.relative_to(folder).as_posix()))
    return url


@pytest.mark.slow
def test_every_kind_of_input_makes_the_same_corpus_from_there(network, bucket, tmp_path, monkeypatch):
    source = every_kind(tmp_path / "in")
    url = send(source, f"{bucket}/in")
    monkeypatch.setattr(storage, "BLOCK", 2000)
    options = Options(eval_fraction=0.2, task_bytes=3000, deduplicate=True)
    here = prepare([str(source)], tmp_path / "here", options)
    network.calm()
    network.shake(3, share=0.2, methods=("GET", "HEAD"))
    there = prepare([url], tmp_path / "there", options)
    assert len(network.faults) > 20
    assert here.manifest_hash == there.manifest_hash and here.train.num_documents > 80
    files = [sorted((path.name, path.read_bytes()) for path in folder.iterdir() if path.name != "manifest.json")
             for folder in (tmp_path / "here", tmp_path / "there")]
    told = [json.loads((folder / "manifest.json").read_bytes()) for folder in (here.path, there.path)]
    assert told[0].pop("stamps") != told[1].pop("stamps") and told[0] == told[1]
    assert files[0] == files[1] and len(files[0]) > 10


@pytest.mark.slow
def test_several_processes_read_from_there(bucket, tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    storage.put(tmp_path / "a.jsonl", f"{bucket}/a.jsonl")
    options = Options(eval_fraction=0.2, task_bytes=5000)
    here, there = prepare([str(tmp_path / "a.jsonl")], tmp_path / "here", options), tmp_path / "there"
    assert prepare([f"{bucket}/a.jsonl"], there, options, workers=2).manifest_hash == here.manifest_hash


@pytest.mark.slow
def test_input_that_changes_between_two_runs_is_read_again(bucket, tmp_path):
    def write(text):
        (tmp_path / "a.txt").write_text(text)
        storage.put(tmp_path / "a.txt", f"{bucket}/a.txt")

    write("one")
    prepare_part([f"{bucket}/a.txt"], tmp_path / "out", Options(eval_fraction=0))  # all but the manifest
    write("two")
    corpus = prepare([f"{bucket}/a.txt"], tmp_path / "out", Options(eval_fraction=0))
    assert bytes(corpus.train.read(0, 3).astype(np.uint8)) == b"two"


@pytest.mark.slow
def test_input_that_changes_while_it_is_read_is_noticed(bucket, tmp_path, monkeypatch):
    from jaxtrain.data.formats import inputs

    (tmp_path / "a.txt").write_text("one")
    storage.put(tmp_path / "a.txt", f"{bucket}/a.txt")
    plain = inputs.read

    def read(*arguments):
        yield from plain(*arguments)
        (tmp_path / "a.txt").write_text("two")
        storage.put(tmp_path / "a.txt", f"{bucket}/a.txt")

    monkeypatch.setattr(inputs, "read", read)
    with pytest.raises(UserError, match="changed while it was read; run again"):
        prepare([f"{bucket}/a.txt"], tmp_path / "out", Options(eval_fraction=0))
    assert not (tmp_path / "out/manifest.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("source", "words"), [
    ("{bucket}/none", "{bucket}/none has no files"),
    ("s3://no-such-bucket/in", "s3://no-such-bucket/in: is not there"),
    ("nonsense://b/in", "nonsense:// cannot be used"),
])
def test_a_mistake_is_one_line(bucket, tmp_path, capsys, source, words):
    assert main([f"--input={source.format(bucket=bucket)}", f"--output={tmp_path}/out"]) == 2
    error = capsys.readouterr().err
    assert words.format(bucket=bucket) in error and error.count("\n") == 1


def test_a_protocol_that_needs_more_than_a_url_is_one_line(capfd):
    for url in ("ftp://example.org/x", "webhdfs://x/y", "github://a/b", "zip://x", "reference://x"):
        for ask in (storage.find, storage.size, storage.read, storage.names, storage.exists):
            with pytest.raises(UserError, match=rf"{url}.*:// cannot be used .*; use s3:// or gs://"):
                ask(url)
    gc.collect()
    assert capfd.readouterr().err == ""  # such as an exception ignored in the file system's __del__


@pytest.fixture
def plain_http(tmp_path, monkeypatch):
    """A server of files as simple as they come: it tells no sizes."""
    class Handler(http.server.SimpleHTTPRequestHandler):
        def send_header(self, keyword, value):
            if keyword.lower() != "content-length":
                super().send_header(keyword, value)

        def log_message(self, *_):
            pass

    monkeypatch.setattr(storage, "PAUSE", (0.0, 0.0))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=tmp_path)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_plain_http_source_is_one_line(plain_http, tmp_path):
    pytest.importorskip("aiohttp")
    (tmp_path / "manifest.json").write_text("{}")
    (tmp_path / "a.jsonl").write_text("{}")
    for ask in (lambda: open_corpus(plain_http, tmp_path), lambda: find_tasks(f"{plain_http}/a.jsonl"),
                lambda: storage.size(f"{plain_http}/a.jsonl"), lambda: Mirror(tmp_path, plain_http).fetch()):
        with pytest.raises(UserError):
            ask()


def test_small_files_are_bounded(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    for place in (tmp_path / "file", f"file://{tmp_path}/file"):
        assert storage.read_small(place, 5) == b"12345"
        with pytest.raises(OSError, match="Larger than 4 bytes"):
            storage.read_small(place, 4)
