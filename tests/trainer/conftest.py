"""Runs on two devices: one that the tests of what watches a run share, and all that are started on so few."""

import importlib
import json

import jax
import pytest

from jaxtrain.builder import build
from jaxtrain.config.load import load_config
from tests.tiny import devices, tiny_flags

TWO = ["model.num_layers=1", "model.embed_dim=16", "model.mlp_dim=32", "model.num_heads=2", "model.max_seq_len=16",
       "data.seq_len=16", "data.global_batch_size=4", "train.progress=false", "train.eval_every=0", "mesh.data=1",
       "mesh.fsdp=2"]


@pytest.fixture(scope="module")
def on_two():
    """All runs of a module's own process have two devices."""
    with devices(2):
        yield


@pytest.fixture(scope="module")
def built_once():
    """Runs of a module that have the same config are one `Run`, which traces its programs once."""
    loop, made = importlib.import_module("jaxtrain.trainer.loop"), {}

    def of(config, **parts):
        name = json.dumps(config.to_dict(), sort_keys=True)
        if name not in made:
            made[name] = build(config, **parts)
        return made[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "build", of)
        yield of


@pytest.fixture(scope="session")
def two(tmp_path_factory):
    """The run."""
    config, *words = tiny_flags(tmp_path_factory, TWO, lines=50)
    overrides = dict(word.removeprefix("--config.").split("=", 1) for word in words)
    return build(load_config(config.removeprefix("--config="), overrides), devices=jax.devices()[:2])
