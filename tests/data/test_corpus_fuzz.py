"""Damaged and forged corpora: 200 of them are opened and read in one process, none of which can harm it.

Each is the copy of a prepared corpus with one to three changes: to bytes, to the manifest (its own hash made to fit or
not), or to what lies in the place of a file. Reading it gives the tokens of the undamaged corpus, or another corpus by
its hash, or one line that says what is wrong.
"""

import contextlib
import json
import os
import random
import shutil
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.config.schema import DataConfig
from jaxtrain.data import load_corpus
from jaxtrain.data.corpus.open import BESIDE
from jaxtrain.data.corpus.origins import origins
from jaxtrain.data.loading.batch_spec import BatchSpec
from jaxtrain.data.loading.batches import eval_batches, packing, rows, train_batches
from jaxtrain.data.prepare.prepare import Options, prepare
from jaxtrain.errors import UserError
from jaxtrain.files import atomic_files, bounded_files
from tests.fuzzing import with_memory
from tests.odd_files import device, fifo, folder, sparse, unix_socket

MEMORY = 2**27  # bytes that one of them may take
FOREIGN: set[str] = set()  # links that count as made by somebody else


# -------------------------------------------------------------------------------------------------- undamaged corpora

@pytest.fixture(scope="module")
def corpora(tmp_path_factory) -> list[Path]:
    """Text by characters, and conversations with loss masks, each in several shards."""
    made = tmp_path_factory.mktemp("made")
    (made / "text.jsonl").write_text("".join(json.dumps({"text": f"document {n}: " + "word " * (n % 17)}) + "\n"
                                             for n in range(150)))
    (made / "talk.jsonl").write_text("".join(json.dumps({"messages": [
        {"role": "user", "content": f"How much is {n}?"},
        {"role": "assistant", "content": f"It is {n}. " * (n % 5 + 1)},
    ]}) + "\n" for n in range(100)))
    options = {"text": Options(tokenizer="characters", eval_fraction=0.2, task_bytes=4000),
               "talk": Options(chat_template="plain", eval_fraction=0.2, task_bytes=6000)}
    return [prepare([str(made / f"{name}.jsonl")], made / name, some).path for name, some in options.items()]


# ------------------------------------------------------------------------------------------------------------ changes

def flip(rng, path):
    content = bytearray(bounded_files.read(path))
    for _ in range(rng.randint(1, 8)):
        if content:
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def cut(rng, path):
    os.truncate(path, rng.randrange(len(bounded_files.read(path)) + 1))


def extend(rng, path):
    with bounded_files.appended(path) as file:
        file.write(rng.choice([b"\0", b"{}", rng.randbytes(99), bytes(5000)]))


def garbage(rng, path):
    path.unlink()
    path.write_bytes(rng.choice([b"", rng.randbytes(200), b"[" * 100_000, b"null", b'{"a":' * 50_000, bytes(99)]))


def swap(rng, path):
    other = rng.choice(sorted(path.parent.iterdir()))
    content, theirs = bounded_files.read(path), bounded_files.read(other)
    path.write_bytes(theirs)
    other.write_bytes(content)


def gone(rng, path):
    path.unlink()


def odd(rng, path):
    path.unlink()
    rng.choice([fifo, device, folder, sparse, unix_socket])(path)


def link_loop(rng, path):
    path.unlink()
    path.symlink_to(path.name)


def link_out(rng, path):
    """A link of somebody else to what lies outside: the file itself, or another."""
    outside = path.parent.parent / "outside"
    target = rng.choice(["secret", path.name])
    if target != "secret":
        (outside / target).write_bytes(bounded_files.read(path))
    path.unlink()
    path.symlink_to(rng.choice([outside / target, f"../outside/{target}"]))
    FOREIGN.add(str(path))


def header(rng, path):
    """An array of another shape, order or type than its content."""
    content = bounded_files.read(path)
    for old, new in rng.choice([[(b"(", b"(9999999")], [(b"'<i8'", b"'|O'")], [(b"<i8", b"<f8")], [(b"False", b"True")],
                                [(b"NUMPY", b"NUMP!")], [(b"'shape'", b"'shapes'")], [(b"{", b"{" * 200)]]):
        content = content.replace(old, new, 1)
    path.write_bytes(content)


def numbers(rng, path):
    """An array of other numbers, or of other objects."""
    count = rng.choice([0, 1, 3, 50])
    array = rng.choice([np.full(count, 2**62), np.full(count, -1), np.arange(count)[::-1], np.zeros((count, 2)),
                        np.array([{}] * count), np.arange(count, dtype="<i8")])
    path.unlink()
    with open(path, "wb") as file:
        np.save(file, array, allow_pickle=True)


