"""The `model` section of a config from a published model's config.json, and back.

What changes numbers and cannot be expressed is refused by name. A key that config.json leaves out has the default that
Hugging Face's transformers gives it for the model type.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtrain.config import published_towers
from jaxtrain.config.families import (
    FAMILIES,
    ExpertsConfig,
    Gemma3Config,
    GptOssConfig,
    ModelConfig,
    RotaryConfig,
)
from jaxtrain.config.field_checks import most
from jaxtrain.config.modality_families import WhisperConfig
from jaxtrain.config.published import defaults, layer_patterns
from jaxtrain.config.published.layer_patterns import Refuse, layer_types
from jaxtrain.config.published.rotary_keys import gemma_layers, published_rotary, rotary
from jaxtrain.config.schema import ROWS, DataConfig
from jaxtrain.config.speech import published_speech
from jaxtrain.config.vision_keys import DualEncoderConfig
from jaxtrain.errors import UserError
from jaxtrain.files import bounded_files

Keys = dict[str, Any]
FILE = "config.json"
# Of published model types: the family, and the class that transformers has for it.
_TYPES = {
    "gpt2": ("gpt2", "GPT2LMHeadModel"), "llama": ("llama", "LlamaForCausalLM"),
    "mistral": ("llama", "MistralForCausalLM"), "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"), "mixtral": ("mixtral", "MixtralForCausalLM"),
    "qwen3_moe": ("qwen3_moe", "Qwen3MoeForCausalLM"), "gemma3_text": ("gemma3", "Gemma3ForCausalLM"),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3ForCausalLM"), "gpt_oss": ("gpt_oss", "GptOssForCausalLM"),
    "whisper": ("whisper", "WhisperForConditionalGeneration"), "siglip": ("siglip", "SiglipModel"),
    "clip": ("clip", "CLIPModel"),
}
PUBLISHED = {name for name, _ in _TYPES.values()}  # the families that have a format
# Published key -> ours.
_GPT2 = {"vocab_size": "vocab_size", "n_layer": "num_layers", "n_embd": "embed_dim", "n_head": "num_heads",
         "n_inner": "mlp_dim", "n_positions": "max_seq_len", "layer_norm_epsilon": "norm_eps",
         "tie_word_embeddings": "tied_embeddings"}
_WHISPER = {"vocab_size": "vocab_size", "decoder_layers": "num_layers", "encoder_layers": "encoder_layers",
            "d_model": "embed_dim", "decoder_attention_heads": "num_heads", "decoder_ffn_dim": "mlp_dim",
            "max_target_positions": "max_seq_len", "max_source_positions": "audio_positions", "num_mel_bins": "mels",
            "eos_token_id": "end"}
_COMMON = {"vocab_size": "vocab_size", "num_hidden_layers": "num_layers", "hidden_size": "embed_dim",
           "num_attention_heads": "num_heads", "num_key_value_heads": "num_kv_heads", "head_dim": "head_dim",
           "intermediate_size": "mlp_dim", "max_position_embeddings": "max_seq_len", "rms_norm_eps": "norm_eps",
           "tie_word_embeddings": "tied_embeddings"}
# Keys of ours that other programs ignore, where they differ from what is published.
_WHISPER_MORE = {"ctc_weight": 0.0, "mask_padding": False}
_OWN = {"gpt2": _GPT2, "whisper": _WHISPER}  # of types that share no keys with the others
_MORE = {
    "mixtral": {"num_local_experts": "num_experts", "num_experts_per_tok": "experts_per_token"},
    "qwen3_moe": {"num_experts": "num_experts", "num_experts_per_tok": "experts_per_token",
                  "moe_intermediate_size": "expert_mlp_dim", "norm_topk_prob": "normalize_router"},
    "gemma3_text": {"sliding_window": "window", "query_pre_attn_scalar": "query_scale"},
    "deepseek_v3": {"q_lora_rank": "q_rank", "kv_lora_rank": "kv_rank", "qk_nope_head_dim": "head_dim",
                    "qk_rope_head_dim": "rope_head_dim", "v_head_dim": "value_head_dim",
                    "n_routed_experts": "num_experts", "num_experts_per_tok": "experts_per_token",
                    "moe_intermediate_size": "expert_mlp_dim", "n_shared_experts": "shared_experts",
                    "first_k_dense_replace": "dense_layers", "n_group": "expert_groups",
                    "topk_group": "expert_groups_used", "routed_scaling_factor": "router_scale",
                    "norm_topk_prob": "normalize_router"},
    "gpt_oss": {"num_local_experts": "num_experts", "num_experts_per_tok": "experts_per_token",
                "intermediate_size": "expert_mlp_dim", "sliding_window": "window", "swiglu_limit": "swiglu_limit",
                "swiglu_alpha": "swiglu_alpha"},
}
# Keys that may be 0, or are no sizes; and those of which null means what a family derives.
_NO_SIZES = ("n_shared_experts", "first_k_dense_replace", "eos_token_id")
_DERIVED = ("num_key_value_heads", "head_dim", "n_inner", "q_lora_rank")
# What a published model may say, since it is what ours do; the first one is the default, and what is written.
_NO, _SILU = (False, None), ("silu", "swish")
_BIASES: dict[str, tuple] = {"attention_bias": _NO, "mlp_bias": _NO, "hidden_act": _SILU}
_FIXED: dict[str, dict[str, tuple]] = {
    "gpt2": {"activation_function": ("gelu_new", "gelu_pytorch_tanh"), "scale_attn_weights": (True,),
             "scale_attn_by_inverse_layer_idx": _NO, "add_cross_attention": _NO},
    "gemma3_text": {"hidden_activation": ("gelu_pytorch_tanh",), "attention_bias": _NO,
                    "attn_logit_softcapping": (None,), "final_logit_softcapping": (None,),
                    "use_bidirectional_attention": _NO},
    "deepseek_v3": _BIASES | {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,),
                              "rope_interleave": (True,), "rms_norm_eps": (1e-6,)},
    "gpt_oss": {"attention_bias": (True,), "hidden_act": _SILU},
    "whisper": {"activation_function": ("gelu",), "scale_embedding": _NO, "tie_word_embeddings": (True,)},
}
_BIAS_RATE = 0.001  # of DeepSeek-V3's first 14.3T tokens (arXiv 2412.19437, section 4.2); config.json does not say


def model_section(folder: str | Path) -> Keys:
    """Return the keys of a config's `model` section for the model in `folder`."""
    path = Path(folder) / FILE
    given = bounded_files.user_json(path, dict, "--config", "give a folder in Hugging Face's format")
    if given is None:
        fix = "give a folder in Hugging Face's format"
        if (path.parent / "adapter_config.json").is_file():
            fix = f"it has adapters: give that of their model, and --config.train.init_from={folder}"
        raise UserError("--config", f"there is no {path}", fix)
    try:
        given = _text_of(given, path)
        kind = given.get("model_type")
        if kind is None and isinstance(given.get("model"), dict):
            raise UserError("--config", f"{folder} is the workdir of a run, not a published folder",
                            f"begin with it by train.init_from={folder}, or export it first")
        if not isinstance(kind, str) or kind not in _TYPES:
            said = kind if isinstance(kind, str) and len(kind) < 50 else defaults.shown(kind)
            raise UserError(f"{path}", f"model_type={said} is not one that jaxtrain has", f"known: {', '.join(_TYPES)}")
        section = _section(kind, given, path)
        if kind in published_towers.KINDS:
            section |= published_towers.pixels(kind, path.parent, section["picture_size"])
            section |= published_towers.fillers(kind, path.parent)
        if kind == "whisper":
            section |= published_speech.section(given, path.parent)
        return section
    except UserError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        raise UserError(f"{path}", f"a value does not have the form expected ({error})", "download it again") from error


