"""A checkpoint is whole or it does not exist, fits any mesh, and says what does not fit it."""

import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.checkpoint import CheckpointManager, restore, verify
from jaxtrain.errors import UserError
from tests.tiny import ROOT, free_address


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    step: jax.Array
    params: Any
    opt_state: Any
    loss_scale: Any = None


def make_state(seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    params = {"embed": {"table": jax.random.normal(keys[0], (64, 16))},
              "layers": {"up": jax.random.normal(keys[1], (4, 16, 32)).astype(jnp.bfloat16),
                         "scale": jax.random.normal(keys[2], (4, 16))}, "nothing": None}
    decay = {"embed": {"table": False}, "layers": {"up": True, "scale": False}, "nothing": None}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.masked(optax.add_decayed_weights(0.1), decay),
                            optax.masked(optax.trace(0.9), decay), optax.adamw(optax.linear_schedule(1, 0, 9)))
    opt_state = optimizer.update(jax.tree.map(jnp.ones_like, params), optimizer.init(params), params)[1]
    return State(jnp.uint32(7), params, opt_state)


def shardings(state, data, tensor, explicit=False):
    mode = AxisType.Explicit if explicit else AxisType.Auto
    mesh = jax.make_mesh((data, tensor), ("data", "tensor"), axis_types=(mode, mode),
                         devices=jax.devices()[:data * tensor])
    specs = {1: P("data"), 2: P("data", "tensor"), 3: P(None, "data", "tensor")}
    fits = {1: 4, 2: 4}  # vectors and scales are small
    return jax.tree.map(lambda x: NamedSharding(
        mesh, specs.get(x.ndim, P()) if x.ndim and x.shape[0] % data == 0 and fits.get(x.ndim, 0) <= x.size else P()),
        state)


def abstract(state, where):
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, where)


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.fixture
def store(tmp_path):
    store = CheckpointManager(tmp_path / "checkpoints", keep=2)
    yield store
    store.close()


def saved(store, *steps):
    state = make_state()
    for step in steps:
        store.save(step, state, {"n": step})
    store.wait()
    return state


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("to", [(2, 4), *(pytest.param(to, marks=pytest.mark.slow) for to in ((1, 2), (8, 1), (1, 1)))])
def test_restored_on_another_mesh(tmp_path, store, to, explicit):
    state = make_state()
    placed = jax.device_put(state, shardings(state, 4, 2, explicit))
    store.save(3, placed, {"tokens": 30, "note": "é"})
    store.wait()
    target = abstract(state, shardings(state, *to, explicit))
    fresh = CheckpointManager(tmp_path / "checkpoints", keep=2)  # another process knows nothing
    restored = fresh.restore(3, target)
    assert_same(restored, state)
    assert isinstance(restored, State) and restored.params["nothing"] is None
    assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(lambda x: x.sharding, target)
    assert fresh.meta(3) == {"tokens": 30, "note": "é"}
    fresh.close()


def test_donation_right_after_save(store):
    state, expected = make_state(), make_state()
    step = jax.jit(lambda s: jax.tree.map(lambda x: x * 0, s), donate_argnums=0)
    store.save(1, state)
    after = step(state)  # takes the memory of the state; on CPU not of arrays that are still being copied
    store.wait()
    assert_same(store.restore(1, abstract(after, jax.tree.map(lambda x: x.sharding, after))), expected)


def test_latest_keep_and_saving_twice(tmp_path, store):
    assert store.latest() is None
    saved(store, 1, 2, 10)
    assert store.latest() == 10
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["10", "2"]
    store.save(10, make_state(seed=1))
    store.wait()
    state = make_state()
    assert_same(store.restore(10, abstract(state, shardings(state, 1, 1))), state)
    assert store.meta(10) == {"n": 10}


def test_a_step_below_the_latest_is_saved(store):
    saved(store, 5)
    saved(store, 3)
    assert store.meta(3) == {"n": 3}


