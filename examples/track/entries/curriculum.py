"""Short rows first: the first half of the arithmetic on rows of 64, as many tokens a step, then rows of 256."""


def stages():
    keys = {
        "model": {"name": "gpt2", "vocab_size": 320, "num_layers": 4, "embed_dim": 128, "num_heads": 4,
                  "max_seq_len": 256},
        "optimizer": {"name": "adamw", "learning_rate": 4e-3, "warmup_steps": 0.05}}
    return [(SHORT, {**keys, "data": {"seq_len": 64, "global_batch_size": 32}}),
            (LONG, {**keys, "data": {"seq_len": 256, "global_batch_size": 8}})]


SHORT, LONG = 364, 328