FILE = [flip, flip, flip, cut, cut, extend, garbage, swap, gone, odd, odd, link_loop, link_out, link_out]
VALUES = [None, True, -1, 0, 1, 2**31, 2**63, 10**400, 1e308, -0.5, "", "x", "../outside/secret", "/etc/hostname", "..",
          "a\0b", "\udc80", "x" * 5000, "<u4", ">u2", "|O", "<u1", [], {}, [[]], [None] * 50, {"": {}}]


def places(value, path=()):
    """Every place in the manifest, as a path of keys."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield (*path, key)
        yield from places(part, (*path, key))


def edited(rng, manifest):
    """Change a place in the manifest."""
    *path, key = rng.choice(list(places(manifest)))
    parent = manifest
    for one in path:
        parent = parent[one]
    what = rng.randrange(7)
    if what == 0:
        del parent[key]
    elif what == 1 and isinstance(parent[key], int):
        parent[key] = parent[key] * rng.choice([-1, 2, 10**6, 10**12]) + rng.choice([-1, 0, 1])
    elif what == 2 and isinstance(parent[key], dict | list) and parent[key]:
        other = rng.choice(list(places(parent[key])))[0]
        parent[key] = parent[key][other]
    elif what == 3 and isinstance(parent, dict):
        other = rng.choice(sorted(parent))
        parent[key], parent[other] = parent[other], parent[key]
    elif what == 4 and isinstance(parent, list):
        parent.append(parent[key])
    elif what == 5:
        nested = rng.choice(VALUES)
        for _ in range(rng.choice([2, 50, 300])):
            nested = [nested] if rng.random() < 0.5 else {"a": nested}
        parent[key] = nested
    else:
        parent[key] = rng.choice(VALUES)


def names(rng, manifest):
    """Name files outside, where the manifest names files."""
    name = rng.choice(["../outside/secret", "/etc/hostname", "..", ".", "a/../../outside/secret", "unfinished/../x",
                       "a\\b",
                       "a//b", "", "sub/link", "./a", "~/x"])
    shard = rng.choice([shard for split in manifest["splits"].values() for shard in split["shards"]])
    what = rng.randrange(4)
    if what == 0:
        manifest["tokenizer"]["file"] = name
    elif what == 1:
        shard["name"] = name
    else:
        inner = shard[rng.choice(["sha256", "crc32"])]
        inner[f"{name}{rng.choice(['', '.bin', '.offsets.npy'])}"] = rng.choice(sorted(inner.values()))


def sealed(place, manifest):
    """Write the manifest with a hash of its own that fits."""
    content = {key: value for key, value in manifest.items() if key not in BESIDE}
    manifest["sha256"] = atomic_files.digest(content)
    (place / "manifest.json").write_text(json.dumps(manifest))


def forged(rng, place):
    """Change files, and make the hashes in the manifest fit."""
    manifest = bounded_files.read_json(place / "manifest.json")
    shard = rng.choice([shard for split in manifest["splits"].values() for shard in split["shards"]])
    name = rng.choice(sorted(shard["sha256"]))
    rng.choice([flip, cut, extend, garbage, *([header, numbers] * 2 if name.endswith(".npy") else [])])(
        rng, place / name)
    shard["sha256"][name] = atomic_files.file_digest(place / name)
    sealed(place, manifest)


def changed(rng, place):
    """Make one change to a corpus."""
    kind = rng.randrange(10)
    manifest = place / "manifest.json"
    if kind < 4:
        rng.choice(FILE)(rng, rng.choice([*sorted(path for path in place.iterdir() if path.is_file()), manifest]))
    elif kind < 6:
        forged(rng, place)
    else:
        content = bounded_files.read_json(manifest)
        rng.choice([edited, edited, names])(rng, content)
        if rng.random() < 0.8:
            sealed(place, content)
        else:
            manifest.write_text(json.dumps(content))


# ------------------------------------------------------------------------------------------------------------ reading

class Watch:
    """Notes the files that this process opens and changes, while it is on."""

    def __init__(self):
        self.on, self.opened, self.changed = False, [], []
        sys.addaudithook(self._hook)

    def _hook(self, event, arguments):
        if not self.on:
            return
        if event == "open" and isinstance(arguments[0], str | bytes):
            writes = isinstance(arguments[2], int) and arguments[2] & (
                os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            (self.changed if writes else self.opened).append(os.fsdecode(arguments[0]))
        elif event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate",
                       "os.utime",
                       "shutil.rmtree"):
            self.changed += [os.fsdecode(one) for one in arguments if isinstance(one, str | bytes)]

    def __enter__(self):
        self.on, self.opened, self.changed = True, [], []
        return self

    def __exit__(self, *_):
        self.on = False


def read(source: str, cache: Path, corrupt: str):
    """Return all that a run reads of a corpus: its hash, its tokens by split and step, and what was lost."""
    config = DataConfig(source=source, seq_len=32, global_batch_size=4, corrupt=corrupt, cache_dir=str(cache))
    corpus = load_corpus(config)
    batches, judged = train_batches(config, corpus), eval_batches(config, corpus)
    packing(config, corpus)
    found = [batches[step] for step in range(min(-(-len(rows(config, corpus, "train")) // 4), 100))]
    found += [judged[step] for step in range(min(judged.num_batches, 100))] if judged else []
    origins(corpus, "train", *batches.origin(0, 0))
    for batch in found:
        BatchSpec({key: batch[key].dtype for key in batch}, "a run",  # what every run refuses
                  below=dict.fromkeys(("tokens", "targets"), corpus.tokenizer.vocab_size)).check(batch)
    return corpus.manifest_hash, found, corpus.tokenizer.vocab_size


def tried(source: str, cache: Path, corrupt: str, watch: Watch):
    """Read a corpus: what it gave or raised, and the memory it took; only a read that never ends takes a minute."""
    return with_memory(lambda: read(source, cache, corrupt), watch, 60)


def same(given, want, end) -> bool:
    """Return whether all rows are what they should be, except for those that are empty because they were lost."""
    if len(given) != len(want):
        return False
    for got, one in zip(given, want, strict=True):
        for i in range(len(one["tokens"])):
            lost = not got["weights"][i].any() and (got["tokens"][i] == end).all()
            if not lost and not all(np.array_equal(got[key][i], one[key][i]) for key in one):
                return False
    return True


def wrong(found, whole, memory, watch, allowed, outside) -> str:
    """Return which promise a read broke, or ""."""
    if memory > MEMORY:
        return f"took {memory:,} bytes"
    if leaked := [path for path in watch.opened if outside(path)]:
        return f"opened {leaked[0]}"
    if leaked := [path for path in watch.changed if not Path(os.path.abspath(path)).is_relative_to(allowed)]:
        return f"changed {leaked[0]}"
    if isinstance(found, UserError):
        return "" if "\n" not in str(found) and len(str(found)) < 1000 else f"said too much: {found}"
    if isinstance(found, BaseException):
        return f"raised {type(found).__name__}: {found}"
    (identity, given, ids), (right, want, vocab) = found, whole
    if any(row["tokens"].max() >= ids or row["tokens"].min() < 0 for row in given):
        return "gave ids beyond the vocabulary"
    return "" if identity != right or same(given, want, vocab - 1) else "gave other tokens"


@pytest.mark.parametrize("cases", [
    pytest.param(60, marks=pytest.mark.slow), pytest.param(200, marks=pytest.mark.exhaustive)])
def test_damaged_corpora_harm_nobody(corpora, tmp_path, monkeypatch, cases):
    lstat = os.lstat

    def told(path, **keys):
        found = lstat(path, **keys)
        return os.stat_result([*found[:4], found.st_uid + 1, *found[5:]]) if str(path) in FOREIGN else found

    monkeypatch.setattr(os, "lstat", told)
    watch, broken, outcomes = Watch(), [], {}
    whole = [read(str(path), tmp_path / "whole", "fail") for path in corpora]
    tracemalloc.start()
    try:
        for seed in range(cases):
            rng = random.Random(seed)
            base = tmp_path / str(seed)
            (base / "outside").mkdir(parents=True)
            (base / "outside" / "secret").write_text("secret")
            which = rng.randrange(len(corpora))
            place = shutil.copytree(corpora[which], base / "corpus")
            FOREIGN.clear()
            for _ in range(rng.choice([1, 1, 1, 2, 3])):
                with contextlib.suppress(OSError, ValueError, KeyError, IndexError, TypeError, AttributeError):
                    changed(rng, place)  # the change before can be in its way
            mode = rng.choice(["fail", "fail", "skip_and_count"])
            source = rng.choice(["", "", "file://"]) + str(place)
            links = {path for path in place.iterdir() if path.is_symlink()}

            def outside(path, base=base, links=links if "://" not in source else set()):
                """Whether a file lies outside of the corpus; a store's own links are its business."""
                real = os.path.realpath(path) if Path(path) in links else os.path.abspath(path)
                return real.startswith(str(base / "outside")) or real == "/etc/hostname"

            found, memory = tried(source, base / "cache", mode, watch)
            if problem := wrong(found, whole[which], memory, watch, base, outside):
                broken.append(f"{seed} ({mode}, {source}): {problem}")
            kind = "refused" if isinstance(found, UserError) else "read" if isinstance(found, tuple) else "broken"
            outcomes[kind] = outcomes.get(kind, 0) + 1
            assert (base / "outside" / "secret").read_text() == "secret"
            shutil.rmtree(base)
    finally:
        tracemalloc.stop()
    assert not broken, "\n".join([f"{len(broken)} of them:", *broken[:20]])
    assert outcomes["refused"] > cases // 4 and outcomes["read"] > cases // 10  # so that both were tried