def test_half_written_folders_are_not_checkpoints(tmp_path, store):
    folder = tmp_path / "checkpoints"
    for name in ("7.orbax-checkpoint-tmp", "8.orbax-checkpoint-tmp-123", "notes"):
        (folder / name).mkdir(parents=True)
    (folder / "9").write_text("a file")
    assert store.latest() is None


def test_arrays_that_had_another_name_are_found(tmp_path, store):
    """An encoder of images was `picture`, in the parameters and in what the optimizer keeps of them."""
    saved(store, 1)
    state = make_state()

    def named(name, one):
        return State(one.step, {name: one.params["embed"], "rest": one.params["layers"]},
                     {"momentum": {name: {"table": one.params["embed"]["table"] * 2}}})

    store.save(2, named("picture", state), {})
    store.wait()
    now = named("image", state)
    assert_same(store.restore(2, abstract(now, shardings(now, 2, 4))), now)
    wanted = abstract(now, shardings(now, 2, 4)).params
    assert_same(restore.load_params(tmp_path, wanted, 2), now.params)
    with pytest.raises(UserError, match="params/image"):
        store.restore(1, abstract(now, shardings(now, 2, 4)))


@pytest.mark.parametrize(("change", "message"), [
    (lambda x: jax.ShapeDtypeStruct((64, 8), x.dtype, sharding=x.sharding), "float32[64, 16] .* float32[64, 8]"),
    (lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=x.sharding),
     "float32[64, 16] .* bfloat16[64, 16]"),
    (lambda x: None, "float32[64, 16] .* missing"),
    (lambda x: {"a": x}, "missing .* float32[64, 16]"),
])
def test_mismatch(store, capfd, change, message):
    state = saved(store, 1)
    target = abstract(state, shardings(state, 1, 1))
    target.params["embed"]["table"] = change(target.params["embed"]["table"])
    pattern = message.replace("[", r"\[").replace("]", r"\]")
    with pytest.raises(UserError, match=f"^params/embed/table(/a)?: is {pattern} in this run; build the model"):
        store.restore(1, target)
    assert capfd.readouterr().err == ""


def test_unreadable(tmp_path, store, capfd):
    state = saved(store, 1, 2)
    target = abstract(state, shardings(state, 8, 1))
    for manifest in (tmp_path / "checkpoints" / "2").rglob("manifest.ocdbt"):
        manifest.write_bytes(b"\0" * 100)
    fresh = CheckpointManager(tmp_path / "checkpoints", keep=2)
    with pytest.raises(UserError, match=r"^checkpoint: .*/2 cannot be read \(") as error:
        fresh.restore(2, target)
    assert len(str(error.value)) < 600
    with pytest.raises(UserError, match=r"^checkpoint: there is no .*/4;"):
        fresh.restore(4, target)
    with pytest.raises(UserError, match=r"^checkpoint: there is no .*/4;"):
        fresh.meta(4)
    assert_same(fresh.restore(1, target), state)
    fresh.close()
    assert capfd.readouterr().err.count("\n") < 5


def test_a_failed_restore_has_no_echoes(tmp_path, store, monkeypatch):
    """Orbax alone prints a traceback for each of the other arrays, some time after the error."""
    state, seen = saved(store, 1, 2), []
    target = abstract(state, shardings(state, 1, 1))
    hook = seen.append
    monkeypatch.setattr(sys, "unraisablehook", hook)
    store.restore(1, target)
    assert sys.unraisablehook is hook
    for manifest in (tmp_path / "checkpoints" / "2").rglob("manifest.ocdbt"):
        manifest.write_bytes(b"")
    with pytest.raises(UserError, match="cannot be read"):
        CheckpointManager(tmp_path / "checkpoints").restore(2, target)
    echo, other = (SimpleNamespace(exc_value=RuntimeError(text)) for text in ("Event loop is closed", "other"))
    sys.unraisablehook(echo)
    sys.unraisablehook(other)
    assert echo not in seen and other in seen


