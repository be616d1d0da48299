"""Killed without a durable checkpoint, and with a process's memory gone, a run goes on from the last snapshot."""

import contextlib
import functools
import json
import os
import shutil
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.builder import build
from jaxtrain.checkpoint import CheckpointManager, LocalCheckpoints
from jaxtrain.checkpoint.local import snapshots
from jaxtrain.config.load import load_config
from jaxtrain.distributed.authentication import secret
from jaxtrain.errors import UserError
from jaxtrain.main import main
from jaxtrain.observe.events import events
from tests.tiny import (
    SLOW,
    TWO_DEVICES,
    devices,
    free_address,
    tiny_flags,
    virtual_devices,
    wait_for_checkpoint,
    wait_for_lines,
)

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.usefixtures("cache")  # programs are compiled once
STEPS = 12
TINY = ["model.num_layers=1", "model.embed_dim=48", "model.max_seq_len=32", "data.seq_len=32", "train.eval_batches=1",
        "train.eval_every=0", "data.global_batch_size=24", f"train.steps={STEPS}", "checkpoint.every=0",
        "checkpoint.local_checkpoint_every=2", "resilience.check_every=0"]


# ------------------------------------------------------------------------------------------- one process, without a run
def state_of(value):
    x = np.arange(64, dtype=np.float32).reshape(8, 8) + value
    mesh = jax.make_mesh((8,), ("x",))
    return {"w": jax.device_put(x, NamedSharding(mesh, P("x"))), "b": jax.device_put(x[0], NamedSharding(mesh, P()))}


def abstract(devices=4):
    where = NamedSharding(jax.make_mesh((devices,), ("x",), devices=jax.devices()[:devices]), P(None))
    return {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=where),
            "b": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=where)}


@pytest.fixture
def workdir(tmp_path):
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def opened(workdir, every=1):
    return LocalCheckpoints(workdir, every, str(workdir.parent / "local"))


def take(workdir, *steps):
    with contextlib.closing(opened(workdir)) as ours:
        for step in steps:
            assert ours.take(step, state_of(step), {"step": step}) >= 0


def restored(workdir, above=0, devices=4):
    with contextlib.closing(opened(workdir)) as ours:
        found = ours.restore_newest(abstract(devices), above)
    if found is None:
        return None
    step, state, meta = found
    assert meta == {"step": step} and state["w"].sharding == abstract(devices)["w"].sharding
    for path, leaf in state_of(step).items():
        np.testing.assert_array_equal(np.asarray(state[path]), np.asarray(leaf))
    return step


def files(workdir):
    return sorted((workdir.parent / "local").rglob("*.snapshot"))


def test_the_newest_on_another_mesh(workdir):
    take(workdir, 3, 4)
    assert restored(workdir) == 4 and restored(workdir, devices=1) == 4
    assert restored(workdir, above=3) == 4 and restored(workdir, above=4) is None


def test_two_are_kept(workdir):
    take(workdir, 1, 2, 3, 4)
    assert [int(path.name[:9]) for path in files(workdir)] == [3, 4]
    take(workdir, 5, 6)
    assert [int(path.name[:9]) for path in files(workdir)] == [5, 6]


def test_a_peer_that_is_ahead_keeps_what_it_sent(workdir):
    """Pieces of a step may arrive from a peer before this process has its own pieces of that step."""
    with contextlib.closing(opened(workdir)) as ours:
        ours.take(4, state_of(4), {"step": 4})
        ours.wait()
        sent = ours._keep(0, snapshots.Taken(5, ours._start, 2).name(1))
        sent.parent.mkdir(parents=True)
        sent.write_bytes(b"pieces")
        ours.take(5, state_of(5), {"step": 5})
        ours.wait()
        assert sent.exists()


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone", "empty"])
def test_a_damaged_one_is_told_and_passed_over(workdir, damage, capsys):
    take(workdir, 3, 4)
    newest = files(workdir)[-1]
    content = bytearray(newest.read_bytes())
    content[-5] ^= 1
    {"flipped": lambda: newest.write_bytes(content), "cut": lambda: newest.write_bytes(content[:-9]),
     "gone": newest.unlink, "empty": lambda: newest.write_bytes(b"")}[damage]()
    assert restored(workdir) == 3
    if damage in ("flipped", "cut"):
        assert f"{newest.name} is damaged" in capsys.readouterr().err
        assert "snapshot_damaged" in [event["kind"] for event in events(workdir)]


