"""GGUF files: every tensor is what the folder has, by a reader of our own; and by others' readers, where installed."""

import struct

import ml_dtypes
import numpy as np
import pytest

from jaxtrain.commands import quantize
from jaxtrain.errors import UserError
from jaxtrain.hub.release import gguf_file
from tests.hub import published

FLOATS = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
VALUES = {4: "<I", 5: "<i", 6: "<f", 7: "<?"}
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 96, "hidden_size": 64,
          "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
          "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "bos_token_id": 1,
          "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}}
KINDS = {"llama": {}, "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True, "architectures": [
    "Qwen2ForCausalLM"]}, "qwen3": {"model_type": "qwen3", "head_dim": 128, "architectures": ["Qwen3ForCausalLM"]}}


def shapes(config):
    """The tensors of a published folder."""
    wide, inner = config["hidden_size"], config["intermediate_size"]
    width = config.get("head_dim", wide // config["num_attention_heads"])
    q, k = (config[f"num_{name}_heads"] * width for name in ("attention", "key_value"))
    layer = {"self_attn.q_proj.weight": (q, wide), "self_attn.k_proj.weight": (k, wide),
             "self_attn.v_proj.weight": (k, wide), "self_attn.o_proj.weight": (wide, q),
             "mlp.gate_proj.weight": (inner, wide), "mlp.up_proj.weight": (inner, wide),
             "mlp.down_proj.weight": (wide, inner), "input_layernorm.weight": (wide,),
             "post_attention_layernorm.weight": (wide,)}
    if config["model_type"] == "qwen2":
        layer |= {f"self_attn.{n}_proj.bias": (size,) for n, size in (("q", q), ("k", k), ("v", k))}
    if config["model_type"] == "qwen3":
        layer |= {f"self_attn.{n}_norm.weight": (width,) for n in "qk"}
    found = {"model.embed_tokens.weight": (config["vocab_size"], wide), "model.norm.weight": (wide,)}
    found |= {f"model.layers.{n}.{name}": shape for n in range(config["num_hidden_layers"])
              for name, shape in layer.items()}
    return found if config["tie_word_embeddings"] else found | {"lm_head.weight": (config["vocab_size"], wide)}


def small(name, shape):
    """A tensor like those of a model that is trained: products keep the size of what they multiply."""
    return published.weight(name, shape) * np.float32(0.25 if len(shape) > 1 else 1)


def folder_of(path, kind, weight=published.weight):
    config = CONFIG | KINDS[kind]
    return published.write(path / kind, {"config": config, "tensors": shapes(config)}, weight=weight)


def parsed(path):
    """The keys and the tensors of a file: shape, number of the kind, and bytes."""
    data = path.read_bytes()
    at = 0

    def take(form):
        nonlocal at
        found = struct.unpack_from(form, data, at)
        at += struct.calcsize(form)
        return found[0] if len(found) == 1 else found

    def text():
        nonlocal at
        size = take("<Q")
        at += size
        return data[at - size:at].decode()

    def value(kind):
        if kind == 8:
            return text()
        if kind == 9:
            inner, count = take("<I"), take("<Q")
            return [value(inner) for _ in range(count)]
        return take(VALUES[kind])

    magic, version, tensors, count = take("<4sIQQ")
    assert (magic, version) == (b"GGUF", 3)
    keys = {}
    for _ in range(count):
        key = text()
        keys[key] = value(take("<I"))
    infos = {}
    for _ in range(tensors):
        name, rank = text(), take("<I")
        shape = tuple(reversed([take("<Q") for _ in range(rank)]))
        infos[name] = shape, *take("<IQ")
    begin = -(-at // 32) * 32
    assert all(offset % 32 == 0 for _, _, offset in infos.values())
    return keys, {name: (shape, kind, data[begin + offset:]) for name, (shape, kind, offset) in infos.items()}


def values(shape, kind, raw):
    """The numbers that the bytes of a tensor stand for."""
    count = int(np.prod(shape))
    if kind == 8:
        blocks = np.frombuffer(raw, np.dtype([("scale", "<f2"), ("numbers", "i1", 32)]), count // 32)
        return (blocks["scale"].astype(np.float32)[:, None] * blocks["numbers"]).reshape(shape)
    dtype = {0: np.float32, 1: np.float16, 30: ml_dtypes.bfloat16}[kind]
    return np.frombuffer(raw, dtype, count).astype(np.float32).reshape(shape)


@pytest.mark.parametrize("kind", [*KINDS])
@pytest.mark.parametrize("form", ["f32", "f16", "bf16", "q8_0"])
def test_every_tensor_is_that_of_the_folder(tmp_path, kind, form):
    folder, to = folder_of(tmp_path, kind), tmp_path / "model.gguf"
    assert quantize.main([f"{folder}", f"--output={to}", f"--format={form}"]) == 0
    keys, tensors = parsed(to)
    config = CONFIG | KINDS[kind]
    assert keys["general.architecture"] == kind and keys[f"{kind}.block_count"] == 2
    assert keys[f"{kind}.rope.freq_base"] == 100 and keys[f"{kind}.attention.key_length"] == config.get("head_dim", 16)
    assert len(tensors) == len(shapes(config)) and ("output.weight" in tensors) is not config["tie_word_embeddings"]
    own = {"token_embd.weight": "model.embed_tokens.weight", "blk.1.ffn_down.weight":
           "model.layers.1.mlp.down_proj.weight", "blk.0.attn_q.weight": "model.layers.0.self_attn.q_proj.weight",
           "blk.1.attn_k.weight": "model.layers.1.self_attn.k_proj.weight", "output_norm.weight": "model.norm.weight",
           "blk.0.attn_output.weight": "model.layers.0.self_attn.o_proj.weight"}
    for name, theirs in own.items():
        want = published.weight(theirs, shapes(config)[theirs])
        if kind == "llama" and ("attn_q" in name or "attn_k" in name):  # neighbours turn together in llama.cpp
            heads = len(want) // 16
            want = np.stack([want.reshape(heads, 16, -1)[:, [i // 2 + 8 * (i % 2)]] for i in range(16)], 1).reshape(
                want.shape)
        got = values(*tensors[name])
        if form == "q8_0" and want.ndim > 1:
            steps = np.abs(want.reshape(-1, 32)).max(1).repeat(32).reshape(want.shape) / 127
            # Half a step, and what rounding the scale to float16 adds to the 127th of them.
            assert (np.abs(got - want) <= (0.5 + 127 * 2.0**-11) * steps).all() and np.abs(got - want).max() > 0
        else:
            np.testing.assert_array_equal(got, want.astype(FLOATS[form] if want.ndim > 1 else np.float32))


def test_the_tokenizer_is_in_the_file(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    folder = folder_of(tmp_path, "llama")
    own = tokenizers.ByteLevelBPETokenizer()
    own.train_from_iterator(["a banana, another banana"] * 9, vocab_size=264, special_tokens=["<|end|>"])
    own.save(f"{folder / 'tokenizer.json'}")
    gguf_file.write(folder, tmp_path / "model.gguf", "f16")
    keys, _ = parsed(tmp_path / "model.gguf")
    assert keys["tokenizer.ggml.model"] == "gpt2" and len(keys["tokenizer.ggml.tokens"]) == 96
    assert keys["tokenizer.ggml.tokens"][0] == "<|end|>" and keys["tokenizer.ggml.token_type"][:2] == [3, 1]
    assert keys["tokenizer.ggml.bos_token_id"] == 1 and keys["tokenizer.ggml.merges"]


@pytest.mark.parametrize(("change", "reason"), [
    ({"model_type": "mixtral"}, "this is mixtral"),
    ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}}, "scaled rotary positions")])
def test_what_a_file_has_no_word_for_is_refused(tmp_path, change, reason):
    config = CONFIG | change
    folder = published.write(tmp_path / "model", {"config": config, "tensors": shapes(config)})
    with pytest.raises(UserError, match=reason):
        gguf_file.write(folder, tmp_path / "model.gguf", "f16")
    assert not [*tmp_path.glob("model.gguf*")]


@pytest.mark.parametrize("kind", [*KINDS])
def test_transformers_reads_the_same_logits(tmp_path, kind):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    folder = folder_of(tmp_path, kind, small)
    tokens = torch.tensor(np.random.default_rng(0).integers(0, 96, (2, 12)))

    def logits(**where):
        model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        with torch.no_grad():
            return model(tokens).logits.numpy()

    want = logits(pretrained_model_name_or_path=folder)
    for form, most in (("f32", 1e-6), ("f16", 1e-3), ("bf16", 1e-2), ("q8_0", 4e-2)):
        gguf_file.write(folder, tmp_path / f"{form}.gguf", form)
        got = logits(pretrained_model_name_or_path=tmp_path, gguf_file=f"{form}.gguf")
        assert np.abs(got - want).max() < most * np.abs(want).max(), form
