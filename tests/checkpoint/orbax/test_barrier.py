"""A save that one process alone cannot write: nobody waits for it, the run goes on, and the next one is whole."""

import os
import re

import pytest

from jaxtrain.checkpoint import verify
from tests.tiers import exhaustive, slow
from tests.tiny import ROOT, free_address

N = 3
CODE = """
import sys, time, jax, numpy as np
from pathlib import Path
from jax.sharding import NamedSharding, PartitionSpec as P
import orbax.checkpoint as ocp
from jaxtrain.checkpoint import CheckpointManager, fingerprint, manager
folder, address, me, what, who = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
jax.distributed.initialize(address, num_processes=3, process_id=me)
w = np.arange(24, dtype=np.float32)
where = NamedSharding(jax.make_mesh((3,), ("data",)), P("data"))
state = {"w": jax.make_array_from_callback(w.shape, where, lambda index: w[index])}
full, slow = OSError(28, "No space left on device"), []

def failing():
    return step == 1 and me == who

async def save(self, *args, original=ocp.StandardCheckpointHandler.async_save, **keys):
    async def fail():
        raise full

    async def dawdle():  # what this process still writes when another part of it has failed
        time.sleep(2)
        slow.append(list(Path(folder).glob("1*tmp*")))

    parts = list(await original(self, *args, **keys))
    if what == "write" and failing():
        parts += [ocp.future.CommitFutureAwaitingContractedSignals(part, name="full") for part in (fail(), dawdle())]
    return parts

def finalize(self, *args, original=ocp.CompositeCheckpointHandler.finalize, **keys):
    if what == "commit" and failing():
        raise full
    return original(self, *args, **keys)

def read(parts, original=fingerprint.read):
    if what == "sums" and failing():
        raise full
    return original(parts)

ocp.StandardCheckpointHandler.async_save = save
ocp.CompositeCheckpointHandler.finalize = finalize
manager.fingerprint.read = read
checkpoints = CheckpointManager(folder)
for step in (1, 2, 3, 4, 5):
    checkpoints.save(step, state)
    for job in checkpoints._jobs:
        job.thread.join()
    assert checkpoints.failed() == (step == 1), step
    assert checkpoints.latest() == (step if step > 1 else None), step
    if step == 1:
        assert me or not list(Path(folder).glob("*tmp*"))
if what == "write" and me == who:
    while not slow:
        time.sleep(0.1)
    assert slow[0], "the folder was taken away from under one that still wrote"
# What was exchanged about a save is forgotten, once the last process has read it.
if me == 0:
    while jax._src.distributed.global_state.client.key_value_dir_get("jaxtrain/checkpoint/"):
        time.sleep(0.1)
checkpoints.close()
"""


@pytest.mark.parametrize("what, who", [
    *slow(("sums", 1)), *exhaustive(("write", 0), ("commit", 0), ("write", 2), ("sums", 0))])
def test_a_save_that_fails_in_one_process_alone(tmp_path, forked, what, who):
    address = free_address()
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    processes = [forked.start(["-c", CODE, tmp_path, address, i, what, who], ROOT, env) for i in range(N)]
    try:
        errors = [process.communicate(timeout=300)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * N, "\n".join(errors)
    where = f" in process {who}" if who else ""  # process 0 tells, and knows its own
    assert re.search(rf"checkpoint 1 could not be saved \(No space left on device{where}: "
                     r"[\d,]+ bytes are needed, and [\d,]+ are free\);",
                     errors[0]), errors[0]
    assert not any("could not be saved" in error for error in errors[1:])  # one of them speaks
    assert verify.good(tmp_path, 5)
