"""LFM2: gated short convolutions in most layers, attention with QK norms in the others (arXiv 2511.23404)."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from jaxtrain.config.decoder_config import RotaryConfig
from jaxtrain.config.family import Family
from jaxtrain.config.field_checks import at_most
from jaxtrain.config.hybrids.layer_pattern import ATTENTION, PatternConfig
from jaxtrain.hf import decoder_tensors
from jaxtrain.hf.decoder_tensors import OUT
from jaxtrain.hf.hf_format import COMMON, Entry, HFConfig, Keys, Refuse
from jaxtrain.hf.layer_patterns import FULL, pattern, published_pattern
from jaxtrain.hf.rotary_keys import published_rotary, rotary

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute, Decoder
    from jaxtrain.models.rotary_decoder import Part

CONVOLUTION = "C"
LETTERS = {"conv": CONVOLUTION, FULL: ATTENTION}
KEYS = {key: ours for key, ours in COMMON.items() if key != "rms_norm_eps"} | {
    "norm_eps": "norm_eps", "conv_L_cache": "conv_width", "conv_bias": "conv_bias"}
WHOLE = "model.embed_tokens.weight", "model.embedding_norm.weight", "model.layers"


@dataclass(frozen=True)
class ConvolutionConfig(PatternConfig, RotaryConfig):
    """Layers with gated short convolutions, and others with attention."""

    layer_pattern: str = CONVOLUTION * 2 + ATTENTION  # kinds of layers in turn: C gated convolution, A attention
    rope_theta: float = 1_000_000.0
    conv_width: int = at_most(3, 64, above=1)  # tokens that a convolution sees, the token itself among them
    conv_bias: bool = False  # whether layers with convolutions have biases
    kinds: ClassVar = {CONVOLUTION: "gated convolution", ATTENTION: "attention"}


@dataclass(frozen=True)
class Lfm2Config(ConvolutionConfig):
    """LFM2."""

    name: str = "lfm2"


def lfm2(c: ConvolutionConfig, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build an LFM2 decoder."""
    from jaxtrain.models.layers import RMSNorm
    from jaxtrain.models.recurrent.gated_convolution import GatedConvolution
    from jaxtrain.models.rotary_decoder import grouped_query, rotary_decoder

    norm = partial(RMSNorm, c.head_dim, c.norm_eps, axis="head_dim")
    parts: dict[str, Part] = {ATTENTION: grouped_query(c, compute, qk_norm=norm),
                             CONVOLUTION: partial(GatedConvolution, c.embed_dim, c.conv_width, bias=c.conv_bias)}
    return rotary_decoder(c, compute, [parts[kind] for kind in c.layer_kinds], rngs=rngs)


def read(kind: str, known: Keys, refuse: Refuse) -> Keys:
    """Return our keys of the kinds of layers, of rotary positions, and of what files have by an older name."""
    found = pattern(known, refuse, LETTERS) | rotary(kind, known, refuse)
    if (tied := known.get("tie_embedding")) is not None:
        if type(tied) is not bool:
            raise refuse("tie_embedding", "is not true or false")
        found |= {"tied_embeddings": tied}
    return found


def _read(known: Keys, refuse: Refuse) -> Keys:
    if known["layer_types"] is None:
        layers = range(known["num_hidden_layers"])
        attending = {*(layers if known["full_attn_idxs"] is None else known["full_attn_idxs"])}
        known = known | {"layer_types": [FULL if n in attending else "conv" for n in layers]}
    return read("lfm2", known, refuse) | {"mlp_dim": _mlp_dim(known, refuse)}


def _mlp_dim(known: Keys, refuse: Refuse) -> int:
    """Return the width of the MLP, which files may say before it is cut by a third and rounded up."""
    width, block = known.get("block_ff_dim", known["intermediate_size"]), known["block_multiple_of"]
    if type(width) is not int or width < 1:
        raise refuse("block_ff_dim", "is not a size that a model has")
    if not known["block_auto_adjust_ff_dim"]:
        return width
    if block < 1 or known["block_ffn_dim_multiplier"] <= 0:
        raise refuse("block_multiple_of", "cannot be expressed: no width follows from it")
    return -(-int(known["block_ffn_dim_multiplier"] * int(2 * width / 3)) // block) * block


def write(c: ConvolutionConfig) -> Keys:
    """Return the published keys of the kinds of layers and of rotary positions."""
    return published_rotary(c) | {"layer_types": published_pattern(c.layer_kinds, LETTERS)}


def _write(c: Lfm2Config) -> Keys:
    return write(c) | {"block_auto_adjust_ff_dim": False}


def swiglu(ours: str = "mlp", at: str = "feed_forward", end: str = "/kernel", experts: int = 0) -> list[Entry]:
    """Return the entries of a gated MLP, or of experts."""
    return [Entry(f"{ours}/{name}{end}", f"{at}.{theirs}.weight", "df->fd" if name == "down" else "fd->df",
                  experts=experts)
            for name, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2"))]


def mixer(c: ConvolutionConfig, kind: str) -> list[Entry]:
    """Return the entries of both norms, and of attention or of a convolution."""
    norms = [Entry("attention_norm/scale", "operator_norm.weight"), Entry("mlp_norm/scale", "ffn_norm.weight")]
    if kind == ATTENTION:
        return [*norms, *decoder_tensors.ATTENTION[:3], Entry("attention/out/kernel", "self_attn.out_proj.weight", OUT),
                *(Entry(f"attention/{name}_norm/scale", f"self_attn.{name}_layernorm.weight") for name in "qk")]
    parts = [(name, (n, 3)) for n, name in enumerate(("before", "after", "x"))]
    biases = [*(Entry(f"attention/{name}/bias", "conv.in_proj.bias", "(pe)->e", part) for name, part in parts),
              Entry("attention/bias", "conv.conv.bias"), Entry("attention/out/bias", "conv.out_proj.bias")]
    return [*norms, *(Entry(f"attention/{name}/kernel", "conv.in_proj.weight", "(pe)d->de", part)
                      for name, part in parts),
            Entry("attention/kernel", "conv.conv.weight", "epw->we"),
            Entry("attention/out/kernel", "conv.out_proj.weight", "de->ed"), *biases * c.conv_bias]


def _layer(c: Lfm2Config, experts: bool, kind: str) -> list[Entry]:
    return [*mixer(c, kind), *swiglu()]


FAMILY = Family(
    Lfm2Config, lfm2, tensors=decoder_tensors.decoder(_layer, WHOLE),
    hf=(HFConfig("lfm2", "Lfm2ForCausalLM", KEYS, fixed={}, read=_read, write=_write, classifier=None),))
