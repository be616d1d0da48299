"""Draws config.json files of published models, and compares what jaxtrain and transformers take them for.

    python -m tests.config.families FILE    # of `tests/config/families_truth.py --to=FILE`
"""

import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.config.family import config_of
from jaxtrain.config.model_config import ModelConfig
from jaxtrain.errors import UserError
from jaxtrain.hf import defaults
from jaxtrain.hf.hf_config import model_section
from tests.config import dense_families, gemma4_family, hybrid_families, routed_families

TRUTH = Path(__file__).with_name("families_truth.json")
PARTS = (routed_families, dense_families, hybrid_families, gemma4_family)
KINDS = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gemma3_text", "gemma3", "deepseek_v3",
         "gpt_oss", "whisper", "siglip", "clip", *(kind for part in PARTS for kind in part.KINDS))
NO_LOGITS = ("gemma3", "whisper", "siglip", "clip")
# The keys of each type, with values to draw from.
_SHAPE = {"vocab_size": [24, 40], "hidden_size": [16, 32], "num_hidden_layers": [1, 2, 3, 4, 7],
          "num_attention_heads": [2, 4], "intermediate_size": [20], "max_position_embeddings": [16, 32]}
_ROTARY = {"num_key_value_heads": [1, 2, None], "rms_norm_eps": [1e-5, 1e-6], "tie_word_embeddings": [True, False],
           "rope_theta": [100, 50.0], "rope_scaling": "rope", "rope_parameters": "rope",
           "partial_rotary_factor": [1.0, None], "original_max_position_embeddings": [8]}
_WINDOWS = {"use_sliding_window": [True, False], "sliding_window": [3, 5, None], "max_window_layers": [0, 1, 2, 9],
            "layer_types": "layers"}
_DRAWS: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": [24], "n_layer": [1, 2], "n_embd": [16], "n_head": [2, 4], "n_positions": [16],
             "n_inner": [20, None], "layer_norm_epsilon": [1e-5, 1e-3], "tie_word_embeddings": [True, False],
             "num_hidden_layers": [3], "hidden_size": [32], "activation_function": ["gelu_new"]},
    "llama": _SHAPE | _ROTARY | {"head_dim": [6, None], "sliding_window": [3], "attention_bias": [False]},
    "mistral": _SHAPE | _ROTARY | {"head_dim": [6, None], "sliding_window": [3, None], "layer_types": "layers"},
    "qwen2": _SHAPE | _ROTARY | _WINDOWS | {"head_dim": [6]},
    "qwen3": _SHAPE | _ROTARY | _WINDOWS | {"head_dim": [6]},
    "mixtral": _SHAPE | _ROTARY | {"head_dim": [6, None], "sliding_window": [3, None], "num_local_experts": [4],
                                   "num_experts": [3], "num_experts_per_tok": [2, 3]},
    "qwen3_moe": _SHAPE | _ROTARY | _WINDOWS | {
        "head_dim": [6], "num_experts": [4], "num_local_experts": [3], "num_experts_per_tok": [2, 3],
        "moe_intermediate_size": [6], "norm_topk_prob": [True, False], "decoder_sparse_step": [1, 2],
        "mlp_only_layers": [[], [0], [0, 1], [1], [99]]},
    "gemma3_text": _SHAPE | _ROTARY | {
        "head_dim": [6], "sliding_window": [3, 5], "sliding_window_pattern": [2, 3], "query_pre_attn_scalar": [9],
        "rope_local_base_freq": [50.0], "layer_types": "layers", "rope_parameters": "nested",
        "rope_scaling": [{"rope_type": "linear", "factor": 8.0}, {"type": "linear", "factor": 8.0}, None]},
    "deepseek_v3": _SHAPE | _ROTARY | {
        "num_key_value_heads": [2, 4, None], "kv_lora_rank": [12], "qk_nope_head_dim": [6], "qk_rope_head_dim": [4],
        "v_head_dim": [8], "q_lora_rank": [12, None], "n_routed_experts": [8], "num_experts_per_tok": [2],
        "moe_intermediate_size": [6], "n_shared_experts": [1, 2], "first_k_dense_replace": [0, 1], "n_group": [4],
        "topk_group": [2], "routed_scaling_factor": [2.5, 1.5], "norm_topk_prob": [True, False],
        "rms_norm_eps": [1e-6], "num_local_experts": [16]},
    "gpt_oss": _SHAPE | _ROTARY | {
        "head_dim": [8], "num_local_experts": [4], "num_experts": [6], "num_experts_per_tok": [2],
        "swiglu_limit": [0.8], "swiglu_alpha": [1.5], "sliding_window": [3, 5], "layer_types": "layers"},
    "whisper": {"vocab_size": [60_000], "num_mel_bins": [80, 16], "encoder_layers": [1, 2], "decoder_layers": [1, 2],
                "encoder_attention_heads": [2], "decoder_attention_heads": [2], "encoder_ffn_dim": [20],
                "decoder_ffn_dim": [20], "d_model": [16], "max_source_positions": [8], "max_target_positions": [12],
                "num_hidden_layers": [3], "num_attention_heads": [2]},
}
_DRAWS |= {kind: {key: values for key, values in (_SHAPE | _ROTARY | own).items() if values}
           for part in PARTS for kind, own in part.DRAWS.items()}