def _text_of(given: Keys, path: Path) -> Keys:
    """Return what a config.json says of the model of text, where that is a part of it."""
    if given.get("model_type") != "gemma3":
        return given
    both = defaults.filled("gemma3", given, path)
    text = both["text_config"] or {}
    tied = defaults.filled("gemma3_text", text, path, "text_config.")["tie_word_embeddings"]
    if both["tie_word_embeddings"] is not tied:
        raise UserError(f"{path}", f"tie_word_embeddings={both['tie_word_embeddings']} is {tied} in text_config",
                        "use a model that jaxtrain can express")
    return text | {"model_type": "gemma3_text"}  # whatever it says: the class has one


def starting_config(folder: str) -> dict[str, Keys]:
    """Return the sections of a config that begins with the model in `folder` and its weights."""
    model = model_section(folder)
    other = sorted(path.name for end in ("bin", "pt", "pth", "gguf") for path in Path(folder).glob(f"*.{end}"))
    if other and not any(Path(folder).glob("*.safetensors")):
        raise UserError("--config", f"the weights in {folder} are not safetensors but {other[0]}",
                        "save them as safetensors, or move them away to begin with random ones")
    data = {"seq_len": min(DataConfig.seq_len, model["max_seq_len"])}
    if not FAMILIES[model["name"]].text:
        family = FAMILIES[model["name"]](**model)
        data = {"seq_len": family.longest_row, "packing": ROWS[family.rows_of][0]}
    found = {"model": model, "data": data, "train": {"init_from": folder}}
    if is_reward_model(folder):
        found |= {"preference": {"loss": "reward"}, "data": found["data"] | {"packing": "pairs"}}
    return found


