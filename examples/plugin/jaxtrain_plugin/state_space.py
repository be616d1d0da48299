"""A family: a decoder of selective state spaces in place of attention (Mamba-2; Dao and Gu, arXiv 2405.21060).

Shape suffixes: B batch, T sequence, D embedding, H heads, K head width, N state.
"""

from dataclasses import dataclass

from jaxtrain.config.decoder_config import DecoderConfig
from jaxtrain.config.family import Family
from jaxtrain.config.field_checks import at_most
from jaxtrain.errors import UserError
from jaxtrain.hf import decoder_tensors
from jaxtrain.hf.hf_format import Entry, HFConfig


@dataclass(frozen=True)
class StateSpaceConfig(DecoderConfig):
    """Selective state spaces, after a short convolution."""

    name: str = "state_space"
    state_dim: int = at_most(16, 2**12, above=0)  # numbers that each channel of a head remembers
    conv_width: int = at_most(4, 64, above=0)  # tokens that the convolution before the state space sees
    rows_cut = False  # a state goes from token to token: no mesh may cut rows

    def __post_init__(self):
        super().__post_init__()
        if self.window:
            raise UserError("model.window", "state spaces have no attention", "leave it out")

    @property
    def windows(self) -> dict[int, int]:
        """Nothing: no layer has attention, of which FLOPs would be counted."""
        return {}

    def attentions(self, seq_len: int) -> list:
        """Return nothing: no kernel of attention is chosen."""
        return []


def state_space(c: StateSpaceConfig, compute, *, rngs):
    """Build the decoder; JAX is imported here, so that a mistake in a config is told before."""
    from jaxtrain.models.decoder import Decoder
    from jaxtrain.models.layers import Embed, Head, RMSNorm
    from jaxtrain_plugin.state_space_layer import StateSpaceLayer

    return Decoder(Embed(c.vocab_size, c.embed_dim, rngs=rngs), lambda rngs: StateSpaceLayer(c, rngs=rngs),
                   c.num_layers, RMSNorm(c.embed_dim, c.norm_eps, rngs=rngs), compute=compute, rngs=rngs,
                   head=None if c.tied_embeddings else Head(c.vocab_size, c.embed_dim, rngs=rngs))


def layer(c: StateSpaceConfig, experts: bool) -> list[Entry]:
    """Return the published tensors of a layer, as PATH, NAME, and how dimensions of the one become the other's."""
    return [Entry("norm/scale", "norm.weight"), Entry("conv", "mixer.conv1d.weight", "(hk)w->whk"),
            *(Entry(f"{name}/kernel", f"mixer.{name}_proj.weight", "(hk)d->dhk") for name in ("x", "gate")),
            *(Entry(f"{name}/kernel", f"mixer.{name}_proj.weight", "nd->dn") for name in ("write", "read")),
            Entry("dt/kernel", "mixer.dt_proj.weight", "hd->dh"), Entry("dt/bias", "mixer.dt_proj.bias", "h->h"),
            Entry("decay", "mixer.A_log", "h->h"), Entry("skip", "mixer.D", "h->h"),
            Entry("out/kernel", "mixer.out_proj.weight", "d(hk)->hkd")]


FAMILY = Family(StateSpaceConfig, state_space, tensors=decoder_tensors.decoder(layer), hf=(HFConfig(
    "state_space", "StateSpaceForCausalLM", {
        "vocab_size": "vocab_size", "num_hidden_layers": "num_layers", "hidden_size": "embed_dim",
        "num_heads": "num_heads", "head_dim": "head_dim", "state_size": "state_dim", "conv_kernel": "conv_width",
        "max_position_embeddings": "max_seq_len", "rms_norm_eps": "norm_eps", "tie_word_embeddings": "tied_embeddings"},
    fixed={"hidden_act": ("silu",)}, defaults={"rms_norm_eps": 1e-5, "conv_kernel": 4, "tie_word_embeddings": True},
    unpublished=("num_kv_heads", "mlp_dim")),))
