"""The language models of multimodal folders: logits of transformers, what is said of other parts, further tokens."""

import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxtrain.config.family import config_of
from jaxtrain.hf.hf_config import model_section
from tests.hub import published
from tests.hub.published_models import loaded, logits
from tests.tiers import slow

TRUTH = json.loads((Path(__file__).parents[1] / "wrapper_truth.json").read_text())
QWEN = TRUTH["qwen3_5"]


@pytest.mark.parametrize(("name", "others", "tied"), [
    ("qwen3_5_moe", "visual", False),
    ("mistral3_own_head", "multi_modal_projector and vision_tower", False),
    *slow(("qwen3_5", "visual", False), ("gemma3", "multi_modal_projector and vision_tower", True),
          ("mistral3", "multi_modal_projector and vision_tower", True),
          ("llama4", "multi_modal_projector and vision_model", False))])
def test_text_has_the_logits_of_transformers_and_other_parts_are_said_to_be_left_out(name, others, tied, tmp_path,
                                                                                     capsys):
    run, params = loaded(published.write(tmp_path, TRUTH[name]))
    said = capsys.readouterr().err
    assert said == f"{tmp_path} has a multimodal model, of which the language model is read, without {others}\n"
    wanted = np.asarray(TRUTH[name]["logits"]).reshape(*published.TOKENS.shape, -1)
    assert np.abs(logits(run, params) - wanted).max() < 1e-5 * np.abs(wanted).max()
    assert run.config.model.tied_embeddings == tied


def test_an_index_tells_of_an_output_projection_as_a_single_file_does(tmp_path):
    published.write(tmp_path, TRUTH["mistral3"])
    assert config_of(model_section(tmp_path)).tied_embeddings
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {
        "language_model.lm_head.weight": "model-00001-of-00001.safetensors"}}))
    assert not config_of(model_section(tmp_path)).tied_embeddings


@pytest.mark.parametrize("keys", [{}, {"mtp_loss_weight": 0.3}])
def test_layers_for_further_tokens_are_read_where_the_model_has_a_weight_for_their_loss(keys, tmp_path):
    layer = re.compile(r"model\.language_model\.layers\.1\.")
    tensors = QWEN["tensors"] | {layer.sub("mtp.layers.0.", name): shape for name, shape in QWEN["tensors"].items()
                                 if layer.match(name)} | {"mtp.fc.weight": [16, 32]} | {
        f"mtp.{name}.weight": [16] for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")}
    run, params = loaded(published.write(tmp_path, QWEN | {"tensors": tensors}), keys)
    assert run.config.model.mtp_layers == 1
    assert bool(keys) == ("ahead" in params)
    if keys:
        whole = published.weight("mtp.fc.weight", (16, 32))
        np.testing.assert_array_equal(jax.device_get(params["ahead"]["next"]["kernel"]), whole[:, :16].T)
