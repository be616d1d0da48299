"""Record what Hugging Face's transformers takes for the keys of config.json, for each model type that jaxtrain reads.

    python -m tests.config.families_truth                     # writes the table of defaults and the truth of the tests
    python -m tests.config.families_truth --cases=300 --to=F  # the same for that many drawn files a type

Needs torch and transformers, which the tests do not. The table, jaxtrain/hf/defaults.json, has for each
type the keys that its class declares, with their default and the types that it accepts, the other names of keys, and
the base of rotary positions. `python -m tests.config.families FILE` compares jaxtrain with what `--to` wrote.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import sys
import tempfile
import types
import typing
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PreTrainedConfig

from jaxtrain.hf import defaults, hf_config
from tests.config import (
    dense_families,
    dense_families_truth,
    families,
    gemma4_family,
    gemma4_family_truth,
    hybrid_families,
    hybrid_families_truth,
    routed_families,
    routed_families_truth,
)
from tests.hub import published, published_truth

HALVES = ("siglip_text_model", "siglip_vision_model", "clip_text_model", "clip_vision_model")  # of the types of towers


def model_types() -> list[str]:
    """Return the types of transformers that jaxtrain reads, those that have one inside, and the halves of others."""
    each = [published for families in hf_config.types().values() for published in families.values()]
    kinds = dict.fromkeys([one.model_type for one in each] + [one.nested for one in each] + [*HALVES])
    return [kind for kind in kinds if kind in transformers.CONFIG_MAPPING]


def table() -> dict[str, Any]:
    """Return what the classes of transformers declare."""
    return {kind: _declared(transformers.CONFIG_MAPPING[kind]) for kind in model_types()}


def _declared(cls: type[PreTrainedConfig]) -> dict[str, Any]:
    of_all = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    own = {field.name: field for field in dataclasses.fields(cls) if field.name not in of_all}
    keys = {name: {"type": sorted(_kinds(field.type)), "default": field.default} for name, field in own.items()}
    for name, key in keys.items():
        assert key["default"] is not dataclasses.MISSING, (cls, name)
    # The class sets keys that it does not declare last, by whichever name it knows them.
    names = {(theirs if ours in own else ours): (ours if ours in own else theirs)
             for theirs, ours in (getattr(cls, "attribute_map", None) or {}).items()}
    found: dict[str, Any] = {"keys": keys, "names": names}
    if "rope_parameters" in own:
        found["theta"] = cls.default_theta
    return json.loads(json.dumps(found))


def _kinds(annotation: Any) -> set[str]:
    """Return the kinds of JSON values that an annotation allows."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return set().union(*map(_kinds, typing.get_args(annotation)))
    if annotation is None or annotation is types.NoneType:
        return {"null"}
    if origin is typing.Literal:
        return {type(one).__name__ for one in typing.get_args(annotation)}
    if origin in (list, tuple):
        inside = [one for one in typing.get_args(annotation) if one is not Ellipsis]
        return {f"list of {one}" for one in set().union(*map(_kinds, inside))}
    if annotation in (list, tuple):
        return {"list"}
    if annotation in (int, float, bool, str):
        return {annotation.__name__}
    return {"dict"}  # a config of its own, or the parameters of rotary positions


