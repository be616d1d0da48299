"""DeepSeek-V3 (671B, 37B at work on each token), trained from random values: the published shape, in rows of 4,096.

    python -m jaxtrain.main --config=configs/deepseek_v3.py --config.data.source=/path/to/text

For 2,048 accelerators of 80 GB: experts on groups of 4 devices and split in two, all inside a machine, and all weights
sharded over 256 such groups. By simulation for H100 with InfiniBand (docs/performance.md) it takes 57 s a step and 53
GB, 15 % MFU (9 to 25); with each of a layer's experts on a device of its own, tokens cross the network: that is slower.
Expert load is evened out by the router's bias; what buffers have no room for takes another pass, and no token is
dropped. With --config.model.mtp_loss_weight=0.3 one more layer learns the token after the next. Speed and loss: not
measured. Text given as it is becomes bytes; `jaxtrain.data.prepare` makes a corpus with the published tokenizer.json.
Variant: `:tiny`.
"""

from ml_collections import ConfigDict


def get_config(variant=None):
    if variant not in (None, "tiny"):
        raise ValueError(f"deepseek_v3.py has no variant {variant!r}: known is tiny")
    config = ConfigDict({
        "model": {"name": "deepseek_v3", "vocab_size": 129280, "num_layers": 61, "embed_dim": 7168, "num_heads": 128,
                  "head_dim": 128, "rope_head_dim": 64, "value_head_dim": 128, "q_rank": 1536, "kv_rank": 512,
                  "mlp_dim": 18432, "dense_layers": 3, "num_experts": 256, "experts_per_token": 8,
                  "expert_mlp_dim": 2048, "shared_experts": 1, "router": "sigmoid", "router_scale": 2.5,
                  "expert_groups": 8, "expert_groups_used": 4, "router_bias_rate": 0.001, "balance_loss": 0.0001,
                  "max_seq_len": 4096, "norm_eps": 1e-6, "rope_theta": 10_000.0, "tied_embeddings": False},
        "mesh": {"data": 1, "fsdp": -1, "expert": 4, "tensor": 2},
        "data": {"seq_len": 4096, "global_batch_size": 16384},  # 67 million tokens
        "optimizer": {"learning_rate": 2.2e-4, "warmup_steps": 2000, "final_fraction": 0.1,
                      "zero_stage": 3},
        "train": {"steps": 220_000, "accumulation": 2, "remat": "full", "eval_every": 1000},
    })
    if variant == "tiny":
        config.update({
            "model": {"vocab_size": 320, "num_layers": 3, "embed_dim": 64, "num_heads": 4, "head_dim": 16,
                      "rope_head_dim": 8, "value_head_dim": 16, "q_rank": 48, "kv_rank": 32, "mlp_dim": 192,
                      "dense_layers": 1, "num_experts": 8, "experts_per_token": 2, "expert_mlp_dim": 48,
                      "expert_groups": 4, "expert_groups_used": 2, "max_seq_len": 64},
            "mesh": {"data": 1, "expert": 1, "tensor": 1},
            "data": {"seq_len": 64, "global_batch_size": 16},
            "optimizer": {"learning_rate": 3e-3, "warmup_steps": 1, "zero_stage": 0},
            "train": {"steps": 20, "accumulation": 1, "eval_every": 10},
            "checkpoint": {"every": 10},
        })
    return config
