"""Tiny published models: their config.json, weights that follow from their names, and what transformers computes.

`tests/hub/published_truth.py` makes the truth, with torch and transformers; the tests need neither.
"""

import json
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxtrain.hub.weights import safetensors_files

TRUTH = Path(__file__).with_name("published_truth.json")
# Without 0, the padding of Gemma, whose gradient transformers leaves out.
TOKENS = np.random.default_rng(7).integers(1, 24, (2, 12)).astype(np.int32)

_SIZES = {"vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "intermediate_size": 20, "max_position_embeddings": 16, "rms_norm_eps": 1e-5,
          "rope_theta": 100.0, "tie_word_embeddings": False}
_ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "n_shared_experts": 2,
           "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
           "num_hidden_layers": 3, "norm_topk_prob": True}
_LATENT = _ROUTED | {"num_key_value_heads": 4, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
                     "v_head_dim": 8, "rms_norm_eps": 1e-6}
CASES = {  # name: (model type, what transformers is given)
    "gpt2": ("gpt2", {"vocab_size": 24, "n_layer": 2, "n_embd": 16, "n_head": 4, "n_positions": 16}),
    "llama": ("llama", _SIZES), "llama_head_dim": ("llama", _SIZES | {"head_dim": 6, "tie_word_embeddings": True}),
    "llama_llama3": ("llama", _SIZES | {"rope_scaling": {
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8}}),
    "llama_linear": ("llama", _SIZES | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "llama_yarn": ("llama", _SIZES | {"head_dim": 8, "rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}}),
    "mistral": ("mistral", _SIZES | {"sliding_window": 5}),
    "qwen2": ("qwen2", _SIZES), "qwen3": ("qwen3", _SIZES | {"head_dim": 6}),
    "qwen3_window": ("qwen3", _SIZES | {"head_dim": 6, "use_sliding_window": True, "sliding_window": 5,
                                        "max_window_layers": 1, "num_hidden_layers": 3}),
    "mixtral": ("mixtral", _SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3_moe": ("qwen3_moe", _SIZES | {
        "head_dim": 6, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "norm_topk_prob": True,
        "mlp_only_layers": [0], "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 5,
        "max_window_layers": 2}),
    "qwen3_moe_sparse": ("qwen3_moe", _SIZES | {
        "head_dim": 6, "num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 6, "norm_topk_prob": False,
        "decoder_sparse_step": 2, "num_hidden_layers": 4}),
    "gemma3": ("gemma3_text", _SIZES | {
        "head_dim": 6, "sliding_window": 5, "sliding_window_pattern": 2, "query_pre_attn_scalar": 9,
        "num_hidden_layers": 3, "rope_local_base_freq": 50.0, "tie_word_embeddings": True, "rms_norm_eps": 1e-6}),
    "gemma3_scaled": ("gemma3_text", _SIZES | {
        "head_dim": 6, "sliding_window": 5, "sliding_window_pattern": 2, "query_pre_attn_scalar": 6,
        "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    "deepseek_v3": ("deepseek_v3", _SIZES | _LATENT | {"q_lora_rank": 12, "rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "gpt_oss": ("gpt_oss", _SIZES | {
        "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5, "num_hidden_layers": 3,
        "swiglu_limit": 0.8, "swiglu_alpha": 1.5, "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 4.0,
            "beta_slow": 1.0, "truncate": False}}),
    "gpt_oss_plain": ("gpt_oss", _SIZES | {
        "head_dim": 6, "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 3,
        "layer_types": ["full_attention", "full_attention"], "rope_scaling": {"rope_type": "default"}}),
    "llama_biased": ("llama", _SIZES | {"attention_bias": True, "mlp_bias": True}),
    "arcee": ("arcee", _SIZES | {"attention_bias": True, "mlp_bias": True}),
    "smollm3": ("smollm3", _SIZES | {"num_hidden_layers": 3, "no_rope_layer_interval": 2, "pad_token_id": 0}),
    "granite": ("granite", _SIZES | {"embedding_multiplier": 6.0, "attention_multiplier": 0.3,
                                     "residual_multiplier": 0.22, "logits_scaling": 4.0, "mlp_bias": True}),
    "seed_oss": ("seed_oss", _SIZES | {"head_dim": 6, "attention_out_bias": True, "pad_token_id": 0}),
    "ernie4_5": ("ernie4_5", _SIZES | {"head_dim": 6, "use_bias": True}),
    "phi3": ("phi3", _SIZES | {"sliding_window": 5, "pad_token_id": 0}),
    "phi3_partial": ("phi3", _SIZES | {"hidden_size": 32, "partial_rotary_factor": 0.75, "pad_token_id": 0}),
    "glm4": ("glm4", _SIZES | {"head_dim": 8, "pad_token_id": 0}),
    "glm4_moe": ("glm4_moe", _SIZES | _ROUTED | {"head_dim": 8, "attention_bias": True, "use_qk_norm": True}),
    "dots1": ("dots1", _SIZES | _ROUTED | {"head_dim": 6, "max_window_layers": 0, "sliding_window": 5}),
    "olmo2": ("olmo2", _SIZES | {"pad_token_id": 0}),
    "olmo3": ("olmo3", _SIZES | {
        "head_dim": 8, "num_hidden_layers": 3, "sliding_window": 5, "pad_token_id": 0,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}}),
    "exaone4": ("exaone4", _SIZES | {"head_dim": 6, "num_hidden_layers": 3, "sliding_window": 5,
                                     "sliding_window_pattern": 2, "pad_token_id": 0}),
    "exaone4_full": ("exaone4", _SIZES | {"sliding_window": None, "layer_types": ["full_attention"] * 2,
                                          "pad_token_id": 0}),
    "deepseek_v3_plain": ("deepseek_v3", _SIZES | _LATENT | {"q_lora_rank": None}),
}


def weight(name: str, shape) -> np.ndarray:
    """A tensor that follows from its name, of numbers that bfloat16 holds."""
    numbers = np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape) * (0.3 if len(shape) > 1 else 0.1)
    if len(shape) == 1 and "norm" in name + name.replace("ln_", "norm") and name.endswith("weight"):
        numbers += 1
    return numbers.astype(ml_dtypes.bfloat16).astype(np.float32)


def projections(name: str, tensor: np.ndarray) -> list[float]:
    """A tensor's norm, and its products with two tensors that follow from its name."""
    others = np.random.default_rng(zlib.crc32(f"{name} projected".encode())).normal(size=(2, tensor.size))
    return [float(np.linalg.norm(tensor)), *(others @ np.asarray(tensor, np.float64).reshape(-1)).tolist()]


def truth() -> dict:
    return json.loads(TRUTH.read_text())["cases"]


def write(folder: Path, case: dict, dtype=np.float32, weight=weight) -> Path:
    """Write the folder of a case as transformers does."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(case["config"]))
    shapes = {name: tuple(shape) for name, shape in case["tensors"].items()}
    safetensors_files.write(folder / safetensors_files.SINGLE, shapes, dict.fromkeys(shapes, dtype),
                            (weight(name, shape) for name, shape in shapes.items()))
    return folder
