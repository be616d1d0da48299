"""Qwen3.5: Gated DeltaNet in most layers, gated attention in the others (https://qwen.ai/blog?id=qwen3.5)."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from jaxtrain.config.decoder_config import PartialRotaryConfig
from jaxtrain.config.family import Family
from jaxtrain.config.field_checks import at_most, derive
from jaxtrain.config.hybrids.layer_pattern import ATTENTION, PatternConfig
from jaxtrain.errors import UserError
from jaxtrain.hf import decoder_tensors, multi_token_tensors
from jaxtrain.hf.decoder_tensors import HEADS, OUT
from jaxtrain.hf.hf_format import COMMON, NO, SILU, Entry, HFConfig, Keys, Refuse
from jaxtrain.hf.layer_patterns import FULL, LINEAR, pattern, published_pattern
from jaxtrain.hf.rotary_keys import partial_rotary, published_partial_rotary
from jaxtrain.models.llama import MultiTokenConfig

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute, Decoder
    from jaxtrain.models.rotary_decoder import Part

DELTA = "D"
LETTERS = {LINEAR: DELTA, FULL: ATTENTION}
MTP_KEYS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")  # the latter is what servers read of Qwen3-Next
# Published key -> ours.
DELTA_KEYS = {"linear_num_key_heads": "state_key_heads", "linear_num_value_heads": "state_heads",
              "linear_key_head_dim": "state_key_dim", "linear_value_head_dim": "state_value_dim",
              "linear_conv_kernel_dim": "conv_width"}


@dataclass(frozen=True)
class DeltaConfig(PatternConfig):
    """Layers with Gated DeltaNet, and others with attention."""

    layer_pattern: str = DELTA * 3 + ATTENTION  # kinds of layers in turn: D Gated DeltaNet, A attention
    state_heads: int = at_most(0, 2**16, least=0)  # heads of the states and of values; 0: num_heads
    # heads of queries and keys in layers with states, each for several of state_heads; 0: state_heads
    state_key_heads: int = at_most(0, 2**16, least=0)
    state_key_dim: int = at_most(0, 2**16, least=0)  # width of a key in layers with states; 0: head_dim
    state_value_dim: int = at_most(0, 2**16, least=0)  # width of a value in layers with states; 0: head_dim
    conv_width: int = at_most(4, 64, above=1)  # tokens that a convolution sees, the token itself among them
    kinds: ClassVar = {DELTA: "Gated DeltaNet", ATTENTION: "attention"}
    chunk_kernels = True

    def __post_init__(self):
        super().__post_init__()
        derive(self, "state_heads", self.num_heads)
        derive(self, "state_key_heads", self.state_heads)
        derive(self, "state_key_dim", self.head_dim)
        derive(self, "state_value_dim", self.head_dim)
        if self.state_heads % self.state_key_heads:
            raise UserError("model.state_key_heads", f"{self.state_key_heads} does not divide model.state_heads="
                            f"{self.state_heads}", "choose a divisor of it")

    @property
    def state_flops(self) -> float:
        """The FLOPs of all states for one token: each is read for the key, written and read for the query."""
        return 6.0 * self.layer_kinds.count(DELTA) * self.state_heads * self.state_key_dim * self.state_value_dim


@dataclass(frozen=True)
class Qwen35Config(MultiTokenConfig, DeltaConfig, PartialRotaryConfig):
    """Qwen3.5."""

    name: str = "qwen3_5"
    rotary_part: float = 0.25
    norm_eps: float = 1e-6
    mtp_after_norm = True

    def __post_init__(self):
        super().__post_init__()
        if self.multi_token_layers > 1:
            raise UserError("model.mtp_layers", f"{self.name} has one layer that predicts a further token, and "
                            f"{self.mtp_layers} would share its projection", "set it to 1")


def delta_net(c: DeltaConfig, compute: "Compute", beta_factor: float = 1.0, eps: float = 0.0) -> "Part":
    """Return what makes the Gated DeltaNet of a layer. `eps`: of its norm, where it is not `norm_eps`."""
    from jaxtrain.models.recurrent.gated_delta_net import GatedDeltaNet

    return partial(GatedDeltaNet, c.embed_dim, c.state_key_heads, c.state_heads, c.state_key_dim, c.state_value_dim,
                   c.conv_width, eps or c.norm_eps, beta_factor=beta_factor, kernel=compute.recurrent_kernel)


def qwen3_5(c: Qwen35Config, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build a Qwen3.5 decoder."""
    from jaxtrain.models.rotary_decoder import grouped_query, rotary_decoder
    from jaxtrain.models.sandwich_layers import ShiftedRMSNorm

    attention = grouped_query(c, compute, gated=True,
                              qk_norm=partial(ShiftedRMSNorm, c.head_dim, c.norm_eps, axis="head_dim"))
    parts = {DELTA: delta_net(c, compute), ATTENTION: attention}
    return rotary_decoder(c, compute, [parts[kind] for kind in c.layer_kinds], norm=ShiftedRMSNorm, ahead=attention,
                          rngs=rngs)


