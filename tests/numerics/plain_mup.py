"""The factors of muP, written out from the definition of the base model (arXiv 2203.03466, tables 3 and 8)."""

import re

import numpy as np

# Parameters by the end of their path. What a matrix reads and what it writes: "" is a size that no width changes.
SIDES = {
    "embed/table": ("", "embed"), "positions/table": ("", "embed"), "output/kernel": ("embed", ""),
    "reward_head/kernel": ("embed", ""), "value_head/kernel": ("embed", ""),
    "router/kernel": ("embed", ""), "router/(logit_)?bias": ("", ""),
    "(q|k|v)/kernel": ("embed", "attention"), "attention/out/kernel": ("attention", "embed"),
    "(gate|up)/kernel": ("embed", "mlp"), "down/kernel": ("mlp", "embed"),
    "mlp/(gate|up)": ("embed", "mlp"), "mlp/down": ("mlp", "embed"),
    "ahead/(later/)*(this|next)/kernel": ("embed", "embed"),
    "(gate|up)_bias": ("", "mlp"), "down_bias": ("", "embed"), "sinks": ("", "heads"),
    "(q|k|v)/bias": ("", "attention"), "up/bias": ("", "mlp"), "(out|down)/bias": ("", "embed"),
    "norm(_this|_next)?/(scale|bias)": ("", "embed"), "(attention|mlp)(_out)?_norm/(scale|bias)": ("", "embed"),
    "(q|k)_norm/scale": ("", "head"),
}
LATENT = {  # in DeepSeek's attention
    "attention/(q|kv)_down/kernel": ("embed", "latent"), "attention/(q|kv)/kernel": ("latent", "attention"),
    "(q|kv)_norm/scale": ("", "latent"),
}
ADAPTER = {"out/adapter/down": ("attention", ""), "out/adapter/up": ("", "embed"),
           "(q|k|v|gate)/adapter/down": ("embed", ""), "(q|k|v)/adapter/up": ("", "attention"),
           "mlp/gate/adapter/up": ("", "mlp")}


def times(c) -> dict[str, float]:
    """Return how many times as wide as in the base the sizes of a model are."""
    base = c.mup_base or {"embed_dim": c.embed_dim, "num_heads": c.num_heads}
    embed, heads = c.embed_dim / base["embed_dim"], c.num_heads / base["num_heads"]
    head = c.head_dim / base["head_dim"] if "head_dim" in base else embed / heads
    mlp = c.mlp_dim / base["mlp_dim"] if "mlp_dim" in base else embed
    latent = c.kv_rank / base["kv_rank"] if "kv_rank" in base else embed
    return {"": 1.0, "embed": embed, "mlp": mlp, "heads": heads, "head": head, "attention": heads * head,
            "latent": latent}


def sides(c, path: str) -> tuple[float, float]:
    """Return how many times as many inputs and outputs the parameter at a path has."""
    table = (LATENT if c.name == "deepseek_v3" else {}) | ADAPTER | SIDES
    reads, writes = next(found for end, found in table.items() if re.search(f"(^|/){end}$", path))
    return times(c)[reads], times(c)[writes]


def initial(c, path: str) -> float:
    """The factor of an initial deviation."""
    reads, writes = sides(c, path)
    return 1 / reads if writes == 1 else 1 / np.sqrt(reads)


def step(c, path: str, optimizer: str, shape: tuple[int, ...]) -> float:
    """The factor of a step; `shape` is that of the matrix, inputs x outputs, which Muon orthogonalizes (or None)."""
    reads, writes = sides(c, path)
    if optimizer == "sgd":
        return writes / reads
    if shape and optimizer == "muon":  # its norm is 0.2 sqrt(larger side), and should grow as sqrt(outputs / inputs)
        here, there = max(shape), max(shape[0] / reads, shape[1] / writes)
        return np.sqrt(writes / reads) * np.sqrt(there / here)
    return 1 / reads


def scores(c) -> float:
    """Return the factor of scores, beside 1 / sqrt(head_dim)."""
    return times(c)["head"] ** -0.5


def logits(c) -> float:
    """Return the factor of logits."""
    return 1 / times(c)["embed"] if c.tied_embeddings else 1.0
