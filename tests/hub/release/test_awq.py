"""Linear layers in AWQ's 4 bits: what the numbers stand for, by the published formula and by another's reader."""

import json

import numpy as np
import pytest

from jaxtrain.commands import quantize
from jaxtrain.errors import UserError
from jaxtrain.hub.release import awq, awq_folder, calibration
from jaxtrain.hub.weights import safetensors_files
from tests.hub.release.test_gguf import CONFIG, folder_of, shapes, small

GROUP = 32
UP, DOWN, NORM = (f"model.layers.1.{name}" for name in ("mlp.up_proj", "mlp.down_proj", "post_attention_layernorm"))


@pytest.fixture
def exported(tmp_path):
    """A folder, and the same in AWQ's format by drawn moments."""
    folder, draw = folder_of(tmp_path, "llama", small), np.random.default_rng(0)
    moments = {}
    for name, shape in shapes(CONFIG).items():
        if "_proj" in name:
            x = draw.standard_normal((200, shape[1])) * np.exp(draw.standard_normal(shape[1]))
            moments[name] = (x.T @ x).astype(np.float32)
    for layer in range(2):  # layers that read the same inputs have the same moments
        at = f"model.layers.{layer}"
        for name in ("k", "v"):
            moments[f"{at}.self_attn.{name}_proj.weight"] = moments[f"{at}.self_attn.q_proj.weight"]
        moments[f"{at}.mlp.up_proj.weight"] = moments[f"{at}.mlp.gate_proj.weight"]
    awq_folder.write(folder, tmp_path / "awq", GROUP, moments)
    return folder, tmp_path / "awq", moments


def view(folder, name):
    return safetensors_files.tensors_of(folder)[name].view(safetensors_files.DTYPES | safetensors_files.OTHERS)


def matrix(folder, layer):
    """The matrix [in, out] of a layer: each word has eight outputs, in the order of the kernels of its authors."""
    words, zeros, scales = (view(folder, f"{layer}.{part}") for part in ("qweight", "qzeros", "scales"))

    def unpacked(x):
        found = np.zeros((len(x), 8 * x.shape[1]), np.int64)
        for place, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            found[:, column::8] = x.astype(np.int64) >> 4 * place & 15
        return found

    return (unpacked(words) - unpacked(zeros).repeat(GROUP, 0)) * scales.astype(np.float64).repeat(GROUP, 0)


def test_layers_and_what_is_before_them_together_compute_what_they_did(exported):
    folder, to, _ = exported
    described = json.loads((to / "config.json").read_text())["quantization_config"]
    assert (described["quant_method"], described["version"], described["bits"]) == ("awq", "gemm", 4)
    norm, before = view(to, f"{NORM}.weight"), view(folder, f"{NORM}.weight")
    assert norm.dtype == before.dtype and np.abs(norm / before - 1).max() > 0.1, "the norm has scales"
    scales = (before.astype(np.float64) / norm)[:, None]
    for layer, rows in ((UP, scales), (DOWN, 1)):
        got, want = matrix(to, layer), view(folder, f"{layer}.weight").T * rows
        if layer == UP:  # its outputs are divided by what the next layer's inputs are multiplied by
            ratio = np.median(got / want, 0)
            want = want * ratio
        else:
            want = want / ratio[:, None]
        steps = (view(to, f"{layer}.scales").astype(np.float64)).repeat(GROUP, 0)
        assert (np.abs(got - want) <= 0.6 * steps).mean() > 0.97 and np.ptp(ratio) > 0.1
    np.testing.assert_array_equal(view(to, "lm_head.weight"), view(folder, "lm_head.weight"))


def test_scales_of_inputs_change_products_less_than_rounding_alone():
    draw = np.random.default_rng(0)
    sizes = np.exp(2 * draw.standard_normal(64))
    inputs = draw.standard_normal((512, 64)) * sizes
    weights = draw.standard_normal((48, 64)).astype(np.float32)

    def error(scales):
        got = awq.restored(*awq.rounded(weights * scales, GROUP), GROUP) / scales
        return np.linalg.norm(inputs @ (got - weights).T)

    scales = awq.input_scales([weights[:16], weights[16:]], GROUP, inputs.T @ inputs)
    assert error(scales) < 0.7 * error(np.ones(64, np.float32))
    assert np.corrcoef(np.log(scales), np.log(sizes))[0, 1] > 0.9
    numbers, zeros, _ = awq.rounded(weights, GROUP)
    assert numbers.max() == 15 and numbers.min() == 0 and zeros.min() > 0 and zeros.max() < 15


def test_what_it_cannot_do_is_refused(tmp_path, capsys):
    folder = folder_of(tmp_path, "llama")
    assert quantize.main([f"{folder}", f"--output={tmp_path / 'x'}", "--format=awq"]) == 2
    assert "--calibrate: awq scales inputs by what they are in a text" in capsys.readouterr().err
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "gemma3_text"}))
    with pytest.raises(UserError, match="awq does not know what scales the inputs of layers of gemma3_text"):
        awq_folder.write(folder, tmp_path / "x", GROUP, {})


def test_another_reader_unpacks_the_same_matrices(exported):
    torch = pytest.importorskip("torch")
    unpacking = pytest.importorskip("gptqmodel.quantization.awq.utils.packing_utils")
    _, to, _ = exported
    for layer in (UP, DOWN):
        parts = [torch.from_numpy(view(to, f"{layer}.{part}").copy()) for part in ("qweight", "qzeros", "scales")]
        found = unpacking.dequantize_gemm(*parts, 4, GROUP)
        np.testing.assert_allclose(found.float().numpy(), matrix(to, layer), rtol=2e-3, atol=1e-4)


@pytest.mark.slow
def test_transformers_reads_a_model_that_scales_change_less(tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("gptqmodel")
    folder = folder_of(tmp_path, "llama", uneven)
    tokens = np.random.default_rng(1).integers(0, 96, (16, 32))

    def logits(where):
        how = {} if where == folder else {"quantization_config": transformers.AwqConfig(backend="torch_awq")}
        model = transformers.AutoModelForCausalLM.from_pretrained(where, dtype=torch.float16, device_map="cpu", **how)
        with torch.no_grad():
            return model(torch.tensor(tokens)).logits.float().numpy()

    want, moments = logits(folder), calibration.moments_of(folder, tokens)
    awq_folder.write(folder, tmp_path / "awq", GROUP, moments)
    awq_folder.write(folder, tmp_path / "plain", GROUP, {name: np.eye(len(one)) for name, one in moments.items()})
    scaled, plain = (np.linalg.norm(logits(tmp_path / name) - want) / np.linalg.norm(want) for name in ("awq", "plain"))
    print(f"logits apart: with scales {scaled:.4f}, without {plain:.4f}")
    assert scaled < 0.9 * plain < 0.4


def uneven(name, shape):
    """Inputs of layers of very different sizes, by the norms."""
    x = small(name, shape)
    if "layernorm" not in name:
        return x
    return x * np.exp(np.random.default_rng(len(name)).standard_normal(shape)).astype(x.dtype)