def resolved(given: dict[str, Any]) -> dict[str, Any] | None:
    """Return the shape of the model that transformers makes of a config.json, as `families.shape` does; None: none."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            keys = {key: value for key, value in given.items() if key != "model_type"}
            config = transformers.CONFIG_MAPPING[given["model_type"]](**json.loads(json.dumps(keys)))
            return _SHAPES.get(given["model_type"], _decoder)(config)
    except Exception as error:
        print(f"refused: {type(error).__name__} {str(error)[-90:]!r}")
        return None


def _decoder(c: Any) -> dict[str, Any]:
    kind, heads = c.model_type, c.num_attention_heads
    found = {"vocab_size": c.vocab_size, "layers": c.num_hidden_layers, "width": c.hidden_size, "heads": heads,
             "length": c.max_position_embeddings, "tied": bool(c.tie_word_embeddings),
             "eps": c.layer_norm_epsilon if kind == "gpt2" else c.rms_norm_eps}
    if kind == "gpt2":
        return found | {"mlp": 4 * c.n_embd if c.n_inner is None else c.n_inner}
    layers, sparse = range(c.num_hidden_layers), [False] * c.num_hidden_layers
    if kind == "deepseek_v3":
        sparse = [n >= c.first_k_dense_replace for n in layers]
        found |= {"head_dim": c.qk_nope_head_dim, "turning": c.qk_rope_head_dim, "value": c.v_head_dim, "kv": heads,
                  "latents": [c.q_lora_rank or 0, c.kv_lora_rank]}
        assert heads == c.num_key_value_heads
    else:
        head_dim = getattr(c, "head_dim", None)
        found |= {"head_dim": c.hidden_size // heads if head_dim is None else head_dim, "kv": c.num_key_value_heads}
    assert heads % found["kv"] == 0  # which the models do not check
    if kind == "qwen3_moe":
        sparse = [n not in c.mlp_only_layers and c.num_experts > 0 and (n + 1) % c.decoder_sparse_step == 0
                  for n in layers]
    sparse = [True] * len(sparse) if kind in ("mixtral", "gpt_oss") else sparse
    found["experts"] = sparse
    if not all(sparse):
        found["mlp"] = c.intermediate_size
    if any(sparse):
        found |= _experts(c)
    window = getattr(c, "sliding_window", None) or 0
    if kind in ("llama", "deepseek_v3"):
        found["windows"] = [0] * len(sparse)
    elif kind in ("mistral", "mixtral", "qwen3_moe"):
        found["windows"] = [window] * len(sparse)
    else:
        found["windows"] = [window * (name == "sliding_attention") for name in c.layer_types]
        assert window or "sliding_attention" not in c.layer_types
    return found | _positions(c)


def _experts(c: Any) -> dict[str, Any]:
    kind = c.model_type
    count = getattr(c, "n_routed_experts", None) or c.num_local_experts
    assert c.num_experts_per_tok <= count
    found = {"count": count, "chosen": c.num_experts_per_tok,
             "expert_mlp": c.intermediate_size if kind in ("mixtral", "gpt_oss") else c.moe_intermediate_size}
    if kind == "deepseek_v3":
        assert count % c.n_group == 0 and c.topk_group <= c.n_group
        assert c.num_experts_per_tok <= count // c.n_group * c.topk_group
        found |= {"shared": c.n_shared_experts, "groups": [c.n_group, c.topk_group], "scale": c.routed_scaling_factor,
                  "normalized": bool(c.norm_topk_prob)}
    if kind == "qwen3_moe":
        found["normalized"] = c.norm_topk_prob
    return found


_CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "mixtral": "Mixtral",
            "qwen3_moe": "Qwen3Moe", "deepseek_v3": "DeepseekV3", "gpt_oss": "GptOss", "gemma3_text": "Gemma3"}


def _positions(c: Any) -> dict[str, Any]:
    """Return the frequencies of rotary positions, as the model's own module computes them, and the factor of each."""
    kind = c.model_type
    module = getattr(transformers, f"{_CLASSES[kind]}Model", None) or transformers.Gemma3TextModel
    there = sys.modules[module.__module__]
    rotary = getattr(there, f"{_CLASSES[kind]}RotaryEmbedding")(c)
    if kind == "gemma3_text":
        named = {name: [getattr(rotary, f"{name}_inv_freq"), getattr(rotary, f"{name}_attention_scaling")]
                 for name in sorted({*c.layer_types})}
        return {"scores": c.query_pre_attn_scalar, "turns": {
            name: [*map(float, freq), float(scale)] for name, (freq, scale) in named.items()}}
    found: dict[str, Any] = {"turns": [*map(float, rotary.inv_freq), float(rotary.attention_scaling)]}
    if kind == "deepseek_v3":
        attention = getattr(there, "DeepseekV3Attention")(c, 0)
        found["scores"] = float(attention.scaling)
    return found