def test_one_whose_secret_is_not_given_is_kept_for_who_has_it(workdir, monkeypatch):
    monkeypatch.setenv("JAXTRAIN_SECRET", "the secret of a supervised run")
    secret.cache_clear()
    take(workdir, 3)
    monkeypatch.delenv("JAXTRAIN_SECRET")
    secret.cache_clear()
    assert restored(workdir) is None and len(files(workdir)) == 1
    monkeypatch.setenv("JAXTRAIN_SECRET", "the secret of a supervised run")
    secret.cache_clear()
    assert restored(workdir) == 3
    monkeypatch.undo()
    secret.cache_clear()


def test_a_new_beginning_does_not_know_them(workdir):
    take(workdir, 3, 4)
    shutil.rmtree(workdir / "checkpoints")  # as one does to begin anew
    assert restored(workdir) is None and files(workdir) == []


def test_after_turning_back_they_do_not_count(workdir):
    take(workdir, 3, 4)
    snapshots.turn_back(workdir)
    assert restored(workdir) is None


def test_forgotten_in_the_run(workdir):
    with contextlib.closing(opened(workdir)) as ours:
        ours.take(3, state_of(3), {"step": 3})
        ours.take(4, state_of(4), {"step": 4})
        ours.forget(above=3)
    assert restored(workdir) == 3
    take(workdir, 4, 5)
    take(workdir, 3)  # again: what is later belongs to another past
    assert restored(workdir) == 3


def test_another_model_is_not_restored(workdir, capsys):
    take(workdir, 3)
    with contextlib.closing(opened(workdir)) as ours:
        other = abstract() | {"b": jax.ShapeDtypeStruct((8,), jnp.bfloat16, sharding=abstract()["b"].sharding)}
        assert ours.restore_newest(other) is None
    assert "b is ((8,), 'float32') in it and ((8,), 'bfloat16') in this run" in capsys.readouterr().err


def test_a_full_disk_does_not_end_the_run(workdir, monkeypatch, capsys):
    take(workdir, 3)
    def full(*_):
        raise OSError(28, "No space left on device")
    with contextlib.closing(opened(workdir)) as ours:
        monkeypatch.setattr(snapshots.pieces, "write", full)
        ours.take(4, state_of(4))
        ours.wait()
        monkeypatch.undo()
        assert "(No space left on device); training goes on" in capsys.readouterr().err
    assert restored(workdir) == 3


def test_off(workdir):
    with contextlib.closing(opened(workdir, every=0)) as ours:
        assert ours.restore_newest(abstract()) is None and not ours.due(4)
        ours.forget(0)
        ours.remove()
    assert list(workdir.iterdir()) == []


def test_the_memory_is_given_back(workdir):
    take(workdir, 3)
    ours = opened(workdir)
    ours.close()
    ours.remove()
    assert list((workdir.parent / "local").iterdir()) == []


def test_a_folder_that_cannot_be_written(workdir):
    (workdir.parent / "local").write_text("a file")
    with pytest.raises(UserError, match=r"checkpoint\.local_dir: .* cannot be written"):
        opened(workdir)


@pytest.fixture
def victim(tmp_path):
    """A folder of somebody else, laid out as snapshots are."""
    file = tmp_path / "victim" / "process-0" / "own" / "000000003-0123456789ab-0of1.snapshot"
    file.parent.mkdir(parents=True)
    file.write_text("precious")
    (file.parent / "notes.snapshot.tmp").write_text("precious too")
    return tmp_path / "victim"


def untouched(victim):
    return {path.read_text() for path in victim.rglob("*") if path.is_file()} == {"precious", "precious too"}


def refused(workdir):
    with pytest.raises(UserError, match=r"^checkpoint\.local_dir: .* only you can enter, .*; remove it, or give"):
        opened(workdir)
    return True


def test_the_folder_is_private(workdir):
    before = os.umask(0)
    try:
        take(workdir, 3)
    finally:
        os.umask(before)
    place = snapshots.folder(workdir, str(workdir.parent / "local"))
    assert place.stat().st_mode & 0o777 == 0o700
    assert restored(workdir) == 3


