"""config.json of published models: both ways of writing rotary positions, and what cannot be expressed."""

import contextlib
import json

import pytest

import jaxtrain as jt
from jaxtrain.config.family import config_class, config_of
from jaxtrain.hf.hf_config import config_json, model_section
from tests.hub import published
from tests.hub.cases import CASES
from tests.numerics import reference


def section(folder, config) -> dict:
    (folder / "config.json").write_text(json.dumps(config))
    return model_section(folder)


@pytest.mark.parametrize("name", CASES)
def test_what_is_written_says_what_was_read(name, tmp_path):
    """Both ways of writing it are read: that of transformers 5, and the older one, in which ours is written."""
    kind, given = CASES[name]
    newer = section(tmp_path, published.truth(name)["config"])
    older = section(tmp_path, given | {"model_type": kind})
    model = config_of(newer)
    assert model == config_of(older)
    written = section(tmp_path, config_json(model))
    assert config_of(written) == model


@pytest.mark.parametrize(("name", "changes", "reason"), [
    ("llama", {"model_type": "qwen3_moes"}, "model_type=qwen3_moes is not one that jaxtrain has; the nearest of "),
    ("llama", {"model_type": "qwen3_moes"}, ": qwen3_moe, qwen2_moe, qwen3_next; docs/model_types.md has all of them"),
    ("llama", {"model_type": "zzzz"}, " are known: docs/model_types.md has all of them"),
    ("llama", {"hidden_act": "relu"}, "hidden_act='relu' cannot be expressed: only 'silu' can"),
    ("mistral", {"attention_bias": True}, "attention_bias=True cannot be expressed: only False can"),
    ("llama", {"hidden_size": None}, "hidden_size=None is not a whole number; correct it, or download it again"),
    ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "its short_factor is not a list of numbers"),
    ("llama", {"rope_parameters": {"rope_type": "proportional"}}, "its type is not linear, dynamic, llama3, yarn or"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic"}}, "has no factor"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 cannot be expressed"),
    ("gpt2", {"activation_function": "relu"}, "activation_function='relu' cannot be expressed"),
    ("qwen3_window", {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
     "only the first layers may have no window"),
    ("qwen3_window", {"layer_types": ["sliding_attention"]}, "does not have one for each of num_hidden_layers=3"),
    ("qwen3_window", {"sliding_window": None}, "it has layers with a window, and there is no window"),
    ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config={'quant_method': 'fp8'} cannot"),
    ("llama", {"max_position_embeddings": "many"}, "max_position_embeddings='many' is not a whole number"),
    ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers=[1] cannot be expressed: only the first layers"),
    ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0 cannot be expressed"),
    ("gemma3", {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}, "layer_types="),
    ("gemma4", {"use_bidirectional_attention": "all"}, "only None can"),
    ("gemma4", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_parameters say it for each kind"),
    ("gemma4", {"rope_parameters": {"sliding_attention": {"rope_theta": 9.0}}}, "no object with a rope_theta for full"),
    ("gemma4", {"rope_parameters": {"sliding_attention": {"rope_theta": 9.0}, "full_attention": {
        "rope_type": "yarn", "rope_theta": 9.0}}}, "positions are plain, or proportional in global layers"),
    ("gemma4", {"per_layer_config": {"0": {"head_dim": 4}}}, "global layers have sizes of their own, and they alone"),
    ("gemma4", {"per_layer_config": {"7": {"head_dim": 4}}}, "its keys are not numbers of layers"),
    ("gemma4_moe", {"top_k_experts": None}, "top_k_experts=None is not a size that experts have"),
    ("gemma4_small", {"num_kv_shared_layers": 5}, "no layer of each kind has keys of its own"),
    ("gemma4_small", {"vocab_size_per_layer_input": 20}, "each token needs an input for each layer"),
    ("gemma2", {"final_logit_softcapping": -1.0}, "final_logit_softcapping=-1.0 is not a cap"),
    ("cohere2", {"sliding_window": None}, "sliding_window=None is not a size that a window has"),
    ("ministral3", {"rope_parameters": {"rope_type": "default", "original_max_position_embeddings": 8}},
     "its llama_4_scaling_beta is not a number"),
    ("hunyuan", {"rope_parameters": {"rope_type": "dynamic", "alpha": 0.5}}, "its alpha is not a number of 1 or more"),
    ("olmo", {"clip_qkv": 0.0}, "clip_qkv=0.0 is not a size to clip to"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax' cannot be expressed: only 'sigmoid' can"),
    ("deepseek_v3", {"rope_interleave": False}, "rope_interleave=False cannot be expressed"),
    ("bailing_hybrid", {"architectures": ["BailingMoeV2_5ForCausalLM"]}, "Ling 2.5 has lightning attention"),
    ("bailing_hybrid", {"expert_swiglu_limit_list": [None, 7.0]}, "transformers reads the file as if it were null"),
    ("bailing_hybrid", {"kda_lower_bound": 0.0}, "kda_lower_bound=0.0 cannot be expressed: it is not negative"),
    ("phimoe", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "its type is not default or longrope"),
    ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok=3 cannot be expressed: only 2 can"),
    ("youtu", {"rope_interleave": False}, "rope_interleave=False cannot be expressed"),
    ("gpt_oss", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config={'quant_method': 'fp8'} cannot"),
    ("gpt_oss", {"attention_bias": False}, "attention_bias=False cannot be expressed: only True can"),
    ("gpt_oss", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types="),
])
def test_what_cannot_be_expressed_is_refused_by_name(name, changes, reason, tmp_path):
    with pytest.raises(jt.UserError) as refusal:
        section(tmp_path, published.truth(name)["config"] | changes)
    assert f"{refusal.value}".startswith(f"{tmp_path / 'config.json'}: ") and reason in f"{refusal.value}"


@pytest.mark.parametrize(("name", "left_out", "expected"), [  # the defaults of transformers 5.24
    ("mistral", ["sliding_window"], {"window": 4096}),
    ("qwen3_window", ["max_window_layers", "layer_types"], {"window": 0}),  # 28: beyond the last layer
    ("deepseek_v3", ["n_group", "topk_group", "routed_scaling_factor", "norm_topk_prob", "q_lora_rank",
                     "n_shared_experts"],
     {"expert_groups": 8, "expert_groups_used": 4, "router_scale": 2.5, "normalize_router": True, "q_rank": 1536,
      "shared_experts": 1}),
    ("mixtral", ["rms_norm_eps", "sliding_window", "num_key_value_heads"],
     {"norm_eps": 1e-5, "window": 0, "num_kv_heads": 8}),
    ("mistral", ["num_key_value_heads"], {"num_kv_heads": 8}),
    ("qwen3", ["head_dim"], {"head_dim": 128}),
    ("qwen3_moe", ["num_key_value_heads", "max_window_layers"], {"num_kv_heads": 4, "window": 5}),
    ("gemma3", ["head_dim", "num_key_value_heads"], {"head_dim": 256, "num_kv_heads": 4}),
    ("gpt_oss", ["rope_parameters", "layer_types", "head_dim", "num_key_value_heads"],
     {"rope_type": "yarn", "rope_scaling": 32.0, "rope_original_len": 4096, "rope_truncate": False, "global_every": 2,
      "rope_theta": 150_000.0, "head_dim": 64, "num_kv_heads": 8}),
])
def test_what_is_left_out_has_the_default_of_its_type(name, left_out, expected, tmp_path):
    config = {key: value for key, value in published.truth(name)["config"].items() if key not in left_out}
    found = section(tmp_path, config)
    assert {key: found[key] for key in expected} == expected


def test_a_base_of_rotary_positions_may_exceed_32_bits(tmp_path):
    """Accept the base of a model for a million tokens."""
    config = published.truth("llama")["config"]
    assert section(tmp_path, {key: value for key, value in config.items() if not key.startswith("rope_")} | {
        "rope_theta": 3580165449.0})["rope_theta"] == 3580165449.0
    with pytest.raises(jt.UserError, match=r"rope_theta=1e[+]?300 is not a number up to"):
        section(tmp_path, config | {"rope_theta": 1e300})


def test_the_published_gpt_oss_is_the_shipped_config(tmp_path):
    """The published file has the older form of rotary positions, packed experts, and no key for the activation."""
    wanted = jt.load_config("configs/gpt_oss_20b.py").model
    layers = ["sliding_attention", "full_attention"] * 12
    found = section(tmp_path, {
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "head_dim": 64,
        "eos_token_id": 200002, "experts_per_token": 4, "hidden_act": "silu", "hidden_size": 2880,
        "initial_context_length": 4096, "intermediate_size": 2880, "layer_types": layers, "model_type": "gpt_oss",
        "max_position_embeddings": 131072, "num_attention_heads": 64, "num_experts_per_tok": 4, "vocab_size": 201088,
        "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False,
        "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"}, "rms_norm_eps": 1e-5,
        "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn", "truncate": False,
                         "original_max_position_embeddings": 4096},
        "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
        "tie_word_embeddings": False})
    assert config_class("gpt_oss")(**found, balance_loss=wanted.balance_loss) == wanted


ODD = (None, "x", -1, 0, 1.5, [], {}, [1], {"a": 1}, True, 10**30)
NESTED = (*ODD, {"rope_type": "linear"}, {"rope_type": "yarn", "factor": "a"}, {"type": "linear", "factor": None},
          {"full_attention": 3})


@pytest.mark.parametrize("name", ["gemma3", *(pytest.param(name, marks=pytest.mark.slow) for name in (
    "gpt2", "llama_yarn", "qwen3_window", "qwen3_moe_sparse", "deepseek_v3", "gpt_oss"))])
def test_no_value_of_a_wrong_kind_ends_in_a_traceback(name, tmp_path):
    config = published.truth(name)["config"]
    damaged = [{"model_type": "gemma3", "text_config": value} for value in ODD]
    for key in {*config, "rope_scaling", "rope_parameters", "layer_types"}:
        damaged += [{other: value for other, value in config.items() if other != key}]
        damaged += [config | {key: value} for value in NESTED]
    for content in damaged:
        (tmp_path / "config.json").write_text(json.dumps(content))
        with contextlib.suppress(jt.UserError):
            jt.load_config(f"hf:{tmp_path}")


@pytest.mark.parametrize(("family", "changes", "reason"), [
    ("gpt2", {"model__window": 4}, "model.window: 4 cannot be published as gpt2"),
    ("qwen3_moe", {}, "model.shared_experts: 2 cannot be published as qwen3_moe"),
    ("mixtral", {"model__router": "sigmoid"}, "model.router: 'sigmoid' cannot be published as mixtral"),
    ("deepseek_v3", {"model__norm_eps": 1e-5}, "model.latent_norm_eps: 0.0 cannot"),
    ("deepseek_v3", {"model__norm_eps": 1e-6, "model__router_bias_rate": 0.0}, "model.router_bias_rate: 0.0 cannot"),
])
def test_a_model_that_no_published_type_is_stays_in_the_own_format(family, changes, reason):
    with pytest.raises(jt.UserError) as refusal:
        config_json(reference.tiny(family, **changes).model)
    assert reason in f"{refusal.value}"


def test_ntk_scaling_is_published_as_another_base():
    model = reference.tiny("llama", model__rope_type="ntk", model__rope_scaling=2.0, model__head_dim=8).model
    assert config_json(model)["rope_theta"] == pytest.approx(100 * 2 ** (8 / 6))


def test_weights_that_are_not_safetensors_are_not_passed_over(tmp_path):
    section(tmp_path, published.truth("llama")["config"])
    assert jt.load_config(f"hf:{tmp_path}").train.init_from == f"{tmp_path}"  # refused there
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(jt.UserError, match=r"are not safetensors but pytorch_model.bin; save them as safetensors"):
        jt.load_config(f"hf:{tmp_path}")


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(jt.UserError, match=r"--config: there is no .*config.json; give a folder in Hugging"):
        jt.load_config(f"hf:{tmp_path}")


def test_a_model_whose_mup_is_in_its_weights_is_published_and_one_with_multipliers_is_not():
    base = {"embed_dim": 16, "num_heads": 8}
    untied = reference.tiny("llama", model__mup_base=base).model
    assert config_json(untied) == config_json(reference.tiny("llama").model)
    for family, more, changes in (("gpt2", {"head_dim": 4}, {}), ("llama", {"head_dim": 2}, {}),
                                  ("gemma3", {"head_dim": 4}, {"model__tied_embeddings": False})):
        model = reference.tiny(family, model__mup_base=base | more, **changes).model
        with pytest.raises(jt.UserError, match=r"model.mup_base: .* cannot be published as"):
            config_json(model)


@pytest.mark.parametrize("name", ["siglip", "clip"])
def test_encoders_of_images_and_texts_are_published_without_a_reward_head(name, tmp_path):
    model = config_of(section(tmp_path, {"model_type": name}))
    assert config_json(model)["architectures"]
    with pytest.raises(jt.UserError, match=rf"^preference\.loss: transformers has no class .+ type {name};"):
        config_json(model, reward_head=True)


def test_a_hybrid_without_experts_needs_no_size_of_theirs_to_be_published(tmp_path):
    model = jt.make_config({"model": {"name": "nemotron_h", "num_layers": 4, "layer_pattern": "MFAF"}}).model
    assert config_of(section(tmp_path, config_json(model))) == model
