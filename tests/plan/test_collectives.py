"""Collectives read from the traced step are those that XLA makes of it, to the byte except for scalars."""

import jax
import pytest

from jaxtrain.config.load import load_config
from jaxtrain.plan.compiler import compile_step
from jaxtrain.plan.estimate import estimate
from jaxtrain.plan.targets import TARGETS
from tests.tiers import exhaustive, slow

SMALL = {"mesh.data": -1, "mesh.fsdp": 1, "data.global_batch_size": 32, "train.accumulation": 1, "model.num_layers": 2,
         "model.num_heads": 8, "model.num_kv_heads": 4, "train.remat": "none"}
LAYOUTS = [
    *slow({"mesh.data": 8, "optimizer.zero_stage": 1}, {"mesh.stage": 2, "mesh.fsdp": 2, "pipeline.microbatches": 4}),
    *exhaustive({}, {"mesh.fsdp": 2, "mesh.tensor": 2, "train.remat": "full"}, {"mesh.fsdp": 8}, {"mesh.tensor": 4},
                {"mesh.fsdp": 8, "optimizer.offload": True}),
]


@pytest.mark.parametrize("keys", LAYOUTS, ids=lambda keys: "-".join(map(str, keys.values())) or "data")
def test_collectives_are_those_that_are_compiled(keys):
    config = load_config("configs/llama3_8b.py:tiny", {**SMALL, **keys})
    guess = estimate(config, TARGETS["cpu"], jax.device_count())
    real = compile_step(config, TARGETS["cpu"], jax.device_count())
    kinds = {kind for kind, _ in (*guess.talked, *real.talked)}
    for kind in kinds:
        mine, theirs = (sum(size for (one, _), size in talked.items() if one == kind)
                        for talked in (guess.talked, real.talked))
        # 2 %, and what is smaller than a kilobyte or two: norms and scalars, which XLA joins as it likes.
        assert abs(mine - theirs) <= 0.02 * theirs + 4096, f"{kind}: {mine:,} predicted, {theirs:,} compiled"
    assert real.talked, "a mesh of several devices that do not talk"
