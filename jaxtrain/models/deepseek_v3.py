"""DeepSeek-V3: latent attention, some dense layers, then experts chosen by biased sigmoid scores (arXiv 2412.19437)."""

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from jaxtrain.config.family import Family
from jaxtrain.config.latent_config import LatentConfig
from jaxtrain.hf import decoder_tensors, multi_token_tensors
from jaxtrain.hf.hf_format import BIASES, COMMON, Entry, HFConfig, Keys, Refuse
from jaxtrain.hf.rotary_keys import rotary
from jaxtrain.models.llama import written
from jaxtrain.models.mixtral import ExpertsConfig

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.attention.query_temperature import Tempered
    from jaxtrain.models.decoder import Compute, Decoder
    from jaxtrain.models.rotary_decoder import Part

# Published key -> ours, of experts as other families have them, too.
EXPERT_KEYS = {
    "n_routed_experts": "num_experts", "num_experts_per_tok": "experts_per_token",
    "moe_intermediate_size": "expert_mlp_dim", "n_shared_experts": "shared_experts",
    "first_k_dense_replace": "dense_layers", "n_group": "expert_groups", "topk_group": "expert_groups_used",
    "routed_scaling_factor": "router_scale", "norm_topk_prob": "normalize_router"}
LATENT_KEYS = {"q_lora_rank": "q_rank", "kv_lora_rank": "kv_rank", "qk_nope_head_dim": "head_dim",
               "qk_rope_head_dim": "rope_head_dim", "v_head_dim": "value_head_dim"}
MTP_KEYS = ("num_nextn_predict_layers", "num_mtp_layers")  # the latter is the name that transformers declares
LATENT_EPS = 1e-6
BIAS_RATE = 0.001  # of the first 14.3T tokens (arXiv 2412.19437, section 4.2); config.json does not say


@dataclass(frozen=True)
class DeepseekV3Config(LatentConfig, ExpertsConfig):
    """DeepSeek-V3: a mixture of experts with multi-head latent attention (MLA)."""

    name: str = "deepseek_v3"
    mtp_after_norm = True


def deepseek_v3(c: DeepseekV3Config, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build a DeepSeek decoder."""
    return latent_decoder(c, compute, rngs=rngs)


def latent_decoder(c: LatentConfig, compute: "Compute", *, rotary: "Tempered | None" = None,
                   rngs: "nnx.Rngs") -> "Decoder":
    """Build a decoder with latent attention; with a `rotary` of its own, that gives factors of queries as well."""
    from jaxtrain.models.rotary_decoder import rotary_decoder

    return rotary_decoder(c, compute, latent(c, compute, tempered=rotary is not None), rotary=rotary, rngs=rngs)


def latent(c: LatentConfig, compute: "Compute", **how: bool) -> "Part":
    """Return what makes the latent attention of a layer, with these options of `LatentAttention`."""
    from jaxtrain.models.attention.mla import LatentAttention
    from jaxtrain.models.attention.rotary import score_factor

    return partial(LatentAttention, c.embed_dim, c.num_heads, c.head_dim, c.rope_head_dim, c.value_head_dim, c.q_rank,
                   c.kv_rank, c.latent_norm_eps or c.norm_eps, window=c.window, backend=compute.attention,
                   context=compute.context, score_factor=score_factor(c), **how)


def latents(kind: str, known: Keys, refuse: Refuse) -> Keys:
    """Return our keys of latent attention and its rotary positions, of a published model of this type."""
    if known["num_key_value_heads"] not in (None, known["num_attention_heads"]):
        raise refuse("num_key_value_heads", "cannot be expressed: only as many as num_attention_heads can")
    own = {} if known["rms_norm_eps"] == LATENT_EPS else {"latent_norm_eps": LATENT_EPS}
    return own | {"num_kv_heads": 0} | rotary(kind, known, refuse)


def _read(known: Keys, refuse: Refuse) -> Keys:
    return {"router": "sigmoid", "router_bias_rate": BIAS_RATE} | latents("deepseek_v3", known, refuse) | (
        multi_token_tensors.layers(known, refuse, *MTP_KEYS))


def _write(c: DeepseekV3Config) -> Keys:
    return written_latents(c) | multi_token_tensors.written_layers(c, MTP_KEYS[0])


def written_latents(c: LatentConfig) -> Keys:
    """Return the keys of config.json of latent attention and its rotary positions."""
    return written(c) | {"q_lora_rank": c.q_rank or None, "head_dim": c.rope_head_dim}


def latent_layer(c: LatentConfig, experts: bool) -> list[Entry]:
    """Return the entries of a layer."""
    return [*decoder_tensors.latent_attention(c, paired=c.rope_head_dim), *decoder_tensors.NORMS,
            *(decoder_tensors.experts(c) if experts else decoder_tensors.swiglu())]


_V3 = HFConfig(
    "deepseek_v3", "DeepseekV3ForCausalLM", COMMON | EXPERT_KEYS | LATENT_KEYS,
    fixed=BIASES | {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,),
                    "rope_interleave": (True,)}, read=_read, write=_write)
# Kimi K2 is published as a type of its own, which transformers has no class for; it is exported as DeepSeek-V3.
FAMILY = Family(
    DeepseekV3Config, deepseek_v3,
    tensors=decoder_tensors.decoder(latent_layer, ahead=multi_token_tensors.further_layers),
    hf=(_V3, replace(_V3, model_type="kimi_k2", like="deepseek_v3")))