_TOWER = {"hidden_size": [16, 32], "intermediate_size": [20], "num_hidden_layers": [1, 2],
          "num_attention_heads": [2, 4], "layer_norm_eps": [1e-5, 1e-6], "hidden_act": ["gelu", "gelu_pytorch_tanh"]}
_TEXT = _TOWER | {"vocab_size": [24, 60_000], "max_position_embeddings": [8], "pad_token_id": [1, 5],
                  "eos_token_id": [2, 7], "bos_token_id": [3], "projection_size": [16, None]}
_IMAGE = _TOWER | {"image_size": [16], "patch_size": [4, 8], "num_channels": [3]}
# What decides how large a model is, and always stands in files of which logits are computed.
_SIZES = {*_SHAPE, "n_layer", "n_embd", "n_head", "n_positions", "num_local_experts", "num_experts",
          "n_routed_experts", "moe_intermediate_size", "kv_lora_rank", "num_experts_per_tok", "n_group", "topk_group",
          "q_lora_rank", *hybrid_families.SIZES, *gemma4_family.SIZES}


def drawn(kind: str, rng: np.random.Generator, small: bool = False) -> dict[str, Any]:
    """Return a config.json of this type, without some of its keys; `small`: with those that make it small."""
    if kind == "gemma3":
        text = drawn("gemma3_text", rng, small)
        more = {"tie_word_embeddings": bool(rng.integers(2))} if rng.random() < 0.3 else {}
        return {"model_type": kind} | more | ({"text_config": text} if rng.random() < 0.9 else {})
    if kind in ("siglip", "clip"):
        halves = {half: _of(draws, rng, 0.6, set()) for half, draws in (("text_config", _TEXT),
                                                                        ("vision_config", _IMAGE))}
        older = {f"{half}_dict": value for half, value in halves.items() if rng.random() < 0.1}
        return {"model_type": kind} | halves | older | ({"projection_dim": 24} if rng.random() < 0.5 else {})
    fitting = kind in (*hybrid_families.KINDS, *gemma4_family.KINDS, "dots1", "helium", "nemotron", "stablelm")
    share = 0.9 if fitting else 0.75  # of types whose sizes have to fit one another
    given = _of(_DRAWS[kind], rng, share, _SIZES if small else set())
    for key in ("num_local_experts", "num_experts", "num_hidden_layers", "hidden_size", "num_attention_heads"):
        # Another name of a key that is there as well.
        declared = defaults.table()[kind]["names"]
        if key in declared and rng.random() < 0.7:
            given.pop(key, None)
    if kind in (*dense_families.KINDS, *hybrid_families.KINDS):
        given["pad_token_id"] = None  # many have one by default that is beyond a small vocabulary
    return {"model_type": kind} | given


