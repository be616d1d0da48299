"""GLM-4.5 and its successors: rotary positions of half of each head, and DeepSeek-V3's experts (arXiv 2508.06471)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxtrain.config.decoder_config import PartialRotaryConfig
from jaxtrain.config.family import Family
from jaxtrain.hf import decoder_tensors, multi_token_tensors
from jaxtrain.hf.hf_format import COMMON, SILU, Entry, HFConfig, Keys, Refuse
from jaxtrain.hf.rotary_keys import partial_rotary, published_partial_rotary
from jaxtrain.models.deepseek_v3 import BIAS_RATE, EXPERT_KEYS, MTP_KEYS
from jaxtrain.models.llama import dense
from jaxtrain.models.mixtral import ExpertsConfig

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute, Decoder


@dataclass(frozen=True)
class Glm4MoeConfig(ExpertsConfig, PartialRotaryConfig):
    """GLM-4.5."""

    name: str = "glm4_moe"
    rotary_part: float = 0.5
    mtp_after_norm = True
    attention_bias: bool = False  # whether queries, keys and values have biases
    use_qk_norm: bool = False  # whether queries and keys are normalised


def glm4_moe(c: Glm4MoeConfig, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build a GLM-4.5 decoder."""
    return dense(c, compute, qk_norm=c.use_qk_norm, qkv_bias=c.attention_bias, rngs=rngs)


def _read(known: Keys, refuse: Refuse) -> Keys:
    return {"router": "sigmoid", "router_bias_rate": BIAS_RATE} | partial_rotary("glm4_moe", 0.5, known, refuse) | (
        multi_token_tensors.layers(known, refuse, *MTP_KEYS))


def _write(c: Glm4MoeConfig) -> Keys:
    return published_partial_rotary(c) | multi_token_tensors.written_layers(c, MTP_KEYS[0])


def layer(c: Glm4MoeConfig, experts: bool) -> list[Entry]:
    """Return the entries of a layer."""
    return [*decoder_tensors.ATTENTION, *decoder_tensors.biases(qkv=c.attention_bias),
            *decoder_tensors.QK_NORMS * c.use_qk_norm, *decoder_tensors.NORMS,
            *(decoder_tensors.experts(c) if experts else decoder_tensors.swiglu())]


FAMILY = Family(
    Glm4MoeConfig, glm4_moe, tensors=decoder_tensors.decoder(layer, ahead=multi_token_tensors.further_layers),
    hf=(HFConfig("glm4_moe", "Glm4MoeForCausalLM",
                 COMMON | EXPERT_KEYS | {key: key for key in ("attention_bias", "use_qk_norm")},
                 fixed={"hidden_act": SILU}, read=_read, write=_write, classifier=None),))
