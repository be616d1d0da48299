"""The `model` section of a config from a published model's config.json, and back.

What changes numbers and cannot be expressed is refused by name. A key that config.json leaves out has the default that
Hugging Face's transformers gives it for the model type.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtrain.config import published_towers
from jaxtrain.config.families import FAMILIES, Gemma3Config, GptOssConfig, ModelConfig, RotaryConfig
from jaxtrain.config.modality_families import WhisperConfig
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
                  "moe_intermediate_size": "expert_mlp_dim", "norm_topk_prob": "normalize_router",
                  "decoder_sparse_step": "experts_every"},
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
# What transformers takes for a key that is not there, where it is not our default.
_DEFAULTS: dict[str, Keys] = {
    "gpt2": {"tie_word_embeddings": True, "layer_norm_epsilon": 1e-5},
    "mistral": {"sliding_window": 4096},
    "mixtral": {"rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "qwen2": {"max_window_layers": 28}, "qwen3": {"max_window_layers": 28},
    "qwen3_moe": {"norm_topk_prob": False, "max_window_layers": 28},
    "deepseek_v3": {"q_lora_rank": 1536, "n_shared_experts": 1, "first_k_dense_replace": 3, "n_group": 8,
                    "topk_group": 4, "routed_scaling_factor": 2.5, "norm_topk_prob": True},
    "gemma3_text": {"tie_word_embeddings": True, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
                    "sliding_window_pattern": 6, "query_pre_attn_scalar": 256, "sliding_window": 4096},
    "gpt_oss": {"rms_norm_eps": 1e-5, "rope_theta": 150_000.0, "head_dim": 64, "num_key_value_heads": 8,
                "attention_bias": True},
}
_GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                 "original_max_position_embeddings": 4096}
_NEEDED = ("vocab_size", "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "n_layer",
           "n_embd", "n_head", "n_positions", "max_position_embeddings", "num_local_experts", "num_experts",
           "n_routed_experts", "moe_intermediate_size", "num_experts_per_tok", "kv_lora_rank", "qk_nope_head_dim",
           "qk_rope_head_dim", "v_head_dim", "d_model", "decoder_layers", "encoder_layers", "decoder_attention_heads",
           "decoder_ffn_dim")
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
    "whisper": {"activation_function": ("gelu",), "scale_embedding": _NO},
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
        given = given["text_config"] if given.get("model_type") == "gemma3" else given
        kind = given.get("model_type")
        if kind is None and isinstance(given.get("model"), dict):
            raise UserError("--config", f"{folder} is the workdir of a run, not a published folder",
                            f"begin with it by train.init_from={folder}, or export it first")
        if f"{kind}" not in _TYPES:
            raise UserError(f"{path}", f"model_type={kind} is not one that jaxtrain has", f"known: {', '.join(_TYPES)}")
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
    def refuse(key: str, why: str) -> UserError:
        return UserError(f"{path}", f"{key}={given.get(key)!r} {why}", "use a model that jaxtrain can express")

    family = _TYPES[kind][0]
    if kind in published_towers.KINDS:
        return published_towers.section(kind, given, path)
    usual = {"tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 1e4}
    known: Keys = usual | _DEFAULTS.get(kind, {}) | given
    for key in ("num_experts", "n_routed_experts"):
        known.setdefault(key, known.get("num_local_experts"))  # its name in transformers 5
    for key, allowed in _FIXED.get(kind, _BIASES).items():
        if known.get(key, allowed[0]) not in allowed:
            raise refuse(key, f"cannot be expressed: only {allowed[0]!r} can")
    table = _OWN.get(kind) or _COMMON | _MORE.get(kind, {})
    for key in _NEEDED:
        if key in table and (type(known.get(key)) is not int or not known[key]):
            raise UserError(f"{path}", f"it has no {key}", "download it again")
    packed = (known.get("quantization_config") or {}).get("quant_method")
    if known.get("quantization_config") and (kind, packed) != ("gpt_oss", "mxfp4"):  # hub/weights/mxfp4.py reads these
        raise refuse("quantization_config", "cannot be expressed: only plain weights can")
    section: Keys = {"name": family} | {ours: known[key] for key, ours in table.items() if known.get(key) is not None}
    if kind == "gemma3_text":
        return section | _gemma_layers(known, refuse)
    if kind == "gpt_oss":
        section["global_every"] = _global_every(known, 2, refuse)
        known["rope_scaling"] = known.get("rope_scaling") or _GPT_OSS_ROPE
    if kind in ("mistral", "mixtral") or (kind.startswith("qwen") and known.get("use_sliding_window")):
        section["window"] = known.get("sliding_window") or 0
        if section["window"] and kind.startswith("qwen"):
            first, layers = known["max_window_layers"], known["num_hidden_layers"]
            if len(kinds := set(known.get("layer_types") or _windowed(layers, first))) != 1:
                raise refuse("layer_types" if known.get("layer_types") else "max_window_layers",
                             "cannot be expressed: all layers have the window, or none")
            section["window"] *= "sliding_attention" in kinds
    if kind == "qwen3_moe":
        dense = known.get("mlp_only_layers") or []
        if dense != list(range(len(dense))) or len(dense) % section.get("experts_every", 1):
            raise refuse("mlp_only_layers", "cannot be expressed: only the first layers may be dense")
        section["dense_layers"] = len(dense)
    if kind == "deepseek_v3":
        section |= {"router": "sigmoid", "router_bias_rate": _BIAS_RATE, "num_kv_heads": 0}
    if kind == "whisper":
        start = known.get("decoder_start_token_id")
        section |= {key: known.get(key, plain) for key, plain in _WHISPER_MORE.items()}
        section |= {} if start is None else {"prefix": [start]}
    for key in ("attention_heads", "ffn_dim") if kind == "whisper" else ():
        if known.get(f"encoder_{key}") != known[f"decoder_{key}"]:
            raise refuse(f"encoder_{key}", f"cannot be expressed: only decoder_{key}={known[f'decoder_{key}']} can")
    return section if kind in _OWN else section | _rotary(known, refuse)


def _rotary(known: Keys, refuse: Any) -> Keys:
    """Return our keys of rotary positions, from either of the two ways in which they are published."""
    newer = known.get("rope_parameters") or {}
    scaling = newer or known.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    where = "rope_parameters" if newer else "rope_scaling"
    found = {"rope_theta": float(newer.get("rope_theta", known["rope_theta"]))}
    if known.get("partial_rotary_factor", newer.get("partial_rotary_factor", 1)) not in (1, None):
        raise refuse("partial_rotary_factor", "cannot be expressed: all of a head's width turns")
    if kind == "default":
        return found
    if kind not in ("linear", "llama3", "yarn"):
        raise refuse(where, "cannot be expressed: its type is not linear, llama3 or yarn")
    found |= {"rope_type": kind, "rope_scaling": float(scaling["factor"])}
    if kind != "linear":
        found["rope_original_len"] = scaling.get("original_max_position_embeddings") or known["max_position_embeddings"]
    return found | {f"rope_{key}": scaling[key] for key in _SCALINGS[kind] if scaling.get(key) is not None}


_SCALINGS = {"linear": (), "llama3": ("low_freq_factor", "high_freq_factor"),
             "yarn": ("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim")}


def _gemma_layers(known: Keys, refuse: Any) -> Keys:
    """Return our keys of local and global layers, from either of the two ways in which they are published."""
    both = known.get("rope_parameters") or {}
    near = {"rope_theta": known["rope_local_base_freq"]} | both.get("sliding_attention", {})
    far = {"rope_theta": known["rope_theta"]} | (known.get("rope_scaling") or {}) | both.get("full_attention", {})
    kind, every = far.get("rope_type", "default"), known["sliding_window_pattern"]
    if kind not in ("default", "linear") or near.get("rope_type", "default") != "default":
        raise refuse("rope_parameters" if both else "rope_scaling", "cannot be expressed: only linear scaling can")
    return {"global_every": _global_every(known, every, refuse), "rope_theta": float(far["rope_theta"]),
            "local_rope_theta": float(near["rope_theta"]),
            "rope_factor": float(far.get("factor", 1)) if kind == "linear" else 1.0}


def _global_every(known: Keys, usual: int, refuse: Any) -> int:
    """Return every how many layers one is global."""
    if not (layers := known.get("layer_types")):
        return usual
    every = layers.index("full_attention") + 1 if "full_attention" in layers else len(layers) + 1
    if layers != _layer_types(every, len(layers)):
        raise refuse("layer_types", "cannot be expressed: only every so many layers the last one is global")
    return every


def _windowed(layers: int, first: int) -> list[str]:
    """Return the kinds of layers of which those from the first one on have a window."""
    return ["sliding_attention" if n >= first else "full_attention" for n in range(layers)]


def _layer_types(every: int, layers: int) -> list[str]:
    return ["full_attention" if (n + 1) % every == 0 else "sliding_attention" for n in range(layers)]


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
        found |= {"layer_types": _layer_types(c.global_every, c.num_layers), "rope_theta": c.rope_theta,
                  "rope_local_base_freq": c.local_rope_theta, "sliding_window_pattern": c.global_every,
                  "rope_scaling": {"rope_type": "linear", "factor": c.rope_factor} if c.rope_factor != 1 else None}
    elif isinstance(c, RotaryConfig):
        found |= _published_rotary(c) | {"sliding_window": c.window or None}
        if kind.startswith("qwen") and c.window:
            found |= {"use_sliding_window": True, "max_window_layers": 0}
    if isinstance(c, GptOssConfig):
        found |= {"layer_types": _layer_types(c.global_every, c.num_layers),
                  "rope_scaling": found["rope_scaling"] or {"rope_type": "default"}}
    if kind == "mixtral":
        found["intermediate_size"] = getattr(c, "expert_mlp_dim")  # noqa: B009 (of one family only)
    if kind == "qwen3_moe":
        found["mlp_only_layers"] = list(range(c.dense_layers))
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


def _published_rotary(c: RotaryConfig) -> Keys:
    plain = {"rope_theta": c.rope_theta, "rope_scaling": None}
    if c.rope_scaling == 1:
        return plain
    if c.rope_type == "ntk":  # another base, and nothing else
        width = c.rope_head_dim or c.head_dim
        return plain | {"rope_theta": c.rope_theta * c.rope_scaling ** (width / (width - 2))}
    scaling = {"rope_type": c.rope_type, "factor": c.rope_scaling}
    if c.rope_type != "linear":
        scaling["original_max_position_embeddings"] = c.rope_original_len
    zero_is_none = {key: getattr(c, f"rope_{key}") for key in _SCALINGS[c.rope_type]}
    return plain | {"rope_scaling": scaling | {key: value for key, value in zero_is_none.items()
                                               if value or key == "truncate"}}


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
        if getattr(c, key) != getattr(back, key) and not same:
            raise UserError(f"model.{key}", f"{getattr(c, key)!r} cannot be published as {kind}",
                            "keep the model in jaxtrain's format")
    if bool(c.router_bias_rate) != bool(back.router_bias_rate):
        raise UserError("model.router_bias_rate", f"{c.router_bias_rate} cannot be published as {kind}",
                        "keep the model in jaxtrain's format")