def test_a_planted_folder_is_refused(workdir, victim, monkeypatch):
    place = snapshots.folder(workdir, str(workdir.parent / "local"))
    place.parent.mkdir()
    place.symlink_to(victim)
    assert refused(workdir) and untouched(victim)
    place.unlink()
    place.mkdir(mode=0o755)
    assert refused(workdir)  # others can read it
    place.chmod(0o700)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: place.stat().st_uid + 1)
        assert refused(workdir)  # it belongs to somebody else
    opened(workdir).close()


def test_a_run_in_a_planted_folder_does_not_begin(flags, workdir, victim, capsys):
    place = snapshots.folder(workdir, str(workdir.parent))
    place.symlink_to(victim)
    assert main([*flags, f"--config.checkpoint.local_dir={workdir.parent}", f"--workdir={workdir}"]) == 2
    assert f"checkpoint.local_dir: {place} is not a folder that belongs to you" in capsys.readouterr().err
    assert untouched(victim)


def test_neither_removing_nor_writing_follows_links(workdir, victim, capsys):
    place = snapshots.folder(workdir, str(workdir.parent / "local"))
    with contextlib.closing(opened(workdir)) as ours:
        (place / "process-7").symlink_to(victim / "process-0")
        ours.forget(above=0)
        ours.remove()
        assert untouched(victim)
        shutil.rmtree(place)
        place.symlink_to(victim)
        ours.forget(above=0)
        ours.take(4, state_of(4))
        ours.wait()
        assert "snapshot of step 4 by process 0 failed (checkpoint.local_dir: " in capsys.readouterr().err
        ours.remove()
    assert untouched(victim)


def test_what_a_kill_left_half_written_is_deleted(workdir):
    take(workdir, 3)
    torn = [files(workdir)[0].with_name(name) for name in (
        "000000004-0123456789ab-0of1.snapshot.tmp", ".000000004-0123456789ab-0of1.snapshot.tmp")]  # ours, and a peer's
    for path in torn:
        path.write_bytes(b"half")
    opened(workdir).close()
    assert not any(path.exists() for path in torn) and restored(workdir) == 3


# -------------------------------------------------------------------------------------------- runs of real processes
@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    return tiny_flags(tmp_path_factory, TINY)


@pytest.fixture(scope="module")
def processes(forked):
    return functools.partial(_processes, forked)


@contextlib.contextmanager
def _processes(forked, flags, workdir, many, each):
    """All of them, started, each with a disk of its own; none is left behind."""
    coordinator = free_address()
    started = []
    try:
        for i in range(many):
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "OWN_DISK": disk(workdir, i),
                           "XLA_FLAGS": virtual_devices(each)}
            where = [f"--coordinator={coordinator}", f"--num_processes={many}", f"--process_id={i}"]
            program = SLOW % 0.25 if many > 1 else TWO_DEVICES + SLOW % 0.25
            command = ["-c", program, *flags, *(where if many > 1 else []),
                       "--config.checkpoint.local_dir=$OWN_DISK", f"--workdir={workdir}"]
            started.append(forked.start(command, ROOT, environment))
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait(timeout=60)


def disk(workdir, process):
    return f"{workdir.parent}/disk-{process}"


def numbers(workdir):
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines if "loss" in line]


def final(flags, workdir):
    words = dict(f.removeprefix("--config.").split("=") for f in flags[1:]) | {"mesh.data": 2, "mesh.fsdp": 1}
    config = load_config(flags[0].partition("=")[2], words)
    run = build(config, devices=jax.devices()[:2])
    return jax.tree.leaves(jax.device_get(CheckpointManager(workdir / "checkpoints").restore(STEPS, run.abstract)))


def ended(started, seconds=600):
    said = [process.communicate(timeout=seconds)[1] for process in started]
    assert [process.returncode for process in started] == [0] * len(started), "".join(said)
    return said


@pytest.fixture(scope="module")
def alone(flags, tmp_path_factory):
    """A calm run of this process."""
    calm = tmp_path_factory.mktemp("alone") / "calm"
    with devices(2):
        assert main([*flags, "--config.checkpoint.local_checkpoint_every=0", f"--workdir={calm}"]) == 0
    return calm