def _of(draws: dict[str, Any], rng: np.random.Generator, share: float, always: set[str]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for key, values in draws.items():
        rare = 0.25 if isinstance(values, str) or key in (
            "partial_rotary_factor", "original_max_position_embeddings", "per_layer_config") else share
        if key in always or rng.random() < rare:
            given[key] = _value(values, given, rng)
    return given


def _value(values: Any, given: dict[str, Any], rng: np.random.Generator) -> Any:
    def one_of(*several: Any) -> Any:
        return several[rng.integers(len(several))]

    if callable(values):
        return values(given, rng)
    if values == "rope":
        way = one_of("default", "linear", "llama3", "yarn", None, "dynamic")
        if way is None:
            return one_of(None, {}, {"rope_theta": 7.0})
        found = {one_of("rope_type", "rope_type", "type"): way}
        found |= {} if way == "default" else {"factor": one_of(4.0, 2, 1.0)}
        found |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if way == "llama3" else {}
        found |= {"rope_theta": 30.0} if rng.random() < 0.4 else {}
        found |= {"original_max_position_embeddings": 8} if way in ("llama3", "yarn") and rng.random() < 0.7 else {}
        if way == "yarn":
            found |= {key: value for key, value in (("beta_fast", 4), ("beta_slow", 0.5), ("truncate", False),
                                                    ("attention_factor", 1.25)) if rng.random() < 0.3}
            found |= {"mscale": 1.0, "mscale_all_dim": one_of(1.0, 0.5)} if rng.random() < 0.4 else {}
        return found
    if values == "nested":
        far = one_of({"rope_type": "linear", "factor": 4.0}, {"rope_type": "default", "rope_theta": 70.0}, {}, None)
        return one_of({"full_attention": far}, {"full_attention": far, "sliding_attention": {"rope_theta": 9.0}}, {},
                      {"rope_type": "linear", "factor": 2.0})
    if values == "layers":
        count, first = given.get("num_hidden_layers", 3) + int(rng.random() < 0.1), rng.integers(5)
        return one_of(None, ["full_attention" if n < first else "sliding_attention" for n in range(count)],
                      ["full_attention" if (n + 1) % 2 == 0 else "sliding_attention" for n in range(count)],
                      ["full_attention"] * count, ["sliding_attention"] * count)
    return values[rng.integers(len(values))]


def section(given: dict[str, Any], folder: Path) -> ModelConfig | str:
    """Return the model that jaxtrain makes of a config.json; text where it refuses that."""
    (folder / "config.json").write_text(json.dumps(given))
    try:
        keys = model_section(folder)
        return config_of(keys)
    except UserError as error:
        return f"{error}"


def shape(given: dict[str, Any], folder: Path) -> dict[str, Any] | str:
    """Return the shape of the model that jaxtrain makes of a config.json; text where it refuses that."""
    model = section(given, folder)
    if isinstance(model, str):
        return model
    own = {"whisper": _whisper, "siglip": _towers, "clip": _towers} | {
        kind: part.shape for part in PARTS for kind in part.KINDS}
    return own.get(given["model_type"], _decoder)(model, given)


def _decoder(c: Any, given: dict[str, Any]) -> dict[str, Any]:
    found = {"vocab_size": c.vocab_size, "layers": c.num_layers, "width": c.embed_dim, "heads": c.num_heads,
             "length": c.max_seq_len, "tied": c.tied_embeddings, "eps": c.norm_eps}
    if c.name == "gpt2":
        return found | {"mlp": c.mlp_dim}
    found |= {"head_dim": c.head_dim, "kv": c.num_kv_heads}
    if c.latent_attention:
        found |= {"turning": c.rope_head_dim, "value": c.value_head_dim, "latents": [c.q_rank, c.kv_rank]}
    layers = range(c.num_layers)
    e = c.experts
    sparse = [e.num > 0 and n >= e.dense_layers and (n - e.dense_layers + 1) % e.every == 0 for n in layers]
    found["experts"] = sparse
    if not all(sparse):
        found["mlp"] = c.mlp_dim
    if any(sparse):
        found |= {"count": e.num, "chosen": e.per_token, "expert_mlp": e.mlp_dim}
        if c.name == "deepseek_v3":
            found |= {"shared": c.shared_experts, "groups": [c.expert_groups, c.expert_groups_used],
                      "scale": c.router_scale}
        if c.name in ("deepseek_v3", "qwen3_moe"):
            found["normalized"] = c.normalize_router
    every, first = getattr(c, "global_every", 0), getattr(c, "global_first", 0)
    everywhere = [(every > 0 and (n + 1) % every == 0) or n < first for n in layers]
    found["windows"] = [0 if full else c.window for full in everywhere]
    return found | _positions(c, everywhere)


def _positions(c: Any, everywhere: list[bool]) -> dict[str, Any]:
    from jaxtrain.models.attention.rotary import frequencies, scaled_frequencies, score_factor

    if c.name == "gemma3":
        far, near = frequencies(c.head_dim, c.rope_theta) / c.rope_factor, frequencies(c.head_dim, c.local_rope_theta)
        both = {"full_attention": [*map(float, far), 1.0], "sliding_attention": [*map(float, near), 1.0]}
        return {"scores": c.query_scale, "turns": {
            name: turns for name, turns in both.items() if (name == "full_attention") in everywhere}}
    turns, scale = scaled_frequencies(c, c.rotary_width)
    found: dict[str, Any] = {"turns": [*map(float, turns), float(scale)]}
    if c.name == "deepseek_v3":
        found["scores"] = score_factor(c) * (c.head_dim + c.rope_head_dim) ** -0.5
    return found


def _whisper(c: Any, given: dict[str, Any]) -> dict[str, Any]:
    return {"vocab_size": c.vocab_size, "layers": [c.encoder_layers, c.num_layers], "width": c.embed_dim,
            "heads": c.num_heads, "mlp": c.mlp_dim, "mels": c.mels, "lengths": [c.audio_positions, c.max_seq_len]}


def _towers(c: Any, given: dict[str, Any]) -> dict[str, Any]:
    return {"text": [c.vocab_size, c.text_len, c.embed_dim, c.mlp_dim, c.num_layers, c.num_heads, c.norm_eps],
            "image": [c.image_size, c.patch_size, c.image_embed_dim, c.image_mlp_dim, c.image_layers,
                      c.image_heads, c.image_norm_eps],
            "activation": {"tanh": "gelu_pytorch_tanh", "exact": "gelu", "quick": "quick_gelu"}[c.gelu],
            "joint": c.joint_dim, "end": c.text_end}


def close(a: Any, b: Any) -> bool:
    """Return whether two shapes are the same, and their numbers within 1e-6."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(close(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(close, a, b))
    if isinstance(a, float) or isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-12)
    return a == b


def logits_error(case: dict[str, Any], folder: Path) -> float:
    """Return the largest error of the logits of a case, relative to the largest of these."""
    import jax

    import jaxtrain as jt
    from jaxtrain.hub.weights import published_weights
    from jaxtrain.sharding import mesh_context
    from tests.hub import published

    published.write(folder, case | {"config": case["given"]})
    run = jt.build(jt.make_config({"model": model_section(folder), "data": {"seq_len": 8}, "mesh": {"data": 1}}),
                   devices=jax.devices()[:1])
    params = published_weights.load(folder, run.config.model, run.abstract.all_params)
    with mesh_context.use(run.mesh, run.sharded.rules):
        found = np.asarray(jax.jit(lambda p: run.model.merge(p)(published.TOKENS))(params)).reshape(-1)
    wanted = np.asarray(case["logits"])
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def main() -> int:
    wrong, same, refused, more, errors = 0, 0, {}, 0, []
    for case in json.loads(Path(sys.argv[1]).read_text()):
        with tempfile.TemporaryDirectory() as folder:
            found, kind = shape(case["given"], Path(folder)), case["given"]["model_type"]
            if isinstance(found, str):
                if case["shape"]:
                    reason = found.split("config.json: ")[-1]
                    refused.setdefault(kind, []).append(reason)
            elif case["shape"] is None:
                more += 1
                print("transformers refuses", json.dumps(case["given"]))
            elif not close(found, case["shape"]):
                wrong += 1
                print("DIFFERS", json.dumps(case["given"]), *(
                    f"\n    {key}: {found.get(key)} for {case['shape'].get(key)}"
                    for key in found.keys() | case["shape"].keys()
                    if not close(found.get(key), case["shape"].get(key))))
            else:
                same += 1
                if "logits" in case and len(sys.argv) > 2:
                    errors.append(logits_error(case, Path(folder)))
                    if errors[-1] > 1e-4:
                        print("LOGITS DIFFER", errors[-1], json.dumps(case["given"]))
    for kind, reasons in refused.items():
        print(kind, len(reasons), "refused that transformers reads:", *sorted({*reasons})[:40], sep="\n    ")
    print(f"{same} the same, {wrong} differ, {sum(map(len, refused.values()))} refused here only, {more} there only; "
          f"{len(errors)} logits, largest error {max(errors, default=0):.1e}")
    return int(wrong > 0 or max(errors, default=0) > 1e-4)


if __name__ == "__main__":
    sys.exit(main())
