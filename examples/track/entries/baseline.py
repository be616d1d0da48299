"""The baseline: the shape of configs/gpt.py with AdamW."""


def stages():
    return [(STEPS, {
        "model": {"name": "gpt2", "vocab_size": 320, "num_layers": 4, "embed_dim": 128, "num_heads": 4,
                  "max_seq_len": 256},
        "data": {"seq_len": 256, "global_batch_size": 8},
        "optimizer": {"name": "adamw", "learning_rate": 4e-3, "warmup_steps": 0.05}})]


STEPS = 656
