"""Nemotron-H and Nemotron 3: layers of Mamba-2, attention without positions, an MLP or experts (arXiv 2504.03624)."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from jaxtrain.config.decoder_config import RoutedDecoderConfig
from jaxtrain.config.family import Family
from jaxtrain.config.field_checks import at_most, number
from jaxtrain.config.hybrids.layer_pattern import ATTENTION, PatternConfig
from jaxtrain.config.hybrids.state_space_config import MAMBA, StateSpaceConfig
from jaxtrain.config.model_config import Experts
from jaxtrain.errors import UserError
from jaxtrain.hf import decoder_tensors, defaults, mamba2_format
from jaxtrain.hf.hf_format import SILU, Entry, HFConfig, Keys, Refuse, renaming
from jaxtrain.hf.layer_patterns import FULL, LINEAR, pattern, published_pattern
from jaxtrain.models.deepseek_v3 import BIAS_RATE

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute, Decoder

MLP, EXPERTS = "F", "E"
LETTERS = {LINEAR: MAMBA, FULL: ATTENTION, "mlp": MLP, "moe": EXPERTS}
OLDER = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}  # hybrid_override_pattern
OLDER_KEYS = {"mamba_n_groups": "state_groups", "mamba_d_conv": "conv_width", "mamba_conv_bias": "conv_bias",
              "mamba_dt_min": "least_step"}


@dataclass(frozen=True)
class NemotronHConfig(StateSpaceConfig, RoutedDecoderConfig, PatternConfig):
    """Nemotron-H and Nemotron 3."""

    name: str = "nemotron_h"
    # kinds of layers in turn: M Mamba-2, A attention, F an MLP, E experts
    layer_pattern: str = MAMBA + MLP + ATTENTION + MLP
    tied_embeddings: bool = False
    mlp_bias: bool = False  # whether the matrices of MLPs have biases, shared experts' among them
    shared_mlp_dim: int = at_most(0, 2**22, least=0)  # width of the MLP of shared experts; 0: there are none
    latent_dim: int = at_most(0, 2**20, least=0)  # width of what routed experts are given and return; 0: embed_dim
    normalize_router: bool = True  # whether the weights of the experts chosen for a token are normalized to sum to 1
    router_scale: float = number(1.0, above=0)  # factor by which the weights of the chosen experts are multiplied
    expert_groups: int = at_most(1, 2**16, above=0)  # number of groups into which the experts are divided
    # number of groups that a token may choose experts from: those with the highest sum of their two best scores
    expert_groups_used: int = at_most(1, 2**16, above=0)
    # update size of the router bias that balances the load without a loss (DeepSeek-V3)
    router_bias_rate: float = number(BIAS_RATE, above=0)
    kinds: ClassVar = {MAMBA: "Mamba-2", ATTENTION: "attention", MLP: "an MLP", EXPERTS: "experts"}

    @property
    def experts(self) -> Experts:
        """The routed experts."""
        if not self.num_experts:
            return Experts()
        return replace(
            super().experts, shared_mlp_dim=self.shared_mlp_dim, latent_dim=self.latent_dim, score="sigmoid",
            normalized=self.normalize_router, scale=self.router_scale, groups=self.expert_groups,
            groups_used=self.expert_groups_used, bias_rate=self.router_bias_rate)

    def _check_experts(self):
        if (EXPERTS in self.layer_kinds) != (self.num_experts > 0):
            raise UserError("model.num_experts", f"it is {self.num_experts}, and model.layer_pattern="
                            f"{self.layer_pattern} has {'no ' * (self.num_experts > 0)}layers with experts (E)",
                            "change one of them")
        if self.num_experts and (self.num_experts % self.expert_groups or self.expert_groups_used > self.expert_groups):
            raise UserError("model.expert_groups", f"{self.expert_groups} does not divide model.num_experts="
                            f"{self.num_experts}, or is below model.expert_groups_used={self.expert_groups_used}",
                            "choose a divisor that is large enough")
        super()._check_experts()


def nemotron_h(c: NemotronHConfig, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build a Nemotron-H decoder."""
    from jaxtrain.kernels.functions import squared_relu
    from jaxtrain.models.layers import SquaredReLU
    from jaxtrain.models.mamba2 import mixer
    from jaxtrain.models.rotary_decoder import grouped_query, rotary_decoder, routed
    from jaxtrain.models.single_mixer_blocks import FeedForwardBlock, MixerBlock

    def mlp(out_std: float, rngs: "nnx.Rngs") -> "nnx.Module":
        return SquaredReLU(c.embed_dim, c.mlp_dim, out_std=out_std, bias=c.mlp_bias, rngs=rngs)

    experts = routed(c, compute, activation=squared_relu, gated=False, shared=SquaredReLU, shared_bias=c.mlp_bias)
    parts = {MAMBA: mixer(c, compute), ATTENTION: grouped_query(c, compute)}
    return rotary_decoder(
        c, compute, [parts.get(kind, parts[ATTENTION]) for kind in c.layer_kinds], mlp=mlp,
        experts=[experts if kind == EXPERTS else mlp for kind in c.layer_kinds],
        block=[MixerBlock if kind in parts else FeedForwardBlock for kind in c.layer_kinds], rngs=rngs)


