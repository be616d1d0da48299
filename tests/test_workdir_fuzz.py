"""Damaged and forged workdirs: a run starts in 500 of them, in one process, none of which can harm it.

Each is the copy of a workdir with two checkpoints and one to three changes to a file or to what lies in its place. The
start goes on from a checkpoint exactly as it was saved, begins anew where there is none, or says in one line what is
wrong; the commands that look at a workdir do likewise.
"""

import contextlib
import json
import os
import random
import shutil
import traceback
import tracemalloc
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxtrain.checkpoint import CheckpointManager, commands, verify
from jaxtrain.commands import goodput
from jaxtrain.config.load import load_config, make_config
from jaxtrain.errors import UserError
from jaxtrain.files import bounded_files
from jaxtrain.observe import events
from jaxtrain.observe.ledger import Ledger
from jaxtrain.observe.metrics import _JsonLines
from jaxtrain.run import runinfo
from jaxtrain.trainer.rollback import RolledBack, agree, apply_pending_rollback
from tests.data.test_corpus_fuzz import MEMORY, VALUES, Watch, cut, edited, extend, flip, garbage, gone, link_loop
from tests.fuzzing import with_memory
from tests.odd_files import device, fifo, folder, sparse, unix_socket

CONFIG = make_config({}, {"train.steps": 40})
HERE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
ABSTRACT = {"w": jax.ShapeDtypeStruct((16, 8), np.float32, sharding=HERE),
            "step": jax.ShapeDtypeStruct((), np.int32, sharding=HERE)}


def state_of(step):
    return {"w": jax.numpy.arange(128.0).reshape(16, 8) * step, "step": jax.numpy.int32(step)}


def files(workdir, step, known=None):
    return runinfo.write_run_files(workdir, CONFIG, mesh_sizes={"data": 1}, device_kind="cpu",
                                   data_manifest_hash="abc", done=step, known=known)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    work = tmp_path_factory.mktemp("made") / "work"
    runinfo.make_workdir(work)
    about = files(work, 0, {"run": "a" * 16, "adopted": []})
    with contextlib.closing(CheckpointManager(work / "checkpoints", keep=2)) as checkpoints:
        for step in (10, 20):
            checkpoints.save(step, state_of(step), about | {"config": CONFIG.to_dict(), "step": step, "loss": 1.0})
        checkpoints.wait()
    (work / "metrics.jsonl").write_text("".join(f'{{"step": {n}, "loss": 1.5}}\n' for n in range(1, 25)))
    for n in range(9):
        events.record(work, "something", step=n)
    with Ledger(work, every=0) as ledger:
        ledger.open(40)
    (work / "skipped_batches.json").write_text('{"batches": [], "rollbacks": 0, "void_above": null}\n')
    return work


# ------------------------------------------------------------------------------------------------------------ changes

def link_out(rng, path):
    outside = next(parent for parent in path.parents if (parent / "outside").exists()) / "outside"
    target = rng.choice(["secret", "copy"])
    if target == "copy":
        (outside / "copy").write_bytes(bounded_files.read(path))
    path.unlink()
    path.symlink_to(outside / target)


def odd(rng, path):
    path.unlink()
    rng.choice([fifo, device, folder, sparse, unix_socket])(path)


def hole(rng, path):
    """Zeros in the middle, as a power failure leaves them; sometimes very many."""
    content = bounded_files.read(path)
    at = rng.randrange(len(content) + 1)
    path.write_bytes(content[:at] + bytes(rng.choice([1, 100, 5000, 2**24 + 5])) + content[at:])


def value(rng, path):
    """Change a place in the JSON of a file, or of a line of it."""
    text = bounded_files.read(path).decode()
    lines = text.splitlines() if path.suffix == ".jsonl" else [text]
    number = rng.randrange(len(lines))
    content = json.loads(lines[number])
    edited(rng, content)
    lines[number] = json.dumps(content)
    path.write_text("\n".join(lines) + "\n")


def another(rng, path):
    path.write_text(json.dumps(rng.choice(VALUES)))


def moved(rng, path):
    """A file or folder under another name in the same place, as of another step."""
    other = rng.choice(["15", "30", "99999999999999999999", "-1", "x", "10.damaged", "1e3", "0x10.json", "1.json"])
    path.rename(path.with_name(other))


def linked_folder(rng, path):
    outside = next(parent for parent in path.parents if (parent / "outside").exists()) / "outside"
    shutil.copytree(path, outside / "theirs")
    shutil.rmtree(path)
    path.symlink_to(outside / "theirs")


def emptied(rng, path):
    shutil.rmtree(path)
    rng.choice([fifo, device, folder, unix_socket, lambda path: path.write_text("x")])(path)


def changed(rng, work):
    small = sorted(path for path in work.iterdir() if path.is_file()) + sorted(work.glob("ledger/*"))
    inner = sorted(path for path in work.glob("checkpoints/*/**/*") if path.is_file())
    marks = [path for path in inner if path.name == "good.json"]
    kind = rng.random()
    if kind < 0.1:
        rng.choice([linked_folder, emptied, moved])(rng, rng.choice(sorted(
            path for path in [*work.glob("checkpoints/*"), work / "ledger", work / "checkpoints"] if path.is_dir())))
        return
    path = rng.choice(small if kind < 0.6 else marks if kind < 0.75 else inner)
    plain = [flip, flip, cut, extend, garbage, gone, odd, odd, link_loop, link_out, hole, another]
    rng.choice([*plain, *[value] * 6] if path.suffix in (".json", ".jsonl") else plain)(rng, path)


