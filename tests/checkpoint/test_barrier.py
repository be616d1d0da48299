"""A save that one process alone cannot write: nobody waits for it, the run goes on, and the next one is whole."""

import os
import re
import subprocess
import sys

import pytest

from jaxtrain.checkpoint import verify
from tests.tiny import free_address

CODE = """
import sys, jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import orbax.checkpoint as ocp
from jaxtrain.checkpoint import Checkpoints, verify
folder, address, me, who = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
jax.distributed.initialize(address, num_processes=2, process_id=me)
w = np.arange(32, dtype=np.float32)
where = NamedSharding(jax.make_mesh((4,), ("data",)), P("data"))
state = {"w": jax.make_array_from_callback(w.shape, where, lambda index: w[index])}
failing = {1: who, 2: 1 - who}  # of each save: it does not matter whose disk is full

async def save(self, *args, original=ocp.StandardCheckpointHandler.async_save, **keys):
    async def fail():
        raise OSError(28, "No space left on device")

    futures = list(await original(self, *args, **keys))
    if failing.get(step) == me:
        futures.append(ocp.future.CommitFutureAwaitingContractedSignals(fail(), name="full"))
    return futures

ocp.StandardCheckpointHandler.async_save = save
store = Checkpoints(folder)
for step in (1, 2, 3):
    store.save(step, state)
    for job in store._jobs:
        job.thread.join()
    assert store.failed() == (step < 3), step
    assert verify.steps(folder) == ([3] if step == 3 else []), step
# What was exchanged about a save goes with the next one.
if me == 0:
    kept = jax._src.distributed.global_state.client.key_value_dir_get("jaxtrain/checkpoint/")
    assert len({key.split("/")[2] for key, _ in kept if "/barrier/" in key}) == 1, kept
store.close()
"""


@pytest.mark.parametrize("who", [0, 1])
def test_a_write_that_fails_in_one_process_alone(tmp_path, who):
    address = free_address()
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    processes = [subprocess.Popen([sys.executable, "-c", CODE, tmp_path, address, str(i), str(who)], env=env,
                                  stderr=subprocess.PIPE, text=True) for i in range(2)]
    try:
        errors = [process.communicate(timeout=60)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
    for step, process in ((1, who), (2, 1 - who)):
        where = f" in process {process}" if process else ""  # process 0 tells, and knows its own
        assert re.search(rf"checkpoint {step} could not be saved \(.*No space left on device{where}\);", errors[0])
    assert "could not be saved" not in errors[1]  # one of them speaks
    assert verify.good(tmp_path, 3)
