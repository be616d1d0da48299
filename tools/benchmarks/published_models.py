"""The models of published runs: a file of configs/, and what to change in it."""

from typing import Any

LLAMA2 = {"model.vocab_size": 32000, "model.rope_theta": 10_000.0, "model.rope_scaling": 1.0}


def _mpt(layers: int, embed: int, heads: int) -> tuple[str, dict[str, Any]]:
    """Return MPT: GPT-2's block of another shape (MosaicML's has no biases)."""
    return "gpt:124m", {"model.vocab_size": 50368, "model.num_layers": layers, "model.embed_dim": embed,
                        "model.num_heads": heads, "model.max_seq_len": 65536}


def _maxtext(layers: int, embed: int, heads: int, mlp: int) -> tuple[str, dict[str, Any]]:
    """Return MaxText's default model, scaled as its `global_parameter_scale` does."""
    return "llama3_8b", {**LLAMA2, "model.num_layers": layers, "model.embed_dim": embed, "model.num_heads": heads,
                         "model.num_kv_heads": heads, "model.head_dim": 128, "model.mlp_dim": mlp}


SINKS = {"train.attention": "auto"}  # cuDNN's kernel has none
DEEPSEEK_MTP = {"model.mtp_loss_weight": 0.1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2 124M": ("gpt:124m", {}),
    "Llama-2 7B": ("llama3_8b", {**LLAMA2, "model.num_kv_heads": 32, "model.mlp_dim": 11008}),
    "Llama-2 13B": ("llama3_8b", {**LLAMA2, "model.num_layers": 40, "model.embed_dim": 5120, "model.num_heads": 40,
                                  "model.num_kv_heads": 40, "model.mlp_dim": 13824}),
    "Llama 34B": ("llama3_8b", {**LLAMA2, "model.num_layers": 48, "model.embed_dim": 8192, "model.num_heads": 64,
                                "model.num_kv_heads": 8, "model.mlp_dim": 22016}),
    "Llama-2 70B": ("llama3_70b", LLAMA2),
    "Llama-3.2 1B": ("llama3_1b", {}),
    "Llama-3.1 8B": ("llama3_8b", {}),
    "Llama-3.1 70B": ("llama3_70b", {}),
    "Llama-3.1 405B": ("llama3_405b", {}),
    "Mistral 7B": ("llama3_8b", {**LLAMA2, "model.num_kv_heads": 8, "model.mlp_dim": 14336}),
    "Mixtral 8x7B": ("mixtral_8x7b", {}),
    "Mixtral 8x22B": ("mixtral_8x7b", {"model.vocab_size": 32768, "model.num_layers": 56, "model.embed_dim": 6144,
                                       "model.num_heads": 48, "model.head_dim": 128, "model.mlp_dim": 16384}),
    "Qwen2.5 7B": ("qwen2p5_0p5b", {"model.vocab_size": 152064, "model.num_layers": 28, "model.embed_dim": 3584,
                                    "model.num_heads": 28, "model.num_kv_heads": 4, "model.head_dim": 128,
                                    "model.mlp_dim": 18944, "model.tied_embeddings": False}),
    "Qwen2.5 32B": ("qwen2p5_0p5b", {"model.vocab_size": 152064, "model.num_layers": 64, "model.embed_dim": 5120,
                                     "model.num_heads": 40, "model.num_kv_heads": 8, "model.head_dim": 128,
                                     "model.mlp_dim": 27648, "model.tied_embeddings": False}),
    "Qwen3-30B-A3B": ("qwen3_30b_a3b", {"optimizer.moment_dtype": "bfloat16"}),
    "Qwen3-235B-A22B": ("qwen3_30b_a3b", {"model.num_layers": 94, "model.embed_dim": 4096, "model.num_heads": 64,
                                          "model.expert_mlp_dim": 1536}),
    "GPT-OSS 20B": ("gpt_oss_20b", SINKS),
    "GPT-OSS 120B": ("gpt_oss_20b:120b", SINKS),
    "DeepSeek-V3": ("deepseek_v3", DEEPSEEK_MTP),
    "DeepSeek-V3 without MTP": ("deepseek_v3", {}),
    "Kimi K2": ("deepseek_v3", {"model.vocab_size": 163840, "model.num_heads": 64, "model.dense_layers": 1,
                                "model.num_experts": 384, "model.expert_groups": 1, "model.expert_groups_used": 1}),
    "Gemma 3 12B": ("gemma3_1b", {"model.num_layers": 48, "model.embed_dim": 3840, "model.num_heads": 16,
                                  "model.num_kv_heads": 8, "model.mlp_dim": 15360, "model.window": 1024}),
    "GPT-3 175B": ("gpt:124m", {"model.vocab_size": 50304, "model.num_layers": 96, "model.embed_dim": 12288,
                                "model.num_heads": 96, "model.max_seq_len": 2048}),
    "MPT 125M": _mpt(12, 768, 12),
    "MPT 350M": _mpt(24, 1024, 16),
    "MPT 760M": _mpt(24, 1536, 12),
    "MPT 1B": _mpt(24, 2048, 16),
    "MPT 3B": _mpt(32, 2560, 20),
    "MPT 7B": _mpt(32, 4096, 32),
    "MPT 13B": _mpt(40, 5120, 40),
    "MPT 30B": _mpt(48, 7168, 56),
    "MPT 70B": _mpt(80, 8192, 64),
    "MaxText 16B": _maxtext(32, 4096, 64, 28672),
    "MaxText 32B": _maxtext(64, 4096, 64, 28672),
    "MaxText 64B": _maxtext(64, 8192, 64, 28672),
    "MaxText 128B": _maxtext(64, 8192, 128, 57344),
    "MaxText 256B": _maxtext(128, 8192, 128, 57344),
    "MaxText 512B": _maxtext(128, 16384, 128, 57344),
    "MaxText 1024B": _maxtext(128, 16384, 256, 114688),
}
