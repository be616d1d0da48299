"""A published folder as one file in GGUF (version 3), which llama.cpp and what is built on it read.

The format is that of github.com/ggml-org/ggml, docs/gguf.md: a header of typed keys, the names, shapes, kinds and
offsets of tensors, and their bytes. Matrices are written as F32, F16, BF16 or Q8_0 (blocks of 32 int8 numbers with a
scale in float16), vectors as F32. Tensors are read and written one at a time.
"""

import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import ml_dtypes
import numpy as np

from jaxtrain.base.annotations import Json, JsonMapping, JsonObject
from jaxtrain.errors import UserError
from jaxtrain.files import bounded_files
from jaxtrain.hf.hf_config import FILE
from jaxtrain.hub.folders.published_files import TOKENIZER, json_of
from jaxtrain.hub.weights import safetensors_files
from jaxtrain.hub.weights.safetensors_files import Tensor

ALIGNMENT, BLOCK = 32, 32
FAMILIES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}  # model_type -> architecture
# The kinds of tensors: the number of ggml, and of a whole file of that kind.
KINDS = {"f32": (0, 0), "f16": (1, 1), "q8_0": (8, 7), "bf16": (30, 32)}
_VALUES = {"u32": (4, "<I"), "i32": (5, "<i"), "f32": (6, "<f"), "bool": (7, "<?")}
_STRING, _ARRAY = 8, 9
_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}


@dataclass(frozen=True)
class _Written:
    """A tensor to be written: its name in the file, its shape, its kind, and what returns its bytes."""

    name: str
    shape: tuple[int, ...]
    kind: str
    read: Callable[[], np.ndarray]

    @property
    def size(self) -> int:
        """The bytes that it has."""
        count = int(np.prod(self.shape))
        return count // BLOCK * (BLOCK + 2) if self.kind == "q8_0" else count * (4 if self.kind == "f32" else 2)


def write(folder: Path, to: Path, kind: str, name: str = "") -> int:
    """Write the model of a published folder into a file, which appears when it is whole; return its size.

    name: of the model, in the file; that of the folder, if there is none.
    """
    config = bounded_files.user_json(folder / FILE, dict, f"{folder}", "download it again") or {}
    keys = _model_keys(config, name or folder.resolve().name, kind) | _tokenizer_keys(folder, config)
    tensors = [_planned(name, tensor, config, kind) for name, tensor in sorted(
        safetensors_files.tensors_of(folder).items()) if not _is_tied(name, config)]
    partial = to.with_name(f"{to.name}.partial")
    try:
        with open(partial, "wb") as file:
            _write_header(file, keys, tensors)
            for tensor in tensors:
                file.write(tensor.read().tobytes())
                _pad(file)
            size = file.tell()
        partial.rename(to)
    finally:
        partial.unlink(missing_ok=True)
    return size


def q8_0(x: np.ndarray) -> np.ndarray:
    """Return the bytes of an array in Q8_0: for each 32 numbers a scale in float16, and 32 of int8."""
    blocks = x.reshape(-1, BLOCK).astype(np.float32)
    scale = np.abs(blocks).max(1, keepdims=True) / np.float32(127)
    ratio = np.divide(blocks, scale, out=np.zeros_like(blocks), where=scale != 0)
    numbers = np.trunc(ratio + np.copysign(np.float32(0.5), ratio)).astype(np.int8)  # ties away from zero, as ggml
    return np.concatenate([scale.astype(np.float16).view(np.uint8), numbers.view(np.uint8)], 1)


# ---------------------------------------------------------------------------------------------------------------- keys
def _model_keys(config: JsonMapping, name: str, kind: str) -> JsonObject:
    """Return the keys of the file that say how the model computes."""
    known = config.get("model_type")
    if known not in FAMILIES:
        raise UserError("--format", f"GGUF is written of {', '.join(FAMILIES)}, and this is {known}",
                        "export the folder as it is")
    if (rope := config.get("rope_scaling") or config.get("rope_parameters")) and rope.get(
            "rope_type", rope.get("type", "default")) != "default":
        raise UserError("--format", f"scaled rotary positions ({rope}) are not written to GGUF",
                        "convert the folder by llama.cpp's own program")
    if config.get("sliding_window") and config.get("use_sliding_window", known == "mistral"):
        raise UserError("--format", "a sliding window is not written to GGUF",
                        "convert the folder by llama.cpp's own program")
    family, heads = FAMILIES[known], config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    base = config.get("rope_theta") or (config.get("rope_parameters") or {}).get("rope_theta", 10000.0)
    own = {"context_length": config["max_position_embeddings"], "embedding_length": config["hidden_size"],
           "block_count": config["num_hidden_layers"], "feed_forward_length": config["intermediate_size"],
           "attention.head_count": heads, "attention.head_count_kv": config.get("num_key_value_heads") or heads,
           "attention.key_length": width, "attention.value_length": width, "rope.dimension_count": width,
           "vocab_size": config["vocab_size"]}
    own = {f"{family}.{key}": ("u32", value) for key, value in own.items()}
    floats = {"attention.layer_norm_rms_epsilon": config["rms_norm_eps"], "rope.freq_base": base}
    return {"general.architecture": family, "general.name": name, "general.file_type": ("u32", KINDS[kind][1]),
            "general.quantization_version": ("u32", 2),
            **own, **{f"{family}.{key}": ("f32", float(value)) for key, value in floats.items()}}