# ----------------------------------------------------------------------------------------------------------- the start

def begin(work):
    """Do what the start of a run does in its workdir; return the step and the state that it goes on from."""
    runinfo.make_workdir(work)
    events.record(work, "start")
    with Ledger(work, every=0) as ledger, contextlib.closing(
            CheckpointManager(work / "checkpoints", keep=2)) as checkpoints:
        skipped = apply_pending_rollback(work, checkpoints)
        step = checkpoints.newest() or 0
        known, saved = runinfo.identity(work, checkpoints.meta(step) if step else {})
        runinfo.check_workdir(work, CONFIG, done=skipped.reach(step), saved=saved)
        files(work, skipped.reach(step), known)
        restored = checkpoints.restore_newest(ABSTRACT) if step else None
        if restored:
            agree(work, skipped, restored[2], restored[0])
        ledger.open(40)
        ledger.resumed(step)
        lines = _JsonLines(work / "metrics.jsonl", step)
        lines.write({"step": step + 1, "loss": 0.5})
        lines.close()
    return restored and (restored[0], jax.device_get(restored[1]))


def look(work):
    """Do what the commands do that look at a workdir; each may refuse."""
    for do in (lambda: commands.show(work), lambda: list(commands.verified(work, [])),
               lambda: list(commands.diff(work, 10, work, 20)), lambda: load_config(work / "config.json"),
               lambda: events.events(work), lambda: goodput.main([str(work)])):
        with contextlib.suppress(UserError):
            do()


def tried(work, watch):
    """Do all of it: what it gave or raised, and how much memory it took; only what never ends takes two minutes."""
    def do():
        look(work)
        return begin(work)

    return with_memory(do, watch, 120)


def intact(path, step):
    """The whole lines of metrics up to a step."""
    try:
        lines = bounded_files.read(path).split(b"\n")
    except OSError:
        return []
    found = []
    for line in lines[:-1]:
        with contextlib.suppress(ValueError):
            if bounded_files.parsed(line, {"step": int, "loss": float})["step"] <= step:
                found.append(line)
    return found


def wrong(found, memory, watch, base, before, secret) -> str:
    """Return which promise a start broke, or ""."""
    if memory > MEMORY:
        return f"took {memory:,} bytes"
    outside = str(base / "outside")
    compiled = str(base.parents[1] / "cache" / "xla")  # JAX still writes where an earlier test of this process had it
    if leaked := [path for path in watch.changed if not Path(os.path.abspath(path)).is_relative_to(base)
                  and not path.startswith(("/proc", "/dev", compiled))]:
        return f"changed {leaked[0]}"
    if (base / "outside/secret").read_text() != secret or any(path.startswith(outside) for path in watch.changed):
        return "changed what lies outside"
    if isinstance(found, UserError):
        return "" if "\n" not in str(found) and len(str(found)) < 2000 else f"said too much: {found}"
    if isinstance(found, RolledBack):
        return ""
    if isinstance(found, BaseException):
        where = traceback.extract_tb(found.__traceback__)[-3:]
        return f"raised {type(found).__name__}: {found} at {[(one.filename[-40:], one.lineno) for one in where]}"
    step = found[0] if found else 0
    if found and (step not in (10, 20) or not all(
            np.array_equal(found[1][key], jax.device_get(want)) for key, want in state_of(step).items())):
        return f"loaded wrong content for step {step}"
    after = intact(base / "work/metrics.jsonl", step)
    if lost := [line for line in before if json.loads(line)["step"] <= step and line not in after]:
        return f"lost lines of metrics: {lost[0]}"
    return ""


@pytest.mark.parametrize("seeds", [pytest.param(range(60), marks=pytest.mark.slow, id="60"),
                                   pytest.param(range(60, 500), marks=pytest.mark.exhaustive, id="440")])
def test_damaged_workdirs_harm_nobody(made, tmp_path, monkeypatch, seeds):
    monkeypatch.setattr(verify, "_AGAIN_S", (0.0, 0.0))  # retries of storage that fails for a moment
    monkeypatch.setattr(os, "fsync", lambda _: None)  # nothing here must survive a power failure
    watch, broken, outcomes = Watch(), [], {}
    tracemalloc.start()
    try:
        for seed in seeds:
            rng = random.Random(seed)
            base = tmp_path / str(seed)
            (base / "outside").mkdir(parents=True)
            (base / "outside" / "secret").write_text("secret")
            work = shutil.copytree(made, base / "work")
            for _ in range(rng.choice([1, 1, 1, 2, 3])):
                with contextlib.suppress(OSError, ValueError, KeyError, IndexError, TypeError, AttributeError):
                    changed(rng, work)  # the change before can be in its way
            before = intact(work / "metrics.jsonl", 20)
            secret = (base / "outside" / "secret").read_text()  # a change may itself have followed a link
            found, memory = tried(work, watch)
            if problem := wrong(found, memory, watch, base, before, secret):
                broken.append(f"{seed}: {problem}")
            kind = "refused" if isinstance(found, UserError) else "began" if found is None else str(
                found[0]) if isinstance(found, tuple) else "broken"
            outcomes[kind] = outcomes.get(kind, 0) + 1
            shutil.rmtree(base)
    finally:
        tracemalloc.stop()
    assert not broken, "\n".join([f"{len(broken)} of them:", *broken[:20]])
    tried_all = min(outcomes[kind] for kind in ("refused", "10", "20"))
    assert tried_all > len(seeds) // 20, outcomes