def test_unwritable(tmp_path):
    (tmp_path / "file").write_text("in the way")
    store = CheckpointManager(tmp_path / "file" / "checkpoints")
    assert store.latest() is None
    with pytest.raises(UserError, match=r"^--workdir: .* cannot be written"):
        store.save(1, make_state())


@pytest.mark.parametrize("name", ["a%20b", "a#b?c|d", "a b*{c}::ü"])
def test_any_folder_keeps_good_checkpoints(tmp_path, name):
    with contextlib.closing(CheckpointManager(tmp_path / name / "checkpoints")) as store:
        store.save(1, {"a": jnp.ones(3)})
        store.wait()
    assert verify.verify(tmp_path / name / "checkpoints", 1) == []


@pytest.mark.parametrize("name", ["run[1]", "a\\b"])
def test_a_folder_that_orbax_cannot_use_is_refused(tmp_path, name):
    with pytest.raises(UserError, match=r"--workdir: Orbax cannot restore checkpoints in .*; give a folder"):
        CheckpointManager(tmp_path / name / "checkpoints")


@pytest.mark.slow
def test_quiet(tmp_path):
    code = """
import logging, sys, absl.logging, jax.numpy as jnp
logging.basicConfig(level=logging.INFO)
absl.logging.set_verbosity(absl.logging.INFO)
from jaxtrain.checkpoint import CheckpointManager, verify
store = CheckpointManager(sys.argv[1])
store.save(1, {"a": jnp.ones(3)})
store.close()
absl.logging.info("from somebody else")
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == ""
    assert [line for line in done.stderr.splitlines() if "jax" not in line] == ["INFO:absl:from somebody else"]


@pytest.mark.slow
def test_killed_in_the_midst_of_a_save(tmp_path, forked):
    code = """
