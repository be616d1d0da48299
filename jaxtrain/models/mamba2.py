"""Mamba-2: layers of a state space model alone, without attention and MLPs (arXiv 2405.21060)."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from jaxtrain.config.family import Family
from jaxtrain.config.hybrids.state_space_config import StateSpaceConfig
from jaxtrain.hf import decoder_tensors, mamba2_format
from jaxtrain.hf.hf_format import SILU, Entry, HFConfig, Keys, Refuse, renaming

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute, Decoder
    from jaxtrain.models.rotary_decoder import Part


@dataclass(frozen=True)
class Mamba2Config(StateSpaceConfig):
    """Mamba-2."""

    name: str = "mamba2"
    max_seq_len: int = 2**20  # no published file has one, and nothing depends on it

    @property
    def windows(self) -> dict[int, int]:
        """No layer has attention."""
        return {}

    def attentions(self, seq_len: int) -> list[tuple[int, int, int, bool]]:
        """Return none."""
        return []


def mixer(c: StateSpaceConfig, compute: "Compute", *, out_bias: bool | None = None, norm: str = "after_gate",
          factors: tuple[float, ...] = ()) -> "Part":
    """Return what makes the Mamba-2 of a layer, with these options of `Mamba2`; no `out_bias`: as other projections."""
    from jaxtrain.models.recurrent.mamba2_mixer import Mamba2

    return partial(Mamba2, c.embed_dim, c.state_heads, c.state_head_dim, c.state_groups, c.state_dim, c.conv_width,
                   c.norm_eps, conv_bias=c.conv_bias, bias=c.state_bias,
                   out_bias=c.state_bias if out_bias is None else out_bias, norm=norm,
                   steps=(c.least_step, c.largest_step), factors=factors, kernel=compute.recurrent_kernel)


def mamba2(c: Mamba2Config, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build a Mamba-2 decoder."""
    from jaxtrain.models.rotary_decoder import rotary_decoder
    from jaxtrain.models.single_mixer_blocks import MixerBlock

    return rotary_decoder(c, compute, mixer(c, compute), block=MixerBlock, rngs=rngs)


def _read(known: Keys, refuse: Refuse) -> Keys:
    width = mamba2_format.expanded(known, refuse, "expand", "num_heads", "head_dim")
    return {"max_seq_len": Mamba2Config.max_seq_len} | width | mamba2_format.steps(known, refuse)


def _write(c: Mamba2Config) -> Keys:
    return mamba2_format.published_steps(c) | {"expand": mamba2_format.expansion(c)}


def _layer(c: Mamba2Config, experts: bool) -> list[Entry]:
    return [Entry("attention_norm/scale", "norm.weight"), *mamba2_format.layer(c, "mixer")]


FAMILY = Family(
    Mamba2Config, mamba2, tensors=decoder_tensors.decoder(
        _layer, decoder_tensors.BACKBONE, prefix="backbone.",
        own_name=renaming({r"^backbone\.embedding\.weight$": "backbone.embeddings.weight"})),
    hf=(HFConfig("mamba2", "Mamba2ForCausalLM", {
        "vocab_size": "vocab_size", "num_hidden_layers": "num_layers", "hidden_size": "embed_dim",
        "num_heads": "num_heads", "head_dim": "head_dim", "n_groups": "state_groups", "state_size": "state_dim",
        "conv_kernel": "conv_width", "use_conv_bias": "conv_bias", "use_bias": "state_bias",
        "layer_norm_epsilon": "norm_eps", "tie_word_embeddings": "tied_embeddings"},
        fixed={"hidden_act": SILU}, read=_read, write=_write, classifier=None, unpublished=("max_seq_len",)),))