def assert_went_on_as(calm, flags, work):
    """Assert that the run ended with the same bits, and without snapshots when all is done."""
    assert numbers(work) == numbers(calm)
    for ours, theirs in zip(final(flags, work), final(flags, calm), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert list(Path(disk(work, 0)).iterdir()) == []


@pytest.mark.exhaustive
def test_one_process_killed(processes, flags, alone, tmp_path):
    work = tmp_path / "work"
    with processes(flags, work, 1, 8) as started:
        wait_for_lines(work, 8, started[0])
        started[0].kill()
    assert CheckpointManager(work / "checkpoints").latest() is None
    with processes(flags, work, 1, 8) as started:
        said = ended(started)
    assert "resumed from the snapshot of step " in said[0]
    assert next(event["step"] for event in events(work) if event["kind"] == "snapshot_restored") in (4, 6, 8, 10)
    assert_went_on_as(alone, flags, work)


@pytest.mark.exhaustive
def test_a_whole_snapshot_counts_where_no_checkpoint_is_good(processes, flags, alone, tmp_path):
    work = tmp_path / "work"
    with processes([*flags, "--config.checkpoint.every=5"], work, 1, 8) as started:
        wait_for_lines(work, 9, started[0])
        wait_for_checkpoint(work, 5, started[0])
        started[0].kill()
    for file in (work / "checkpoints").rglob("*"):
        if file.is_file() and "/5/" in str(file):
            file.write_bytes(b"")
    with processes([*flags, "--config.checkpoint.every=0"], work, 1, 8) as started:
        said = ended(started)
    assert "checkpoint 5 is damaged" in said[0] and "resumed from the snapshot of step " in said[0]
    assert_went_on_as(alone, flags, work)


@pytest.fixture(scope="module")
def lost(processes, flags, tmp_path_factory):
    """mesh, devices -> the flags, and a run of three processes that lost one with its disk, as it was then."""
    found = {}

    def run(*mesh, each=2):
        three = [*flags, *(f"--config.mesh.{axis}" for axis in mesh), "--config.optimizer.zero_stage=1"]
        if (mesh, each) not in found:
            folder = found[mesh, each] = tmp_path_factory.mktemp("three")
            with processes(three, folder / "work", 3, each) as started:
                wait_for_lines(folder / "work", 7, started[0])
                started[1].kill()
                time.sleep(1)
            shutil.rmtree(disk(folder / "work", 1))
            shutil.copytree(folder, f"{folder}-then")
        folder = found[mesh, each]  # and no other: snapshots are found by the path of their workdir
        shutil.rmtree(folder)
        shutil.copytree(f"{folder}-then", folder)
        return three, folder / "work"

    return run


@pytest.mark.parametrize("mesh", [
    pytest.param(["data=6"], marks=pytest.mark.exhaustive, id="replicas"),
    pytest.param(["data=2", "fsdp=3"], marks=pytest.mark.exhaustive, id="shards")])
def test_one_of_three_lost_with_its_memory(processes, lost, mesh, tmp_path):
    flags, work = lost(*mesh)
    calm = tmp_path / "calm"
    with processes([*flags, "--config.checkpoint.local_checkpoint_every=0"], calm, 3, 2) as started:
        ended(started)
    with processes(flags, work, 3, 2) as started:  # the same mesh: the same bits
        said = ended(started)
    restored = [event["step"] for event in events(work) if event["kind"] == "snapshot_restored"]
    assert len(restored) == 3 and restored[0] in (2, 4, 6, 8) and len({*restored}) == 1
    assert f"resumed from the snapshot of step {restored[0]}" in said[0]
    assert numbers(work) == numbers(calm)
    for ours, theirs in zip(final(flags, work), final(flags, calm), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_three_go_on_as_two(processes, lost, alone):
    three, work = lost("data=1", "fsdp=3", each=1)
    shutil.move(disk(work, 2), disk(work, 1))  # the last machine is the second now
    two = [*three, "--config.mesh.fsdp=2"]
    with processes(two, work, 2, 1) as started:
        said = ended(started)
    assert "resumed from the snapshot of step " in said[0]
    for ours, theirs in zip(numbers(work), numbers(alone), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    for ours, theirs in zip(final(two, work), final(two, alone), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
