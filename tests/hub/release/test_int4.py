"""Linear layers in 4 bits: the form, GPTQ's rounding, and what transformers makes of it, where it is installed."""

import json

import numpy as np
import pytest

from jaxtrain.commands import quantize
from jaxtrain.errors import UserError
from jaxtrain.hub.release import calibration, gptq, int4_folder
from jaxtrain.hub.weights import safetensors_files
from tests.hub import published
from tests.hub.release.test_gguf import CONFIG, folder_of, shapes, small

NAME = "model.layers.1.mlp.down_proj.weight"


def unpacked(folder, name):
    """The matrix that a folder's numbers and scales stand for."""
    tensors = safetensors_files.tensors_of(folder)
    words, scales, shape = (tensors[f"{name}_{part}"].view(safetensors_files.DTYPES | safetensors_files.OTHERS)
                            for part in ("packed", "scale", "shape"))
    numbers = (words.view(np.uint32)[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15).reshape(shape).astype(int)
    scales = scales.astype(np.float32)
    return (numbers - 8) * scales.repeat(shape[1] // scales.shape[1], 1)


def test_a_folder_has_what_it_is_rounded_to(tmp_path):
    folder, to = folder_of(tmp_path, "llama"), tmp_path / "int4"
    assert quantize.main([f"{folder}", f"--output={to}", "--format=int4", "--group=32"]) == 0
    config = json.loads((to / "config.json").read_text())
    assert config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] == 32
    tensors = safetensors_files.tensors_of(to)
    assert sum(name.endswith("_packed") for name in tensors) == 14 and "lm_head.weight" in tensors
    want, got = published.weight(NAME, shapes(CONFIG)[NAME]), unpacked(to, NAME)
    steps = np.abs(want.reshape(64, -1, 32)).max(2).repeat(32, 1) / 7
    assert (np.abs(got - want) <= 0.52 * steps).all()
    assert json.loads((to / "export.json").read_text())["rounding"] == "nearest"


def test_gptq_changes_products_with_its_inputs_less_than_rounding_to_the_nearest():
    draw = np.random.default_rng(0)
    inputs = draw.standard_normal((512, 16)) @ draw.standard_normal((16, 64)) + 0.1 * draw.standard_normal((512, 64))
    matrix = draw.standard_normal((24, 64)).astype(np.float32)

    def error(*moments):
        numbers, scales = gptq.rounded(matrix, 32, *moments)
        assert numbers.min() >= -8 and numbers.max() <= 7
        return np.linalg.norm(inputs @ (numbers * scales.repeat(32, 1) - matrix).T)

    # Columns that are read independently have no errors to make up for.
    np.testing.assert_array_equal(gptq.rounded(matrix, 32)[0], gptq.rounded(matrix, 32, np.eye(64))[0])
    assert error(inputs.T @ inputs) < 0.5 * error()


@pytest.mark.slow
def test_moments_are_those_of_what_each_layer_reads(tmp_path):
    """The first layer's queries read the normalised embeddings, which NumPy computes here."""
    folder = folder_of(tmp_path, "llama")
    tokens = np.random.default_rng(1).integers(0, 96, (3, 8))
    found = calibration.moments_of(folder, tokens)
    assert {*found} == {name for name in shapes(CONFIG) if "_proj" in name}
    x = published.weight("model.embed_tokens.weight", (96, 64))[tokens.reshape(-1)]
    name = "model.layers.0.input_layernorm.weight"
    x = x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-5) * published.weight(name, (64,))
    for part in "qkv":
        np.testing.assert_allclose(found[f"model.layers.0.self_attn.{part}_proj.weight"], x.T @ x, rtol=1e-4, atol=1e-3)
    assert np.abs(found["model.layers.1.self_attn.q_proj.weight"] - x.T @ x).max() > 1


def test_a_group_that_does_not_divide_is_refused(tmp_path):
    with pytest.raises(UserError, match="no multiple of 48"):
        int4_folder.write(folder_of(tmp_path, "llama"), tmp_path / "out", 48)
    assert not (tmp_path / "out").exists()


def test_transformers_reads_a_model_that_gptq_changes_less(tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    folder = folder_of(tmp_path, "llama", small)
    tokens = np.random.default_rng(1).integers(0, 96, (16, 32))

    def logits(where):
        model = transformers.AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32)
        with torch.no_grad():
            return model(torch.tensor(tokens)).logits.numpy()

    want, errors = logits(folder), []
    for name, moments in (("nearest", None), ("gptq", calibration.moments_of(folder, tokens))):
        int4_folder.write(folder, tmp_path / name, 32, moments)
        errors.append(np.linalg.norm(logits(tmp_path / name) - want) / np.linalg.norm(want))
    assert errors[1] < 0.85 * errors[0] < 0.3