def _tokenizer_keys(folder: Path, config: JsonMapping) -> JsonObject:
    """Return the keys of a byte-level BPE tokenizer; none where the folder has no other kind."""
    found = json_of(folder, TOKENIZER)
    model = found.get("model") or {}
    if model.get("type") != "BPE" or not any("ByteLevel" in f"{found.get(part)}" for part in (
            "pre_tokenizer", "decoder")):
        return {}
    names = {number: text for text, number in model["vocab"].items()}
    added = {token["id"]: token for token in found.get("added_tokens", [])}
    names |= {number: token["content"] for number, token in added.items()}
    count = config["vocab_size"]
    tokens = [names.get(number, f"[PAD{number}]") for number in range(count)]
    # The types of tokens: 1 normal, 3 control, 4 user defined, 5 unused.
    types = [5 if n not in names else (3 if added[n].get("special") else 4) if n in added else 1 for n in range(count)]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    ends = {f"tokenizer.ggml.{name}_token_id": ("u32", config[f"{name}_token_id"]) for name in ("bos", "eos")
            if isinstance(config.get(f"{name}_token_id"), int)}
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": _PRE.get(f"{config.get('model_type')}", "default"),
            "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": ("i32", types),
            "tokenizer.ggml.merges": merges, **ends}


_PRE = {"qwen2": "qwen2", "qwen3": "qwen2"}  # the names of rules by which llama.cpp cuts text before BPE


# ------------------------------------------------------------------------------------------------------------- tensors
def _is_tied(name: str, config: JsonMapping) -> bool:
    return name == "lm_head.weight" and bool(config.get("tie_word_embeddings"))


def _planned(name: str, tensor: Tensor, config: JsonMapping, kind: str) -> _Written:
    """Return how a tensor of the folder is written."""
    found = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.+)\.(weight|bias)", name)
    own = _NAMES.get(found[2]) if found else None
    if own is None or found is None:
        raise UserError("--format", f"GGUF has no name for the tensor {name}", "export the folder as it is")
    own = f"{f'blk.{found[1]}.' if found[1] else ''}{own}.{found[3]}"
    if len(tensor.shape) < 2:
        kind = "f32"
    elif kind == "q8_0" and tensor.shape[-1] % BLOCK:
        kind = "f16"  # as llama.cpp does with rows that are no whole blocks

    def read() -> np.ndarray:
        x = tensor.view().astype(np.float32)
        return _bytes(_paired(x, own, config), kind)

    return _Written(own, tensor.shape, kind, read)


def _paired(x: np.ndarray, name: str, config: JsonMapping) -> np.ndarray:
    """Return rows of queries and keys in the order of the architecture `llama`, which turns neighbours together."""
    heads = {"attn_q": config["num_attention_heads"],
             "attn_k": config.get("num_key_value_heads") or config["num_attention_heads"]}.get(name.split(".")[-2])
    if FAMILIES[config["model_type"]] != "llama" or heads is None:
        return x
    return x.reshape(heads, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def _bytes(x: np.ndarray, kind: str) -> np.ndarray:
    if kind == "q8_0":
        return q8_0(x)
    return x.astype({"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}[kind])


# ---------------------------------------------------------------------------------------------------------------- file
def _write_header(file: BinaryIO, keys: JsonMapping, tensors: Sequence[_Written]) -> None:
    """Write all that comes before the bytes of tensors."""
    file.write(struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(keys)))
    for key, value in keys.items():
        file.write(_text(key) + b"".join(_typed(value)))
    at = 0
    for tensor in tensors:
        file.write(_text(tensor.name) + struct.pack("<I", len(tensor.shape)))
        file.write(struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape)))  # the last dimension comes first
        file.write(struct.pack("<IQ", KINDS[tensor.kind][0], at))
        at += -(-tensor.size // ALIGNMENT) * ALIGNMENT
    _pad(file)


def _typed(value: Json) -> Iterator[bytes]:
    """Yield the bytes of a value with its type: a text, a list of texts, or a pair of a type and one or many numbers.
    """
    if isinstance(value, str):
        yield struct.pack("<I", _STRING) + _text(value)
    elif isinstance(value, list):
        yield struct.pack("<IIQ", _ARRAY, _STRING, len(value))
        yield from map(_text, value)
    else:
        (number, form), of = _VALUES[value[0]], value[1]
        if isinstance(of, list):
            yield struct.pack("<IIQ", _ARRAY, number, len(of))
            yield from (struct.pack(form, one) for one in of)
        else:
            yield struct.pack("<I", number) + struct.pack(form, of)


def _text(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(raw)) + raw


def _pad(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % ALIGNMENT))
