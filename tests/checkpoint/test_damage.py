"""Whatever is done to a checkpoint's files is noticed and named, and the checkpoint before it is loaded instead."""

import json
import os
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.checkpoint import CheckpointManager, verify
from jaxtrain.errors import UserError
from jaxtrain.observe.events import events
from tests.odd_files import ODD, WRONG, in_time


def state_of(step):
    keys = jax.random.split(jax.random.key(step), 2)
    return {"w": jax.random.normal(keys[0], (8, 64)), "b": jax.random.normal(keys[1], (33,)).astype(jnp.bfloat16),
            "step": jnp.int32(step), "flag": jnp.array([True, False, True])}


WHERE = NamedSharding(jax.make_mesh((4,), ("data",), devices=jax.devices()[:4]), P())
ABSTRACT = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=WHERE), state_of(0))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "checkpoints"
    store = CheckpointManager(folder, keep=3)
    for step in (10, 20, 30):
        store.save(step, state_of(step), {"n": step})
    store.close()
    assert [step for step in verify.steps(folder) if verify.good(folder, step)] == [10, 20, 30]
    return folder


@pytest.fixture
def copy(made, tmp_path):
    shutil.copytree(made, tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


def data(folder):
    """The largest file of array data that is the final one."""
    files = [path for path in (folder / "30" / "state").rglob("*") if path.parent.name == "d" and path.is_file()]
    return max(files, key=lambda path: (path.stat().st_size, path.name))


def flip(path: Path, at=0.5, bit=0):
    content = bytearray(path.read_bytes())
    content[int(len(content) * at)] ^= 1 << bit
    path.write_bytes(content)


def flips(name, at=0.5, bit=0):
    return lambda folder: flip(folder / "30" / name, at, bit)


def swap(folder):
    for entry in (folder / "30" / "state").iterdir():
        other = folder / "20" / "state" / entry.name
        entry.rename(folder / "aside")
        other.rename(entry)
        (folder / "aside").rename(other)


def older_file(folder):
    ours, theirs = folder / "30" / "meta" / "metadata", folder / "20" / "meta" / "metadata"
    assert ours.stat().st_size == theirs.stat().st_size
    shutil.copy(theirs, ours)


def dtype_in_metadata(folder):
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{folder}/30/state"}).result()
    before = store.read("b/.zarray").result().value
    assert b"bfloat16" in before
    store.write("b/.zarray", before.replace(b"bfloat16", b"<f2")).result()


def unverified(change):
    """The same to a checkpoint that nobody has read back yet: what was saved is all that tells."""
    def both(folder):
        (folder / "30" / "good.json").unlink()
        change(folder)
    return both


def all_of_another(folder):
    shutil.rmtree(folder / "30")
    shutil.copytree(folder / "10", folder / "30")


def replace_by(make):
    def change(folder):
        path = data(folder)
        path.unlink()
        make(path)
    return change


def delete(name):
    def change(folder):
        path = folder / "30" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return change


def put(name, make):
    """Something else in the place of a small file."""
    def change(folder):
        (folder / "30" / name).unlink()
        make(folder / "30" / name)
    return change


def mark(change):
    """Return a damage that changes good.json and leaves it well-formed."""
    def do(folder):
        record = json.loads((folder / "30" / "good.json").read_text())
        del record["sha256"]
        change(record)
        (folder / "30" / "good.json").write_bytes(verify._sealed(record))
    return do


DAMAGE = {
    "data file truncated by a byte": lambda f: os.truncate(data(f), data(f).stat().st_size - 1),
    "data file empty": lambda f: os.truncate(data(f), 0),
    "data file longer": lambda f: data(f).write_bytes(data(f).read_bytes() + b"\0"),
    "bit flipped at the start of the data": lambda f: flip(data(f), 0),
    "bit flipped within the data": lambda f: flip(data(f), 0.5, 7),
    "bit flipped at the end of the data": lambda f: flip(data(f), 0.9999),
    "data file missing": lambda f: data(f).unlink(),
    "data file random": lambda f: data(f).write_bytes(np.random.default_rng(0).bytes(data(f).stat().st_size)),
    "data file a folder": replace_by(Path.mkdir),
    "data file a link to nowhere": replace_by(lambda path: path.symlink_to("/nowhere")),
    "data file a link to the right content": replace_by(lambda path: path.symlink_to(
        path.parents[3] / "20" / path.relative_to(path.parents[2]))),
    "data file a pipe": replace_by(os.mkfifo),
    "bit flipped in the manifest": flips("state/manifest.ocdbt"),
    "manifest missing": delete("state/manifest.ocdbt"),
    "bit flipped in _METADATA": flips("state/_METADATA"),
    "_METADATA missing": delete("state/_METADATA"),
    "another dtype in the metadata": dtype_in_metadata,
    "bit flipped in meta": flips("meta/metadata"),
    "bit flipped in the fingerprint": flips("fingerprint/metadata", 0.6),
    "fingerprint missing": delete("fingerprint"),
    "bit flipped in good.json": flips("good.json", 0.4),
    "good.json truncated": lambda f: os.truncate(f / "30" / "good.json", 100),
    "good.json empty": lambda f: os.truncate(f / "30" / "good.json", 0),
    "good.json of another step": lambda f: shutil.copy(f / "20" / "good.json", f / "30" / "good.json"),
    "good.json that forgets a file": mark(lambda record: record["files"].popitem()),
    "good.json with a file that is not a pair": mark(lambda record: record["files"].update({"a": 3})),
    "good.json without files": mark(lambda record: record.pop("files")),
    "good.json without a step": mark(lambda record: record.pop("step")),
    "good.json with metadata that is a list": mark(lambda record: record.update(meta=[])),
    **{f"{name} {make.__name__}": put(name, make) for name in ("good.json", "meta/metadata", "fingerprint/metadata")
       for make in (*ODD, *WRONG)},
    "folder missing": delete("state"),
    "folder empty": lambda f: (shutil.rmtree(f / "30"), (f / "30").mkdir()),
    "a file that does not belong": lambda f: (f / "30" / "state" / "d" / "0").touch(),
    "states of two steps swapped": swap,
    "an older file of the same size": older_file,
    "all of another step": all_of_another,
    "unverified: bit flipped in the data": unverified(lambda f: flip(data(f))),
    "unverified: data file missing": unverified(lambda f: data(f).unlink()),
    "unverified: states of two steps swapped": unverified(swap),
    "unverified: bit flipped in _METADATA": unverified(flips("state/_METADATA", 0.001)),
    "unverified: another dtype in the metadata": unverified(dtype_in_metadata),
    **{f"unverified: {name} {make.__name__}": unverified(put(name, make))
       for name in ("meta/metadata", "fingerprint/metadata", "_CHECKPOINT_METADATA", "state/_METADATA")
       for make in (*ODD, *WRONG[:7])},
    "unverified: data file a pipe": unverified(replace_by(os.mkfifo)),
    "unverified: data file a device": unverified(replace_by(lambda path: path.symlink_to("/dev/zero"))),
    "unverified: fingerprint missing": unverified(delete("fingerprint")),
    "unverified: bit flipped in the fingerprint": unverified(flips("fingerprint/metadata", 0.6)),
    "unverified: commit without arrays": unverified(delete("state")),
    "unverified: all of another step": lambda f: (all_of_another(f), unverified(lambda _: None)(f)),
}


@pytest.mark.parametrize("damage", [
    pytest.param(name, marks=pytest.mark.slow) if re.match("unverified: (fingerprint/|_CHECKPOINT_|state/)", name)
    else name for name in DAMAGE])
def test_damage(copy, capfd, damage):
    DAMAGE[damage](copy)
    if "swapped" in damage:
        assert verify.verify(copy, 20)  # the other one is as damaged
    problems = in_time(lambda: verify.verify(copy, 30))
    assert problems and verify.verify(copy, 10) == []
    store = CheckpointManager(copy, keep=3)
    step, state, meta = store.restore_newest(ABSTRACT)
    expected = 10 if "swapped" in damage else 20
    assert (step, meta) == (expected, {"n": expected})
    for ours, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(state_of(expected)), strict=True):
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()

    # Told, once; set aside, not lost; and never chosen again.
    err = capfd.readouterr().err
    assert err.startswith("checkpoint 30 is damaged (") and err.count("\n") == (2 if "swapped" in damage else 1)
    told = [event for event in events(copy.parent) if event["kind"] == "checkpoint_damaged"]
    assert told[0]["step"] == 30 and problems[0] in told[0]["problems"]
    assert (copy / "30.damaged").exists() and not (copy / "30").exists()
    assert CheckpointManager(copy, keep=3).restore_newest(ABSTRACT)[0] == expected
    store.close()