def _layers(known: Keys, refuse: Refuse) -> Keys:
    """Return the keys with a kind for each layer, which some files have as a text."""
    key, older = "layers_block_type", "hybrid_override_pattern"
    if known[key] is None and older in known:
        text = known[older]
        if not isinstance(text, str) or {*text} - OLDER.keys():
            raise refuse(older, f"cannot be expressed: it is not made of {' '.join(OLDER)}")
        known = known | {key: [OLDER[letter] for letter in text]}
    elif known[key] is None:
        known = known | {key: [LINEAR, "moe", FULL, "mlp"]}
    return known | {"num_hidden_layers": len(known[key])}


def _read(known: Keys, refuse: Refuse) -> Keys:
    known = _layers(known, refuse)
    found: Keys = {"num_layers": known["num_hidden_layers"], "least_step": float(known["time_step_min"])}
    found |= pattern(known, refuse, LETTERS, "layers_block_type")
    for key, ours in OLDER_KEYS.items():
        if key in known:
            kind = {"conv_bias": "bool", "least_step": "float"}.get(ours, "int")
            if why := defaults.misfit(known[key], [kind]):
                raise refuse(key, why)
            found[ours] = known[key]
    if known["n_shared_experts"] < 0 or known["moe_shared_expert_intermediate_size"] < 1:
        raise refuse("moe_shared_expert_intermediate_size", "is not a size that a model has")
    if EXPERTS not in found["layer_pattern"]:
        found |= {"num_experts": 0, "expert_groups": 1, "expert_groups_used": 1, "shared_mlp_dim": 0}
    return found | {"latent_dim": known["moe_latent_size"] or 0, "num_kv_heads": known["num_key_value_heads"] or 0}


def _write(c: NemotronHConfig) -> Keys:
    return {"layers_block_type": published_pattern(c.layer_kinds, LETTERS), "time_step_min": c.least_step,
            "moe_latent_size": c.latent_dim or None, "n_routed_experts": c.num_experts or 1,
            **({} if c.num_experts else {"moe_shared_expert_intermediate_size": c.mlp_dim})}  # which no layer has


_MLP = {"mlp_hidden_act": ("relu2",), "mamba_hidden_act": SILU, "tie_word_embeddings": (False,)}


def _experts(c: NemotronHConfig) -> list[Entry]:
    found = [Entry("mlp/router/kernel", "mixer.gate.weight", "ed->de", float32=True),
             Entry("mlp/router/bias", "mixer.gate.e_score_correction_bias", float32=True),
             *decoder_tensors.ungated(c.mlp_bias, "mlp/shared", "mixer.shared_experts"),
             *(Entry(f"mlp/{name}", f"mixer.experts.{{expert}}.{name}_proj.weight", layout, experts=c.num_experts)
               for name, layout in (("up", "fd->df"), ("down", "df->fd")))]
    for ours, theirs, layout in (("into", "fc1", "ld->dl"), ("out_of", "fc2", "dl->ld")) if c.latent_dim else ():
        at = f"mixer.{theirs}_latent_proj"
        found += [Entry(f"mlp/{ours}_latent/kernel", f"{at}.weight", layout),
                  *[Entry(f"mlp/{ours}_latent/bias", f"{at}.bias")] * c.mlp_bias]
    return found


def _layer(c: NemotronHConfig, experts: bool, kind: str) -> list[Entry]:
    if kind in (MLP, EXPERTS):
        fed = _experts(c) if kind == EXPERTS else decoder_tensors.ungated(c.mlp_bias, theirs="mixer")
        return [Entry("mlp_norm/scale", "norm.weight"), *fed]
    attention = [replace(entry, theirs=entry.theirs.replace("self_attn", "mixer"))
                 for entry in decoder_tensors.ATTENTION]
    return [Entry("attention_norm/scale", "norm.weight"),
            *(attention if kind == ATTENTION else mamba2_format.layer(c, "mixer"))]


FAMILY = Family(
    NemotronHConfig, nemotron_h,
    tensors=decoder_tensors.decoder(_layer, decoder_tensors.BACKBONE, prefix="backbone.",
                                    own_name=renaming({r"^model\.": "backbone."})),
    hf=(HFConfig("nemotron_h", "NemotronHForCausalLM", {
        "vocab_size": "vocab_size", "hidden_size": "embed_dim", "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_kv_heads", "head_dim": "head_dim", "max_position_embeddings": "max_seq_len",
        "intermediate_size": "mlp_dim", "mlp_bias": "mlp_bias", "layer_norm_epsilon": "norm_eps",
        "mamba_num_heads": "state_heads", "mamba_head_dim": "state_head_dim", "n_groups": "state_groups",
        "ssm_state_size": "state_dim", "conv_kernel": "conv_width", "use_conv_bias": "conv_bias",
        "use_bias": "state_bias", "n_routed_experts": "num_experts", "num_experts_per_tok": "experts_per_token",
        "moe_intermediate_size": "expert_mlp_dim", "moe_shared_expert_intermediate_size": "shared_mlp_dim",
        "norm_topk_prob": "normalize_router", "routed_scaling_factor": "router_scale", "n_group": "expert_groups",
        "topk_group": "expert_groups_used"}, fixed=_MLP, read=_read, write=_write, classifier=None),))
