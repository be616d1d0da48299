"""gpt-oss on meshes: sinks, biases of experts and layers by turns give the numbers of the plain model."""

import pytest

import jaxtrain as jt
from jaxtrain.models.gpt_oss import GptOssConfig
from tests.composition import fuzz

# Every second of five layers is global: both stages hold layers of both kinds, and one an empty slot.
CASES = [
    {"mesh.tensor": 4, "mesh.fsdp": 2, "train.remat": "full"},
    {"mesh.expert": 2, "mesh.tensor": 2, "mesh.fsdp": 2, "train.accumulation": 2},
    {"mesh.context": 4, "mesh.tensor": 2, "mesh.context_strategy": "ring", "train.remat": "attention"},
    {"mesh.context": 2, "mesh.tensor": 2, "mesh.expert": 2, "mesh.context_strategy": "ulysses"},
    {"mesh.context": 2, "mesh.tensor": 2, "mesh.context_strategy": "ulysses", "train.attention": "splash"},
    {"mesh.context": 4, "mesh.fsdp": 2, "mesh.context_strategy": "gather"},
    {"mesh.stage": 2, "mesh.expert": 2, "mesh.tensor": 2, "pipeline.schedule": "zb_h1"},
    {"mesh.stage": 2, "mesh.context": 2, "mesh.tensor": 2, "mesh.context_strategy": "ulysses"},
    {"mesh.tensor": 4, "model.num_kv_heads": 2, "mesh.overrides.kv_heads": "none",
     "mesh.overrides.act_kv_heads": "none", "model.capacity_factor": 0.75},
]


@pytest.mark.parametrize("keys", [
    pytest.param(case, marks=pytest.mark.exhaustive if i != 6 else pytest.mark.slow)
    for i, case in enumerate(CASES)], ids=str)
def test_any_mesh_gives_the_numbers_of_the_plain_model(keys):
    fuzz.check({f"mesh.{axis}": 1 for axis in fuzz.AXES} | {
        "family": "gpt_oss", "packing": True, "data.global_batch_size": fuzz.ROWS, "data.seq_len": fuzz.SEQ,
        "model.max_seq_len": fuzz.SEQ, "model.num_layers": 5, "train.precision": "float32",
        "value_and_grad": "mesh.stage" not in keys} | keys)


@pytest.mark.parametrize("field", ["window", "global_every", "num_experts", "swiglu_limit"])
def test_what_it_cannot_do_without(field):
    with pytest.raises(jt.UserError, match=f"model.{field}"):
        GptOssConfig(**{field: 0})
