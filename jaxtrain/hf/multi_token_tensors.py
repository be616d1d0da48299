"""The published tensors of multi-token prediction: layers after the last one, or tensors whose names begin with "mtp.".

Both project the norm of an embedding and that of an activation, in this order, and read activations behind the last
norm (`mtp_after_norm`): vLLM, SGLang and transformers give them what the output head reads.
"""

from dataclasses import replace

from jaxtrain.config.model_config import ModelConfig
from jaxtrain.hf.hf_format import Entry, Keys, Refuse

MOST = 16  # layers


def further_layers(c: ModelConfig, block: list[Entry]) -> list[Entry]:
    """Return the entries of DeepSeek-V3's form: each layer has a number, and copies of the embeddings and the head."""
    found = []
    for n in range(c.multi_token_layers):
        ours, theirs = f"ahead/{'later/' * n}", f"model.layers.{c.num_layers + n}."
        head = "embed/table" if c.ties_head else "output/kernel"
        found += [Entry("embed/table", f"{theirs}embed_tokens.weight", "vd->vd", copy=True),
                  Entry(head, f"{theirs}shared_head.head.weight", "vd->vd" if c.ties_head else "vd->dv", copy=True),
                  *_inputs(ours, f"{theirs}enorm.weight", f"{theirs}hnorm.weight", f"{theirs}eh_proj.weight"),
                  Entry(f"{ours}norm/scale", f"{theirs}shared_head.norm.weight"), *_block(ours, theirs, block)]
    return found


def mtp_tensors(c: ModelConfig, block: list[Entry]) -> list[Entry]:
    """Return the entries of Qwen3-Next's form, which has one projection."""
    return [*_inputs("ahead/", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.fc.weight"),
            Entry("ahead/norm/scale", "mtp.norm.weight"), *_block("ahead/", "mtp.layers.0.", block)]


def _inputs(ours: str, embedding: str, activation: str, both: str) -> list[Entry]:
    return [Entry(f"{ours}norm_next/scale", embedding), Entry(f"{ours}norm_this/scale", activation),
            *(Entry(f"{ours}{name}/kernel", both, "e(pd)->de", part=(n, 2)) for n, name in enumerate(("next", "this")))]


def _block(ours: str, theirs: str, block: list[Entry]) -> list[Entry]:
    return [replace(entry, ours=f"{ours}block/{entry.ours}", theirs=f"{theirs}{entry.theirs}") for entry in block]


def layers(known: Keys, refuse: Refuse, *names: str) -> Keys:
    """Return our key of the number of layers, by the first of these names that a config.json has; 0 there: none."""
    key = next((name for name in names if known.get(name) is not None), None)
    if key is None:
        return {}
    if type(count := known[key]) is not int or not 0 <= count <= MOST:
        raise refuse(key, f"is not a number of layers up to {MOST}")
    return {"mtp_layers": count} if count else {}


def written_layers(c: ModelConfig, key: str) -> Keys:
    """Return the key of config.json that says how many of the layers are written."""
    return {key: c.multi_token_layers}