def read(kind: str, known: Keys, refuse: Refuse) -> Keys:
    """Return our keys of the kinds of layers and of rotary positions."""
    return pattern(given_layers(known), refuse, LETTERS) | partial_rotary(kind, 0.25, known, refuse) | (
        multi_token_tensors.layers(known, refuse, *MTP_KEYS))


def given_layers(known: Keys) -> Keys:
    """Return the keys with a kind for each layer, where a file says only every how many layers one has attention."""
    if known["layer_types"] is not None:
        return known
    every = known.get("full_attention_interval", 4)
    return known | {"layer_types": [FULL if (n + 1) % every == 0 else LINEAR
                                    for n in range(known["num_hidden_layers"])]}


def write(c: Qwen35Config) -> Keys:
    """Return the published keys of the kinds of layers and of rotary positions."""
    return published_partial_rotary(c) | {"layer_types": published_pattern(c.layer_kinds, LETTERS)} | (
        multi_token_tensors.written_layers(c, MTP_KEYS[c.name == "qwen3_next"]))


def convolutions(c: DeltaConfig, at: str) -> list[Entry]:
    """Return the entries of the convolutions of Gated DeltaNet, of one tensor."""
    keys, values = c.state_key_heads * c.state_key_dim, c.state_heads * c.state_value_dim
    return [decoder_tensors.convolution(f"attention/{name}_conv", f"{at}.conv1d", (n * keys, 2 * keys + values))
            for n, name in enumerate("qkv")]


def delta_rest(at: str, norm: str = "norm", out: str = "out_proj") -> list[Entry]:
    """Return the entries of decay, norm and output of Gated DeltaNet, of tensors below `at`."""
    return [Entry("attention/decay/rate", f"{at}.A_log"), Entry("attention/decay/bias", f"{at}.dt_bias"),
            Entry("attention/norm/scale", f"{at}.{norm}.weight"),
            Entry("attention/out/kernel", f"{at}.{out}.weight", OUT)]


_GATED = [*(Entry(f"attention/{name}/kernel", "self_attn.q_proj.weight", "(hpk)d->dhk", part=(n, 2))
           for n, name in enumerate(("q", "gate"))),
         *(entry for entry in decoder_tensors.ATTENTION if "/q/" not in entry.ours)]


def mixer(c: Qwen35Config, kind: str) -> list[Entry]:
    """Return the entries of attention or of Gated DeltaNet."""
    if kind == ATTENTION:
        return [*_GATED, *decoder_tensors.QK_NORMS]
    at, keys, values = "linear_attn", c.state_key_heads * c.state_key_dim, c.state_heads * c.state_value_dim
    return [*(Entry(f"attention/{name}/kernel", f"{at}.in_proj_qkv.weight", HEADS, rows=(n * keys, 2 * keys + values))
              for n, name in enumerate("qkv")),
            Entry("attention/gate/kernel", f"{at}.in_proj_z.weight", HEADS),
            *(Entry(f"attention/{ours}/kernel", f"{at}.in_proj_{name}.weight", "hd->dh")
              for ours, name in (("beta", "b"), ("step", "a"))), *convolutions(c, at), *delta_rest(at)]


def _layer(c: Qwen35Config, experts: bool, kind: str) -> list[Entry]:
    return [*mixer(c, kind), *decoder_tensors.NORMS, *decoder_tensors.swiglu()]


FAMILY = Family(
    Qwen35Config, qwen3_5, tensors=decoder_tensors.decoder(_layer, ahead=multi_token_tensors.mtp_tensors),
    hf=(HFConfig("qwen3_5_text", "Qwen3_5ForCausalLM", COMMON | DELTA_KEYS,
                 fixed={"attention_bias": NO, "hidden_act": SILU}, read=partial(read, "qwen3_5_text"), write=write,
                 nested="qwen3_5", classifier="Qwen3_5TextForSequenceClassification"),))
