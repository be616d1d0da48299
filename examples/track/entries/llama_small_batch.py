"""Another architecture, rotary positions and SwiGLU without biases, and half the rows a step, so twice the steps."""


def stages():
    return [(STEPS, {
        "model": {"name": "llama", "vocab_size": 320, "num_layers": 4, "embed_dim": 128, "num_heads": 4,
                  "num_kv_heads": 4, "mlp_dim": 352, "max_seq_len": 256},
        "data": {"seq_len": 256, "global_batch_size": 4},
        "optimizer": {"name": "adamw", "learning_rate": 4e-3, "warmup_steps": 0.05}})]


STEPS = 1288