import os, signal, sys, time, jax, jax.numpy as jnp
from types import SimpleNamespace
from jaxtrain.checkpoint import CheckpointManager, verify
from jaxtrain.checkpoint.orbax import deferred_json
store = CheckpointManager(sys.argv[1])
state = {"w": jnp.arange(1 << 24, dtype=jnp.float32), "step": jnp.int32(1)}
store.save(1, state)
store.wait()
deferred_json.json = SimpleNamespace(dumps=lambda content: time.sleep(100))  # without it nothing is complete
store.save(2, jax.tree.map(lambda x: x + 1, state))
while not any("tmp" in name for name in os.listdir(sys.argv[1])):
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""
    folder = tmp_path / "checkpoints"
    done = forked(["-c", code, folder], ROOT, {**os.environ, "XLA_FLAGS": ""}, timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert any("tmp" in path.name for path in folder.iterdir())  # it was in the midst
    state = {"w": jnp.arange(1 << 24, dtype=jnp.float32), "step": jnp.int32(1)}
    store = CheckpointManager(folder)
    assert store.latest() == 1
    assert_same(store.restore(1, abstract(state, shardings(state, 8, 1))), state)
    store.save(3, state)
    store.close()
    assert store.latest() == 3 and sorted(path.name for path in folder.iterdir()) == ["1", "3"]  # half of 2 is gone


@pytest.mark.slow
def test_two_processes(tmp_path, forked):
    """Both make all calls; each writes its shards, and the numbers are there on one process with another mesh."""
    code = """
import sys, jax, numpy as np
from pathlib import Path
from types import SimpleNamespace
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxtrain.checkpoint import CheckpointManager, verify
from jaxtrain.checkpoint.orbax import deferred_json
from jaxtrain.errors import UserError
from tests.tiny import ROOT, free_address
from jaxtrain.distributed.coordination import together
jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", num_processes=2, process_id=int(sys.argv[3]))
where = NamedSharding(jax.make_mesh((4,), ("data",)), P("data"))
w = np.arange(32, dtype=np.float32)
state = {"w": jax.make_array_from_callback(w.shape, where, lambda index: w[index])}
store = CheckpointManager(sys.argv[1])
target = {"w": jax.ShapeDtypeStruct((32,), np.float32, sharding=where)}
written, json = [], deferred_json.json
deferred_json.json = SimpleNamespace(dumps=lambda content: written.append(content) or json.dumps(content))
store.save(1, state, {"n": 1})
store.wait()
# One process writes the fingerprint: another would empty it for a moment, when it may be read back.
assert len(written) == (jax.process_index() == 0)
restored = store.restore(1, target)
assert store.latest() == 1 and store.meta(1) == {"n": 1}
# Both read their share back, and the record has all files.
assert set(verify.good(sys.argv[1], 1)["files"]) == set(verify.list_files(Path(sys.argv[1]) / "1")[0])
for step in (2, 3):
    store.save(step, state, {"n": step})
store.wait()
if jax.process_index() == 0:
    file = max((Path(sys.argv[1]) / "3").rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    (Path(sys.argv[1]) / "2" / "good.json").unlink()
together("damaged", None, list)
fresh = CheckpointManager(sys.argv[1])
assert fresh.newest() == 2 and verify.good(sys.argv[1], 2)
assert fresh.restore_newest(target)[0] == 2
# What one process alone cannot load nobody goes on with, and nobody waits for it.
store.save(4, state, {"n": 4})
store.wait()
if jax.process_index() == 1:
    import orbax.checkpoint as ocp

    def broken(self, folder, args, restore=ocp.PyTreeCheckpointHandler.restore):
        if Path(folder).parent.name == "4":
            raise ValueError("no such codec here")
        return restore(self, folder, args=args)

    ocp.PyTreeCheckpointHandler.restore = broken
assert fresh.restore_newest(target)[0] == 2 and (Path(sys.argv[1]) / "4.damaged").exists()
# Who does not see the files says so; nothing is taken for damaged.
store.save(5, state, {"n": 5})
store.wait()
verify._SEEN_S, seen = 0.1, verify.unseen
verify.unseen = lambda folder, files: seen(folder, [*files, "late"])
try:
    fresh.newest()
    raise SystemExit("not noticed")
except UserError as error:
    assert f"process 1 does not see {sys.argv[1]}/5/late" in str(error)
verify.unseen = seen
assert fresh.newest() == 5
try:
    together("refused", None, lambda _: 1 / 0)
except (ZeroDivisionError, OSError) as error:
    assert "division by zero" in str(error)
assert fresh.restore_newest(target, below=2) is None
assert all((a.data == b.data).all() for a, b in zip(restored["w"].addressable_shards, state["w"].addressable_shards))
store.close()
"""
    port = free_address().rpartition(":")[2]
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    processes = [forked.start(["-c", code, tmp_path / "c", port, i], ROOT, env) for i in range(2)]
    try:
        errors = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
    assert "checkpoint 3 is damaged" in errors[0] and "damaged" not in errors[1]  # one of them speaks
    state = {"w": jnp.arange(32, dtype=jnp.float32)}
    store = CheckpointManager(tmp_path / "c")
    assert_same(store.restore(2, abstract(state, shardings(state, 8, 1))), state)
    store.close()


def test_a_lost_connection_is_no_damage(store, monkeypatch):
    def torn(*_, **__):
        raise RuntimeError("restoring") from jax.errors.JaxRuntimeError("Gloo context initialization failed")

    where = shardings(state := make_state(), 2, 2)
    store.save(1, jax.device_put(state, where))
    store.wait()
    monkeypatch.setattr(orbax.checkpoint.Checkpointer, "restore", torn)
    with pytest.raises(RuntimeError, match="restoring"):
        store.restore_newest(abstract(state, where))
    assert store.steps() == [1]
