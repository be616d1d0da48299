"""Experts in MXFP4 are the numbers that the format's bits mean, whichever slices a mesh takes."""

import json
import math
import struct

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.checkpoint.trees import flatten
from jaxtrain.hf.hf_config import model_section
from jaxtrain.hub.weights import mxfp4, published_weights, safetensors_files
from tests.hub import published
from tests.hub.cases import CASES

CONFIG = CASES["gpt_oss"][1] | {
    "hidden_size": 64, "intermediate_size": 32, "model_type": "gpt_oss", "num_local_experts": 4,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}


def value_of(bits: int, scale: int) -> float:
    """The number that four bits and a scale mean, read off the specification's words: sign, exponent, mantissa."""
    sign, exponent, mantissa = bits >> 3, bits >> 1 & 3, bits & 1
    magnitude = 2.0 ** (exponent - 1) * (1 + mantissa / 2) if exponent else mantissa / 2
    return (-1) ** sign * magnitude * 2.0 ** (scale - 127)


def dequantized(blocks, scales):
    """Value by value: [experts, outputs, blocks, 16] and [experts, outputs, blocks] -> [experts, inputs, outputs]."""
    experts, outputs, groups, _ = blocks.shape
    out = np.empty((experts, groups * 32, outputs))
    for e, o, g, n in np.ndindex(experts, outputs, groups, 32):
        byte = int(blocks[e, o, g, n // 2])
        out[e, g * 32 + n, o] = value_of(byte >> 4 if n % 2 else byte & 15, int(scales[e, o, g]))
    return out


def write(path, tensors):
    """A safetensors file, bytes included."""
    names = {np.dtype(np.uint8): "U8", np.dtype(np.float32): "F32"}
    header, at = {}, 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": names[tensor.dtype], "shape": tensor.shape, "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensor.tobytes() for tensor in tensors.values()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose experts are packed; -> the folder, and the experts' matrices by the names of unpacked ones."""
    folder, rng = tmp_path_factory.mktemp("packed"), np.random.default_rng(0)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    run = built(folder)
    shapes = {}
    for entry in published_weights.entries(run.config.model):
        leaf = flatten(run.abstract.params)[entry.ours]
        shapes |= {name: published_weights.published_shape(entry, leaf.shape)
                   for name, _ in published_weights.names(entry, leaf.shape)}
    tensors, plain = {}, {}
    for name, shape in shapes.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = shape
            blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16)).astype(np.uint8)
            scales = rng.integers(110, 140, blocks.shape[:-1]).astype(np.uint8)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            plain[name] = dequantized(blocks, scales)
        else:
            tensors[name] = plain[name] = published.weight(name, shape)
    write(folder / safetensors_files.SINGLE, tensors)
    return folder, plain


def built(folder, **mesh):
    config = {"model": model_section(folder), "data": {"seq_len": 8, "global_batch_size": 8},
              "mesh": mesh or {"data": 1}}
    return jt.build(jt.make_config(config), devices=jax.devices()[:math.prod(mesh.values())])


@pytest.mark.parametrize("mesh", [{}, pytest.param({"fsdp": 4, "tensor": 2}, marks=pytest.mark.slow),
                                  pytest.param({"expert": 4, "fsdp": 2}, marks=pytest.mark.slow)], ids=str)
def test_packed_experts_are_read_and_written_as_plain_ones(folder, mesh, tmp_path):
    run = built(folder[0], **mesh)
    params = published_weights.load(folder[0], run.config.model, run.abstract.params)
    published_weights.save(params, run.config.model, tmp_path, np.float32, 10**9)
    found = safetensors_files.tensors_of(tmp_path)
    assert found.keys() == folder[1].keys()
    for name, want in folder[1].items():
        np.testing.assert_array_equal(found[name].view(), want, err_msg=name)


def test_any_slice_is_that_of_the_whole(folder):
    tensors = mxfp4.joined(folder[0], safetensors_files.tensors_of(folder[0]))
    name, rng = "model.layers.1.mlp.experts.gate_up_proj", np.random.default_rng(1)
    for _ in range(20):
        bounds = [sorted(rng.integers(0, size + 1, 2)) for size in (4, 64, 32)]
        index = tuple(slice(*map(int, pair)) for pair in bounds)
        np.testing.assert_array_equal(tensors[name].read(index, (1, 2)), folder[1][name][:, :, 1::2][index])


def test_every_byte_is_what_transformers_makes_of_it():
    torch = pytest.importorskip("torch")
    theirs = pytest.importorskip("transformers.integrations.mxfp4")
    rng = np.random.default_rng(2)
    blocks = rng.permuted(np.arange(4 * 256) % 256).astype(np.uint8).reshape(2, 8, 4, 16)
    scales = rng.integers(100, 150, (2, 8, 4)).astype(np.uint8)
    got = theirs.convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32)
    np.testing.assert_array_equal(got.numpy(), dequantized(blocks, scales))


@pytest.mark.parametrize("change", ["no scales", "other scales", "plain numbers"])
def test_blocks_that_do_not_fit_are_refused_by_name(tmp_path, change):
    blocks, scales = np.zeros((2, 8, 2, 16), np.uint8), np.zeros((2, 8, 2), np.uint8)
    write(tmp_path / safetensors_files.SINGLE, {"a_blocks": blocks} | {
        "no scales": {}, "other scales": {"a_scales": scales[:, :4]},
        "plain numbers": {"a_scales": scales.astype(np.float32)}}[change])
    with pytest.raises(jt.UserError, match="a_blocks and a_scales are not a matrix of each expert in MXFP4"):
        mxfp4.joined(tmp_path, safetensors_files.tensors_of(tmp_path))