def is_reward_model(folder: str | Path) -> bool:
    """Return whether the model in `folder` is published as a classifier, as reward models are."""
    said = bounded_files.user_json(Path(folder) / FILE, dict, "--config", "download it again") or {}
    classes = said.get("architectures")
    return isinstance(classes, list) and any(f"{name}".endswith("ForSequenceClassification") for name in classes)


def _section(kind: str, given: Keys, path: Path) -> Keys:
    family = _TYPES[kind][0]
    if kind in published_towers.KINDS:
        return published_towers.section(kind, given, path)
    known = defaults.filled(kind, given, path)

    def refuse(key: str, why: str) -> UserError:
        return UserError(f"{path}", f"{key}={defaults.shown(known.get(key))} {why}",
                         "use a model that jaxtrain can express")

    for key, allowed in _FIXED.get(kind, _BIASES).items():
        if known.get(key, allowed[0]) not in allowed:
            raise refuse(key, f"cannot be expressed: only {allowed[0]!r} can")
    packed = (known.get("quantization_config") or {}).get("quant_method")
    if known.get("quantization_config") and (kind, packed) != ("gpt_oss", "mxfp4"):  # hub/weights/mxfp4.py reads these
        raise refuse("quantization_config", "cannot be expressed: only plain weights can")
    section = {"name": family} | _sizes(kind, known, refuse)
    if kind == "gemma3_text":
        return section | gemma_layers(known, refuse)
    section |= {} if kind in _OWN or kind == "deepseek_v3" else _windows(kind, known, refuse)
    if kind == "qwen3_moe":
        section["dense_layers"], section["experts_every"] = layer_patterns.routed(known, refuse)
    if kind == "deepseek_v3":
        if known["num_key_value_heads"] not in (None, known["num_attention_heads"]):
            raise refuse("num_key_value_heads", "cannot be expressed: only as many as num_attention_heads can")
        section |= {"router": "sigmoid", "router_bias_rate": _BIAS_RATE, "num_kv_heads": 0}
    if kind == "whisper":
        section |= {key: known.get(key, plain) for key, plain in _WHISPER_MORE.items()}
        section["prefix"] = [known["decoder_start_token_id"]]
    for key in ("attention_heads", "ffn_dim") if kind == "whisper" else ():
        if known[f"encoder_{key}"] != known[f"decoder_{key}"]:
            raise refuse(f"encoder_{key}", f"cannot be expressed: only decoder_{key}={known[f'decoder_{key}']} can")
    return section if kind in _OWN else section | rotary(kind, known, refuse)


def _sizes(kind: str, known: Keys, refuse: Refuse) -> Keys:
    """Return the keys that have another name only, once they are sizes that a model can have."""
    found, limits = {}, most(FAMILIES[_TYPES[kind][0]])
    for key, ours in (_OWN.get(kind) or _COMMON | _MORE.get(kind, {})).items():
        if (value := known.get(key)) is None:
            if key not in _DERIVED and key in defaults.table()[kind]["keys"]:
                raise refuse(key, "cannot be expressed")
            continue
        if type(value) is int and key not in _NO_SIZES and value < 1:
            raise refuse(key, "is not a size that a model has")
        if type(value) is int and value > limits.get(ours, value):
            raise refuse(key, f"is more than {limits[ours]:,}, the most that jaxtrain reads")
        found[ours] = value
    return found


def _windows(kind: str, known: Keys, refuse: Refuse) -> Keys:
    """Return our keys of which layers have an attention window, and of how many tokens."""
    if kind == "gpt_oss":
        return {"global_every": layer_patterns.global_every(known, 2, refuse)}
    used = kind in ("mistral", "mixtral") or (kind.startswith("qwen") and known["use_sliding_window"])
    window = (used or None) and known["sliding_window"]
    if window is not None and window < 1:
        raise refuse("sliding_window", "is not a size that a window has")
    if kind not in ("qwen2", "qwen3"):  # all layers have it, whatever a file calls them
        if known.get("layer_types") is not None:
            layer_patterns.listed(known, refuse)
        return {"window": window or 0}
    if window is None and known["layer_types"] is None:
        return {"window": 0}
    before = layer_patterns.first_window(known, refuse)
    if before == known["num_hidden_layers"]:
        return {"window": 0}
    if window is None:
        raise refuse("layer_types", "cannot be expressed: it has layers with a window, and there is no window")
    return {"window": window} | ({"global_first": before} if before else {})


