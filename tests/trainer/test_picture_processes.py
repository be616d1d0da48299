"""Models of pictures with two processes of four devices: the numbers of one process of eight, and its checkpoints."""

import shutil
import signal
import time

import numpy as np
import pytest

from jaxtrain.checkpoint import CheckpointManager
from jaxtrain.distributed import exit_codes
from jaxtrain.main import main
from tests.data.prepare_sequences.drawn_pictures import folder_of
from tests.tiny import ROOT
from tests.trainer.test_multiprocess import ended, told, two_processes

pytestmark = pytest.mark.usefixtures("cache")
STEPS = 8
# Ends of batches, rows of one picture's patches and the texts of all pairs are on devices of both processes.
KEYS = ["mesh.data=2", "mesh.fsdp=4", "model.patch_size=2", "model.patches_per_side=6", "model.num_layers=1",
        "model.embed_dim=32", "model.max_seq_len=32", "data.seq_len=32", "data.global_batch_size=8",
        'data.augment=["flip","colour"]', f"train.steps={STEPS}", "train.eval_every=4", "train.eval_batches=1",
        "checkpoint.every=4", "checkpoint.keep=3"]
CONFIGS = {"siglip": ("siglip_b16", "text"), "vision_language": ("vision_language", "text"),
           "picture_flow": ("picture_flow", "folder")}


@pytest.mark.parametrize("kind", [pytest.param("siglip", marks=pytest.mark.slow), *(
    pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ("vision_language", "picture_flow"))])
def test_two_processes_go_on_from_one_and_one_from_two(kind, tmp_path):
    """One of the two gets a signal; then one process finishes it."""
    config, target = CONFIGS[kind]
    more = ["model.picture_layers=1", "model.picture_embed_dim=32"] if kind != "picture_flow" else []
    source = f"data.source={folder_of(tmp_path, target)}"
    flags = [f"--config={ROOT}/configs/{config}.py:tiny", *(f"--config.{key}" for key in [*KEYS, *more, source])]
    alone, workdir = tmp_path / "alone", tmp_path / "work"
    assert main([*flags, f"--workdir={alone}"]) == 0
    shutil.copytree(alone, workdir)
    shutil.rmtree(workdir / "checkpoints" / f"{STEPS}")
    with two_processes(flags, workdir, seconds=0.5) as both:
        end = time.monotonic() + 600
        while not 5 <= told(workdir)[-1]["step"] < STEPS and time.monotonic() < end and both[0].poll() is None:
            time.sleep(0.05)
        both[1].send_signal(signal.SIGTERM)
        outputs = ended(both)
    assert [process.returncode for process in both] == [exit_codes.SAVED] * 2, outputs
    assert "resumed from step 4" in outputs[0]
    assert 5 <= CheckpointManager(workdir / "checkpoints").latest() < STEPS
    assert main([*flags, f"--workdir={workdir}"]) == 0
    ours, theirs = told(workdir), told(alone)
    assert len(ours) == STEPS + 2 and ours[-1].get("eval_loss")
    for our, their in zip(ours, theirs, strict=True):
        assert our.keys() == their.keys()
        np.testing.assert_allclose(list(our.values()), list(their.values()), rtol=1e-5)
