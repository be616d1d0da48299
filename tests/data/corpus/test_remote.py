"""Training from object storage: the batches of the same corpus here, whatever the network and the cache go through."""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jaxtrain import storage
from jaxtrain.config.schema import DataConfig
from jaxtrain.data import load_corpus, open_corpus
from jaxtrain.data.corpus.shard_writer import CHUNK
from jaxtrain.data.loading.batches import eval_batches, train_batches
from jaxtrain.errors import UserError
from jaxtrain.main import main
from tests.data import made
from tests.tiny import devices

ROOT = Path(__file__).parents[3]
STEPS = range(12)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return made.corpus(tmp_path_factory.mktemp("made") / "corpus")


@pytest.fixture
def url(network, bucket, corpus) -> str:
    made.send(corpus, f"{bucket}/corpus")
    network.calm()
    return f"{bucket}/corpus"


def config(source, tmp_path, **keys) -> DataConfig:
    return DataConfig(**{"source": str(source), "cache_dir": str(tmp_path / "cache"), "seq_len": 512,
                         "global_batch_size": 6, **keys})


def stream(config: DataConfig, steps=STEPS) -> str:
    """The hash of all that training gets."""
    batches = train_batches(config, load_corpus(config))
    digest = hashlib.sha256()
    for step in steps:
        for name, column in batches[step].items():
            digest.update(f"{step} {name} {column.dtype} {column.shape}".encode() + column.tobytes())
    return digest.hexdigest()


def cached(tmp_path) -> int:
    """Bytes of chunks on the disk, of which some may go meanwhile."""
    size = 0
    for folder, _, names in os.walk(tmp_path / "cache"):
        for name in names if Path(folder).parent.name == "chunks" else ():
            with contextlib.suppress(FileNotFoundError):
                size += os.stat(Path(folder) / name).st_size
    return size


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_batches_are_those_of_the_corpus_here_through_a_bad_network(impatient, network, url, corpus, tmp_path,
                                                                    packing):
    want = stream(config(corpus, tmp_path, packing=packing))
    for seed, cache_bytes, least in ((1, 2 * CHUNK, 10), (2, 2**36, 2)):
        network.calm()
        network.shake(seed, silent={7})
        assert stream(config(url, tmp_path / str(seed), packing=packing, cache_bytes=cache_bytes)) == want
        assert len(network.faults) >= least and "silent" in network.faults


@pytest.mark.slow
def test_a_chunk_is_fetched_once_and_then_read_from_the_disk(network, url, corpus, tmp_path):
    network.calm()
    first = stream(config(url, tmp_path), range(100))
    chunks = [request for request in network.requests if request.endswith(".bin")]
    assert len(chunks) == 2 * (3 + 2)  # of ids and of marks
    assert cached(tmp_path) == 2 * 1_300_000 * 3
    network.calm()
    assert stream(config(url, tmp_path), range(100)) == first == stream(config(corpus, tmp_path), range(100))
    assert [request for request in network.requests if "train-" in request] == []  # except manifest and listing


@pytest.mark.slow
def test_evaluation_reads_every_row_once(url, corpus, tmp_path):
    here, there = (eval_batches(c, load_corpus(c)) for c in (config(corpus, tmp_path), config(url, tmp_path)))
    assert here.num_batches == there.num_batches
    for step in range(here.num_batches):
        for name, column in here[step].items():
            np.testing.assert_array_equal(column, there[step][name])


@pytest.mark.slow
def test_a_cache_smaller_than_the_corpus_stays_so(network, url, corpus, tmp_path):
    small = config(url, tmp_path, cache_bytes=4 * CHUNK)
    batches, want = (train_batches(c, load_corpus(c)) for c in (small, config(corpus, tmp_path)))
    for step in STEPS:
        for name, column in want[step].items():
            np.testing.assert_array_equal(column, batches[step][name])
        assert 0 < cached(tmp_path) <= 4 * CHUNK
    assert len([request for request in network.requests if request.endswith(".bin")]) > 20  # some came again


@pytest.mark.slow
def test_what_the_disk_did_to_a_chunk_is_put_right(network, url, corpus, tmp_path):
    want = stream(config(url, tmp_path))
    chunks = {path: path.read_bytes() for path in (tmp_path / "cache").rglob("chunks/*/*")}
    flipped, short, empty = sorted(chunks)[:3]
    flipped.write_bytes(bytes([flipped.read_bytes()[0] ^ 1]) + flipped.read_bytes()[1:])
    short.write_bytes(short.read_bytes()[:1000])
    empty.write_bytes(b"")
    assert stream(config(url, tmp_path)) == want
    assert {path: path.read_bytes() for path in chunks} == chunks


@pytest.mark.slow
def test_offsets_are_kept_and_checked(network, url, corpus, tmp_path):
    open_corpus(url, tmp_path)
    network.calm()
    open_corpus(url, tmp_path)
    assert [request for request in network.requests if "offsets" in request] == []
    path, = tmp_path.rglob("train-00000.offsets.npy")
    path.write_bytes(path.read_bytes()[:-8] + b"12345678")
    opened = open_corpus(url, tmp_path)
    assert opened.train.shards[0].offsets[-1] == 1_300_000
    network.fault = lambda number, method, path: "flipped" if "offsets" in path else ""
    path.unlink()
    for corrupt in ("fail", "skip_and_count"):
        with pytest.raises(UserError, match=r"offsets\.npy.*checksum"):
            open_corpus(url, tmp_path, corrupt)


