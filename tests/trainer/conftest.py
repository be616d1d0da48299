"""A run on two devices that the tests of what watches a run share, so that it is compiled once."""

import jax
import pytest

from jaxtrain.builder import build
from jaxtrain.config.load import load_config
from tests.tiny import tiny_flags

TWO = ["model.num_layers=1", "model.embed_dim=16", "model.mlp_dim=32", "model.num_heads=2", "model.max_seq_len=16",
       "data.seq_len=16", "data.global_batch_size=4", "train.progress=false", "train.eval_every=0", "mesh.data=1",
       "mesh.fsdp=2"]


@pytest.fixture(scope="session")
def two(tmp_path_factory):
    """The run."""
    config, *words = tiny_flags(tmp_path_factory, TWO, lines=50)
    overrides = dict(word.removeprefix("--config.").split("=", 1) for word in words)
    return build(load_config(config.removeprefix("--config="), overrides), devices=jax.devices()[:2])
