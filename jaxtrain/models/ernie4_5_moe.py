"""ERNIE 4.5's mixtures of experts: a bias chooses among softmax scores; rotary pairs are neighbours."""

from dataclasses import dataclass, replace

from jaxtrain.config.family import Family
from jaxtrain.hf import decoder_tensors, layer_patterns
from jaxtrain.hf.hf_format import COMMON, NO, SILU, Entry, HFConfig, Keys, Refuse, renaming
from jaxtrain.hf.rotary_keys import published_rotary, rotary
from jaxtrain.models.deepseek_v3 import BIAS_RATE
from jaxtrain.models.ernie4_5 import paired
from jaxtrain.models.llama import dense
from jaxtrain.models.mixtral import ExpertsConfig


@dataclass(frozen=True)
class Ernie45MoeConfig(ExpertsConfig):
    """ERNIE 4.5's mixtures of experts."""

    name: str = "ernie4_5_moe"


def _read(known: Keys, refuse: Refuse) -> Keys:
    count, every = known["num_hidden_layers"], known["moe_layer_interval"]
    start, end = (known[f"moe_layer_{name}_index"] for name in ("start", "end"))
    for key in ("moe_layer_interval", "moe_layer_start_index", "moe_layer_end_index"):
        if known[key] is None or (key == "moe_layer_interval" and every < 1):
            raise refuse(key, "does not say which layers have experts")
    last = count - 1 if end == -1 else end
    first, every = layer_patterns.sparse_layers(
        [(n + 1) % every == 0 and start <= n <= last for n in range(count)], "moe_layer_start_index", refuse)
    return {"router_bias_rate": BIAS_RATE, "dense_layers": first, "experts_every": every} | rotary(
        "ernie4_5_moe", known, refuse)


def _write(c: Ernie45MoeConfig) -> Keys:
    # A layer's number counts from the first one, not from the first one after the dense ones.
    first = c.dense_layers + c.experts_every - 1
    return published_rotary(c) | {"moe_layer_start_index": first, "moe_layer_interval": c.experts_every}


def _layer(c: Ernie45MoeConfig, experts: bool) -> list[Entry]:
    found = [*decoder_tensors.ATTENTION, *decoder_tensors.NORMS, *(decoder_tensors.experts(
        c, bias="moe_statics.e_score_correction_bias") if experts else decoder_tensors.swiglu())]
    # The bias has one row in the tensor.
    return paired([replace(one, layout="oe->oe", cut=(1, c.num_experts)) if one.ours == "mlp/router/bias" else one
                   for one in found], c.head_dim)


FAMILY = Family(
    Ernie45MoeConfig, dense, tensors=decoder_tensors.decoder(
        _layer, own_name=renaming({r"\.mlp\.gate\.moe_statics\.": ".mlp.moe_statics."})),
    hf=(HFConfig("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", COMMON | {
        "moe_num_experts": "num_experts", "moe_k": "experts_per_token", "moe_intermediate_size": "expert_mlp_dim",
        "moe_num_shared_experts": "shared_experts"},
        fixed={"use_bias": NO, "hidden_act": SILU, "moe_norm_min": (1e-12,)}, read=_read, write=_write,
        classifier=None),))
