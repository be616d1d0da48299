"""Models of images with two processes of two devices: the numbers of one process of four, and its checkpoints."""

import shutil
import signal
import time

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.checkpoint import CheckpointManager
from jaxtrain.distributed import exit_codes
from tests.data.prepare_sequences.drawn_images import folder_of
from tests.tiny import ROOT
from tests.trainer.test_multiprocess import ended, told, two_processes

pytestmark = pytest.mark.usefixtures("cache")
STEPS = 12
KEYS = ["model.patch_size=2", "model.patches_per_side=6", "model.num_layers=1",
        "model.embed_dim=32", "model.max_seq_len=32", "data.seq_len=32", "data.global_batch_size=4",
        'data.augment=["flip","colour"]', f"train.steps={STEPS}", "train.eval_every=0", "train.progress=false",
        "checkpoint.every=4", "checkpoint.keep=3"]
ENCODER, BOTH = ["model.image_layers=1", "model.image_embed_dim=32"], ["mesh.data=2", "mesh.fsdp=2"]
# Images and texts that are compared with one another go round all devices of both processes, here over `data` alone.
CONFIGS = {"siglip": ("siglip_b16", "text", [*ENCODER, "model.pooling=mean", "model.text_len=16", "mesh.data=4",
                                             "mesh.fsdp=1"]),
           "vision_language": ("vision_language", "text", [*ENCODER, *BOTH]),
           "image_flow": ("image_flow", "folder", BOTH)}


@pytest.mark.exhaustive  # test_multiprocess.py has the same with text, and test_image_patches.py rows of a process
@pytest.mark.parametrize("kind", CONFIGS)
def test_two_processes_go_on_from_one_and_one_from_two(kind, tmp_path):
    """One of the two gets a signal; then one process finishes it."""
    config, target, more = CONFIGS[kind]
    words = [*KEYS, *more, f"data.source={folder_of(tmp_path, target)}"]
    path = f"{ROOT}/configs/{config}.py:tiny"
    run = jt.build(jt.load_config(path, dict(word.split("=", 1) for word in words)), devices=jax.devices()[:4])
    alone, workdir = tmp_path / "alone", tmp_path / "work"
    whole = jt.train(run, alone)
    shutil.copytree(alone, workdir)
    for step in (8, STEPS):
        shutil.rmtree(workdir / "checkpoints" / f"{step}")
    flags = [f"--config={path}", *(f"--config.{word}" for word in words)]
    with two_processes(flags, workdir, seconds=0.5, devices=2) as both:
        end = time.monotonic() + 600
        while not 5 <= told(workdir)[-1]["step"] < STEPS and time.monotonic() < end and both[0].poll() is None:
            time.sleep(0.05)
        both[1].send_signal(signal.SIGTERM)
        outputs = ended(both)
    assert [process.returncode for process in both] == [exit_codes.SAVED] * 2, outputs
    assert 5 <= CheckpointManager(workdir / "checkpoints").latest() < STEPS
    parts = jt.train(run, workdir)
    ours, theirs = told(workdir), told(alone)
    assert [line["step"] for line in ours] == [*range(1, STEPS + 1), STEPS]  # the last is an evaluation
    for our, their in zip(ours, theirs, strict=True):
        assert our.keys() == their.keys()
        np.testing.assert_allclose(list(our.values()), list(their.values()), rtol=1e-5)
    for our, their in zip(*map(jax.tree.leaves, jax.device_get((parts.params, whole.params))), strict=True):
        # The gradient of a key's bias is rounding noise, and Adam enlarges it: hence the absolute part.
        np.testing.assert_allclose(our, their, rtol=1e-4, atol=1e-4)
