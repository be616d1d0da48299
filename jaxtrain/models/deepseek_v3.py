"""DeepSeek-V3: latent attention, some dense layers, then experts chosen by biased sigmoid scores (arXiv 2412.19437)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from jaxtrain.config.decoder_config import RotaryConfig
from jaxtrain.config.family import Family
from jaxtrain.config.field_checks import at_most, derive, number
from jaxtrain.errors import UserError
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
class LatentConfig(RotaryConfig):
    """Multi-head latent attention (MLA), whose heads turn in part."""

    # rank of the latent that queries are compressed to (q_lora_rank); 0: queries are not compressed
    q_rank: int = at_most(0, 2**20, least=0)
    # rank of the latent that keys and values are compressed to (kv_lora_rank)
    kv_rank: int = at_most(0, 2**20, least=0)
    # width of the part of a head with rotary positions, in addition to head_dim, which has none
    rope_head_dim: int = at_most(0, 2**16, least=0)
    value_head_dim: int = at_most(0, 2**16, least=0)  # width of a value head; 0: head_dim
    # epsilon of the norms of latents, which is 1e-6 in all published models; 0: norm_eps
    latent_norm_eps: float = number(0.0, least=0)
    latent_attention = True
    # parts of heads grow like head_dim
    widths: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **RotaryConfig.widths, "kv_rank": ("latent", "rank"), "rope_head_dim": (), "value_head_dim": ()}

    def __post_init__(self):
        super().__post_init__()
        if not self.kv_rank:
            raise UserError("model.kv_rank", f"{self.name} needs a latent", "give its width, such as 512")
        if "kv_rank" in self.mup_base and not self.q_rank:
            raise UserError("model.mup_base.kv_rank", "queries without a latent grow with embed_dim, and they have the "
                            "latents' logical axis", "leave it out, so that the latent grows like embed_dim")
        if self.rope_head_dim < 2 or self.rope_head_dim % 2:
            raise UserError("model.rope_head_dim", f"{self.rope_head_dim} is not a width that rotates",
                            "give an even number, such as 64")
        if self.num_kv_heads != self.num_heads:
            raise UserError("model.num_kv_heads", f"{self.num_kv_heads} differs from model.num_heads={self.num_heads}",
                            "set it to 0: latent attention has as many key and value heads as query heads")
        derive(self, "value_head_dim", self.head_dim)
        self._check_parts()

    @property
    def rotary_width(self) -> int:
        """The width of the part of a head that turns with its position."""
        return self.rope_head_dim or self.head_dim

    @property
    def attention_width(self) -> int:
        """The widths of a query and of a value in one head, together."""
        return self.head_dim + self.rope_head_dim + self.value_head_dim

    def attentions(self, seq_len: int) -> list[tuple[int, int, int, bool]]:
        """Return that of queries and keys with both of their parts."""
        return [(seq_len, 0, max(self.head_dim + self.rope_head_dim, self.value_head_dim), True)]

    def _check_parts(self) -> None:
        """Refuse heads of which by `mup_base` one part grows and another one does not."""
        grown = self.growth.get("head_dim", 1)
        for key in ("rope_head_dim", "value_head_dim"):
            here, there = getattr(self, key), self.mup_base.get(key, 0)
            if not there and grown != 1 and (key, here) != ("value_head_dim", self.head_dim):
                raise UserError(f"model.mup_base.{key}", f"heads are {grown:g} times as wide as in the base, and it "
                                f"does not say what model.{key}={here} was there", "give that")
            if there and here != grown * there:
                raise UserError(f"model.{key}", f"{here} is {here / there:g} times its width in model.mup_base, and "
                                f"head_dim {grown:g} times", "let both grow by the same factor, or keep head_dim")


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