def _whisper(c: Any) -> dict[str, Any]:
    assert c.encoder_attention_heads == c.decoder_attention_heads and c.encoder_ffn_dim == c.decoder_ffn_dim
    assert c.d_model % c.decoder_attention_heads == 0
    return {"vocab_size": c.vocab_size, "layers": [c.encoder_layers, c.decoder_layers], "width": c.d_model,
            "heads": c.decoder_attention_heads, "mlp": c.decoder_ffn_dim, "mels": c.num_mel_bins,
            "lengths": [c.max_source_positions, c.max_target_positions]}


def _towers(c: Any) -> dict[str, Any]:
    text, image, clip = c.text_config, c.vision_config, c.model_type == "clip"
    common = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "layer_norm_eps")
    assert text.hidden_act == image.hidden_act
    joint = c.projection_dim if clip else text.projection_size
    assert clip or joint == image.hidden_size
    return {"text": [text.vocab_size, text.max_position_embeddings, *(getattr(text, key) for key in common)],
            "image": [image.image_size, image.patch_size, *(getattr(image, key) for key in common)],
            "activation": text.hidden_act, "joint": joint,
            "end": text.vocab_size - 1 if clip and text.eos_token_id == 2 else
            text.eos_token_id if clip else text.pad_token_id}


_SHAPES = {"gemma3": lambda c: _decoder(c.text_config) | {"tied": c.tie_word_embeddings},  # what the whole model takes
           "whisper": _whisper, "siglip": _towers, "clip": _towers} | {
               kind: shape for kinds, shape in (
                   (routed_families.KINDS, routed_families_truth.shape),
                   (dense_families.KINDS, dense_families_truth.shape),
                   (hybrid_families.KINDS, hybrid_families_truth.shape),
                   (gemma4_family.KINDS, gemma4_family_truth.shape)) for kind in kinds}


def logits(given: dict[str, Any]) -> dict[str, Any]:
    """Return the logits of a model whose weights follow from their names, and the shapes of its tensors."""
    keys = {key: value for key, value in given.items() if key != "model_type"}
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        case = published_truth.made(given["model_type"], json.loads(json.dumps(keys)), Path(first))
        folder = published.write(Path(second), case)
        (folder / "config.json").write_text(json.dumps(given))
        found = published_truth.torch_model(folder)(torch.tensor(published.TOKENS, dtype=torch.long)).logits
    return {"tensors": case["tensors"], "logits": [float(f"{x:.7g}") for x in found.detach().numpy().reshape(-1)]}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [*map(_rounded, value)]
    return float(f"{value:.8g}") if isinstance(value, float) else value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=16, help="drawn config.json files of each type")
    parser.add_argument("--logits", type=int, default=0, help="of how many of each type logits are computed, too")
    parser.add_argument("--kinds", nargs="*", default=families.KINDS, help="of these types only; with --to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--to", default="", help="a file for them; without it, the files of the repository are written")
    args = parser.parse_args()
    if not args.to:
        lines = [f"{json.dumps(kind)}: {json.dumps(declared)}" for kind, declared in table().items()]
        defaults.FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    cases = []
    for kind in args.kinds:
        computed = 0
        cases.append({"given": {"model_type": kind}, "shape": resolved({"model_type": kind})})
        for n in range(args.cases):
            small = n < 3 * args.logits
            given = families.drawn(kind, np.random.default_rng([args.seed, families.KINDS.index(kind), n]), small)
            case = {"given": given, "shape": resolved(given)}
            if small and case["shape"] and computed < args.logits and kind not in families.NO_LOGITS:
                try:
                    case |= logits(given)
                    computed += 1
                except Exception as error:
                    print(f"no logits: {type(error).__name__} {str(error)[-90:]!r} {given}")
            cases.append(case)
        print(kind, sum(case["given"]["model_type"] == kind and case["shape"] is not None for case in cases), computed)
    text = "[\n" + ",\n".join(json.dumps(_rounded(case)) for case in cases) + "\n]\n"
    Path(args.to or families.TRUTH).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