def test_extra_empty_file_is_named(copy):
    (copy / "30" / "state" / "0").touch()
    assert verify.verify(copy, 30) == ["state/0 does not belong to it"]


def test_not_readable(copy, monkeypatch):
    """(Root may read anything, so the operating system's refusal is played.)"""
    refused, right = data(copy), os.open

    def opening(path, *args, **keys):
        if Path(path) == refused:
            raise PermissionError(13, "Permission denied", str(path))
        return right(path, *args, **keys)

    monkeypatch.setattr(os, "open", opening)
    assert CheckpointManager(copy).newest() == 20


def test_storage_that_fails_for_a_moment_is_asked_again(copy, monkeypatch):
    failing, waits, right = data(copy), [], os.open
    monkeypatch.setattr(verify.time, "sleep", waits.append)

    def opening(path, *args, **keys):
        if Path(path) == failing and len(waits) < 2:
            raise OSError(5, "Input/output error", str(path))
        return right(path, *args, **keys)

    monkeypatch.setattr(os, "open", opening)
    assert CheckpointManager(copy).newest() == 30
    assert waits == list(verify._AGAIN_S[:2])


def test_half_written_folders_are_nothing(copy, capfd):
    shutil.copytree(copy / "30", copy / "40.orbax-checkpoint-tmp")
    shutil.copytree(copy / "30", copy / "20.deleted")
    store = CheckpointManager(copy, keep=9)
    assert store.newest() == 30 and capfd.readouterr().err == ""
    store.save(40, state_of(40))
    store.close()
    assert sorted(path.name for path in copy.iterdir()) == ["10", "20", "30", "40"]