def config_json(c: ModelConfig, reward_head: bool = False) -> Keys:
    """Return what config.json says of a model; raises UserError where the published model type cannot express it.

    `reward_head`: the model has one, and is published as a classifier with one label.
    """
    if isinstance(c, DualEncoderConfig):
        found = published_towers.described(c)
        _check(c, c.name, found)
        return found
    kind = next(kind for kind, (family, _) in _TYPES.items() if family == c.name)
    kind = "mistral" if kind == "llama" and c.window else kind
    table = _OWN.get(kind) or _COMMON | _MORE.get(kind, {})
    found: Keys = {"architectures": [_TYPES[kind][1]], "model_type": kind}
    found |= {key: allowed[0] for key, allowed in _FIXED.get(kind, _BIASES).items()}
    found |= {key: getattr(c, ours) for key, ours in table.items()}
    if isinstance(c, Gemma3Config):
        found |= {"layer_types": layer_types(c.global_every, c.num_layers), "rope_theta": c.rope_theta,
                  "rope_local_base_freq": c.local_rope_theta, "sliding_window_pattern": c.global_every,
                  "rope_scaling": {"rope_type": "linear", "factor": c.rope_factor} if c.rope_factor != 1 else None}
    elif isinstance(c, RotaryConfig):
        found |= published_rotary(c) | {"sliding_window": c.window or None}
        if kind.startswith("qwen") and c.window:
            found |= {"use_sliding_window": True, "max_window_layers": getattr(c, "global_first", 0)}
    if isinstance(c, GptOssConfig):
        found |= {"layer_types": layer_types(c.global_every, c.num_layers),
                  "rope_scaling": found["rope_scaling"] or {"rope_type": "default"}}
    if kind == "mixtral":
        found["intermediate_size"] = getattr(c, "expert_mlp_dim")  # noqa: B009 (of one family only)
    if isinstance(c, ExpertsConfig) and kind == "qwen3_moe":
        found |= {"mlp_only_layers": list(range(c.dense_layers)), "decoder_sparse_step": c.experts_every}
    if kind == "deepseek_v3":
        found |= {"q_lora_rank": found["q_lora_rank"] or None, "head_dim": c.rope_head_dim}
    if isinstance(c, WhisperConfig):
        found |= {"encoder_attention_heads": c.num_heads, "encoder_ffn_dim": c.mlp_dim, "is_encoder_decoder": True,
                  "num_hidden_layers": c.encoder_layers, "tie_word_embeddings": True} | {
                      "pad_token_id": None, "bos_token_id": None, "decoder_start_token_id": c.prefix[0]}
        found |= {key: value for key, plain in _WHISPER_MORE.items() if (value := getattr(c, key)) != plain}
    _check(c, kind, found)
    if reward_head:
        stem = {"gpt2": "GPT2", "gemma3_text": "Gemma3Text"}.get(kind, _TYPES[kind][1].removesuffix("ForCausalLM"))
        found |= {"architectures": [f"{stem}ForSequenceClassification"], "id2label": {"0": "reward"},
                  "label2id": {"reward": 0}}
    return found


def multipliers(c: ModelConfig) -> tuple[float, float, float]:
    """Return what muP multiplies embeddings, scores and logits by. Those of published models are 1."""
    embed, head = (c.growth.get(axis, 1.0) for axis in ("embed", "head_dim"))
    return embed**-0.5 if isinstance(c, Gemma3Config) else 1.0, head**-0.5, 1 / embed if c.tied_embeddings else 1.0


def _check(c: ModelConfig, kind: str, written: Mapping[str, Any]) -> None:
    """Refuse a key that the published model type has no word for, unless it only shapes training."""
    free = {"name", "mtp_loss_weight", "balance_loss", "router_z_loss", "capacity_factor", "router_bias_rate",
            "prefix", "mask_padding", "ctc_weight", "time_masks", "time_mask", "mel_masks", "mel_mask"}
    try:
        back = FAMILIES[c.name](**_section(kind, dict(written), Path(FILE)))
    except UserError as error:
        raise UserError("model", f"it cannot be published as {kind} ({error})",
                        "keep it in jaxtrain's format") from None
    if c.num_experts and not c.dense_layers and c.experts_every == 1:
        free.add("mlp_dim")  # which no layer has
    if c.rows_of == "pictures":  # how rows are made, and what preprocessor_config.json and the tokenizer say
        free |= {"pictures_per_row", "patches_per_side", "max_seq_len", "pixel_mean", "pixel_std", "text_end",
                 "text_pad"}
    if multipliers(c) == (1, 1, 1):
        free.add("mup_base")  # it has shaped training only
    for key in c.__dataclass_fields__.keys() - free:
        same = c.rope_type == "ntk" if isinstance(c, RotaryConfig) and key.startswith("rope_") else False
        same |= key == "global_every" and min(c.global_every, back.global_every) > c.num_layers  # no layer is global
        if getattr(c, key) != getattr(back, key) and not same:
            raise UserError(f"model.{key}", f"{getattr(c, key)!r} cannot be published as {kind}",
                            "keep the model in jaxtrain's format")
    if bool(c.router_bias_rate) != bool(back.router_bias_rate):
        raise UserError("model.router_bias_rate", f"{c.router_bias_rate} cannot be published as {kind}",
                        "keep the model in jaxtrain's format")
