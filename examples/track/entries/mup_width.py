"""Half again as wide, with the learning rate of the baseline's width, carried over by muP (arXiv 2203.03466)."""


def stages():
    return [(STEPS, {
        "model": {"name": "gpt2", "vocab_size": 320, "num_layers": 4, "embed_dim": 192, "num_heads": 6,
                  "max_seq_len": 256, "mup_base": {"embed_dim": 128, "num_heads": 4}},
        "data": {"seq_len": 256, "global_batch_size": 8},
        "optimizer": {"name": "adamw", "learning_rate": 4e-3, "warmup_steps": 0.05}})]


STEPS = 312
