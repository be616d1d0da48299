"""gpt-oss: attention sinks, local and global attention by turns, experts with biases everywhere (arXiv 2508.10925).

All layers have parameters of the same shapes, so they are one stack: a layer learns from its number whether it has a
sliding window.
"""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from jaxtrain.config.decoder_config import RoutedConfig
from jaxtrain.config.family import Family
from jaxtrain.config.field_checks import at_most, number
from jaxtrain.hf import decoder_tensors
from jaxtrain.hf.hf_format import COMMON, SILU, Entry, HFConfig, Keys, Refuse
from jaxtrain.hf.layer_patterns import global_every, layer_types
from jaxtrain.hf.rotary_keys import rotary
from jaxtrain.models.llama import written

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute, Decoder


@dataclass(frozen=True)
class GptOssConfig(RoutedConfig):
    """gpt-oss: a mixture of experts with biases and attention sinks; every second layer has a sliding window."""

    name: str = "gpt_oss"
    window: int = number(128, above=0)  # sliding window of the local layers, in tokens
    global_every: int = number(2, above=0)  # every N-th layer is global: it uses full attention
    rope_theta: float = 150_000.0  # base frequency of the rotary position embedding (RoPE)
    num_experts: int = at_most(32, 2**16, above=0)  # mixture of experts: number of routed experts in a layer
    experts_per_token: int = at_most(4, 2**16)  # number of experts that process each token (top-k)
    # limit of an expert's activations: the up projection is clamped to [-limit, limit], the gate from above only
    swiglu_limit: float = number(7.0, above=0)
    swiglu_alpha: float = number(1.702, above=0)  # alpha in the experts' activation, gate x sigmoid(alpha x gate)
    tied_embeddings: bool = False  # whether the output projection shares the weights of the embedding table
    sinks = True

    @property
    def global_layers(self) -> int:
        """The number of layers without a window."""
        return self.num_layers // self.global_every


def gpt_oss(c: GptOssConfig, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Return a decoder in the style of gpt-oss."""
    from jaxtrain.models.attention.sink_attention import SinkAttention
    from jaxtrain.models.experts.clamped_swiglu import clamped_swiglu
    from jaxtrain.models.rotary_decoder import grouped_query, rotary_decoder, routed

    activation = partial(clamped_swiglu, limit=c.swiglu_limit, alpha=c.swiglu_alpha)
    attention = grouped_query(c, compute, partial(SinkAttention, c.global_every), qkv_bias=True, out_bias=True)
    return rotary_decoder(c, compute, attention, experts=routed(c, compute, biased=True, activation=activation),
                          rngs=rngs)


# Where a file has no rope_parameters.
_YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
         "original_max_position_embeddings": 4096}


def _read(known: Keys, refuse: Refuse) -> Keys:
    return {"global_every": global_every(known, 2, refuse)} | rotary("gpt_oss", known, refuse, usual=_YARN)


def _write(c: GptOssConfig) -> Keys:
    found = written(c)
    return found | {"layer_types": layer_types(c.global_every, c.num_layers),
                    "rope_scaling": found["rope_scaling"] or {"rope_type": "default"}}


# Every second column of one tensor is the gate's, the others are up's.
_EXPERTS = [
    Entry("mlp/router/kernel", "mlp.router.weight", "ed->de"), Entry("mlp/router/logit_bias", "mlp.router.bias"),
    *(entry for n, name in enumerate(("gate", "up")) for entry in (
        Entry(f"mlp/{name}", "mlp.experts.gate_up_proj", "ed(fp)->edf", (n, 2)),
        Entry(f"mlp/{name}_bias", "mlp.experts.gate_up_proj_bias", "e(fp)->ef", (n, 2)))),
    Entry("mlp/down", "mlp.experts.down_proj", "efd->efd"),
    Entry("mlp/down_bias", "mlp.experts.down_proj_bias", "ed->ed")]


def _layer(c: GptOssConfig, experts: bool) -> list[Entry]:
    return [*decoder_tensors.ATTENTION, *decoder_tensors.QKV_BIASES,
            Entry("attention/out/bias", "self_attn.o_proj.bias"), Entry("attention/sinks", "self_attn.sinks"),
            *decoder_tensors.NORMS, *_EXPERTS]


FAMILY = Family(
    GptOssConfig, gpt_oss, tensors=decoder_tensors.decoder(_layer),
    hf=(HFConfig("gpt_oss", "GptOssForCausalLM", COMMON | {
        "num_local_experts": "num_experts", "num_experts_per_tok": "experts_per_token",
        "intermediate_size": "expert_mlp_dim", "sliding_window": "window", "swiglu_limit": "swiglu_limit",
        "swiglu_alpha": "swiglu_alpha"},
        fixed={"attention_bias": (True,), "hidden_act": SILU}, read=_read, write=_write, quantized="mxfp4"),))