READ = """if True:
    import sys
    from jaxtrain import storage
    from tests.data.corpus.test_remote import config, stream
    from pathlib import Path
    storage.PAUSE = 0.001, 0.01
    print(stream(config(sys.argv[1], Path(sys.argv[2]), cache_bytes=int(sys.argv[3]))))
"""


def reading(url, tmp_path, cache_bytes) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", READ, url, str(tmp_path), str(cache_bytes)], cwd=ROOT, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)


@pytest.mark.slow
def test_processes_share_a_cache_and_put_up_with_each_other(network, url, corpus, tmp_path):
    network.shake(5, share=0.1)
    both = [reading(url, tmp_path, 3 * CHUNK) for _ in range(2)]
    want = stream(config(corpus, tmp_path))
    for process in both:
        out, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
        assert out.strip() == want
    assert cached(tmp_path) <= 4 * CHUNK  # one of them may have come between the other's looking and writing


@pytest.mark.slow
def test_a_kill_while_caching_leaves_nothing_wrong(network, url, corpus, tmp_path):
    cut = 0
    for wait in (0.0, 0.05, 0.15):
        process = reading(url, tmp_path, 2**30)
        while process.poll() is None and not cached(tmp_path):
            time.sleep(0.01)
        time.sleep(wait)
        cut += process.poll() is None
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if wait == 0.0:  # as if it had come in the middle of a file
            (tmp_path / "cache/data/chunks/00").mkdir(exist_ok=True)
            (tmp_path / "cache/data/chunks/00/0.1.partial").write_bytes(b"half")
    assert cut
    assert stream(config(url, tmp_path)) == stream(config(corpus, tmp_path))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("cache")
def test_a_run_learns_the_same_from_there(network, url, corpus, tmp_path):
    losses = []
    for name, source in (("here", corpus), ("there", url)):
        network.shake(7, share=0.1)
        flags = [f"--config.{key}" for key in (
            f"data.source={source}", f"data.cache_dir={tmp_path}/cache", "data.seq_len=64", "model.max_seq_len=64",
            "model.num_layers=1", "model.embed_dim=32", "model.vocab_size=257", "data.global_batch_size=8",
            "train.steps=4", "optimizer.warmup_steps=1", "train.eval_every=2",
            "train.eval_batches=2", "train.log_every=1")]
        with devices(1):
            assert main([f"--config={ROOT}/configs/gpt.py:tiny", *flags, f"--workdir={tmp_path}/{name}"]) == 0
        lines = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        losses.append([(line["step"], line.get("loss"), line.get("eval_loss")) for line in lines])
    assert losses[0] == losses[1] and len(losses[0]) >= 4


# ------------------------------------------------------------------------------------------------------ really gone

def one_sentence(caught) -> str:
    assert "\n" not in str(caught.value) and str(caught.value).count(";") == 1
    return str(caught.value)


@pytest.mark.slow
def test_what_is_no_corpus_is_said(bucket, tmp_path):
    for url in (f"{bucket}/none", "s3://no-such-bucket/x"):
        with pytest.raises(UserError) as caught:
            load_corpus(config(url, tmp_path))
        assert f"data.source: {url} has no manifest.json, so it is not a corpus" in one_sentence(caught)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train-00001.bin", "train-00001.trained.bin", "train-00001.offsets.npy"])
def test_an_object_that_is_missing_is_named_when_the_corpus_is_opened(url, tmp_path, name):
    storage._connected("s3").rm_file(f"{url}/{name}")
    with pytest.raises(UserError) as caught:
        load_corpus(config(url, tmp_path))
    assert f"{url}/{name}" in one_sentence(caught) and "is not there" in str(caught.value)


@pytest.mark.slow
def test_an_object_that_is_too_short_is_named_when_the_corpus_is_opened(url, tmp_path):
    storage._connected("s3").pipe_file(f"{url}/train-00001.bin", b"123")
    with pytest.raises(UserError) as caught:
        load_corpus(config(url, tmp_path))
    assert f"{url}/train-00001.bin has 3 bytes instead of 2600000" in one_sentence(caught)


@pytest.mark.slow
def test_an_object_that_vanishes_later_is_named_at_its_step(network, url, tmp_path):
    batches = train_batches(config(url, tmp_path), load_corpus(config(url, tmp_path)))
    batches[0]
    for number in range(2):
        storage._connected("s3").rm_file(f"{url}/train-{number:05}.trained.bin")
    for path in tmp_path.rglob("chunks/*/*"):
        path.unlink()
    with pytest.raises(UserError) as caught:
        for step in range(1, 20):
            batches[step]
    assert "trained.bin: is not there" in one_sentence(caught)


@pytest.mark.slow
def test_a_store_that_stays_away_is_named_at_its_step(network, url, tmp_path):
    batches = train_batches(config(url, tmp_path), load_corpus(config(url, tmp_path)))
    network.fault = lambda *_: "busy"
    with pytest.raises(UserError) as caught:
        for step in range(20):
            batches[step]
    assert "cannot be read: " in one_sentence(caught) and "check that the store is up" in str(caught.value)
    network.calm()
    for _ in range(100):  # those that were under way may fail yet, but nothing of it sticks
        try:
            batches[0]
            break
        except UserError:
            time.sleep(0.05)
    else:
        pytest.fail("it did not recover")


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_costs_only_time(url, corpus, tmp_path):
    there = config(url, tmp_path)
    load_corpus(there)
    (tmp_path / "cache/data/chunks").write_bytes(b"in the way")
    with pytest.warns(UserWarning, match="cannot be written"):
        assert stream(there, range(2)) == stream(config(corpus, tmp_path), range(2))