def test_one_that_nobody_read_back_counts_when_it_is_whole(copy, capfd):
    (copy / "30" / "good.json").unlink()
    assert verify.good(copy, 30) is None
    assert CheckpointManager(copy).newest() == 30
    assert verify.good(copy, 30)["meta"] == {"n": 30} and capfd.readouterr().err == ""


def test_none_is_good(copy):
    for step in (10, 20, 30):
        (copy / str(step) / "good.json").write_text("{")
    store = CheckpointManager(copy)
    assert store.newest(below=25) is None
    for _ in range(2):
        with pytest.raises(UserError, match=r"is good \(10.damaged, 20.damaged, 30.damaged; events.json") as error:
            CheckpointManager(copy).restore_newest(ABSTRACT)
        assert error.value.key == "checkpoint"
    assert CheckpointManager(copy.parent / "nothing").restore_newest(ABSTRACT) is None


def test_a_step_that_was_damaged_counts_again_once_it_is_saved_again(copy):
    flip(data(copy))
    with CheckpointManager(copy, keep=9) as store:
        assert store.newest() == 20
        store.save(30, state_of(30), {"n": 30})
        store.wait()
        assert store.newest() == 30


def test_one_that_cannot_be_renamed_is_passed_over_once(copy, monkeypatch):
    """Judged by sizes alone, it looks good again and again."""
    flip(data(copy))
    rename = Path.rename
    monkeypatch.setattr(Path, "rename", lambda self, to: rename(self, to) if self.name != "30" else os.rename("", ""))
    step, _, _ = CheckpointManager(copy, verify="sizes").restore_newest(ABSTRACT)
    assert step == 20 and (copy / "30").is_dir()


def test_another_model_is_not_damage(copy):
    other = {**ABSTRACT, "w": jax.ShapeDtypeStruct((8, 64), jnp.bfloat16, sharding=WHERE)}
    with pytest.raises(UserError, match=r"^w: is float32\[8, 64\] in the checkpoint"):
        CheckpointManager(copy).restore_newest(other)
    assert CheckpointManager(copy).newest() == 30


def test_sizes_only(copy):
    """The quick check misses a bit; what was loaded does not."""
    flip(data(copy))
    os.truncate(copy / "20" / "meta" / "metadata", 1)
    store = CheckpointManager(copy, verify="sizes")
    assert store.newest() == 30
    assert store.restore_newest(ABSTRACT)[0] == 10
    assert {path.name for path in copy.iterdir()} == {"10", "20.damaged", "30.damaged"}


def test_going_back_gives_up_what_was_ahead(copy):
    store = CheckpointManager(copy, keep=3)
    assert store.restore_newest(ABSTRACT, below=30)[0] == 20
    assert verify.steps(copy) == [10, 20]  # or a crash would bring back what was given up
    store.save(30, state_of(31))
    store.wait()
    assert (copy / "30.abandoned").exists()
    store.save(40, state_of(40))
    store.close()
    assert not list(copy.glob("*.abandoned")) and verify.steps(copy) == [20, 30, 40]
    assert store.restore(30, ABSTRACT)["flag"].shape == (3,) and verify.verify(copy, 30) == []


def test_one_that_nobody_read_back_and_that_cannot_be_read_is_passed_over(copy, monkeypatch):
    (copy / "30" / "good.json").unlink()
    refused, right = data(copy), os.open

    def opening(path, *args, **keys):
        if Path(path) == refused:
            raise OSError(5, "Input/output error", str(path))
        return right(path, *args, **keys)

    monkeypatch.setattr(verify.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(os, "open", opening)
    assert CheckpointManager(copy).newest() == 20


def test_a_whole_one_is_chosen_though_the_disk_has_no_room_to_say_that_it_is(copy, monkeypatch):
    (copy / "30" / "good.json").unlink()

    def full(source, target, replace=os.replace):
        if Path(target).name == "good.json":
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(verify.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(os, "replace", full)
    assert CheckpointManager(copy).newest() == 30 and (copy / "30").exists()
